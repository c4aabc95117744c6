"""The best distributions of a draft of one pass: by search over all distributions of a grid, and by what must hold of
them."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inference import Sampling
from studies import one_pass_ceiling
from studies.one_pass_ceiling import best_probs, expected
from tests.folders import target_folder


def worth(q: Tensor, distributions: Tensor, weights: Tensor) -> float:
    return float((weights * torch.minimum(distributions, q).sum(1)).sum())


def test_no_distribution_of_a_grid_is_better() -> None:
    generator = torch.Generator().manual_seed(3)
    grid = [torch.tensor(one) / 20 for one in product(range(21), repeat=3) if sum(one) == 20]
    for _ in range(20):
        distributions = torch.rand(4, 3, generator=generator).double().pow(3)
        distributions, weights = (
            distributions / distributions.sum(1, keepdim=True),
            torch.rand(4, generator=generator).double(),
        )
        found = best_probs(distributions, weights)
        assert float(found.sum()) == pytest.approx(1) and float(found.min()) >= 0
        best = max(worth(q, distributions, weights) for q in grid)
        assert best - 1e-9 <= worth(found, distributions, weights) <= best + 0.1 * float(weights.sum())


def test_a_coin_that_decides_the_next_token() -> None:
    """Two first tokens of half the mass, each with a certain and different next one, and the same behind: at best half
    of the second drafts are accepted, and rounds that were refused once count no deeper."""
    distributions = torch.tensor([[[0.5, 0.5], [1, 0], [1, 0], [1, 0]], [[0.5, 0.5], [0, 1], [1, 0], [1, 0]]]).double()
    tokens, places = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]]), torch.arange(2)
    assert expected(distributions, tokens, places, places) == pytest.approx([2, 2.5, 3.0, 3.5])


def test_a_token_that_the_fitted_half_lacks_has_the_distribution_of_all() -> None:
    distributions = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]).double()
    before, weights = torch.tensor([0, 0, 1, 2]), torch.tensor([1.0, 2.0, 1.0, 1.0]).double()
    best = one_pass_ceiling.best_after(distributions, weights, before, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(best[0], best_probs(distributions[:2], weights[:2]))
    torch.testing.assert_close(best[1:3], torch.stack([best[0], distributions[2]]))
    torch.testing.assert_close(best[3], best_probs(distributions[:3], weights[:3]))


def test_below_is_judged_on_continuations_that_fitted_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuations of the first half have another second token than those of the other: a distribution that is fitted
    to one is worth nothing in the other, and all to its own."""
    first, other = torch.tensor([0.5, 0.5]).double(), torch.eye(2).double()
    distributions = torch.stack([torch.stack([first, other[half]]) for half in (0, 0, 1, 1)])
    tokens = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]])
    monkeypatch.setattr(one_pass_ceiling, "distributions_along", lambda *of: (tokens, distributions))
    engine: Any = None
    found = one_pass_ceiling.ceiling(engine, [], 4, Sampling(), 0)
    assert found["below"] == pytest.approx([2, 2]) and found["above"] == pytest.approx([2, 3])
    assert found["markov_below"] == pytest.approx([2, 2]) and found["markov_above"] == pytest.approx([2, 3])


def test_the_report(tmp_path: Path) -> None:
    target, out = target_folder(tmp_path / "target"), tmp_path / "out.json"
    one_pass_ceiling.main(
        [str(out), "--texts", "3", "--samples", "8", "--temperatures", "1", "--set", f"target.path={target}"]
    )
    report = json.loads(out.read_text())
    found = report["tokens_of_a_round"]["1"]["all"]
    assert (report["texts"], report["samples"], report["target"]) == (3, 8, str(target))
    assert found["below"][0] == found["above"][0] == pytest.approx(2)
    assert all(low <= high + 1e-9 for low, high in zip(found["below"], found["above"], strict=True))
    assert found["above"] == sorted(found["above"])
