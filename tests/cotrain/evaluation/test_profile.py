"""Acceptance by draft temperature and by context, and provenance, against a direct computation."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from cotrain.data.texts import Texts
from cotrain.evaluation.held_out import HeldOut, held_out
from cotrain.evaluation.profile import profile, profile_line, provenance
from cotrain.students.base import LAST
from cotrain.students.independent import IndependentStudent
from cotrain.teacher.target_model import served, split
from inference import Sampling
from inference.sampling import keep_top_p, probs
from tests.cotrain.evaluation.test_held_out import LENGTH, PROMPT, Drawn, N, Token, cut, parts, softmax
from tests.folders import network

IDS = torch.randint(2, 300, (5, 21), generator=torch.Generator().manual_seed(0))


TEXTS = Texts(IDS, torch.tensor([3, 4, 5, 3, 1]), torch.tensor([21, 21, 12, 7, 20]), ["a", "b", "a", "a", "b"])


TARGET, DRAFT = network(), network(layers=1, seed=1)


def held(temperature: float, top_p: float = 1.0, texts: Texts = TEXTS) -> HeldOut:
    cut = (lambda logits: keep_top_p(logits, top_p)) if top_p < 1 else None
    return held_out(served(TARGET)[0], texts, temperature, cut)


def profile_of(one: HeldOut) -> dict:
    return profile(one, IndependentStudent(DRAFT), split(TARGET)[1], drafting=(0.0, 0.5, 1.0))


def direct(t: float, drafted: float, top_p: float = 1.0) -> torch.Tensor:
    """alpha (N,) of the sampled tokens, from whole distributions."""
    with torch.no_grad():
        both = [
            probs(model(IDS).logits[:, :-1], Sampling(at, top_p=top_p)) for model, at in ((TARGET, t), (DRAFT, drafted))
        ]
    return torch.minimum(*both).sum(-1)[TEXTS.predicted]


def test_alpha_over_both_temperatures_is_the_overlap_of_the_distributions_served() -> None:
    for t, top_p in ((1.0, 1.0), (0.5, 1.0), (0.0, 1.0), (1.0, 0.8)):
        by = profile_of(held(t, top_p))["by_draft_temperature"]
        assert list(by) == ["0", "0.5", "1"]
        for drafted, alpha in by.items():
            assert abs(alpha - direct(t, float(drafted), top_p).mean()) < 1e-5


def test_the_line_names_the_best_temperature() -> None:
    one = {"by_draft_temperature": {"0.5": 0.7, "1": 0.6}, "by_context": {"1-1": 0.5, "2-3": 0.65}}
    wanted = "acceptance 0.600 with the draft at the same one, 0.700 with the draft at 0.5, the best; "
    wanted += "by tokens of context 0.500 at 1-1, 0.650 at 2-3"
    assert profile_line(1.0, one) == f"target at temperature 1: {wanted}"


def test_surprise_is_a_mean_over_possible_tokens() -> None:
    held, head_p, _, _ = parts()
    distributions = [
        (cut(softmax(head_p(held.states[LAST][row, at]))), int(held.texts.ids[row, at + 1]))
        for row in range(N)
        for at in range(PROMPT[row] - 1, LENGTH[row] - 1)
    ]
    some = [(p, x) for p, x in distributions if p[x] > 0]
    origin = provenance(held, head_p)
    assert 0 < len(some) < len(distributions) == origin.tokens and origin.impossible == pytest.approx(
        1 - len(some) / len(distributions)
    )
    assert origin.surprise == pytest.approx(np.mean([-math.log(p[x]) for p, x in some]), rel=1e-5)
    assert origin.entropy == pytest.approx(np.mean([-(p[p > 0] * np.log(p[p > 0])).sum() for p, _ in some]), rel=1e-5)


def test_acceptance_by_context_is_at_the_targets_own_temperature() -> None:
    held, head_p, states, head_q = parts()
    student: Any = Drawn(held.texts.ids, states, head_q, deep=False)
    by: dict[int, list[float]] = {}
    for row in range(N):
        for at in range(PROMPT[row] - 1, LENGTH[row] - 1):
            one = Token(held, head_p, states, head_q, row, at, deep=False).by_depth[0]
            by.setdefault((at + 1).bit_length(), []).append(one["alpha"])
    figures = profile(held, student, head_p)
    wanted = {f"{2 ** (bits - 1)}-{2**bits - 1}": sum(alphas) / len(alphas) for bits, alphas in sorted(by.items())}
    assert figures["by_context"] == pytest.approx(wanted, rel=1e-5)
    whole = [alpha for alphas in by.values() for alpha in alphas]
    assert figures["by_draft_temperature"]["0.7"] == pytest.approx(sum(whole) / len(whole), rel=1e-5)
