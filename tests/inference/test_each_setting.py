"""Each setting by itself, where nothing beside it could hide that it is forgotten."""

import inspect
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.batched.batch import Batch
from inference.noise import ACCEPT, DRAFT, RESIDUAL, Uniforms, branch_states, gumbel, gumbel_states, uniforms
from inference.policy import Fixed
from inference.processors import process
from inference.proposers import Independent
from inference.request import Request
from inference.round import DecodingRound
from inference.sampling import probs
from inference.verify.rules import RULES
from tests.kinds import KINDS, SHAPED
from tests.tiny import near, tiny

V = 16
ALONE: dict[str, Any] = {
    "temperature": 0.5, "top_k": 2, "top_p": 0.4, "min_p": 0.4, "repetition_penalty": 1.7, "presence_penalty": 1.5,
    "frequency_penalty": 1.5, "logit_bias": {3: 2.5}, "banned": ((4,), (2, 5)), "min_new_tokens": 9, "stop_ids": (6,),
}  # fmt: skip
TOGETHER = {"min_new_tokens": {"stop_ids": (6,)}}  # what a setting needs to act at all
NOT_LAWS = {"stop", "stop_ids", "processors"}


def only(name: str) -> Sampling:
    return Sampling(**{name: ALONE[name]}, **TOGETHER.get(name, {}))


def test_every_setting_that_changes_a_distribution_is_here() -> None:
    assert set(Sampling.__dataclass_fields__) - NOT_LAWS == set(ALONE) - NOT_LAWS


@pytest.mark.parametrize("name", sorted(set(ALONE) - NOT_LAWS))
def test_a_batch_with_one_setting_has_the_distributions_of_its_rows(name: str) -> None:
    """Of drafts, place by place; the other row has none, so that only what the first one asks for is made."""
    sampling, texts, x = [only(name), Sampling()], [[1, 2, 6, 5, 5], [7, 2, 5, 6, 6]], [[5, 2], [4, 5]]
    rows = [Request(i, i, texts[i][:2], 9, one, frozenset(one.stop_ids)) for i, one in enumerate(sampling)]
    for row, text in zip(rows, texts, strict=True):
        row.text += text[2:]
    logits = 2 * torch.randn(2, 3, V, generator=torch.Generator().manual_seed(1))
    round = DecodingRound(rows, [2, 2], RULES["token"], Uniforms(0, torch.device("cpu")), V, torch.device("cpu"))
    found = round.target_probs(logits, torch.tensor(x), [2, 2])
    for a, (row, one) in enumerate(zip(rows, sampling, strict=True)):
        for j in range(3):
            scores = process(logits[a, j : j + 1], [row.text + x[a][:j]], [row.emitted + j], one)
            torch.testing.assert_close(found[a, j], probs(scores, one)[0])
    assert not torch.equal(found[0], logits[0].softmax(-1))


@pytest.mark.parametrize("name", sorted(set(ALONE) - NOT_LAWS))
def test_drafts_by_temperature_alone_are_for_rows_with_nothing_else(name: str) -> None:
    """What a compiled draft is drawn by knows temperatures; whatever else a distribution takes, it must not be
    asked."""
    row, cpu = Request(0, 0, [1, 2], 9, only(name), frozenset()), torch.device("cpu")
    turns = {rule: DecodingRound([row], [2], RULES[rule], Uniforms(0, cpu), V, cpu) for rule in ("token", "coupled")}
    assert turns["token"].temperatures == ([0.5] if name == "temperature" else None)
    assert turns["coupled"].temperatures is None


