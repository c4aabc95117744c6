"""Encoder-decoder targets. Text and logits are transformers' own, of one row at a time: of its whole forward without a
cache, and of its greedy `generate`. Rows have sources of different lengths, wait in spare slots, enter and move."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness.teacher_forced import teacher_forced
from inference.exactness.verdict import check
from inference.models.encoder_decoder import relative_bias
from inference.models.lm import store_prompts
from inference.policy import Fixed
from inference.proposers import Independent
from inference.sampling.noise import row_ids
from inference.source import SourcedText, source_in_text
from tests.encoder_decoders import DRAFTS, FAMILIES, generated, own_logits, sources, t5, with_encoder_of
from tests.inference.test_every_proposer import MIXED
from tests.often import often
from tests.tiny import emitted, near

LIMITS = [5, 21, 9, 30, 14, 7, 26, 11, 18]
SHAPE = (-1, -1, 0, 0, 1)


# positions by distance, and learnt ones over sources that are no ids
@pytest.fixture(params=often(FAMILIES, {"t5", "whisper"}.__contains__))
def model(request: pytest.FixtureRequest) -> Any:
    return FAMILIES[request.param]()


@contextmanager
def encoded_rows(model: Any) -> Iterator[list[int]]:
    """The number of sources in each pass of the encoder."""
    rows: list[int] = []
    hook = model.get_encoder().register_forward_hook(lambda _, __, out: rows.append(len(out[0])))
    try:
        yield rows
    finally:
        hook.remove()


def test_greedy_text_is_that_of_transformers(model: Any) -> None:
    prompts = sources(model, 9)
    engine = Engine(model, Independent(near(model), shape=SHAPE), verify="traversal", rows=4, policy=Fixed(3))
    starts = engine.starts(prompts)
    out = engine.generate(prompts, max_new_tokens=LIMITS, sampling=Sampling(0))
    assert out.tokens == [generated(model, start, n) for start, n in zip(starts, LIMITS, strict=True)]
    assert sum(out.stats.accepted) > 5


def test_texts_that_begin_with_several_ids_and_end_at_the_context(model: Any) -> None:
    """Their first ids are stored in free and in spare slots, beside sources of other lengths; drafts of the longest row
    and the padding of the others pass the last position."""
    made, whole = torch.Generator().manual_seed(2), Engine(model)
    begins = [torch.randint(3, 30, (1 + 5 * n % 7,), generator=made).tolist() for n in range(9)]
    sourced: Any = [source_in_text(start) for start in whole.starts(sources(model, 9))]
    starts = [SourcedText(*one) for one in zip(begins, sourced, strict=True)]
    engine = Engine(model, Independent(near(model, 0.02)), rows=3, policy=Fixed(3), context=64)
    limits = [99 if n % 3 == 0 else 6 for n in range(9)]
    out = engine.generate(starts, max_new_tokens=limits, sampling=Sampling(0), ignore_eos=True)
    for start, text, limit in zip(starts, out.tokens, limits, strict=True):
        assert len(text) == min(limit, 64 - len(start))
        wanted = own_logits(model, [*start, *text], start.source).argmax(-1)
        assert text == wanted[len(start) - 1 : -1].tolist()


@pytest.mark.parametrize(("width", "tree"), [(1, None), (4, None), (1, SHAPE)], ids=["1-None", "4-None", "1-tree1"])
def test_logits_are_those_of_the_whole_forward(model: Any, width: int, tree: Any) -> None:
    """Of texts that begin with 1 to 9 ids, read one at a time, several at a time and along trees."""
    engine = Engine(model)
    made = torch.Generator().manual_seed(1)
    begins = [torch.randint(3, 30, (length,), generator=made).tolist() for length in (1, 9, 2, 5)]
    sourced: Any = [source_in_text(start) for start in engine.starts(sources(model, 4))]
    starts = [SourcedText(*one) for one in zip(begins, sourced, strict=True)]
    texts = [torch.randint(3, 30, (length,), generator=made).tolist() for length in (24, 11, 24, 17)]
    for part in teacher_forced(model, starts, texts, Sampling(), width=width, tree=tree, rows=3):
        for row, logits in zip(part.rows, part.logits, strict=True):
            own = own_logits(model, [*starts[row], *texts[row]], starts[row].source)
            n = len(texts[row])
            assert (logits[:n] - own[len(starts[row]) - 1 :][:n]).abs().max() < 1e-10


def test_the_bias_of_equal_rows_is_transformers_own_and_that_of_a_tree_goes_by_depth() -> None:
    model = t5()
    attention: Any = model.decoder.block[0].layer[0].SelfAttention
    slots = torch.arange(20)
    for start, n in ((0, 20), (7, 5), (15, 1)):
        ours = relative_bias(attention, (start + torch.arange(n)).expand(3, n), slots)
        own = attention.compute_bias(n, 20, past_seen_tokens=start)
        assert torch.equal(ours, own.expand(3, -1, -1, -1))
    apart = relative_bias(attention, torch.tensor([[3], [11]]), slots)
    assert torch.equal(apart[1], attention.compute_bias(1, 20, past_seen_tokens=11)[0])
    # nodes at depths 1, 1 and 2 behind an anchor at position 4
    at = torch.tensor([[[0, 1, 2, 3, 4, 5, 5, 6]]])
    bias = relative_bias(attention, torch.tensor([[5, 5, 6]]), at)
    path = attention.compute_bias(1, 7, past_seen_tokens=6)[0, :, 0]
    assert torch.equal(bias[0, :, 2, [0, 1, 2, 3, 4, 5, 7]], path)


KINDS = ("independent", "shared encoder")
CASES: list[tuple[str, str, str, Any]] = [
    ("t5", kind, rule, None) for kind in KINDS for rule in ("token", "block", "match", "coupled")
]
CASES += [("t5", "shared encoder", rule, SHAPE) for rule in ("tree", "traversal", "coupled")]
CASES += [(family, "shared encoder", "block", None) for family in ("bart", "marian", "whisper")]
CASES += [(family, "independent", "traversal", SHAPE) for family in ("bart", "marian", "whisper")]


@pytest.fixture(params=DRAFTS)
def draft(request: pytest.FixtureRequest) -> Any:
    return DRAFTS[request.param]


def settings_of(rows: slice) -> dict[str, Any]:
    return {"max_new_tokens": LIMITS[rows], "sampling": [MIXED[n % 4] for n in range(9)[rows]], "ignore_eos": True}


@pytest.mark.thorough
def test_rows_are_as_if_alone(draft: Any) -> None:
    """Text and counts; earlier calls leave nothing behind."""
    target = t5()
    prompts = sources(target, 6)
    many, one = (Engine(target, draft(target), rows=rows, policy=Fixed(3)) for rows in (3, 1))
    many.generate(prompts[::-1], max_new_tokens=9, seed=7)
    out = many.generate(prompts, **settings_of(slice(6)))
    for n, prompt in enumerate(prompts):
        alone = one.generate([prompt], **settings_of(slice(n, n + 1)))
        assert (out.tokens[n], out.stats.rows[n]) == (alone.tokens[0], alone.stats.rows[0]), n
    assert sum(out.stats.drafted) > 3


@pytest.mark.thorough
def test_coupled_text_is_plain_text(model: Any, draft: Any) -> None:
    prompts, whole = sources(model, 9), settings_of(slice(9))
    plain = Engine(model, verify="coupled", rows=4).generate(prompts, **whole)
    out = Engine(model, draft(model), verify="coupled", rows=3, policy=Fixed(3)).generate(prompts, **whole)
    assert out.tokens == plain.tokens


def test_the_verdict_is_that_the_text_is_exact() -> None:
    target = t5(eos=None)
    engine = Engine(target, Independent(near(target, 0.05)), policy=Fixed(3), rows=6)
    starts = engine.starts(sources(target, 12))
    report = check(engine, emitted(engine, starts, 24), Sampling(), 24)
    assert report.passed, report.lines()


def test_each_source_is_encoded_once(model: Any) -> None:
    """By the target alone, if the draft's encoder is the target's."""
    prompts = sources(model, 9)
    draft = with_encoder_of(model)
    with encoded_rows(model) as target_rows, encoded_rows(draft) as draft_rows:
        shared, own = (
            Engine(model, Independent(draft, own_encoder=own), rows=4, policy=Fixed(3)) for own in (False, True)
        )
        for engine in (shared, own):
            engine.generate(prompts[:1], max_new_tokens=1)
        del target_rows[:], draft_rows[:]  # the self-checks encode too
        once = shared.generate(prompts, max_new_tokens=LIMITS, seed=1)
        assert (sum(target_rows), sum(draft_rows)) == (9, 0)
        again = own.generate(prompts, max_new_tokens=LIMITS, seed=1)
        assert (sum(target_rows), sum(draft_rows)) == (18, 9)
    assert once.tokens == again.tokens and once.stats.accepted == again.stats.accepted


@pytest.mark.parametrize("changed", ["draft", "target"])
def test_an_encoder_that_changes_is_no_longer_shared(changed: str) -> None:
    """As while a draft is trained: no new slots are needed, so nothing else asks again whether they are equal."""
    target = t5()
    proposer = Independent(with_encoder_of(target))
    engine, prompts = Engine(target, proposer, rows=2), sources(target, 3)
    engine.generate(prompts, max_new_tokens=4)
    assert proposer.shares_encoder
    with torch.no_grad():
        model: Any = target if changed == "target" else proposer.model
        model.get_encoder().block[0].layer[1].DenseReluDense.wo.weight.add_(1)
    engine.generate(prompts, max_new_tokens=4)
    assert not proposer.shares_encoder


def test_what_earlier_sources_left_is_not_read(model: Any) -> None:
    """Here NaN: a masked one would spoil a row, since 0 times NaN is NaN."""
    prompts = sources(model, 9)
    engine = Engine(model, rows=2)
    wanted = engine.generate(prompts, max_new_tokens=LIMITS, seed=1)
    run: Any = engine.target.run
    with torch.inference_mode():
        for layer in run.cross.stores:
            for store in layer.stored:
                store.fill_(torch.nan)
    assert engine.generate(prompts, max_new_tokens=LIMITS, seed=1).tokens == wanted.tokens


def test_a_cleared_slot_is_encoded_again(model: Any) -> None:
    engine = Engine(model, rows=2)
    texts = engine.starts(sources(model, 2))
    store_prompts(engine.target, 0, texts)
    engine.target.clear(1)
    store_prompts(engine.target, 1, texts[1:])
    ids = torch.tensor([text[-1:] for text in texts])
    logits = engine.target.forward(ids, [len(text) - 1 for text in texts]).logits[:, 0]
    for row, text in enumerate(texts):
        assert (logits[row] - own_logits(model, text)[-1]).abs().max() < 1e-10


def test_keys_of_noise_depend_on_the_source(model: Any) -> None:
    """Equal decoder texts of different sources have different noise, and a source has its own in any batch."""
    starts = Engine(model).starts(sources(model, 6))
    assert len(set(row_ids(starts))) == 6
    assert row_ids(starts[2:3]) == row_ids(starts)[2:3]
    assert len(set(row_ids([starts[0], starts[0]]))) == 2


def test_an_id_of_a_text_is_none_of_its_source() -> None:
    one, other = SourcedText([1, 2], (3,)), SourcedText([1], (2, 3))
    assert row_ids([one]) != row_ids([other]) and row_ids([one]) != row_ids([[1, 2, 3]])


def test_a_cleared_slot_is_zero(model: Any) -> None:
    """Not even NaN stays, which zero times would not remove."""
    engine = Engine(model, rows=2)
    store_prompts(engine.target, 0, engine.starts(sources(model, 2)))
    cross = engine.target.cross
    for layer in cross.stores:
        for store in layer.stored:
            store.fill_(torch.nan)
    engine.target.clear(1)
    assert all((store[1] == 0).all() and store[0].isnan().all() for layer in cross.stores for store in layer.stored)
