"""Early exits draft in the target's slots and with the target's tensors, and leave both unchanged. So does the target
in fewer bits in its slots."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cotrain.students.early_exit import EarlyExitStudent as Student
from inference import Engine, Sampling
from inference.models.forward import Stock
from inference.models.llama import rounded
from inference.models.lm import LM, store_prompts
from inference.policy import Fixed
from inference.proposers.early_exit import (
    EarlyExit,
    ExitNetwork,
    FourBits,
    InGroups,
    first_layers,
    learning,
    serving,
    untrained_exit,
)
from inference.proposers.quantised import Quantised
from tests.inference.models.test_llama import WIDE, build
from tests.inference.models.test_packing import BIASED, halved, in_bytes, needs_kernels
from tests.kinds import KINDS, exit_network
from tests.tiny import tiny
from tests.watched import Watched

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5], [8]]


@pytest.fixture
def as_served() -> Any:
    """What is multiplied by weights in 4 bits is rounded as the kernels round it."""

    def rounding(module: nn.Module, given: Any) -> Any:
        if isinstance(module, InGroups):
            early, late = given[0].tensor_split([module.first], 1)
            return torch.cat((early, in_bytes(late)), 1)

    with nn.modules.module.register_module_forward_pre_hook(rounding):
        yield


def stored(engine: Engine, length: int) -> list[torch.Tensor]:
    """Keys and values of the first row's first tokens."""
    parts = [(layer.keys, layer.values) for layer in engine.target.cache.stores]
    return [part[0, :, :length].clone() for both in parts for part in both]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_targets_weights_are_the_same_with_it_and_without(dtype: torch.dtype) -> None:
    """To the bit; the draft copies only the tensors that it changes."""
    target = tiny(layers=3, dtype=dtype)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    proposer = EarlyExit(exit_network(target), target)
    Engine(target, proposer, policy=Fixed(3), rows=2).generate(PROMPTS, max_new_tokens=8)
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())
    ours, theirs = proposer.model, target.model
    assert ours.model.embed_tokens.weight.data_ptr() == theirs.embed_tokens.weight.data_ptr()
    assert ours.model.layers[0].mlp.up_proj.weight.data_ptr() != theirs.layers[0].mlp.up_proj.weight.data_ptr()
    assert len(ours.model.layers) == 2 and len(theirs.layers) == 3
    plain = serving(untrained_exit(target, 2, 0, 1), target)  # without changes it copies the norm alone
    assert plain.model.layers[1].mlp.up_proj.weight.data_ptr() == theirs.layers[1].mlp.up_proj.weight.data_ptr()


def require_the_targets_own(target: Any, proposer: Any, tolerance: float) -> None:
    """Keys and values of a whole text after rounds with drafts are the target's up to rounding."""
    engine = Engine(target, proposer, policy=Fixed(3), rows=1)
    text = PROMPTS[0] + engine.generate(PROMPTS[:1], max_new_tokens=16, ignore_eos=True).tokens[0]
    alone = LM(target, 1)
    store_prompts(alone, 0, [text])
    own = stored(engine, len(text) - 1)
    wanted = [part[0, :, : len(text) - 1] for layer in alone.cache.stores for part in (layer.keys, layer.values)]
    for one, other in zip(own, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["early_exit", "quantised", "two_levels"])
def test_what_verification_stores_is_the_targets_own(kind: str) -> None:
    target = tiny(layers=3)
    require_the_targets_own(target, KINDS[kind].proposer(target), 1e-12)


@needs_kernels
def test_what_verification_stores_over_eight_bits_is_the_targets_own() -> None:
    """The kernels draft in the target's slots too, and 8 bits round by more than the tolerance."""
    target = tiny(layers=3, hidden=32, dtype=torch.bfloat16).float()
    proposer = Quantised(target)
    assert proposer.int8
    require_the_targets_own(target, proposer, 1e-4)
    assert proposer.lm.chains