def test_numbers_of_every_start_are_their_own() -> None:
    """Token by token past all that is made at once; two rows, whose numbers stand side by side; deeper and deeper."""
    noise, cpu = Uniforms(5, torch.device("cpu")), torch.device("cpu")
    assert noise.ahead == Uniforms.AHEAD
    for start in range(2 * Uniforms.AHEAD + 2):
        depths = 2 + (start > 20) + 2 * (start > 90)
        key = torch.tensor([7, 9]), torch.tensor([start, start + 3]), torch.arange(depths)
        assert torch.equal(noise([7, 9], [start, start + 3], depths), uniforms(5, *key, (DRAFT, ACCEPT, RESIDUAL))), (
            start
        )
    assert Uniforms(5, cpu).table.numel() == 0


def test_noise_of_rows_is_of_the_seed_that_is_asked_for() -> None:
    """Also where the rows are those of an earlier call with another seed."""
    rows = [Request(i, 90 + i, [1, 2], 9, Sampling(), frozenset()) for i in range(2)]
    batch, ids = Batch(rows, V, torch.device("cpu")), torch.tensor([90, 91])
    for seed in (5, 0, 6):
        assert torch.equal(batch.gumbel_states(seed), gumbel_states(seed, ids))
        assert torch.equal(batch.branch_states(seed), branch_states(seed, ids))
        round = DecodingRound(rows, [2, 2], RULES["coupled"], Uniforms(seed, ids.device), V, ids.device, batch)
        place = torch.arange(3).expand(2, 3)
        assert torch.equal(round._gumbel, gumbel(seed, ids, place, V))
        assert round.batch is batch


CALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of a stream: what it is given, and beside what
    "max_new_tokens": ({"max_new_tokens": 3}, {}),
    "sampling": ({"sampling": Sampling(0.4, top_k=3)}, {}),
    "seed": ({"seed": 8}, {}),
    "ids": ({"ids": [77]}, {}),
    "ignore_eos": ({"ignore_eos": True}, {}),
}


def test_a_stream_passes_on_all_that_it_is_given() -> None:
    """Each argument changes the text, and to that of `generate`."""
    assert {*inspect.signature(Engine.stream).parameters} - {"self", "prompt"} == {*CALL}
    engine = Engine(tiny(eos=13), Independent(near(tiny(layers=1))), policy=Fixed(2), rows=1)

    def streamed(**settings: Any) -> list[int]:
        return [token for event in engine.stream([1, 2, 3], **settings) for token in event.ids]

    usual: dict[str, Any] = {"max_new_tokens": 24, "seed": next(
        seed for seed in range(99)
        if engine.generate([[1, 2, 3]], max_new_tokens=24, seed=seed).finish == ["stop"]
    )}  # fmt: skip
    for name, (given, _) in CALL.items():
        found = streamed(**usual | given)
        assert found == engine.generate([[1, 2, 3]], **usual | given).tokens[0] != streamed(**usual), name


@pytest.mark.parametrize("shape", [None, (-1, -1, 0, 0, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", SHAPED)
def test_a_greedy_draft_is_certain_whatever_the_temperature(
    kind: str, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its distributions are one-hot at its drafts, siblings are different tokens; those of one that samples are not."""
    target, proposals = tiny(layers=2), []
    propose = Engine.propose

    def kept(engine: Engine, round: DecodingRound) -> Any:
        proposals.append(propose(engine, round))
        return proposals[-1]

    monkeypatch.setattr(Engine, "propose", kept)
    for greedy in (True, False):
        proposer = KINDS[kind].proposer(target, greedy=greedy, **({"shape": shape} if shape else {}))
        engine = Engine(target, proposer, verify="tree", policy=Fixed(2), rows=2)
        proposals.clear()
        engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=5, ignore_eos=True)
        distributions = [(one.q[a, :n], one.x[a, :n]) for one in proposals for a, n in enumerate(one.k) if n]
        own = torch.cat([q.gather(-1, x.unsqueeze(-1)).flatten() for q, x in distributions])
        assert len(own) > 4 and bool((own == 1).all()) == greedy, greedy
        if shape and greedy:
            first = [x[:2].tolist() for _, x in distributions if len(x) > 2]
            assert first and all(len({*pair}) == 2 for pair in first)
