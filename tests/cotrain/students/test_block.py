"""Block drafts: blocks by hand, packed texts, the blocks of a training step, first weights, folders, CUDA graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cotrain.students.base import Guess
from cotrain.students.block import BlockStudent
from cotrain.students.parallel import KEEP
from inference import Engine
from inference.policy import Fixed
from inference.proposers.block import Block
from tests import kinds
from tests.cotrain.losses.test_batch import CONVERSATIONS, module
from tests.cotrain.losses.test_sequence import batch
from tests.cotrain.students.test_eagle import PROMPTS, distributions, draft
from tests.cotrain.students.test_p_eagle import IDS, PREDICTED, guessed, states_of
from tests.cotrain.students.test_parallel import MASKS
from tests.tiny import tiny
from tests.watched import Watched

SHAPES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"markov_rank": 3},
    {"draft_vocab_size": 16, "markov_rank": 3},
    {"target_head": True},
]


def student(**settings: Any) -> BlockStudent:
    return BlockStudent(kinds.block(tiny(), 0.3, **settings), tiny())


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """A head (D,) rotated by the angles of a position, pair by pair."""
    half = len(x) // 2
    output = x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / len(x)), dtype=x.dtype)
        output[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        output[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return output


def normed(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean() + norm.eps).sqrt() * norm.weight


def by_hand(one: BlockStudent, ids: Tensor, anchor: int) -> Tensor:
    """Log distributions (K, V) of the block after a text ids (T,) up to the anchor, query by query and head by head.
    The target has read the tokens before the anchor."""
    network, config = one.network, one.network.config
    states, theta, size = states_of(one, ids[None, :anchor]).states, config.rope_theta, config.head_dim
    context = [
        normed(network.fc.weight @ torch.cat([states[layer][0, t] for layer in config.layers]), network.hidden_norm)
        for t in range(anchor)
    ]
    embedding = one.target.get_input_embeddings().weight
    mask = embedding[config.dflash_config["mask_token_id"]] if config.target_head else network.mask_embedding
    head = (one.target if config.target_head else network).lm_head
    x = [embedding[ids[anchor]], *[mask] * config.depths]
    for layer in network.layers:
        w = layer.self_attn
        read = [normed(q, layer.input_layernorm) for q in x]
        keys = [turned(normed(w.k_proj.weight @ c, w.k_norm), t, theta) for t, c in enumerate([*context, *read])]
        values = [w.v_proj.weight @ c for c in [*context, *read]]
        for i in range(len(x)):
            queries = (w.q_proj.weight @ read[i]).unflatten(0, (-1, size))
            queries = [turned(normed(q, w.q_norm), anchor + i, theta) for q in queries]
            seen = anchor + (i + 1 if config.causal else len(x))
            parts = []
            for q in queries:  # one head of keys
                share = torch.stack([q @ keys[t] for t in range(seen)]) * size**-0.5
                parts.append(share.softmax(-1) @ torch.stack(values[:seen]))
            x[i] = x[i] + w.o_proj.weight @ torch.cat(parts)
        x = [q + layer.mlp(normed(q, layer.post_attention_layernorm)) for q in x]
    logits = torch.stack([head.weight @ normed(q, network.norm) for q in x[1:]])
    if config.markov_rank:  # of the token before: the anchor, then the text's
        before = [ids[anchor + depth] for depth in range(config.depths) if anchor + depth < len(ids)]
        w1, w2 = network.markov_head.markov_w1.weight, network.markov_head.markov_w2.weight
        logits = torch.stack([own + w2 @ w1[token] for own, token in zip(logits, before, strict=False)])
    whole = logits.new_full((len(logits), config.vocab_size), -torch.inf)
    known = network.known if network.pruned else torch.arange(config.vocab_size)
    whole[:, known] = logits
    return whole.log_softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_guesses_are_those_of_blocks_by_hand(settings: dict[str, Any]) -> None:
    one = student(**settings)
    by_depth = guessed(one, IDS[:1])
    assert [guess.depth for guess in by_depth] == [0, 1, 2]
    for anchor in range(1, IDS.shape[1]):
        expected = by_hand(one, IDS[0], anchor)
        for depth, guess in enumerate(by_depth):
            here = guess.at == anchor + depth
            assert int(here.sum()) == (anchor + depth < IDS.shape[1])
            torch.testing.assert_close(distributions(guess)[here], expected[depth : depth + 1][: int(here.sum())])


def test_many_blocks_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = student(markov_rank=3)
    expected = guessed(one, IDS)
    monkeypatch.setattr("cotrain.students.block.MOST_QUERIES", 1)  # two blocks of four queries at once, of nine tokens
    for guess, whole in zip(guessed(one, IDS), expected, strict=True):
        assert torch.equal(guess.at, whole.at)
        torch.testing.assert_close(distributions(guess), distributions(whole))


# --- the blocks of a training step


def in_training(
    one: BlockStudent, ids: Tensor, first: float, predicted: Tensor | None = None, u: float = 0.0
) -> list[Guess]:
    """The guesses of a step. first: the uniform that chooses the first block; u: those that keep guesses of a depth."""
    predicted = torch.ones(len(ids), ids.shape[1] - 1, dtype=torch.bool) if predicted is None else predicted
    uniforms = torch.full(ids.shape, u, dtype=torch.float64)
    uniforms[:, 0] = first
    return guessed(one, ids, uniforms=uniforms, predicted=predicted)


def test_a_training_step_reads_every_third_block_and_the_first_is_random() -> None:
    """Each block by one value of three of the uniform, so that each weighs three times as much."""
    one = student()
    whole = guessed(one, IDS)
    steps = [in_training(one, IDS, u) for u in (0.1, 0.5, 0.9)]
    assert [guess.at[guess.at < 9].tolist() for guess in (step[0] for step in steps)] == [[1, 4, 7], [2, 5], [3, 6]]
    for depth, every in enumerate(whole):
        parts = [step[depth] for step in steps]
        learnt = every.at[every.at % 9 < 8 + depth]  # the last block has no token to learn from
        assert all(part.share == pytest.approx(KEEP**depth / 3) for part in parts) and every.share == 1
        assert torch.equal(torch.cat([part.at for part in parts]).sort().values, learnt)
        order = torch.cat([part.at for part in parts]).argsort()
        together = torch.cat([distributions(part) for part in parts])[order]
        torch.testing.assert_close(together, distributions(every)[every.at % 9 < 8 + depth])


@pytest.mark.parametrize(("u", "depths"), [(0.3, 3), (0.6, 2), (0.8, 1)])
def test_later_depths_are_of_fewer_guesses(u: float, depths: int) -> None:
    """Depth j keeps a block's guess if the uniform at its anchor is below KEEP ** j: 1, .7, .49."""
    counts = [len(guess.at) for guess in in_training(student(), IDS, 0.1, u=u)]
    assert counts == [6, 6, 4][:depths] + [0] * (3 - depths)  # the last block has no position of depth 2


