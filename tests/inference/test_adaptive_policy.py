"""Adaptive policies: exact whatever they decide, free when they draft nothing, and best when their estimates are
right."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inference import Engine, Sampling
from inference.adaptive_policy import INPUTS, Adaptive, Estimates, seconds_of
from inference.policy import Fixed
from inference.proposers import Independent, independent
from inference.round import DecodingRound
from tests.encoder_decoders import sources, t5, with_encoder_of
from tests.exact import chi_square
from tests.inference.test_distribution import joint, pooled, small
from tests.kinds import KINDS
from tests.often import often
from tests.tiny import near, tiny

# --- exactness


@dataclass
class Scripted:
    """Decisions that read the drafts' logits as `CallDecisions` do, and end rounds often and unevenly."""

    given: "Script"
    round: int = 0
    seen: list[Tensor] = field(default_factory=list)
    asks: bool = True

    def idle(self, rows: int, asks: bool) -> bool:
        return self.given.waits

    def open(self, rows: Sequence[int], asks: bool) -> int:
        self.seen, self.round = [], self.round + 1
        return self.given.script[self.round - 1] if self.round <= len(self.given.script) else 3

    def see(self, depth: int, logits: Tensor, temperature: Tensor) -> None:
        if depth == len(self.seen):
            self.seen.append(logits)

    def goes_on(self, depth: int, room: Sequence[int]) -> bool:
        if self.round <= self.given.ended:
            return False
        if not self.given.stops or depth >= len(self.seen):
            return True
        return int(1000 * float(self.seen[depth].softmax(-1).amax(-1).sum())) % 3 > 0

    def close(self, drafts: Sequence[tuple[int, int]]) -> None:
        assert all(0 <= accepted <= drafted <= 3 for drafted, accepted in drafts)


@dataclass(frozen=True)
class Script:
    script: Sequence[int] = ()  # the longest draft of each round; 3 after its end
    ended: int = 0  # of the first rounds, all of which end after one draft
    stops: bool = True  # whether other rounds may end early
    waits: bool = False  # whether the draft reads prompts only when it drafts

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        return [3] * len(texts)

    def begin(self) -> Scripted:
        return Scripted(self)


def test_the_distribution_of_the_text_is_the_targets() -> None:
    """Of few rows at once, so that many rounds end early, under the rule that reads what all drafts come with."""
    target = small(vocab=3, seed=20)
    engine = Engine(target, Independent(near(target, noise=0.2)), verify="block", policy=Script(), rows=30)
    out = engine.generate([[1, 0, 1]] * 3000, max_new_tokens=3, sampling=Sampling(0.8), seed=1)
    counts = (torch.tensor(out.tokens) @ 3 ** torch.arange(2, -1, -1)).bincount(minlength=27)
    assert chi_square(*pooled(counts, joint(target, 3, 0.8) * 3000)) > 1e-4
    drafted = out.stats.drafted
    assert len(drafted) == 2 and 0.05 * drafted[0] < drafted[1] < 0.9 * drafted[0]  # rounds did end early


PROMPTS = [[(7 * i + 5 * n) % 30 + 1 for i in range(n)] for n in (3, 9, 1, 6, 14, 2, 8)]
ESTIMATES = Estimates(0.6, (0.3, 0.9, 1, 0.4), (0.1, 0.8, 1, 0.3))
VARIED = Adaptive({1: (1, 1.3, 1.7, 2.0), 3: (1.1, 1.5, 1.8, 2.4)}, ESTIMATES)


# --- drafting nothing


@pytest.mark.thorough
@pytest.mark.parametrize(
    "script",
    [
        Script([0] * 40, stops=False),
        Script(ended=20, stops=False),
        Script([0] * 40, stops=False, waits=True),
    ],
    ids=["none", "one", "none, prompt unread"],
)
@pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name].drawn])
def test_rounds_that_end_early_leave_no_gap(kind: str, script: Script) -> None:
    """After rounds without drafts, or that ended after one draft, a row drafts what it would in an engine that has just
    begun, round by round."""
    target, whole = tiny(positions=128), {"sampling": Sampling(0), "ignore_eos": True}
    made, wanted = Drafts(), Drafts()
    rare = Engine(target, KINDS[kind].proposer(target), rows=1, policy=script, record=made)
    often = Engine(target, KINDS[kind].proposer(target), rows=1, policy=Fixed(3), record=wanted)
    first = len(script.script) + script.ended
    for prompt in PROMPTS[:2]:
        out = rare.generate([prompt], max_new_tokens=60, **whole)  # type: ignore[arg-type]
        begin = out.stats.rows[0].starts[first]
        often.generate([prompt + out.tokens[0][:begin]], max_new_tokens=60 - begin, **whole)  # type: ignore[arg-type]
        assert max(map(len, made.rounds[:first])) <= min(script.ended, 1) and made.rounds[first:] == wanted.rounds