@needs_kernels
@pytest.mark.usefixtures("as_served")
@pytest.mark.parametrize("rows", [1, 3])
def test_four_bits_are_served_by_the_kernels_as_they_are_learnt(rows: int) -> None:
    """At each draft of real rounds, over a target with biases, also after the target's head has changed; and in the
    dtype of folders as in float32. The target's own keys and values stay."""
    target = halved(build("Qwen2", BIASED | {"num_hidden_layers": 3, "intermediate_size": 96}))
    target.lm_head.weight.data.copy_(rounded(target.lm_head.weight))  # which is served in 8 bits
    network = exit_network(target, bits=4).float()
    for part in network.modules():
        if isinstance(part, FourBits):
            part.gain.data.uniform_(-0.3, 0.3)
    student = Student(network, target)
    proposer = student.proposer()
    watched = Watched(proposer)
    engine = Engine(target, watched, policy=Fixed(3), rows=rows)
    for change in (1.0, 0.5):
        target.lm_head.weight.data.mul_(change)  # which torch does not count
        watched.rounds.clear()
        engine.generate(PROMPTS, max_new_tokens=9, sampling=Sampling(1.0), ignore_eos=True)
        assert proposer.int8 and proposer.weights == "int4" and proposer.lm.chains
        assert all(len(w.qkv.packed.weight[0]) == 36 for w in proposer.lm.run.weights.layers)  # two groups of 18 bytes
        checked = 0
        for done in watched.rounds:
            for b, text in enumerate(done.texts):
                ids = torch.tensor([text + done.x[b, : done.k[b]].tolist()])
                for guess in Student(network, target).guesses({"ids": ids}, None):  # type: ignore[arg-type]
                    if guess.depth >= done.k[b]:
                        continue
                    q = guess.head(guess.states).softmax(-1)[guess.at == len(text) - 1 + guess.depth][0]
                    torch.testing.assert_close(done.q[b, guess.depth], q, atol=5e-3, rtol=0.05)
                    checked += 1
        assert checked > 10
    whole = copy.deepcopy(network)
    for part in whole.modules():
        if isinstance(part, FourBits):
            weight = part.rounded()
            part.fold()
            assert torch.equal(part.bfloat16().rounded(), weight)
    require_the_targets_own(target, EarlyExit(whole, target), 1e-3)


@needs_kernels
@pytest.mark.usefixtures("as_served")
def test_of_all_layers_in_four_bits_the_last_stays_the_targets_in_eight(tmp_path: Path) -> None:
    """Trained as served, from a folder too; an exit before the last layer has 4 bits in all of its own."""
    target = halved(build("Llama", WIDE | {"num_hidden_layers": 9, "intermediate_size": 96}))
    assert untrained_exit(target, 8, 0, 1, 4).config.changed == 8
    network = untrained_exit(target, 9, 0, 1, 4)
    network.save_pretrained(tmp_path)
    network = ExitNetwork.from_pretrained(tmp_path)
    assert network.config.changed == 8 and not len(network.layers[8])
    proposer = EarlyExit(network, target)
    watched = Watched(proposer)
    Engine(target, watched, policy=Fixed(1)).generate(PROMPTS[:1], max_new_tokens=9, sampling=Sampling(1.0))
    last, others = (proposer.lm.run.weights.layers[at].qkv.packed.weight for at in (8, 0))  # type: ignore[union-attr]
    assert (last.dtype, others.dtype) == (torch.int8, torch.uint8)
    for done in watched.rounds:
        ids = torch.tensor([done.texts[0]])
        (guess,) = Student(network, target).guesses({"ids": ids}, None)  # type: ignore[arg-type]
        q = guess.head(guess.states).softmax(-1)[guess.at == ids.shape[1] - 1][0]
        torch.testing.assert_close(done.q[0, 0], q, atol=3e-3, rtol=0.03)
    assert len(watched.rounds) > 2


def test_projections_that_are_not_plain_have_no_four_bits() -> None:
    """Those of quantised weights or adapters, to begin with; a folder serves a target with an adapter too."""
    target = tiny(layers=2, hidden=32, dtype=torch.float32)
    network, plain = exit_network(target, bits=4), target.model.layers[0].mlp.up_proj

    class Other(nn.Linear):
        pass

    other = Other(32, 64, bias=False)
    other.weight = nn.Parameter(plain.weight.detach().to(torch.bfloat16), requires_grad=False)
    target.model.layers[0].mlp.up_proj = other
    with pytest.raises(ValueError, match="projections that are not plain linear layers"):
        untrained_exit(target, 1, 0, 1, 4)
    served = serving(network, target).model.layers[0].mlp.up_proj
    assert type(served) is nn.Linear and served.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="a multiple of 32 inputs"):
        untrained_exit(tiny(hidden=40, heads=2), 1, 0, 1, 4)


