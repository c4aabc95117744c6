"""Acceptance by draft temperature and by context, against a direct computation of the two distributions."""

import torch

from cotrain.data.texts import Texts
from cotrain.evaluation.held_out import HeldOut, evaluate, held_out
from cotrain.evaluation.profile import line, profile
from cotrain.students.independent import Independent
from cotrain.teacher.target_model import served, split
from inference import Sampling
from inference.sampling import keep_top_p, probs
from tests.folders import network

IDS = torch.randint(2, 300, (5, 21), generator=torch.Generator().manual_seed(0))
TEXTS = Texts(IDS, torch.tensor([3, 4, 5, 3, 1]), torch.tensor([21, 21, 12, 7, 20]), ["a", "b", "a", "a", "b"])
TARGET, DRAFT = network(), network(layers=1, seed=1)


def held(temperature: float, top_p: float = 1.0) -> HeldOut:
    cut = (lambda logits: keep_top_p(logits, top_p)) if top_p < 1 else None
    return held_out(served(TARGET)[0], TEXTS, temperature, cut)


def found(one: HeldOut) -> dict:
    return profile(one, Independent(DRAFT), split(TARGET)[1], (0.0, 0.5, 1.0))


def direct(t: float, drafted: float, top_p: float = 1.0) -> torch.Tensor:
    """alpha (N,) of the sampled tokens, from whole distributions."""
    with torch.no_grad():
        both = [probs(model(IDS).logits[:, :-1].flatten(0, 1), [Sampling(at, top_p=top_p)] * 100).view(5, 20, -1)
                for model, at in ((TARGET, t), (DRAFT, drafted))]  # fmt: skip
    return torch.minimum(*both).sum(-1)[TEXTS.predicted]


def test_alpha_over_both_temperatures_is_the_overlap_of_the_distributions_served() -> None:
    for t, top_p in ((1.0, 1.0), (0.5, 1.0), (0.0, 1.0), (1.0, 0.8)):
        by = found(held(t, top_p))["by_draft_temperature"]
        assert list(by) == ["0", "0.5", "1"]
        for drafted, alpha in by.items():
            assert abs(alpha - direct(t, float(drafted), top_p).mean()) < 1e-5


def test_at_the_targets_temperature_it_is_what_evaluation_says() -> None:
    one = held(0.7)
    scores = evaluate(one, Independent(DRAFT), split(TARGET)[1])
    assert abs(found(one)["by_draft_temperature"]["0.7"] - scores["all"].alpha) < 1e-5


def test_contexts_are_counted_in_tokens_before_the_one_drafted() -> None:
    by = found(held(1.0))["by_context"]
    alphas = direct(1.0, 1.0)
    context = torch.arange(1, 21).expand(5, 20)[TEXTS.predicted]
    assert list(by) == ["1-1", "2-3", "4-7", "8-15", "16-31"]
    for span, alpha in by.items():
        low, high = map(int, span.split("-"))
        assert abs(alpha - alphas[(context >= low) & (context <= high)].mean()) < 1e-5


def test_the_line_names_the_best_temperature() -> None:
    one = {"by_draft_temperature": {"0.5": 0.7, "1": 0.6}, "by_context": {"1-1": 0.5, "2-3": 0.65}}
    wanted = "target at T 1: acceptance 0.600 drafting at that temperature, 0.700 at 0.5; by tokens of context "
    assert line(1.0, one) == wanted + "0.500 at 1-1, 0.650 at 2-3"
