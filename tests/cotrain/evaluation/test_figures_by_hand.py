"""Every held-out figure against plain loops over whole distributions in float64: cut distributions, domains of several
sizes, ragged texts, and drafts whose distribution depends on the depth, with guesses at some places alone."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain.data.texts import Texts
from cotrain.evaluation import comparison
from cotrain.evaluation.held_out import HeldOut, evaluate, figures
from cotrain.evaluation.profile import profile
from cotrain.evaluation.provenance import provenance
from cotrain.losses.guess import Guess
from cotrain.students.base import LAST
from cotrain.training.held_out_points import depths, part_of, whole
from inference.sampling import keep_top_k
from inference.verify import prediction

N, T, V, D, KEPT, TEMPERATURE = 5, 12, 9, 4, 7, 0.7
PROMPT, LENGTH = [2, 1, 5, 3, 4], [9, 12, 6, 10, 5]  # tokens of each, some texts of one token alone
DOMAINS = ["b", "a", "b", "c", "a"]


def parts() -> tuple[HeldOut, torch.nn.Linear, torch.Tensor, torch.nn.Linear]:
    """Texts with states of a target, its head; states of a draft by depth (2, N, T, D), and its head."""
    torch.manual_seed(5)
    ids = torch.randint(V, (N, T))
    texts = Texts(ids, torch.tensor(PROMPT), torch.tensor(LENGTH), DOMAINS)
    head_p, head_q = (torch.nn.Linear(D, V, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        head_q.weight += 4 * (head_p.weight - head_q.weight) / 5
    states = 2 * torch.randn(N, T, D, dtype=torch.float64)
    held = HeldOut(texts, {LAST: states}, TEMPERATURE, lambda logits: keep_top_k(logits, KEPT))
    near = states + torch.randn(2, N, T, D, dtype=torch.float64)
    return held, head_p, near, head_q


class Drawn:
    """A student whose states are given; of two depths, the second guesses at two places of three."""

    network = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, ids: torch.Tensor, states: torch.Tensor, head: Any, deep: bool) -> None:
        self.ids, self.states, self.head, self.deep = ids, states, head, deep

    def guesses(self, batch: Any, seen: Any) -> list[Guess]:
        rows = [int((self.ids == row).all(1).nonzero()[0]) for row in batch["ids"]]
        if not self.deep:
            return [Guess.everywhere(self.states[0][rows], self.head)]
        states, every = self.states[:, rows], torch.arange(len(rows) * T)
        some = every[every % T % 3 != 0]
        return [
            Guess(0, every, states[0].flatten(0, 1), self.head),
            Guess(1, some, states[1].flatten(0, 1)[some], self.head),
        ]


def cut(probs: np.ndarray) -> np.ndarray:
    kept = np.where(probs >= np.sort(probs)[-KEPT], probs, 0.0)
    return kept / kept.sum()


def softmax(logits: torch.Tensor) -> np.ndarray:
    found = np.exp(logits.detach().numpy() / TEMPERATURE)
    return np.asarray(found / found.sum())


class Token:
    """A sampled token: by depth l, hit, confidence, alpha, p(argmax q), KL and entropy of q; None where none is drawn.
    One that p gives nothing stands at the edge of a cut: as if p = q there."""

    def __init__(
        self, held: HeldOut, head_p: Any, states: torch.Tensor, head_q: Any, row: int, at: int, deep: bool
    ) -> None:
        x = int(held.texts.ids[row, at + 1])
        p = cut(softmax(head_p(held.states[LAST][row, at])))
        self.found: list[dict[str, float] | None] = []
        for depth in range(1 + deep):
            if depth and at % 3 == 0:
                self.found.append(None)
                continue
            q = softmax(head_q(states[depth][row, at]))
            served, top = cut(q), int(q.argmax())
            tiny = math.log(np.finfo(np.float64).tiny)
            l = -math.inf if served[x] == 0 else float(np.log(served[x]) - np.log(p[x])) if p[x] else 0.0
            kl = sum(a * (math.log(a) - max(math.log(b), tiny)) for a, b in zip(p, q, strict=True) if a > 0)
            self.found.append({
                "l": l, "hit": float(top == x), "sure": float(q[top]), "alpha": float(np.minimum(p, served).sum()),
                "greedy": float(p[top]), "kl": kl, "entropy": float(-(q * np.log(q)).sum()),
            })  # fmt: skip


def calls(tokens: list[Token], k: int, chance: Any) -> float:
    """Expected rounds of a text, from its end backwards; chance: that a token is accepted, of what was found of it."""
    left = [0.0] * (len(tokens) + k + 2)
    for start in reversed(range(len(tokens))):
        reached, total = 1.0, 1.0
        for n in range(k + 1):
            at = start + n
            r = 0.0 if n == k or at >= len(tokens) else chance(tokens[at], n)
            total += reached * (1 - r) * left[at + 1]
            reached *= r
        left[start] = total
    return left[0]


def accepted(token: Token, depth: int) -> float:
    found = token.found[min(depth, len(token.found) - 1)]
    return 0.0 if found is None else min(1.0, math.exp(found["l"]))


def hit(token: Token, depth: int) -> float:
    found = token.found[min(depth, len(token.found) - 1)]
    return 0.0 if found is None else found["hit"]


def mean(texts: list[list[Token]], name: str, depth: int = 0) -> float:
    found = [token.found[depth] for text in texts for token in text]
    return sum(one[name] for one in found if one) / len(found)


def calibration(texts: list[list[Token]]) -> float:
    bins, found = np.zeros(15), [token.found[0] for text in texts for token in text]
    for one in found:
        assert one is not None
        bins[min(int(one["sure"] * 15), 14)] += one["sure"] - one["hit"]
    return float(np.abs(bins).sum() / len(found))


def grid(texts: list[list[Token]], name: str, never: float, deep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, L), or (N, L, 2), and lengths: for what `prediction` says of them."""
    lengths = torch.tensor([len(text) for text in texts])
    rows = torch.zeros(len(texts), int(lengths.max()), 2, dtype=torch.float64)
    for row, text in enumerate(texts):
        for at, token in enumerate(text):
            for depth, one in enumerate(token.found):
                rows[row, at, depth] = never if one is None else one[name]
    return (rows if deep else rows[..., 0]), lengths