def test_prompts_that_waited_unread_are_read_before_drafts() -> None:
    """Rows that come at once, and from spare slots: each drafts what it would in an engine that has just begun."""
    target, whole = tiny(positions=128), {"sampling": Sampling(0), "ignore_eos": True}
    made, wanted, limits = DraftsByRow(), DraftsByRow(), [4, 30, 30, 30, 30, 30, 30]
    script = Script([0] * 8, stops=False, waits=True)
    rare = Engine(target, KINDS["independent"].proposer(target), rows=4, policy=script, record=made)
    call = rare.begin(PROMPTS, limits, **whole)  # type: ignore[arg-type]
    staged = [len(call.staged) for _ in rare.rounds(call)]
    often = Engine(target, KINDS["independent"].proposer(target), rows=1, policy=Fixed(3), record=wanted)
    for row in call.rows[1:]:
        first = made.rows[row.index][0][0]
        given = PROMPTS[row.index] + row.new[:first]
        often.generate([given], max_new_tokens=30 - first, **whole)  # type: ignore[arg-type]
        assert len(wanted.rows[0]) > 2
        assert made.rows[row.index] == [(first + start, drafts) for start, drafts in wanted.rows[0]]
    assert any(staged)


@pytest.mark.parametrize("kind", ["independent", "parallel"])
def test_a_long_gap_is_filled_by_passes_of_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt that was not read: in passes of a few ids, without the rows that lack nothing."""
    monkeypatch.setattr(independent, "CHUNK", 7)
    target, prompt = tiny(positions=128), [(5 * i) % 30 + 1 for i in range(41)]
    made, wanted = Drafts(), Drafts()
    draft = KINDS[kind].proposer(target)
    rare = Engine(target, draft, rows=1, policy=Script([0] * 3, stops=False, waits=True), record=made)
    rare.generate([[1]], max_new_tokens=1)  # allocates slots
    widths: list[int] = []
    store = draft.lm.store
    draft.lm.store = lambda ids, *given, **more: widths.append(ids.shape[1]) or store(ids, *given, **more)
    out = rare.generate([prompt], max_new_tokens=20, sampling=Sampling(0), ignore_eos=True)
    assert widths == [*[7] * 6, 1]  # 44 tokens of the text, but for its last one
    often = Engine(target, KINDS[kind].proposer(target), rows=1, policy=Fixed(3), record=wanted)
    often.generate([prompt + out.tokens[0][:3]], max_new_tokens=17, sampling=Sampling(0), ignore_eos=True)
    assert made.rounds[3:] == wanted.rounds


@pytest.mark.parametrize("own_encoder", often([False, True], bool))
def test_a_source_is_read_by_a_draft_whose_prompts_wait(own_encoder: bool) -> None:
    target = t5()
    draft = Independent(with_encoder_of(target, 0.2), own_encoder=own_encoder)
    prompts = sources(target, 4)
    plain = Engine(target, verify="coupled", rows=2).generate(prompts, max_new_tokens=12, ignore_eos=True)
    counts = []
    for waits in (True, False):
        engine = Engine(target, draft, verify="coupled", rows=2, policy=Script([0] * 4, stops=False, waits=waits))
        out = engine.generate(prompts, max_new_tokens=12, ignore_eos=True)
        assert out.tokens == plain.tokens and sum(out.stats.drafted) > 8
        counts.append(out.stats.rows)
    assert counts[0] == counts[1]  # the same drafts are accepted


class DraftsByRow:
    """Receives the drafts of each row, with the tokens that it had emitted."""

    def begin(self, rule: str, rows: Any) -> None:
        self.rows: dict[int, list[tuple[int, list[int]]]] = {}

    def note(self, rows: Any, starts: Any, proposal: Any, table: Any) -> None:
        for slot, row in enumerate(rows):
            if proposal.k[slot]:
                drafts = proposal.x[slot, : proposal.k[slot]].tolist()
                self.rows.setdefault(row.index, []).append((starts[slot], drafts))


class Drafts:
    """Receives the drafts of each round of one row."""

    def begin(self, rule: str, rows: Any) -> None:
        self.rounds: list[list[int]] = []

    def note(self, rows: Any, starts: Any, proposal: Any, table: Any) -> None:
        self.rounds.append(proposal.x[0, : proposal.k[0]].tolist())


def test_nothing_is_drafted_if_nothing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass of the draft model, and from the first round on."""
    target = tiny()
    draft = Independent(near(target))
    never = Adaptive({1: (1.0, 5.0, 9.0)}, Estimates(0.5, (0.0,) * INPUTS, (0.0,) * INPUTS))
    for rows in (2, 9):  # prompts wait in spare slots, and do not
        engine = Engine(target, draft, rows=rows, policy=never)
        engine.generate([[1]], max_new_tokens=1)  # allocates slots
        for name in ("forward", "store"):
            monkeypatch.setattr(draft.lm, name, None)
        out = engine.generate(PROMPTS, max_new_tokens=9, seed=3)
        assert out.stats.drafted == [] and out.stats.tokens == out.stats.target_calls