@pytest.mark.parametrize("bits", [None, 4])
def test_the_exit_of_a_target_in_its_own_forward_runs_in_its_own_too(bits: int | None) -> None:
    """A hook on the last layer, which the exit does not have, is one that only the target's own forward runs."""
    target = tiny(layers=3, hidden=32, dtype=torch.float32)
    target.model.layers[2].register_forward_hook(lambda *_: None)
    proposer = EarlyExit(exit_network(target, bits=bits), target)
    out = Engine(target, proposer, policy=Fixed(3)).generate(PROMPTS[:1], max_new_tokens=8, sampling=Sampling(0))
    assert out.tokens == Engine(target).generate(PROMPTS[:1], max_new_tokens=8, sampling=Sampling(0)).tokens
    assert type(proposer.lm.run) is Stock


@pytest.mark.parametrize("kind", ["early_exit", "quantised"])
def test_drafts_start_from_the_targets_slots(kind: str) -> None:
    """The draft reads one id a row before the first draft, however long the text is, and none twice."""
    target, fed = tiny(layers=3), []
    proposer: Any = KINDS[kind].proposer(target)
    engine = Engine(target, proposer, policy=Fixed(2), rows=1)
    forward = LM.forward

    def counted(self: LM, ids: torch.Tensor, *args: Any, **more: Any) -> Any:
        fed.append((self is engine.target, ids.shape[1]))
        return forward(self, ids, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LM, "forward", counted)
        engine.generate(PROMPTS[:1], max_new_tokens=12, ignore_eos=True)
    assert {size for own, size in fed if not own} == {1} and len(fed) > 6
    assert proposer.lm.cache is engine.target.cache


def test_an_untrained_exit_is_the_targets_own_norm_and_head() -> None:
    target = tiny(layers=3)
    ids = torch.tensor(PROMPTS[:1])
    states = target(input_ids=ids, output_hidden_states=True).hidden_states[2]
    wanted = target.lm_head(target.model.norm(states))
    for rank in (0, 4):
        network = untrained_exit(target, 2, rank, 2).double()
        torch.testing.assert_close(serving(network, target)(ids).logits, wanted)
        (guess, *_) = Student(network, target).guesses({"ids": ids}, None)  # type: ignore[arg-type]
        torch.testing.assert_close(guess.head(guess.states), wanted[0])


def test_changes_are_added_to_copies() -> None:
    """Merged weights and separate changes give one distribution; columns before `first` are the target's own."""
    target = tiny(layers=3)
    network, ids = exit_network(target), torch.tensor(PROMPTS[:1])
    one, other = serving(network, target)(ids).logits, learning(network, target)(ids).logits
    torch.testing.assert_close(one, other)
    own = learning(network, target, 3).model(ids, use_cache=False).last_hidden_state
    plain = first_layers(target, 2).model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(own[:, :3], plain[:, :3])
    assert not torch.allclose(own[:, 3:], plain[:, 3:])
    with torch.no_grad():
        network.layers[0]["mlp/up_proj"].up.mul_(2)
    assert not torch.allclose(serving(network, target)(ids).logits, one)  # merged again


def test_packed_texts_are_read_apart() -> None:
    """Each as if alone, and no round starts across them."""
    target = tiny(layers=3)
    student = Student(exit_network(target), target)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    packed = student.guesses({"ids": ids, "position_ids": positions}, None)  # type: ignore[arg-type]
    alone = [student.guesses({"ids": part}, None) for part in (ids[:, :6], ids[:, 6:])]  # type: ignore[arg-type]
    for depth, guess in enumerate(packed):
        first, second = (part[depth] for part in alone)
        assert (
            guess.at.tolist()
            == [*range(depth, 6), *range(6 + depth, 10)]
            == [*first.at.tolist(), *(6 + second.at).tolist()]
        )
        torch.testing.assert_close(guess.states, torch.cat([first.states, second.states]))


def test_another_target_and_missing_layers_raise() -> None:
    target = tiny(layers=3)
    with pytest.raises(ValueError, match="its target is not the engine's model"):
        Engine(tiny(layers=3), EarlyExit(exit_network(target), target)).generate(PROMPTS[:1], max_new_tokens=4)
    for layers in (0, 4):
        with pytest.raises(ValueError, match="but the target has 3: give 1 to 3"):
            untrained_exit(target, layers, 2, 2)
