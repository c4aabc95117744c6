"""Settings of many rows at once on their device: the results are those of each row alone, and of `tests.reference`."""

import random
from collections import deque
from collections.abc import Hashable
from dataclasses import replace
from itertools import product

import pytest
import torch

from inference.request import Request
from inference.round import Batch, DecodingRound
from inference.sampling import Sampling, probs
from inference.sampling.noise import Uniforms
from inference.verify.rules import RULES
from inference.verify.tree import Tree, usable_lengths
from tests.reference import CHOICES, NEUTRAL, STEPS, Step, grid, reference

CPU, NOISE = torch.device("cpu"), Uniforms(0, torch.device("cpu"))
SMALL, ENDS = 10, frozenset({3, 4})  # a vocabulary in which settings meet, and two end tokens

V = 24
REGIMES = [
    Sampling(0),
    Sampling(),
    Sampling(0.7),
    Sampling(1.3, top_k=5),
    Sampling(0.9, top_p=0.8),
    Sampling(0, top_k=3),
    Sampling(top_k=7, top_p=0.6, min_p=0.05),
    Sampling(min_p=0.2),
    Sampling(top_k=V + 9),
    Sampling(top_k=1),
]


def requests(settings: list[Sampling], seed: int = 0) -> list[Request]:
    """Rows with these settings, in the middle of random texts."""
    chance, rows = random.Random(seed), []
    for i, one in enumerate(settings):
        text = chance.choices(range(SMALL), k=chance.randint(1, 5))
        rows.append(Request(i, i, text, 99, one, ENDS | frozenset(one.stop_ids)))
        rows[-1].text += chance.choices(range(SMALL), k=chance.randint(0, 6))
    return rows


def random_logits(*shape: int) -> torch.Tensor:
    return (2 * torch.randn(*shape, SMALL, dtype=torch.float64)).round(decimals=1)  # with ties


def wanted(
    logits: torch.Tensor, row: Request, drafts: list[int], sampling: Sampling | None = None, steps: list[Step] = STEPS
) -> torch.Tensor:
    return reference(logits, [*row.text, *drafts], row.prompt, sampling or row.sampling, sorted(ENDS), steps)


@pytest.mark.parametrize(
    "parents", [None, pytest.param((-1, -1, 0, 0, 1), marks=pytest.mark.thorough)], ids=["chain", "tree"]
)
def test_rows_that_enter_leave_and_move_have_the_distributions_of_the_reference(
    parents: tuple[int, ...] | None,
) -> None:
    """Of every draft before it, over rounds that emit a few tokens each, with several numbers of drafts."""
    torch.manual_seed(1)
    chance, tree = random.Random(2), None if parents is None else Tree(parents)
    nodes = [[*range(i)] for i in range(4)] if parents is None else [[], [0], [1], [0, 2], [0, 3], [1, 4]]
    waiting, active, batch, compared = deque(requests(grid(20, seed=3))), list[Request](), None, 0
    while waiting or active:
        while waiting and len(active) < 4:
            active.append(waiting.popleft())
        k = [chance.randint(0, len(nodes) - 1) for _ in active]
        x, logits = torch.randint(SMALL, (len(active), len(nodes) - 1)), random_logits(len(active), len(nodes))
        round = DecodingRound(active, k, RULES["tree"], NOISE, SMALL, CPU, batch)
        batch, p = round.batch, round.target_probs(logits, x, k, tree)
        for a, (row, length) in enumerate(zip(active, k, strict=True)):
            alone = DecodingRound([row], [length], RULES["tree"], NOISE, SMALL, CPU)
            single = alone.target_probs(logits[a : a + 1], x[a : a + 1], [length], tree)[0]
            for column, path in enumerate(nodes[: length + 1]):
                drafts = x[a, path].tolist()
                before = [0] if parents is None else [0, *(node + 1 for node in path)]
                columns = [*range(column)] if parents is None else before[:-1]
                mass = [float(p[a, at, x[a, node]]) for at, node in zip(columns, path, strict=True)]
                if row.ends.isdisjoint(drafts) and (all(mass) or not row.sampling.processors):  # else no text has them
                    right = wanted(logits[a, column], row, drafts)
                    torch.testing.assert_close(p[a, column], right, rtol=0, atol=1e-12, equal_nan=True)
                    torch.testing.assert_close(single[column], right, rtol=0, atol=1e-12, equal_nan=True)
                    compared += 1
                    if parents is None and column < length:  # as a draft model's own
                        q = round.probs(logits[:, column], [x[:, i] for i in range(column)])[a]
                        torch.testing.assert_close(q, right, rtol=0, atol=1e-12, equal_nan=True)
            row.text += chance.choices(range(SMALL), k=chance.randint(1, 3))
        for slot in [slot for slot, row in enumerate(active) if row.emitted > 20][::-1]:
            active[slot] = active[-1]
            active.pop()
    assert compared > 100


@pytest.mark.parametrize("name", [name for name, _ in STEPS])
def test_rows_that_differ_in_one_setting_alone(name: str) -> None:
    """Beside settings of which most are neutral, and of which few are."""
    torch.manual_seed(4)
    for one in (NEUTRAL, *grid(4, seed=5)):
        rows = requests([replace(one, **{name: value}) for value in CHOICES[name]])
        logits = random_logits(len(rows), 1)
        got = DecodingRound(rows, [0] * len(rows), RULES["token"], NOISE, SMALL, CPU).target_probs(
            logits, torch.empty(len(rows), 0, dtype=torch.int64), [0] * len(rows)
        )
        for row, here, p in zip(rows, logits[:, 0], got[:, 0], strict=True):
            torch.testing.assert_close(p, wanted(here, row, []), rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(V,), (3, V)])
def test_mixed_regimes_give_the_distributions_of_each_alone(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(len(REGIMES), *shape)).round(decimals=1).to(dtype)  # with ties
    batch = Batch([Request(i, i, [1], 9, one, frozenset()) for i, one in enumerate(REGIMES)], V, logits.device)
    batched = batch.regimes.probs(logits)
    for row, one in enumerate(REGIMES):
        assert torch.equal(batched[row], probs(logits[row : row + 1], one)[0]), one


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


def test_drafts_end_where_a_distribution_is_missing() -> None:
    p, q = torch.full((4, 4, V), 1 / V), torch.full((4, 3, V), 1 / V)
    p[1, 1], q[2, 2], p[3, 3] = torch.nan, torch.nan, torch.nan
    assert usable_lengths(p, q, torch.tensor([3, 3, 3, 2])).tolist() == [3, 1, 2, 2]
    assert usable_lengths(p[:, :1], None, torch.zeros(4, dtype=torch.int64)).tolist() == [0] * 4