def test_prompts_are_read_at_once_where_drafts_are_likely() -> None:
    """One pass over prompts together is faster than catching up with each."""
    target = tiny()
    draft = Independent(near(target))
    engine = Engine(target, draft, rows=2, policy=VARIED)
    call = engine.begin(PROMPTS[:2], 9, Sampling())
    next(engine.rounds(call))
    assert call.read_by_draft(PROMPTS, 2) is PROMPTS
    asked: list[int] = []
    call.decisions.idle = lambda rows, asks: bool(asked.append(rows))  # type: ignore[union-attr,method-assign,func-returns-value]
    for rows, waiting, staged in ((9, 0, 0), (9, 3, 0), (9, 3, 2), (4, 3, 2)):
        call.waiting.extend(call.rows[:1] * waiting)
        call.staged.extend([(call.rows[0], 2, [])] * staged)
        call.read_by_draft(PROMPTS[:1], rows)
        call.waiting.clear()
        call.staged.clear()
    assert asked == [3, 6, 8, 4]  # the two active rows, those that wait and the new one, or all that there is room for
    few = Adaptive({1: (1.0, 1.1), 8: (1.0, 9.0)}, Estimates(0.6, SOME, SOME)).begin()
    assert not few.idle(1, True) and few.idle(8, True)
    dear = Adaptive({1: (1.0, 1.1)}, Estimates(0.6, SOME, SOME), {1: 9.0}).begin()
    assert dear.idle(1, True) and not dear.idle(1, False)


@pytest.mark.parametrize("kind", ["independent", "eagle"])
def test_no_pass_follows_the_decision_to_stop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that makes one pass per token makes one in a round that ends after one draft."""
    target = tiny()
    passes = [0]
    engine = Engine(target, KINDS[kind].proposer(target), rows=1, policy=Script(ended=99))
    probs = DecodingRound.probs

    def counted(self: DecodingRound, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        passes[0] += 1
        return probs(self, logits, drafted)

    monkeypatch.setattr(DecodingRound, "probs", counted)
    out = engine.generate([PROMPTS[0]], max_new_tokens=12, sampling=Sampling(0.9), seed=1)
    assert passes[0] == out.stats.drafted[0] and len(out.stats.drafted) == 1


# --- decisions


SURE, SOME = (4.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0)  # weights of estimates


def begun(seconds: tuple[float, ...], mean: float, here: Any, ahead: Any = None, rows: int = 1) -> Any:
    """The decisions of a call."""
    return Adaptive({rows: seconds}, Estimates(mean, here, ahead or here)).begin()


def logits_of(top: float) -> Tensor:
    """Logits whose likeliest of three tokens has this probability."""
    return torch.tensor([[top, (1 - top) * 0.7, (1 - top) * 0.3]]).log()


def of_top(low: float, high: float, at: tuple[float, float]) -> tuple[float, ...]:
    """Weights by which drafts of top probability at[0] and at[1] have acceptance low and high."""
    odds = [math.log(a / (1 - a)) for a in (low, high)]
    slope = (odds[1] - odds[0]) / (at[1] - at[0])
    return (odds[0] - slope * at[0], 0.0, slope, 0.0)


def test_right_estimates_give_the_best_rule() -> None:
    """Two sorts of rounds, which the first distribution tells apart. The rate of the rule that the policy follows is
    the highest of all rules, which are enumerated; the policy's own rate is the one that it aims at."""
    seconds, acceptance, tops = (1.0, 1.5, 2.0, 2.5, 3.0), (0.35, 0.92), (0.4, 0.9)

    def rate(lengths: Sequence[int]) -> float:
        tokens = sum((1 - a ** (k + 1)) / (1 - a) for a, k in zip(acceptance, lengths, strict=True))
        return tokens / sum(seconds[k] for k in lengths)

    best = max(itertools.product(range(1, 5), repeat=2), key=rate)
    weights = of_top(*acceptance, tops)
    policy = Adaptive({1: seconds}, Estimates(0.7, weights, weights))
    decisions, chosen = policy.begin(), []
    for top in tops:
        assert decisions.open([0], True) == 4
        decisions.best = rate(best)  # of the long run, which a row's own acceptance only estimates
        k = 0
        while True:
            decisions.see(k, logits_of(top), torch.ones(1))
            k += 1
            if k == 4 or not decisions.goes_on(k - 1, [4]):
                break
        chosen.append(k)
    assert tuple(chosen) == best == (1, 4)


