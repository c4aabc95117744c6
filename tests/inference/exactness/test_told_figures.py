"""Figures that a user reads, each computed once more in plain Python from the counts and distributions that it stands
for."""

import math
from dataclasses import astuple, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from inference import Engine, Sampling
from inference.exactness import agreement, checks
from inference.exactness.checks import check_calls, check_depth
from inference.exactness.figures import Figures
from inference.exactness.ties import Compared, Difference
from inference.exactness.verdict import CallsCheck, DepthCheck, LogitsCheck, SurpriseCheck, TextCheck, Verdict
from inference.measure.arms import ArmResult
from inference.measure.costs import Costs, joined
from inference.measure.real_costs import RealRound, of_stats
from inference.measure.timing import Emitted, Interval, Timing, together
from inference.policy import Fixed
from inference.proposers import Independent
from inference.report.build import build
from inference.report.table import table
from inference.stats import PHASES, Counts, Stats, pooled
from tests.tiny import near, tiny

TEXT = TextCheck(7, 5, 2, 0, 0.25, 0.75, 0.5, 31, 37)
CALLS = CallsCheck(400, 101, 99.0, 5.0, 3, [0.9, 0.8], [0.9, 0.7], 6, 2.5)
DEPTH = DepthCheck(100, 57, 0.55, 0.02)
LOGITS = LogitsCheck(41, 0.1, 0.2, 0.5, 0.05, 0.3, 0.6)
SURPRISE = SurpriseCheck(1000, 1.25, 1.5, 3.0, -2.0, 7)
VERDICT = Verdict(TEXT, CALLS, DEPTH, LOGITS, {}, SURPRISE)
FAILING: dict[str, list[Any]] = {
    "text": [replace(TEXT, unexplained=1)],
    "calls": [replace(CALLS, measured=120), replace(CALLS, measured=78), replace(CALLS, rare=14)],
    "depth": [replace(DEPTH, accepted=62)],
    "logits": [replace(LOGITS, one=0.31), replace(LOGITS, many=0.31), replace(LOGITS, worst=0.61)],
    "surprise": [replace(SURPRISE, z=5.1), replace(SURPRISE, z=-5.1), replace(SURPRISE, place_z=5.1),
                 replace(SURPRISE, place_z=-5.1), replace(SURPRISE, impossible=21)],
}  # fmt: skip


def test_each_figure_beyond_its_limit_fails_its_check_and_the_verdict() -> None:
    assert VERDICT.passed and {*FAILING} == {*VERDICT.figures} - {"passed", "missing"}
    for place, (name, wrong) in enumerate(FAILING.items(), 1):
        for one in wrong:
            verdict = replace(VERDICT, **{name: one})
            assert not one.passed and not verdict.passed, one
            assert not verdict.figures["passed"] and not verdict.figures[name]["passed"]
            assert [line.endswith("FAILED") for line in verdict.lines()] == [n in (0, place) for n in range(6)]
    assert not replace(VERDICT, lossy="lossy_typical").passed
    assert (
        replace(CALLS, rare=12).passed and replace(DEPTH, accepted=10).passed
    )  # fewer are no sign of a wrong distribution


def test_figures_of_a_verdict_are_its_counts_and_what_follows_from_them() -> None:
    figures = VERDICT.figures
    for name, one in {"text": TEXT, "calls": CALLS, "depth": DEPTH, "logits": LOGITS, "surprise": SURPRISE}.items():
        for item in fields(one):
            assert figures[name][item.name] == getattr(one, item.name)
    made = {"z": (101 - 99) / 5, "z_rare": (6 - 2.5) / math.sqrt(2.5 + 3 + 1), "relative": 2 / 99, "tau": 400 / 99}
    for name, value in made.items():
        assert figures["calls"][name] == pytest.approx(value)
    assert figures["depth"]["measured"] == 0.57
    assert (
        TEXT.explained == 0.5
        and replace(TEXT, limit=9.0).explained == 0.5
        and replace(TEXT, noise=0.1).explained == 0.2
    )
    assert replace(VERDICT, calls=None, depth=None).figures["calls"] is None


