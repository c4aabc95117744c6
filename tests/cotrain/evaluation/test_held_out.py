"""Held-out figures against plain loops over whole distributions in float64, and against passes of real models."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from cotrain.data.texts import Texts
from cotrain.evaluation import comparison
from cotrain.evaluation.held_out import HeldOut, evaluate, figures, held_out
from cotrain.losses.guess import Guess
from cotrain.students.base import LAST
from cotrain.students.independent import IndependentStudent
from cotrain.teacher.target_model import served, split
from cotrain.training.callbacks import depths, whole
from inference.sampling import keep_top_k
from inference.verify import predict_chain
from tests.tiny import tiny

N, T, V, D, TOP_K, TEMPERATURE = 5, 12, 9, 4, 7, 0.7


PROMPT, LENGTH = [2, 1, 5, 3, 4], [9, 12, 6, 10, 5]  # tokens of each, some texts of one token alone


DOMAINS = ["b", "a", "b", "c", "a"]


def parts(domains: list[str] = DOMAINS) -> tuple[HeldOut, torch.nn.Linear, torch.Tensor, torch.nn.Linear]:
    """Texts with states of a target, its head; states of a draft by depth (2, N, T, D), and its head."""
    torch.manual_seed(5)
    ids = torch.randint(V, (N, T))
    texts = Texts(ids, torch.tensor(PROMPT), torch.tensor(LENGTH), domains)
    head_p, head_q = (torch.nn.Linear(D, V, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        head_q.weight += 4 * (head_p.weight - head_q.weight) / 5
    states = 2 * torch.randn(N, T, D, dtype=torch.float64)
    held = HeldOut(texts, {LAST: states}, TEMPERATURE, lambda logits: keep_top_k(logits, TOP_K))
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
    top = np.where(probs >= np.sort(probs)[-TOP_K], probs, 0.0)
    return top / top.sum()


def softmax(logits: torch.Tensor) -> np.ndarray:
    weights = np.exp(logits.detach().numpy() / TEMPERATURE)
    return np.asarray(weights / weights.sum())


class Token:
    """A sampled token: by depth l, hit, confidence, alpha, p(argmax q), KL and entropy of q; None where none is drawn.
    One that p gives nothing stands at the edge of a cut: as if p = q there."""

    def __init__(
        self, held: HeldOut, head_p: Any, states: torch.Tensor, head_q: Any, row: int, at: int, deep: bool
    ) -> None:
        x = int(held.texts.ids[row, at + 1])
        p = cut(softmax(head_p(held.states[LAST][row, at])))
        self.by_depth: list[dict[str, float] | None] = []
        for depth in range(1 + deep):
            if depth and at % 3 == 0:
                self.by_depth.append(None)
                continue
            q = softmax(head_q(states[depth][row, at]))
            served, top = cut(q), int(q.argmax())
            tiny = math.log(np.finfo(np.float64).tiny)
            l = -math.inf if served[x] == 0 else float(np.log(served[x]) - np.log(p[x])) if p[x] else 0.0
            kl = sum(a * (math.log(a) - max(math.log(b), tiny)) for a, b in zip(p, q, strict=True) if a > 0)
            self.by_depth.append(
                {
                    "l": l,
                    "hit": float(top == x),
                    "sure": float(q[top]),
                    "alpha": float(np.minimum(p, served).sum()),
                    "greedy": float(p[top]),
                    "kl": kl,
                    "entropy": float(-(q * np.log(q)).sum()),
                }
            )


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
    guess = token.by_depth[min(depth, len(token.by_depth) - 1)]
    return 0.0 if guess is None else min(1.0, math.exp(guess["l"]))


def hit(token: Token, depth: int) -> float:
    guess = token.by_depth[min(depth, len(token.by_depth) - 1)]
    return 0.0 if guess is None else guess["hit"]


def mean(texts: list[list[Token]], name: str, depth: int = 0) -> float:
    guesses = [
        token.by_depth[depth] for text in texts for token in text[depth:]
    ]  # no round drafts the first at depth 1
    return sum(one[name] for one in guesses if one) / len(guesses) if guesses else math.nan


def calibration(texts: list[list[Token]]) -> float:
    bins, guesses = np.zeros(15), [token.by_depth[0] for text in texts for token in text]
    for one in guesses:
        bins[min(int(one["sure"] * 15), 14)] += one["sure"] - one["hit"]
    return float(np.abs(bins).sum() / len(guesses))


def grid(texts: list[list[Token]], name: str, never: float, deep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, L), or (N, L, 2), and lengths: for what `predict_chain` says of them."""
    lengths = torch.tensor([len(text) for text in texts])
    rows = torch.zeros(len(texts), int(lengths.max()), 2, dtype=torch.float64)
    for row, text in enumerate(texts):
        for at, token in enumerate(text):
            for depth, one in enumerate(token.by_depth):
                rows[row, at, depth] = never if one is None else one[name]
    return (rows if deep else rows[..., 0]), lengths