@pytest.mark.parametrize("seconds", [(1.0, 1.25, 1.4, 1.6, 1.9, 2.3), (1.0, 1.6, 2.1, 2.15, 2.2, 2.9)])
def test_equal_acceptance_gives_the_best_fixed_length(seconds: tuple[float, ...]) -> None:
    """Also where a dear draft is followed by cheap ones, as with kernels that work on a few ids at once."""
    for mean in (0.05, 0.3, 0.5, 0.7, 0.9):
        odds = (math.log(mean / (1 - mean)), 0.0, 0.0, 0.0)
        decisions = begun(seconds, mean, odds)
        wanted = int(np.argmax([(1 - mean ** (k + 1)) / (1 - mean) / s for k, s in enumerate(seconds)]))
        assert decisions.open([0], False) == wanted
        if not wanted:
            assert decisions.open([0], True) == 0
            continue
        decisions.open([0], True)
        k = 0
        while True:
            decisions.see(k, logits_of(0.5), torch.ones(1))
            k += 1
            if k == 5 or not decisions.goes_on(k - 1, [5]):
                break
        assert k == wanted, mean


def test_a_row_is_judged_by_its_recent_drafts_and_tried_again() -> None:
    decisions = Adaptive({1: (1.0, 1.4, 1.8), 2: (1.0, 1.4, 1.8)}, Estimates(0.6, SOME, SOME)).begin()
    assert decisions.open([7], False) > 0
    for _ in range(12):
        decisions.open([7], False)
        decisions.close([(2, 0)])
    assert decisions.open([7], False) == 0 and decisions.open([8], False) > 0  # the other row is another text
    rounds = 0
    while decisions.open([7], False) == 0:
        decisions.close([(0, 0)])
        rounds += 1
    assert 10 < rounds < 200


@pytest.mark.parametrize(("drafted", "accepted", "tried"), [(3, 1, 2), (3, 0, 1), (3, 3, 3), (0, 0, 0)])
def test_drafts_after_a_rejected_one_were_not_tested(drafted: int, accepted: int, tried: int) -> None:
    decisions = begun((1.0, 1.1, 1.2, 1.3), 0.6, SOME)
    decisions.open([0], False)
    decisions.close([(drafted, accepted)])
    assert (decisions.recent[0].tried, decisions.recent[0].accepted) == (tried, accepted)


@pytest.mark.parametrize("kind", ["p_eagle", "block", "parallel", "eagle", "medusa"])
def test_drafts_of_one_pass_are_chosen_before_it(kind: str) -> None:
    """To end a round after some drafts saves nothing of the pass: their number follows from the rows' acceptance."""
    target = tiny()
    engine = Engine(target, KINDS[kind].proposer(target), policy=Fixed(2), rows=1)
    engine.generate(PROMPTS[:1], max_new_tokens=4)
    assert engine.proposer.asks == (kind in ("eagle", "medusa"))


