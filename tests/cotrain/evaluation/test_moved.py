"""How far a target has moved, against figures computed by hand, and the coverage of the bound."""

import math

import pytest
import torch

from cotrain.data.texts import Texts
from cotrain.evaluation.moved import CLAIMED, CONFIDENCE, movement, movement_figures, student_quantile, upper_bound
from cotrain.teacher.target_model import served
from tests.cotrain.evaluation.test_held_out import texts
from tests.tiny import near, tiny


def test_figures_agree_with_passes_by_hand() -> None:
    one, other = tiny(), near(tiny(), 0.05)
    some = texts([9, 14, 11], [2, 5, 1], ["b", "a", "b"])
    found = movement(served(one), served(other), some, batch=2)
    kl, reverse, same, nats, index = [], [], [], [], []
    for row in range(3):
        ids, first = some.ids[row, : some.length[row]], int(some.prompt[row])
        with torch.no_grad():
            p, q = (model(ids[None]).logits[0, first - 1 : -1].softmax(-1) for model in (one, other))
        kl += (p * (p / q).log()).sum(-1).tolist()
        reverse += (q * (q / p).log()).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).double().tolist()
        nats += p.gather(1, ids[first:, None]).log().squeeze(1).tolist()
        index += [row] * (len(ids) - first)
    assert found.kl.tolist() == pytest.approx(kl) and found.reverse.tolist() == pytest.approx(reverse)
    assert found.same.tolist() == same and found.original.tolist() == pytest.approx(nats)
    assert found.text.tolist() == index
    said = movement_figures(found, 0.95, lambda ids: f"<{ids[0]}>")
    assert said["kl"] == pytest.approx(sum(kl) / len(kl)) and said["tokens"] == len(kl)
    of_a = [value for value, row in zip(kl, index, strict=True) if row == 1]
    assert said["domains"]["a"]["kl"] == pytest.approx(sum(of_a) / len(of_a))
    assert said["nats"][0] == pytest.approx(-sum(nats) / len(nats)) and said["nats"][1] != said["nats"][0]
    assert said["kl_999"] == pytest.approx(max(kl), rel=0.05)
    assert said["lorenz"]["0.1"] == pytest.approx(sum(sorted(kl)[-(len(kl) // 10) :]) / sum(kl))
    most = max(set(found.token.tolist()), key=lambda t: sum(k for k, x in zip(kl, found.token, strict=True) if x == t))
    assert said["tokens_moved"][0]["token"] == f"<{most}>"


@pytest.mark.parametrize(("confidence", "freedom", "value"), [(0.95, 1, 6.3138), (0.975, 10, 2.2281)])
def test_quantiles_are_those_of_tables(confidence: float, freedom: int, value: float) -> None:
    assert student_quantile(confidence, freedom) == pytest.approx(value, abs=2e-3)


def test_the_bound_has_students_quantile_and_johnsons_correction() -> None:
    """Texts of one token, with KLs 0, 0, 0 and 4: mean 1, variance 4, third moment 6; t(.95; 3) = 2.3534."""
    bound = upper_bound(torch.tensor([0.0, 0.0, 0.0, 4.0]), torch.arange(4), 0.95)
    assert bound == pytest.approx(1 + 2.35336 * (4 / 4) ** 0.5 + 6 * (1 + 2 * 2.35336**2) / (6 * 4 * 4), abs=1e-3)


def test_the_bound_covers_the_mean_of_skewed_texts() -> None:
    """Texts have means and lengths of their own; a bound that took tokens as independent would cover far less."""
    torch.manual_seed(0)
    covered, naive, trials = 0, 0, 100
    for _ in range(trials):
        lengths = torch.randint(100, 209, (24,))
        text = torch.arange(24).repeat_interleave(lengths)
        mean = torch.exp(0.8 * torch.randn(24) - 0.32)  # 1 on average, whatever the length
        values = mean[text] * torch.rand(len(text)).clamp(min=1e-9).log().square() / 2
        covered += upper_bound(values, text, CONFIDENCE) >= 1
        naive += float(values.mean() + 2.33 * values.std() / math.sqrt(len(values))) >= 1
    assert covered / trials >= CLAIMED - 0.02 and naive / trials < 0.9


def test_one_text_bounds_nothing() -> None:
    assert upper_bound(torch.ones(5), torch.zeros(5, dtype=torch.int64), 0.95) == math.inf


def test_the_bound_is_of_the_mean_over_tokens() -> None:
    """Two long texts of a small KL and two short ones of a large KL."""
    text = torch.arange(4).repeat_interleave(torch.tensor([500, 500, 5, 5]))
    values = torch.where(text < 2, 0.1, 1.0) + 0.001 * (text % 2)
    assert 0.108 < float(values.mean()) < upper_bound(values, text, 0.6) < 0.12


def test_a_negative_skewness_does_not_lower_the_bound() -> None:
    values = torch.tensor([1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 0.1])
    error = float(values.double().std() / math.sqrt(7))
    expected = float(values.double().mean()) + student_quantile(0.95, 6) * error
    assert upper_bound(values, torch.arange(7), 0.95) == pytest.approx(expected, rel=1e-6)


def test_packed_texts_are_read_with_their_positions() -> None:
    one, other = tiny(), near(tiny(), 0.05)
    apart = texts([9, 8], [2, 3], ["a", "a"])
    ids = torch.cat([apart.ids[0, :9], apart.ids[1, :8]]).unsqueeze(0)
    places = torch.cat([torch.arange(9), torch.arange(8)]).unsqueeze(0)
    packed = Texts(ids, torch.tensor([12]), torch.tensor([17]), ["a"], places)
    expected = movement(served(one), served(other), apart.rows([1]))
    found = movement(served(one), served(other), packed)
    torch.testing.assert_close(found.kl, expected.kl)