def by_hand(figures: Figures, b: int) -> tuple[float, float]:
    """Mean and variance of the calls of one text under the token rule, backwards from its end."""
    T = int(figures.lengths[b])
    ratio = [min(1.0, math.exp(float(figures.logq[b, t] - figures.logp[b, t]))) for t in range(T)]
    mean, square = [0.0] * (2 * T + 9), [0.0] * (2 * T + 9)
    for t in reversed(range(T)):
        left, moments = 1.0, [0.0, 0.0]
        k = min(int(figures.k[b, t]), T - t)
        for n in range(k + 1):
            passed = left * (ratio[t + n] if n < k else 0.0)
            chance, left = left - passed, passed
            after = t + n + 1
            moments[0] += chance * (1 + mean[after])
            moments[1] += chance * (1 + 2 * mean[after] + square[after])
        mean[t], square[t] = moments
    return mean[0], square[0] - mean[0] ** 2


def known() -> tuple[Figures, Emitted]:
    """Two texts of other lengths, with rounds that draft nothing, and near ties where rounds begin and elsewhere."""
    generator = torch.Generator().manual_seed(3)
    logp, logq = (torch.rand(2, 6, generator=generator).double().add(0.1).log() for _ in range(2))
    alpha = torch.rand(2, 6, generator=generator).double()
    lengths, k = torch.tensor([6, 4]), torch.tensor([[2, 2, 2, 2, 1, 0], [2, 0, 1, 0, 0, 0]])
    near_p, near_q = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)
    near_p[0, 0] = near_p[0, 2] = near_q[0, 3] = near_q[0, 4] = near_q[1, 3] = True
    counts = [Counts(6, 3, [2, 1], [1, 1], [2, 1], [0, 3, 5]), Counts(4, 3, [2], [1], [2], [0, 1, 2])]
    return (Figures(logp, logq, alpha, near_p, near_q, k, lengths),
            Emitted([[1], [2]], [0, 1], [[1] * 6, [1] * 4], counts))  # fmt: skip


def test_calls_are_those_that_texts_must_cost() -> None:
    figures, texts = known()
    found = check_calls(figures, texts, "token")
    assert found is not None
    means, variances = zip(*(by_hand(figures, b) for b in range(2)), strict=True)
    assert found.predicted == pytest.approx(sum(means)) and found.near == 3
    assert found.sigma == pytest.approx(math.sqrt(sum(variances) + 3))
    assert (found.tokens, found.measured) == (10, 6)
    assert found.z == pytest.approx((6 - sum(means)) / found.sigma)


def test_depth_one_is_judged_where_rounds_began_that_drafted() -> None:
    figures, texts = known()
    began = [(0, 0), (0, 3), (1, 0), (1, 2)]
    alpha = [float(figures.alpha[place]) for place in began]
    found = check_depth(figures, texts)
    assert found is not None
    variance = sum(one * (1 - one) for one in alpha) + 2  # near ties at (0, 0) of the target and at (0, 3) of the draft
    assert (found.rounds, found.accepted) == (4, 2)
    assert found.alpha == pytest.approx(sum(alpha) / 4) and found.sigma == pytest.approx(math.sqrt(variance) / 4)