@pytest.mark.parametrize(("mean", "accepted", "wanted"), [(1.0, 2, 2), (0.0, 0, 0)])
def test_drafts_that_are_always_or_never_accepted(mean: float, accepted: int, wanted: int) -> None:
    """No rate is 0 or 1, where odds and the geometric series are infinite."""
    decisions = begun((1.0, 1.1, 1.2), mean, SOME)
    for _ in range(3):
        assert decisions.open([0], False) == wanted and math.isfinite(decisions.best)
        decisions.close([(2, accepted)])
    decisions.open([0], True)
    decisions.see(0, logits_of(0.9), torch.ones(1))
    assert np.isfinite(decisions.seen).all()


def test_decisions_take_time_and_are_left_out_where_they_do_not_pay() -> None:
    """Rounds with decisions are rated with their seconds. Without them the best length is drafted to its end."""
    odds = (math.log(0.7 / 0.3), 0.0, 0.0, 0.0)
    policy = Adaptive({1: (1.0, 1.1, 1.2), 8: (1.0, 1.1, 3.0)}, Estimates(0.7, odds, odds), {1: 0.5})
    decisions = policy.begin()
    assert decisions.open([0], True) == 2 and decisions.seconds.tolist() == pytest.approx([1.0, 1.6, 2.2])
    assert decisions.best == pytest.approx(1.7 / 1.6)
    assert decisions.open(range(4), True) == 2 and decisions.asks  # as the nearest number of rows
    assert decisions.open(range(8), True) == 1 and not decisions.asks
    assert decisions.seconds.tolist() == [1.0, 1.1, 3.0]
    decisions.see(0, logits_of(0.5).expand(8, -1), torch.ones(8))
    assert decisions.seen == [] and decisions.goes_on(0, [2] * 8)
    assert decisions.open([0], False) == 2 and decisions.seconds.tolist() == [1.0, 1.1, 1.2]
    dear = Adaptive(policy.seconds, policy.estimates, {1: 5.0}).begin()
    assert dear.open([0], True) == 0  # with decisions, nothing pays


def test_a_draft_counts_as_far_as_it_is_reached() -> None:
    """With what is known of the draft itself; the one after it has another estimate."""
    here, ahead = (math.log(0.8 / 0.2), 0.0, 0.0, 0.0), (math.log(0.3 / 0.7), 0.0, 0.0, 0.0)
    decisions = begun((1.0, 1.1, 1.2), 0.6, here, ahead)
    decisions.open([0], True)
    decisions.see(0, logits_of(0.5), torch.ones(1))
    assert decisions.reached[0] == pytest.approx([0.8])
    for best, wanted in ((0.8 * 0.3 / 0.1 - 1e-6, True), (0.8 * 0.3 / 0.1 + 1e-6, False)):
        decisions.best, decisions.decided = best, []
        assert decisions.goes_on(0, [2]) == wanted


def test_new_rows_are_not_judged_by_other_rows() -> None:
    decisions = begun((1.0, 1.4, 1.8), 0.6, SOME)
    for _ in range(12):
        decisions.open([0], False)
        decisions.close([(2, 0)])
    assert decisions.open([0], False) == 0 and not decisions.idle(1, False)


def test_a_decision_is_made_once() -> None:
    """The engine asks again after drafts of one pass, whose target pass may still be made shorter."""
    decisions = begun((1.0, 1.1, 1.2), 0.9, SURE)
    decisions.open([0], True)
    decisions.see(0, logits_of(0.9), torch.ones(1))
    assert decisions.goes_on(0, [2]) and decisions.goes_on(0, [1]) and decisions.decided == [True]


def test_rows_whose_limit_is_near_gain_nothing() -> None:
    """The gain is that of rows that can draft on."""
    decisions = begun((1.0, 1.1, 1.2), 0.9, SURE, rows=2)
    for room, wanted in (([2, 2], True), ([1, 1], False)):
        decisions.open([0, 1], True)
        decisions.see(0, logits_of(0.9).expand(2, -1), torch.ones(2))
        assert decisions.goes_on(0, room) == wanted