def test_a_short_text_has_a_block_in_every_step() -> None:
    one = student()
    for u in (0.0, 0.4, 0.6, 0.99):
        first, *_ = in_training(one, IDS[:, :3], u)
        assert len(first.at) == 2 * 1 and first.share == 1.0  # one block has a state and a token to learn from
    predicted = torch.zeros(2, 8, dtype=torch.bool)
    assert all(len(guess.at) == 0 for guess in in_training(one, IDS, 0.5, predicted))


def test_blocks_start_where_tokens_are_learnt() -> None:
    by_depth = in_training(student(depths=1), IDS[:, :6], 0.0, PREDICTED)
    assert by_depth[0].at.tolist() == [2, 3, 8, 9]  # the anchor 0 of the second text has no state before it


@pytest.mark.parametrize("name", ["kl", "0.3*kl+0.7*tv"])
def test_chosen_blocks_keep_the_expected_loss(name: str) -> None:
    one = student()
    made, given = module(one, one.target, name, decay=0.8), batch(CONVERSATIONS, True)
    values = []
    for first in (0.1, 0.5, 0.9):
        edges, value = [1.0, 0.7, 0.49, 0.0], 0.0
        for above, below in zip(edges, edges[1:], strict=False):
            u = torch.full((1, 100), (above + below) / 2)
            u[:, 0] = first
            made._uniforms = lambda keys, positions, u=u: u[:, :positions].expand(len(keys), -1)  # type: ignore[method-assign,misc]
            value += (above - below) * made.learn(given).item()
        values.append(value)
    made.student.guesses = lambda given, seen: BlockStudent(made.draft, one.target).guesses(  # type: ignore[method-assign]
        {"ids": given["ids"]}, seen
    )
    assert made.learn(given).item() == pytest.approx(sum(values) / 3, rel=1e-6)
    assert values[0] != pytest.approx(values[1], rel=1e-3)


# --- while serving