@pytest.mark.parametrize("own", [0.0, 3.0, 1e9])
def test_limits_of_logits_follow_from_rounding_and_the_dtype(own: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """own: units in the last place that transformers' forward moves by; none, some, and more than a dtype excuses."""
    model, unit = tiny(dtype=torch.float32), torch.finfo(torch.float32).eps
    moved = own * unit * torch.tensor([1.0, 2.0, 2.0])
    sides = iter(
        [torch.tensor([3.0, 4.0]).double(), torch.tensor([6.0, 8.0]).double()]
    )  # of passes of one id, and of several
    monkeypatch.setattr(agreement, "difference", lambda a, b: moved.double())
    monkeypatch.setattr(agreement, "_passes", lambda *_: next(sides))
    found = agreement.check_logits(Engine(model, rows=1).target, [[1, 2]], [[3, 4, 5]], 3)
    mean = math.sqrt(3) * own * unit
    assert (found.one, found.many, found.worst) == (pytest.approx(math.sqrt(12.5)), pytest.approx(math.sqrt(50)), 8)
    assert found.own == pytest.approx(mean) and found.tokens == 3
    assert found.limit == pytest.approx(min(max(4 * mean, 4 * unit), 1e-3))
    assert found.worst_limit == pytest.approx(min(max(4 * 2 * own * unit, 24 * unit), 6e-3))


@pytest.mark.parametrize("own", [0.0, 1e-5, 0.5])
def test_a_gap_is_excused_by_the_rounding_that_logits_have(own: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = tiny(dtype=torch.float32), []
    engine = Engine(model, Independent(near(model)), policy=Fixed(2), rows=1)

    def coupled(*given: Any) -> None:
        told.append(given)
        raise KeyError

    monkeypatch.setattr(checks, "check_logits", lambda *_: replace(LOGITS, own=own))
    monkeypatch.setattr(checks, "check_coupled", coupled)
    prompts = [[n, 2] for n in range(3)]
    texts = Emitted([*prompts, prompts[0]], [4, 5, 6, 4], [[1] * 9] * 4, [Counts(9)] * 4)
    with pytest.raises(KeyError):
        checks.check(engine, texts, Sampling(0.5), 600, seed=11)
    ((_, chosen, ids, sampling, limit, seed, bound, tree),) = told
    assert (chosen, ids) == (prompts[:2], [4, 5])  # 1,024 tokens, each prompt once
    assert (sampling, limit, seed, tree) == (Sampling(0.5), 600, 11, None)
    assert bound == pytest.approx(8 * min(max(own, torch.finfo(torch.float32).eps), 1e-3))


def test_texts_that_differ_are_counted_once_and_places_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three places in two of four texts; one is further apart than rounding explains."""
    places = ((0.2, 1), (0.3, 1), (5.0, 3))
    apart = [Difference(gap, torch.tensor([0.0, -gap]), torch.zeros(2), 0, 1, text, 9.0) for gap, text in places]
    given: list[Any] = []

    def compared(*told: Any, **named: Any) -> Compared:
        given.append((told, named))
        return Compared(apart, 17, 0.5, 8.0)

    monkeypatch.setattr(checks, "compare_text", compared)
    model, regime = tiny(), Sampling(0.5)
    engine, prompts = Engine(model, Independent(near(model)), policy=Fixed(3), rows=2), [[n, 2] for n in range(4)]
    found = checks.check_coupled(engine, prompts, [7, 8, 9, 6], regime, 5, 21, 0.25)
    assert found == TextCheck(4, 2, 2, 1, 1.0, 5.0, 8.0, 17, 20) and not found.passed
    (((lm, read, made, sampling), named),) = given
    coupled = Engine(model, verify="coupled", rows=2)
    wanted = coupled.generate(prompts, max_new_tokens=5, sampling=regime, seed=21, ids=[7, 8, 9, 6], ignore_eos=True)
    assert (lm, read, made, sampling) == (engine.target, prompts, wanted.tokens, regime)
    assert named == {"width": 4, "noise_keys": ([7, 8, 9, 6], 21), "bound": 0.25, "tree": None}
    assert engine.rule.name == "token"


def stats(first: int) -> Stats:
    """All numbers different."""
    rows = [Counts(first + 1, first + 2, [4, first], [3, 1], [4, 2], [first])]
    seconds, times = ({phase: scale * (first + n) for n, phase in enumerate(PHASES)} for scale in (0.5, 1))
    return Stats(first + 1, first + 7, [4, first], [3, 1], [4, 2], [], rows, seconds, times)  # type: ignore[arg-type]


def test_pooled_runs_are_sums_of_each_figure() -> None:
    a, b, c = stats(10), stats(20), stats(40)
    c.drafted, c.accepted, c.tried = [5, 40, 2], [2, 2, 1], [5, 3, 2]
    whole = pooled([a, b, c])
    assert (whole.tokens, whole.target_calls) == (11 + 21 + 41, 17 + 27 + 47)
    assert (whole.drafted, whole.accepted, whole.tried) == ([13, 70, 2], [8, 4, 1], [13, 7, 2])
    assert whole.rows == [*a.rows, *b.rows, *c.rows]
    for n, phase in enumerate(PHASES):
        assert whole.seconds[phase] == 0.5 * (70 + 3 * n) and whole.times[phase] == 70 + 3 * n


def test_texts_of_several_timings_keep_every_part() -> None:
    parts = [Emitted([[n]], [n + 10], [[n, n]], [Counts(n)]) for n in range(3)]
    assert together(parts) == Emitted(
        [[0], [1], [2]], [10, 11, 12], [[0, 0], [1, 1], [2, 2]], [Counts(n) for n in range(3)]
    )


def timing() -> Timing:
    """Two batches, of two prompts and one; the second was run once more. Tokens and seconds all different."""
    runs: list[list[dict[str, ArmResult]]] = []
    for batch, (prompts, repeats) in enumerate([(2, 1), (1, 2)]):
        runs.append([])
        for repeat in range(repeats):
            arms = {}
            for n, name in enumerate(("plain", "ours")):
                seconds, one = 1.0 + batch + 0.25 * repeat + 2 * n + n * batch, stats(30 * n + 10 * batch + repeat)
                tokens = [[0] * (5 + batch)] * prompts
                arms[name] = ArmResult(tokens, seconds, 0.75 * seconds - 0.1 * batch, one, prompts * (4 + batch) - n)
            runs[-1].append(arms)
    return Timing([([[1], [2]], [0, 1]), ([[3]], [2])], runs)


def test_a_report_says_what_was_timed() -> None:
    timed, target = timing(), tiny()
    engine = Engine(target, Independent(near(tiny(dtype=torch.float32))), policy=Fixed(2), rows=2)
    found = build(timed, engine, "ours", "plain", sampling=Sampling(0.5), max_new_tokens=5, target="t", verdict=VERDICT)
    paid: dict[str, Any] = {}
    for name in ("ours", "plain"):
        results = [run[name] for batch in timed.runs for run in batch]
        tokens, seconds = sum(len(text) for one in results for text in one.tokens), sum(one.seconds for one in results)
        fewer, decode = sum(one.decode_tokens or 0 for one in results), sum(one.decode_seconds for one in results)
        counted = [one.stats for one in results if one.stats]
        emitted, calls = sum(one.tokens for one in counted), sum(one.target_calls for one in counted)
        wanted = {"tokens": tokens, "seconds": seconds, "speed": tokens / seconds, "decode_tokens": fewer,
                  "decode_seconds": decode, "decode_speed": fewer / decode, "tau": emitted / calls,
                  "target_calls": calls, "rounds": sum(one.times["target"] for one in counted)}  # fmt: skip
        arm = found["arms"][name]
        assert {key: arm[key] for key in wanted} == pytest.approx(wanted)
        for phase in PHASES:
            assert arm["phases"][phase] == sum(one.seconds[phase] for one in counted)
        paid[name] = tokens / seconds, fewer / decode
    ratios = [a / b for a, b in zip(paid["ours"], paid["plain"], strict=True)]
    assert [found["speedup"][part]["value"] for part in ("whole", "decode")] == pytest.approx(ratios)
    settings = found["settings"]
    assert (settings["prompts"], settings["target_dtype"], settings["draft_dtype"]) == (3, "float64", "float32")
    assert [settings[name] for name in ("repeats", "max_new_tokens", "rows", "verify")] == [1, 5, 2, "token"]
    ours, acceptance = timed.stats("ours"), found["acceptance"]
    assert ours is not None
    assert (acceptance["drafted"], acceptance["accepted"]) == (ours.drafted, ours.accepted)
    for name, below in (("prefix", ours.drafted), ("conditional", ours.tried)):
        assert acceptance[name]["measured"] == [a / b for a, b in zip(ours.accepted, below, strict=True)]
        assert acceptance[name]["predicted"] == getattr(CALLS, name)
    assert acceptance["tau"] == {"measured": found["arms"]["ours"]["tau"], "predicted": pytest.approx(400 / 99)}
    rows = {line.split()[0]: line.split() for line in table(found).splitlines() if line}
    for name in ("ours", "plain"):
        arm = found["arms"][name]
        said = [line.split() for line in table(found).splitlines() if line.startswith(name)]
        assert said[0][1:3] == [f"{arm['speed']:.1f}", f"{arm['decode_speed']:.1f}"]
        assert said[0][3:] == [f"{arm['tau']:.3f}", str(arm["tokens"]), f"{arm['seconds']:.2f}"]
        spent = [f"{1000 * arm['phases'][phase] / arm['rounds']:.3f}" for phase in PHASES if phase != "prefill"]
        assert said[1][1:] == [*spent, str(arm["rounds"]), f"{1000 * arm['phases']['prefill']:.1f}"]
    assert rows["tau:"][2:] == [f"{acceptance['tau']['measured']:.3f},", "predicted", f"{400 / 99:.3f}"]


def test_an_interval_is_that_of_batches_drawn_together() -> None:
    timed, x = timing(), []
    for batch in timed.runs:
        x.append(
            [
                sum(values)
                for name in ("ours", "plain")
                for values in zip(*(r[name].paid(True) for r in batch), strict=True)
            ]
        )
    drawn = np.random.default_rng(4).integers(2, size=(50, 2))
    sums = [[sum(x[i][part] for i in one) for part in range(4)] for one in drawn]
    ratios = sorted((a / b) / (c / d) for a, b, c, d in sums)
    found = timed.ratio("ours", "plain", decode=True, resamples=50, seed=4)
    place = 0.025 * 49  # of 50 in order, on a line between the two around it
    assert found.low == pytest.approx(ratios[1] + (place - 1) * (ratios[2] - ratios[1]))
    assert found.high == pytest.approx(ratios[48] - (place - 1) * (ratios[48] - ratios[47]))
    assert Interval(2.0, 1.0, 2.5).within == 0.5 and Interval(2.0, 1.5, 3.0).within == 0.5
    assert Interval(2.0, math.nan, math.nan).within == math.inf


def test_seconds_of_a_round_are_all_of_its_parts() -> None:
    costs = Costs((1.0, 1.25, 1.75), 0.5, (0.125, 0.25, 0.375), first=0.0625)
    assert [costs.round(k) for k in range(3)] == [1.125, 0.5625 + 1.25 + 0.25, 1.0625 + 1.75 + 0.375]
    assert costs.ratio == 0.5 / 1.125
    one = stats(10)
    rounds = one.times["target"]
    seconds = [one.seconds[name] / rounds for name in ("draft", "target", "verify", "other")]
    drafted, plain = of_stats(one, 2), of_stats(one, 0)
    assert astuple(drafted) == pytest.approx((seconds[0], seconds[1], seconds[2] + seconds[3]))
    assert astuple(plain) == pytest.approx((0.0, seconds[1], seconds[0] + seconds[2] + seconds[3]))
    assert drafted.seconds == pytest.approx(sum(seconds)) == plain.seconds and isinstance(plain, RealRound)


def test_a_table_is_joined_of_the_parts_that_run() -> None:
    plain, target, draft = (
        Costs((n, n + 1.0, n + 2.0), n + 3.0, (n + 4.0, n + 5.0, n + 6.0), n, 10 * n, f"t{n}", f"d{n}", n + 7.0)
        for n in (100, 200, 300)
    )
    wanted = Costs((100, 201.0, 202.0), 303.0, (204.0, 205.0, 206.0), 200, 2000, "t200", "d300", 307.0)
    assert joined(plain, target, draft) == wanted