def test_a_row_without_a_distribution_gains_nothing_and_stops_no_other() -> None:
    """Such as a row whose draft reads NaN: it stays in the batch, without drafts."""
    decisions = begun((1.0, 1.1, 1.2), 0.9, SURE, rows=2)
    for room, wanted in (([2, 2], True), ([2, 0], True), ([1, 2], False)):
        decisions.open([0, 1], True)
        decisions.see(0, torch.stack((logits_of(0.9)[0], torch.full((3,), math.nan))), torch.ones(2))
        assert decisions.goes_on(0, room) == wanted


def test_earlier_calls_are_forgotten() -> None:
    target = tiny()
    engine = Engine(target, Independent(near(target)), rows=3, policy=VARIED)
    first, again = (engine.generate(PROMPTS, max_new_tokens=20, seed=3) for _ in range(2))
    assert first.stats.rows == again.stats.rows and first.tokens == again.tokens


def test_decisions_see_what_the_settings_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution that a draft is drawn from, not that of the model."""
    seen: list[Tensor] = []
    monkeypatch.setattr(Scripted, "see", lambda self, depth, logits, temperature: seen.append(logits[:, 5]))
    target = tiny()
    engine = Engine(target, Independent(near(target)), policy=Script(stops=False))
    engine.generate(PROMPTS[:2], max_new_tokens=6, sampling=Sampling(0.8, banned=((5,),)), seed=3)
    assert seen and all((of_5 == -math.inf).all() for of_5 in seen)


def test_the_temperature_of_a_row_is_that_of_its_estimates() -> None:
    decisions = Adaptive({2: (1.0, 1.1)}, Estimates(0.5, (0.0,) * INPUTS, (0.0,) * INPUTS)).begin()
    decisions.open([0, 1], True)
    decisions.see(0, logits_of(0.8).expand(2, -1), torch.tensor([0.5, 0.0]))
    sharp = logits_of(0.8).mul(2).softmax(-1).amax().item()
    assert decisions.seen[0][:, 2] == pytest.approx([sharp, 0.8], rel=1e-6)


def test_seconds_between_numbers_of_rows() -> None:
    table = {1: (1.0, 2.0), 8: (8.0, 16.0), 4: (2.5, 5.0)}
    assert seconds_of(table, 2).tolist() == pytest.approx([1.5, 3.0])
    assert seconds_of(table, 6).tolist() == pytest.approx([5.25, 10.5])
    assert seconds_of(table, 64).tolist() == [8.0, 16.0]


def test_a_file_gives_the_policy_or_says_why_not(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    content: dict[str, Any] = {
        "seconds": {"1": [1, 2], "8": [3, 4]},
        "estimates": {"mean": 0.5, "here": [0] * 4, "ahead": [1] * 4},
        "deciding": {"8": 0.25},
        "identity": None,
    }
    file.write_text(json.dumps(content))
    policy = Adaptive.load(file)
    assert policy.longest == 1 and policy.seconds[8] == (3.0, 4.0) and policy.estimates.ahead == (1.0,) * 4
    assert policy.deciding == {8: 0.25} and (policy.decision(1), policy.decision(7)) == (None, 0.25)
    changes: list[dict[str, Any]] = [
        {"seconds": wrong}
        for wrong in (
            {"1": [1, 2], "2": [1]},
            {"1": [1]},
            {"a": [1, 2]},
            {},
            {"0": [1, 2]},
            {"1": [0, 2]},
            {"1": [1, math.nan]},
        )
    ]
    changes += [{"deciding": wrong} for wrong in (None, {"-8": 1}, {"8": math.inf}, {"8": -1.0})]
    parts = {"here": [0]}, {"mean": math.nan}, {"mean": -1.0}, {"ahead": [0, 0, 0, -math.inf]}
    changes += [{"estimates": content["estimates"] | wrong} for wrong in parts]
    for change in changes:
        file.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=f"policy: {file} is no policy file"):
            Adaptive.load(file)
    with pytest.raises(ValueError, match=r"none.json cannot be read \(No such file"):
        Adaptive.load(tmp_path / "none.json")


def test_trees_are_refused_by_name() -> None:
    target = tiny()
    engine = Engine(target, Independent(near(target), shape=(-1, -1, 0)), verify="tree", policy=VARIED)
    with pytest.raises(ValueError, match="chooses lengths of chains, but this Independent drafts trees"):
        engine.generate(PROMPTS[:1], max_new_tokens=8)
    assert Engine(target, policy=Fixed(1)).generate(PROMPTS[:1], max_new_tokens=2).stats.tokens == 2