def wanted(texts: dict[str, list[list[Token]]], deep: bool) -> dict[str, float]:
    most, found = (2 if deep else 8), dict[str, float]()
    for domain, mine in texts.items():
        tokens = sum(map(len, mine))
        for name, figure in (
            ("alpha", "alpha"),
            ("greedy", "alpha_greedy_draft"),
            ("kl", "kl"),
            ("entropy", "entropy"),
        ):
            found[f"{figure}/{domain}"] = mean(mine, name)
        found[f"calibration_error/{domain}"] = calibration(mine)
        l, lengths = grid(mine, "l", -math.inf, deep)
        for k in range(1, most + 1):
            found[f"tau/{domain}/{k}"] = tokens / sum(calls(text, k, accepted) for text in mine)
            found[f"tau_greedy_draft/{domain}/{k}"] = tokens / sum(calls(text, k, hit) for text in mine)
            found[f"tau_block/{domain}/{k}"] = float(prediction.tau_block(l, k, lengths))
        for name in ("conditional", "prefix"):
            values = getattr(prediction, name)(l.clamp(max=0).exp(), most, lengths).tolist()
            found |= {f"{name}/{domain}/{depth}": value for depth, value in enumerate(values, 1)}
        if deep:
            found |= {f"alpha_by_depth/{domain}/{depth + 1}": mean(mine, "alpha", depth) for depth in (0, 1)}
    return found | {"alpha/worst": min(mean(mine, "alpha") for domain, mine in texts.items() if domain != "all")}


@pytest.mark.parametrize("deep", [False, True])
def test_every_figure_is_what_loops_over_whole_distributions_say(deep: bool) -> None:
    held, head_p, states, head_q = parts()
    student: Any = Drawn(held.texts.ids, states, head_q, deep)
    with torch.no_grad():
        scores = evaluate(held, student, head_p)
    texts = [[Token(held, head_p, states, head_q, row, at, deep) for at in range(PROMPT[row] - 1, LENGTH[row] - 1)]
             for row in range(N)]  # fmt: skip
    by = {name: [text for text, domain in zip(texts, DOMAINS, strict=True) if domain == name] for name in "abc"}
    by["all"] = [text for name in "abc" for text in by[name]]
    hand, found = wanted(by, deep), figures(scores)
    assert found.keys() == hand.keys()
    close = {
        name: pytest.approx(value, rel=2e-5, abs=1e-6, nan_ok=name[:4] in ("cond", "pref"))
        for name, value in hand.items()
    }
    assert {name: value for name, value in found.items() if value != close[name]} == {}
    one = scores["all"]
    k = 2 if deep else 4
    assert one.calls(4).tolist() == pytest.approx([calls(text, k, accepted) for text in by["all"]], rel=1e-5)
    assert one.tau(3, "traversal") == one.tau(3) and one.tau(3, "block") != one.tau(3)
    told = comparison.per_text({0.5: one})["0.5"]
    assert told["lengths"] == [len(text) for text in by["all"]] and told["calls"].keys() == {"4", "8"}
    assert told["calls"]["8"] == one.calls(8).tolist() and told["kl"] == one.kl and told["alpha"] == one.alpha
    assert (told["entropy"], told["calibration"]) == (one.entropy, one.calibration)
    by_depth = [hand[f"alpha_by_depth/all/{i}"] for i in range(1, k + 1)] if deep else None
    assert told.get("alphas") == (by_depth and pytest.approx(by_depth, rel=2e-5))
    curves = whole({0.5: scores, 1.0: {"all": SimpleNamespace(alpha=0.25)}}, 0.5)  # type: ignore[dict-item]
    assert curves == {
        "4_held_out/acceptance_T0.5": one.alpha, "4_held_out/acceptance_T1": 0.25, "4_held_out/kl": one.kl,
        "4_held_out/entropy": one.entropy, "4_held_out/calibration": one.calibration,
    } | {f"5_domains/acceptance_{name}": scores[name].alpha for name in "abc"}  # fmt: skip
    named = {f"3_depth/acceptance_{i}": hand[f"conditional/all/{i}"] for i in range(1, k + 1)}
    assert depths(one, 4) == pytest.approx(named, rel=1e-5)