def wanted(texts: dict[str, list[list[Token]]], deep: bool) -> dict[str, float]:
    most, values = (2 if deep else 8), dict[str, float]()
    for domain, mine in texts.items():
        tokens = sum(map(len, mine))
        for name, figure in (
            ("alpha", "alpha"),
            ("greedy", "alpha_greedy_draft"),
            ("kl", "kl"),
            ("entropy", "entropy"),
        ):
            values[f"{figure}/{domain}"] = mean(mine, name)
        values[f"calibration_error/{domain}"] = calibration(mine)
        l, lengths = grid(mine, "l", -math.inf, deep)
        for k in range(1, most + 1):
            values[f"tau/{domain}/{k}"] = tokens / sum(calls(text, k, accepted) for text in mine)
            values[f"tau_greedy_draft/{domain}/{k}"] = tokens / sum(calls(text, k, hit) for text in mine)
            values[f"tau_block/{domain}/{k}"] = float(
                predict_chain.tau_from(predict_chain.reach_block(l, k, lengths), lengths)
            )
        by_depth = predict_chain.depths_from(predict_chain.reach(l.clamp(max=0).exp(), most, lengths), most, lengths)
        for name, chances in zip(("prefix", "conditional"), by_depth, strict=True):
            values |= {f"{name}/{domain}/{depth}": value for depth, value in enumerate(chances.tolist(), 1)}
        if deep:
            values |= {f"alpha_by_depth/{domain}/{depth + 1}": mean(mine, "alpha", depth) for depth in (0, 1)}
    return values | {"alpha/worst": min(mean(mine, "alpha") for domain, mine in texts.items() if domain != "all")}


@pytest.mark.parametrize("domains", [DOMAINS, ["b", "a", "d", "c", "a"]])  # a text of d is one token
@pytest.mark.parametrize("deep", [False, True])
def test_every_figure_agrees_with_loops_over_whole_distributions(deep: bool, domains: list[str]) -> None:
    held, head_p, states, head_q = parts(domains)
    student: Any = Drawn(held.texts.ids, states, head_q, deep)
    with torch.no_grad():
        scores = evaluate(held, student, head_p)
    texts = [
        [Token(held, head_p, states, head_q, row, at, deep) for at in range(PROMPT[row] - 1, LENGTH[row] - 1)]
        for row in range(N)
    ]
    by = {
        name: [text for text, domain in zip(texts, domains, strict=True) if domain == name]
        for name in sorted({*domains})
    }
    by["all"] = [text for name in sorted(by) for text in by[name]]
    hand, measured = wanted(by, deep), figures(scores)
    assert measured.keys() == hand.keys()
    close = {
        name: pytest.approx(
            value, rel=2e-5, abs=1e-6, nan_ok=name[:4] in ("cond", "pref") or name == "alpha_by_depth/d/2"
        )
        for name, value in hand.items()
    }
    assert {name: value for name, value in measured.items() if value != close[name]} == {}
    one = scores["all"]
    k = 2 if deep else 4
    assert one.calls(4).tolist() == pytest.approx([calls(text, k, accepted) for text in by["all"]], rel=1e-5)
    assert one.tau(3, "traversal") == one.tau(3) and one.tau(3, "block") != one.tau(3)
    saved = comparison.per_text({0.5: one}, {0.5: held})["0.5"]
    assert saved["lengths"] == [len(text) for text in by["all"]] and saved["calls"].keys() == {"4", "8"}
    assert saved["calls"]["8"] == one.calls(8).tolist() and saved["kl"] == one.kl and saved["alpha"] == one.alpha
    assert (saved["entropy"], saved["calibration"]) == (one.entropy, one.calibration)
    by_depth = [hand[f"alpha_by_depth/all/{i}"] for i in range(1, k + 1)] if deep else None
    assert saved.get("alphas") == (by_depth and pytest.approx(by_depth, rel=2e-5))
    curves = whole({0.5: scores, 1.0: {"all": SimpleNamespace(alpha=0.25)}}, 0.5)  # type: ignore[dict-item]
    assert curves == {
        "4_held_out/acceptance_T0.5": one.alpha,
        "4_held_out/acceptance_T1": 0.25,
        "4_held_out/kl": one.kl,
        "4_held_out/entropy": one.entropy,
        "4_held_out/calibration": one.calibration,
    } | {f"5_domains/acceptance_{name}": scores[name].alpha for name in by if name != "all"}
    named = {f"3_depth/acceptance_{i}": hand[f"conditional/all/{i}"] for i in range(1, k + 1)}
    assert depths(one, 4) == pytest.approx(named, rel=1e-5)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny()


def texts(lengths: list[int], prompts: list[int], domains: list[str]) -> Texts:
    ids = torch.randint(32, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    for row, length in zip(ids, lengths, strict=True):
        row[length:] = 0
    return Texts(ids, torch.tensor(prompts), torch.tensor(lengths), domains)


def judged(target: LlamaForCausalLM, texts: Texts, temperature: float = 1.0) -> HeldOut:
    return held_out(served(target)[0], texts, temperature, batch=2)


def test_the_target_as_its_own_draft_is_always_accepted(target: LlamaForCausalLM) -> None:
    some = texts([14, 26], [2, 2], ["a", "b"])
    found = figures(evaluate(judged(target, some), IndependentStudent(target), split(target)[1]))
    assert found["alpha/all"] == pytest.approx(1)
    assert [found[f"tau/all/{k}"] for k in (1, 2, 3, 5)] == pytest.approx([2, 3, 4, 6])
    assert found["kl/all"] == pytest.approx(0, abs=1e-9)


def test_a_part_of_the_texts_is_the_same_share_of_each_domain() -> None:
    """Domains come in turn, as with minutes=, or one after the other; every number of texts."""
    for domains in (["a", "b"] * 6, ["a"] * 8 + ["b"] * 4, ["a"] * 12):
        texts = Texts(torch.zeros(12, 3, dtype=torch.long), torch.ones(12), torch.full((12,), 3), domains)
        held = HeldOut(texts, {LAST: torch.zeros(12, 3, 2)}, 1.0)
        for count in range(1, 13):
            part = held.spread(count)
            assert len(part) == count
            for name in set(domains):
                assert abs(part.texts.domain.count(name) - count * domains.count(name) / 12) < 1
        assert held.spread(12).texts.domain == domains
