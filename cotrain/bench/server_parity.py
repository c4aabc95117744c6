"""Comparison of a draft's tau in a running server with the tau predicted on the server's texts, and with this engine's
tau.

A server samples the first token of a text in the prefill, without a round, so its tau is (tokens - texts) / rounds. In
this engine every token comes from a round. A server counts only the total number of rounds, not the rounds per text.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cotrain.errors import UserError, warn
from cotrain.planning.plan import Plan
from cotrain.planning.planner import BATCH
from cotrain.rollout.samplers import Ids
from inference import Engine
from inference.exactness.audit import ServedCalls, audit, from_target
from inference.exactness.figures import Figures, reach_of
from inference.exactness.side_by_side import pair_figures
from inference.measure.timing import RESAMPLES, Interval, bootstrapped, interleave, ratio_of_sums
from inference.output import Counts, Emitted
from inference.proposers.base import Proposer
from inference.sampling.noise import row_ids
from inference.servers.openai_client import Client, Served, stable_counters
from inference.verify import predict_chain

TOLERANCE = 0.05
Answer = tuple[Ids, float, Served | None]  # ids of each text, seconds, counters of this call
Ask = Callable[[Ids, int], Answer]  # prompts, concurrent requests


@dataclass(frozen=True)
class Parity:
    """The result of the comparison.

    Args:
        tokens: the number of tokens that the server generated, without the first of each text.
        speed: the server's tokens per second, over HTTP.
        rounds: the number of rounds that the server counted.
        served: the server's tau.
        predicted: the tau that is predicted on the server's texts.
        z: standard score of the server's number of rounds under this prediction.
        ours: this engine's tau on the same prompts.
        ratio: served / ours, bootstrapped over prompts.
        unlike: why the texts are not the target's; "" if nothing says so.
        texts: the audit's verdict on the texts.
    """

    tokens: int
    speed: float
    rounds: int
    served: float
    predicted: float
    z: float
    ours: float
    ratio: Interval
    unlike: str = ""
    texts: str = ""

    @property
    def passed(self) -> bool:
        """Return whether three things hold: nothing says that the texts are not the target's; the server's tau is
        within `TOLERANCE` of the predicted one; the interval of `ratio`, or without one the value, overlaps 1 ±
        `TOLERANCE`."""
        value, low, high = self.ratio
        low, high = (low, high) if low == low else (value, value)
        differs = low > 1 + TOLERANCE or high < 1 - TOLERANCE
        return not self.unlike and abs(self.served / self.predicted - 1) <= TOLERANCE and not differs

    def line(self) -> str:
        value, low, high = (one - 1 for one in self.ratio)
        ends = f"[{low:+.1%}, {high:+.1%}]" if low == low else "(too few prompts for an interval)"
        return (
            f"tau {self.served:.3f} served, {self.predicted:.3f} predicted on the served texts (z {self.z:+.1f}), "
            f"{self.ours:.3f} here: {value:+.1%} {ends} on {self.tokens} tokens, {self.speed:.0f} a second"
            f"{self.texts and f'; {self.texts}'}"
        )

    def report(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio._asdict(), "passed": self.passed, "line": self.line()}


def over_http(client: Client, plan: Plan) -> Ask:
    """Return a function (prompts, concurrent requests) -> `Answer` that completes prompts with a running server, in the
    plan's regime. An `Answer` has the new token ids of each prompt, the seconds, and the server's counters of drafts.

    The function raises ValueError if the server returns no token ids, has no counters of drafts, or ends a text early.
    """

    def ask(prompts: Ids, at_once: int) -> Answer:
        before, clock, size = stable_counters(client), time.perf_counter(), plan.bench
        if before is None:
            raise ValueError(
                f"url: {client.root}/metrics has no draft counters, and the comparison needs them: start the server "
                "with a draft and with metrics (vLLM: without --disable-log-stats)"
            )
        warn(f"{client.root}: {len(prompts)} texts are requested, which may take at most {client.timeout:g} s each")
        answers = client.complete(
            prompts, size.new_tokens, plan.sampling, row_ids(prompts), at_once=at_once, ignore_eos=True
        )
        seconds, after = time.perf_counter() - clock, stable_counters(client)
        if any(one.ids is None for one in answers):
            raise ValueError(
                "url: the server returns no token ids, and the prediction needs them: use a server that "
                "returns them, such as vLLM"
            )
        if early := sum(len(one.ids or []) < size.new_tokens for one in answers):
            raise ValueError(
                f"url: the server ended {early} of {len(answers)} texts before {size.new_tokens} tokens, though "
                "ignore_eos and min_tokens were sent: use a server that heeds them, or lower new_tokens= to its limit"
            )
        return [one.ids or [] for one in answers], seconds, after - before if after else None

    return ask


def server_parity(plan: Plan, ask: Ask, k: int, at_once: int) -> Parity:
    """Measure the server's tau and this engine's tau on the same prompts, at draft length k, and return the comparison.

    ask: a function (prompts, concurrent requests) -> `Answer` that completes prompts with the server. at_once: number
    of concurrent requests. Raises ValueError if the server counted no drafts or impossible ones, and UserError if its
    draft length is not k.
    """
    draft = plan.proposer()
    prompts = plan.final(0, plan.bench.prompts)
    tokens, seconds, counted = ask(prompts, at_once)
    if not counted or not counted.rounds:
        raise ValueError(
            "url: the server counted no drafts: start it with a draft and metrics (vLLM: no --disable-log-stats)"
        )
    drafts = drafts_of(counted, k)
    if drafts != k:
        raise UserError(f"url: the server drafts {drafts} tokens a round, not {k}: set k={drafts}")
    engine = plan.engine(k, BATCH, proposer=draft)
    ours = interleave(plan.arms({"own": engine}), prompts, BATCH, plan.bench.seed, warmup=0).texts("own")
    rounds, sigma = rounds_expected(plan, draft, k, prompts, tokens)
    emitted = np.array([len(text) - 1 for text in tokens], dtype=np.float64)
    scale = counted.rounds / rounds.sum()  # the server's rounds over the expected ones
    mine = np.array([(len(text), row.target_calls) for text, row in zip(ours.tokens, ours.counts, strict=True)])
    vocabulary = engine.target.vocabulary
    lm = draft.language_model(1, vocabulary)
    served = from_target(plan.target, prompts, tokens, plan.sampling, vocabulary, lm)
    audited = audit(served, [*map(tuple, prompts)], tokens)
    return Parity(
        unlike="; ".join(audited.wrong),
        texts=audited.verdict,
        tokens=int(emitted.sum()),
        speed=sum(map(len, tokens)) / seconds,
        rounds=counted.rounds,
        served=float(emitted.sum() / counted.rounds),
        predicted=float(emitted.sum() / rounds.sum()),
        z=float((counted.rounds - rounds.sum()) / sigma) if sigma else 0.0,
        ours=float(mine[:, 0].sum() / mine[:, 1].sum()),
        ratio=_ratio(np.stack([emitted, rounds * scale], 1), mine),
    )


def drafts_of(counted: Served, least: int = 1) -> int:
    """Return a server's draft length by its counters. least: for servers that count no depths, whose rounds may be
    shorter. Raises ValueError for counters that cannot be."""
    if not 0 <= counted.accepted <= counted.drafted:
        counts = f"{counted.accepted} accepted tokens of {counted.drafted} drafted"
        raise ValueError(
            f"url: the server counted {counts}, which cannot be: repeat this, or use another version of the server"
        )
    return len(counted.by_depth) or max(least, math.ceil(counted.drafted / counted.rounds))


def served_calls(plan: Plan, counted: Served, prompts: Ids, tokens: Ids) -> ServedCalls:
    """Return a server's rounds beside those that are expected of its texts, by the plan's draft and the token rule.
    counted: by the server, at least one round. prompts, tokens: ids of each prompt, and of the server's text after it.
    Raises ValueError for counters that cannot be."""
    rounds, sigma = rounds_expected(plan, plan.proposer(), drafts_of(counted), prompts, tokens)
    return ServedCalls(counted.rounds, float(rounds.sum()), sigma)


def rounds_expected(plan: Plan, draft: Proposer, k: int, prompts: Ids, tokens: Ids) -> tuple[np.ndarray, float]:
    """Return the expected number of rounds for each text (N,), without its first token, and the standard deviation of
    their sum. draft: drafts k tokens per round. prompts: token ids of each prompt. tokens: token ids of the text that
    the server generated after each."""
    figures = figures_after(plan, plan.engine(k, BATCH, proposer=draft), draft, prompts, tokens)
    reach = reach_of(figures, "token")  # servers use the token rule
    assert reach is not None
    calls = predict_chain.calls_from(reach, figures.lengths)
    return calls.numpy(), float(predict_chain.variance_from(reach, figures.lengths).sum().sqrt())


def figures_after(plan: Plan, engine: Engine, draft: Proposer, prompts: Ids, tokens: Ids, first: int = 1) -> Figures:
    """Return the probabilities of target and draft on texts that another engine generated, from the first token on that
    a round emitted.

    engine, draft: this engine, with the draft that it uses. prompts: token ids of each prompt. tokens: token ids of the
    text after each. first: how many tokens at the beginning of a text came without a round.
    """
    starts = [[*prompt, *text[:first]] for prompt, text in zip(prompts, tokens, strict=True)]
    rest = Emitted(starts, row_ids(starts), [text[first:] for text in tokens], [Counts() for _ in tokens])
    return pair_figures(engine, draft, rest, plan.sampling, plan.bench.new_tokens, 0.0)


def _ratio(served: np.ndarray, ours: np.ndarray) -> Interval:
    """Return the server's tau over this engine's tau, with its bootstrap interval over prompts, nan for few prompts.
    served, ours (N, 2): tokens and rounds for each prompt."""
    return bootstrapped(lambda at: ratio_of_sums(served[at]) / ratio_of_sums(ours[at]), len(ours), RESAMPLES, 0)