def test_a_part_of_the_texts_is_of_what_its_points_may_cost() -> None:
    """24 points over a tenth of the training's tokens; a text has (8 + 11 + 1 + 7 + 1) / 5 sampled ones."""
    held = parts()[0]
    each = sum(length - prompt for length, prompt in zip(LENGTH, PROMPT, strict=True)) / N
    for count in (1, 2, 5):
        part = part_of(held, 24 * (count + 0.5) * each / 0.1)
        assert len(part.texts) == {1: 1, 2: 2, 5: 5}[count] and len(part.states[LAST]) == len(part.texts)
    assert len(part_of(held, 0).texts) == 1 and len(part_of(held, 1e12).texts) == 5
    two = part_of(held, 24 * 2.5 * each / 0.1)  # rows 0 and 3
    assert torch.equal(two.texts.ids, held.texts.ids[[0, 3]]) and torch.equal(
        two.states[LAST], held.states[LAST][[0, 3]]
    )
    assert (two.temperature, two.truncate) == (held.temperature, held.truncate)


def test_a_gain_is_of_sums_over_paired_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a label are means over its runs; tau and the gain are ratios of sums, at each k of its own."""
    monkeypatch.setattr(comparison, "RESAMPLES", 200)
    rng = np.random.default_rng(3)

    def judged() -> dict[str, Any]:
        like = dict(zip(comparison.LIKE, rng.uniform(size=4).tolist(), strict=True))
        return {**like, "lengths": [7, 3, 11], "calls": {k: rng.uniform(1, 3, size=3).tolist() for k in ("4", "8")}}

    def run(label: str, seed: int) -> dict[str, Any]:
        return {"label": label, "seed": seed, "texts": {"0": judged(), "1": judged()}}

    runs = {"base": [run("base", s) for s in (0, 1, 2)], "other": [run("other", s) for s in (2, 1)]}
    for gain in comparison.compare(runs, "base"):
        mine, t, k = runs[gain.label], gain.temperature, str(gain.k)
        pairs = [(m, b) for m in mine for b in runs["base"] if m["seed"] == b["seed"]]
        ours, theirs = (sum(sum(pair[side]["texts"][t]["calls"][k]) for pair in pairs) for side in (0, 1))
        assert gain.seeds == len(pairs) and gain.tau == pytest.approx(21 * len(pairs) / ours)
        assert gain.gain == pytest.approx(theirs / ours - 1) and gain.low <= gain.gain <= gain.high
        for name in comparison.LIKE:
            assert getattr(gain, name) == pytest.approx(sum(m["texts"][t][name] for m in mine) / len(mine))
    assert len(comparison.compare(runs, "base")) == 8


def test_surprise_is_a_mean_over_tokens_that_can_be() -> None:
    held, head_p, _, _ = parts()
    distributions = [(cut(softmax(head_p(held.states[LAST][row, at]))), int(held.texts.ids[row, at + 1]))
            for row in range(N) for at in range(PROMPT[row] - 1, LENGTH[row] - 1)]  # fmt: skip
    some = [(p, x) for p, x in distributions if p[x] > 0]
    found = provenance(held, head_p)
    assert 0 < len(some) < len(distributions) == found.tokens and found.impossible == pytest.approx(
        1 - len(some) / len(distributions)
    )
    assert found.surprise == pytest.approx(np.mean([-math.log(p[x]) for p, x in some]), rel=1e-5)
    assert found.entropy == pytest.approx(np.mean([-(p[p > 0] * np.log(p[p > 0])).sum() for p, _ in some]), rel=1e-5)


def test_acceptance_by_context_is_at_the_targets_own_temperature() -> None:
    held, head_p, states, head_q = parts()
    student: Any = Drawn(held.texts.ids, states, head_q, deep=False)
    by: dict[int, list[float]] = {}
    for row in range(N):
        for at in range(PROMPT[row] - 1, LENGTH[row] - 1):
            one = Token(held, head_p, states, head_q, row, at, deep=False).found[0]
            assert one is not None
            by.setdefault((at + 1).bit_length(), []).append(one["alpha"])
    found = profile(held, student, head_p)
    wanted = {f"{2 ** (bits - 1)}-{2**bits - 1}": sum(alphas) / len(alphas) for bits, alphas in sorted(by.items())}
    assert found["by_context"] == pytest.approx(wanted, rel=1e-5)
    whole = [alpha for alphas in by.values() for alpha in alphas]
    assert found["by_draft_temperature"]["0.7"] == pytest.approx(sum(whole) / len(whole), rel=1e-5)
