"""Settings of many rows at once on their device: the results are those of each row alone."""

from collections.abc import Hashable
from itertools import cycle, islice, product

import pytest
import torch

from inference.request import Request
from inference.round import Batch, send
from inference.sampling import Sampling, probs
from inference.sampling.penalties import process
from inference.verify.tree import usable_lengths

V = 24
REGIMES = [Sampling(0), Sampling(), Sampling(0.7), Sampling(1.3, top_k=5), Sampling(0.9, top_p=0.8),
           Sampling(0, top_k=3), Sampling(top_k=7, top_p=0.6, min_p=0.05), Sampling(min_p=0.2),
           Sampling(top_k=V + 9), Sampling(top_k=1)]  # fmt: skip
HISTORIES = [
    Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias={2: 1.5, 9: -0.3},
             banned=((3, 4), (1,), (5, 6, 7), (3, 3)), min_new_tokens=4, stop_ids=(7,)),
    Sampling(), Sampling(banned=((2, 2, 2), (4,))), Sampling(repetition_penalty=0.7), Sampling(frequency_penalty=-0.5),
    Sampling(min_new_tokens=2, stop_ids=(3, 11)), Sampling(presence_penalty=1.1), Sampling(logit_bias={4: -3.0}),
    Sampling(banned_first=(2, 5)), Sampling(min_new_tokens=1, stop_ids=(3,), banned_first=(8,)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(V,), (3, V)])
def test_mixed_regimes_give_the_distributions_of_each_alone(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(len(REGIMES), *shape)).round(decimals=1).to(dtype)  # with ties
    batch = Batch([Request(i, i, [1], 9, one, frozenset()) for i, one in enumerate(REGIMES)], V, logits.device)
    batched = batch.regimes.probs(logits)
    for row, one in enumerate(REGIMES):
        assert torch.equal(batched[row], probs(logits[row : row + 1], one)[0]), one
    assert torch.equal(batched, probs(logits, REGIMES))


@pytest.mark.parametrize("name, values", [("temperature", (0.5, 1.5)), ("top_k", (2, 9)), ("top_p", (0.3, 0.9)),
                                          ("min_p", (0.0, 0.5))])  # fmt: skip
def test_rows_that_differ_in_one_setting_alone(name: str, values: tuple[float, float]) -> None:
    both, logits = [Sampling(**{name: value}) for value in values], torch.linspace(-3, 3, V).expand(2, V)
    regimes = Batch([Request(i, i, [1], 9, one, frozenset()) for i, one in enumerate(both)], V, logits.device).regimes
    for row, one in enumerate(both):
        assert torch.equal(regimes.probs(logits)[row], probs(logits[row], one))
    assert not torch.equal(*regimes.probs(logits))


def test_batches_of_one_key_differ_in_tensors_alone() -> None:
    """A graph of one batch's distributions serves every other batch of its key and shapes."""
    logits, first = 3 * torch.randn(2, V, generator=torch.Generator().manual_seed(2)), dict[Hashable, Batch]()
    for pair in product(REGIMES, repeat=2):
        batch = Batch([Request(i, i, [1], 9, one, frozenset()) for i, one in enumerate(pair)], V, logits.device)
        name = batch.key, tuple((part, value.shape) for part, value in batch.tensors.items())
        recorded = first.setdefault(name, batch)
        probs = recorded.on(batch.tensors).regimes.probs(logits)
        torch.testing.assert_close(probs, batch.regimes.probs(logits), msg=lambda said, pair=pair: f"{pair}: {said}")
    assert len(first) < len(REGIMES) ** 2 / 2


def test_no_distribution_is_nan_throughout() -> None:
    logits = torch.zeros(4, V)
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    mixed = Batch(
        [Request(i, i, [1], 9, Sampling(t), frozenset()) for i, t in enumerate((0, 1, 0, 0.5))], V, logits.device
    )
    for distribution in (mixed.regimes.probs(logits), *(probs(logits, one) for one in REGIMES)):
        assert distribution[:3].isnan().all() and not distribution[3].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_histories_are_processed_as_one_by_one(dtype: torch.dtype) -> None:
    """Over rounds that emit a few tokens each, at every position of the drafts."""
    torch.manual_seed(1)
    texts = [torch.randint(9, (n,)).tolist() for n in (4, 1, 6, 2, 5, 3, 7, 2, 3, 4)]
    rows = [Request(i, i, text, 50, one, frozenset({0, *one.stop_ids}))
            for i, (text, one) in enumerate(zip(texts, HISTORIES, strict=True))]  # fmt: skip
    penalties, K = Batch(rows, V, torch.device("cpu")).penalties, 3
    assert penalties is not None
    for _ in range(4):
        x, logits = torch.randint(9, (len(rows), K)), torch.randn(len(rows), K + 1, V, dtype=dtype)
        emitted = [row.emitted for row in rows]
        sent = send(torch.device("cpu"), newest=penalties.newest(), tails=penalties.tails(), start=emitted)
        penalties.count(sent["newest"])
        whole = penalties.apply(logits, x, 0, sent["tails"], sent["start"])
        for place in range(K + 1):
            texts = [row.text + draft[:place] for row, draft in zip(rows, x.tolist(), strict=True)]
            new = [count + place for count in emitted]
            wanted = torch.cat([process(logits[a : a + 1, place], texts[a : a + 1], new[a : a + 1], row.sampling, [0])
                                for a, row in enumerate(rows)])  # fmt: skip
            assert torch.equal(whole[:, place], wanted)
            here = penalties.apply(logits[:, place : place + 1], x[:, :place], place, sent["tails"], sent["start"])
            assert torch.equal(here[:, 0], wanted)
        for row, count in zip(rows, islice(cycle((1, 4, 0, 2)), len(rows)), strict=True):
            row.text += torch.randint(9, (count,)).tolist()


def test_drafts_end_where_a_distribution_is_missing() -> None:
    p, q = torch.full((4, 4, V), 1 / V), torch.full((4, 3, V), 1 / V)
    p[1, 1], q[2, 2], p[3, 3] = torch.nan, torch.nan, torch.nan
    assert usable_lengths(p, q, torch.tensor([3, 3, 3, 2])).tolist() == [3, 1, 2, 2]
    assert usable_lengths(p[:, :1], None, torch.zeros(4, dtype=torch.int64)).tolist() == [0] * 4