def test_a_block_is_as_long_as_in_training_whatever_is_drafted() -> None:
    """A mask sees all masks of its block: the first draft's distribution is the same if one or three are drafted."""
    target = tiny()
    for settings in SHAPES:
        first = []
        for k in (1, 3):
            watched = Watched(Block(kinds.block(target, 0.3, **settings)))
            engine = Engine(target, watched, policy=Fixed(k), rows=2)
            output = engine.generate(PROMPTS[:2], max_new_tokens=1, seed=3, ignore_eos=True)
            assert output.stats.target_calls == 2
            watched.rounds.clear()
            engine.generate(PROMPTS[:2], max_new_tokens=4, seed=3, ignore_eos=True)
            first.append(watched.rounds[0].q)
        torch.testing.assert_close(first[0][:, :1], first[1][:, :1])


# --- first weights and folders


@pytest.mark.parametrize("layers", [1, 2])
def test_first_weights_pass_on_the_highest_state_to_the_norm_and_head_of_the_target(layers: int) -> None:
    """A query that attends to one token alone adds that token's highest state, in norm, to its own."""
    target, init = tiny(), SimpleNamespace(kind="target_layers", layers=[])
    settings = draft(kind="block", layers=layers, markov=3, kv_heads=None, intermediate=None, head_dim=8)
    network: Any = BlockStudent.initial(settings, init, target)  # type: ignore[arg-type]
    network = network.to(target.dtype)
    assert len(network.layers) == layers and network.config.num_key_value_heads == 2
    assert network.config.intermediate_size == target.config.intermediate_size
    assert torch.equal(network.lm_head.weight, target.lm_head.weight.to(network.dtype))
    assert torch.equal(network.norm.weight, target.model.norm.weight.to(network.dtype))
    assert not network.markov_head.markov_w2.weight.any() and network.markov_head.markov_w1.weight.std() > 0.1
    seen = states_of(BlockStudent(network, target), IDS)
    angles = network.angles(torch.arange(IDS.shape[1]))
    for _, values in network.context(network.features(seen.states), *angles):
        highest = seen.states[network.config.layers[-1]]
        torch.testing.assert_close(values.flatten(2), F.rms_norm(highest, highest.shape[-1:], eps=1e-6))
    for layer in network.layers:
        assert torch.equal(layer.self_attn.o_proj.weight, torch.eye(16, dtype=network.dtype))
    assert BlockStudent(network, target).proposer().depths == 3


def test_the_head_of_the_target_is_no_weight_of_the_draft() -> None:
    """Neither it nor the mask learns, or is in a folder. It is not a smaller one."""
    target, init = tiny(), SimpleNamespace(kind="target_layers", layers=[])
    settings = {"kind": "block", "layers": 1, "kv_heads": None, "intermediate": None, "head_dim": 8}
    for key in ("vocabulary", "head_rank"):
        with pytest.raises(ValueError, match=f"draft.{key}=20: block drafts have none with this"):
            BlockStudent.initial(draft(**settings, head="target", **{key: 20}), init, target)  # type: ignore[arg-type]
    for small in ({"draft_vocab_size": 20}, {"head_rank": 4}):
        with pytest.raises(ValueError, match="the target's head has all tokens and its full rank"):
            kinds.block(target, target_head=True, **small)
    own, shared = (
        BlockStudent.initial(draft(**settings, head=head), init, target)  # type: ignore[arg-type]
        for head in ("own", "target")
    )
    ends = {"lm_head.weight": target.lm_head.weight.shape, "mask_embedding": (target.config.hidden_size,)}
    assert {name: w.shape for name, w in own.named_parameters() if name not in dict(shared.named_parameters())} == ends
    assert shared.state_dict().keys() <= own.state_dict().keys() and torch.equal(shared.norm.weight, own.norm.weight)
    assert shared.config.dflash_config["mask_token_id"] is None
    one = BlockStudent(shared.to(target.dtype), target, 32)
    assert shared.config.dflash_config["mask_token_id"] == 31  # of 32, without padding
    target.requires_grad_(False)  # as commands load it
    before = target.lm_head.weight.clone()
    made = module(one, target, "0.5*kl+0.5*tv")
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    made.learn(batch(CONVERSATIONS, True)).backward()
    assert all(bool(weight.grad.abs().sum() > 0) for weight in shared.parameters())
    optimizer.step()
    assert torch.equal(target.lm_head.weight, before)
    held = sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])
    assert held == sum(weight.numel() for weight in shared.parameters())


@MASKS
def test_the_mask_is_a_token_that_texts_do_not_have(vocabulary: int, pad: int, eos: Any, mask: int) -> None:
    """Chosen once: a folder keeps the one that its draft learnt with."""
    network = kinds.block(tiny(), target_head=True, dflash_config={}, pad_token_id=pad, eos_token_id=eos)
    for known in (vocabulary, 20):
        BlockStudent(network, tiny(), known)
        assert network.config.dflash_config["mask_token_id"] == mask
