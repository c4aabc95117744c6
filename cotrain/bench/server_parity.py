"""A draft as a server runs it, beside what this engine measures and predicts for the same drafting mode.

A server's first token of a text comes from its prefill, without a round, so its tau is (tokens - texts) / rounds; here
every token comes from a round. A server's rounds are known for all texts together, from its counters.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cotrain.bench.measurement import BATCH, Plan
from inference.exactness.side_by_side import pair_figures, reach_of
from inference.measure.timing import LEVEL, RESAMPLES, Emitted, Interval, engine_arm, interleave
from inference.noise import row_ids
from inference.proposers.base import Proposer
from inference.servers.openai_client import Client, Served, settled
from inference.stats import Counts
from inference.verify import prediction

TOLERANCE = 0.05
Answer = tuple[list[list[int]], float, Served | None]  # ids of each text, seconds, counters of this call
Ask = Callable[[list[list[int]], int], Answer]  # prompts, requests under way


@dataclass(frozen=True)
class Parity:
    """tau of the server, predicted on its own texts for its drafting mode (z: of the rounds, over the acceptance
    coins), and of this engine on the same prompts; ratio: served over ours, bootstrapped over prompts; speed: tokens a
    second, over the wire."""

    tokens: int
    speed: float
    rounds: int
    served: float
    predicted: float
    z: float
    ours: float
    ratio: Interval

    @property
    def passed(self) -> bool:
        """As predicted on the very texts, where coins alone differ; and not told apart from this engine, whose texts
        are others, by more than the tolerance."""
        told_apart = self.ratio.low > 1 + TOLERANCE or self.ratio.high < 1 - TOLERANCE
        return abs(self.served / self.predicted - 1) <= TOLERANCE and not told_apart

    def line(self) -> str:
        return (
            f"tau {self.served:.3f} served, {self.predicted:.3f} predicted on the served texts (z {self.z:+.1f}), "
            f"{self.ours:.3f} here: {self.ratio.value - 1:+.1%} [{self.ratio.low - 1:+.1%}, {self.ratio.high - 1:+.1%}]"
            f" on {self.tokens} tokens, {self.speed:.0f} a second"
        )

    def report(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio._asdict(), "passed": self.passed, "line": self.line()}


def over_http(client: Client, plan: Plan) -> Ask:
    """Asks a running server under the plan's regime. Raises ValueError for one that does not tell token ids."""

    def ask(prompts: list[list[int]], at_once: int) -> Answer:
        before, clock = settled(client), time.perf_counter()
        size = plan.bench
        found = client.complete(
            prompts, size.new_tokens, plan.sampling, row_ids(prompts), at_once=at_once, ignore_eos=True
        )
        seconds, after = time.perf_counter() - clock, settled(client)
        if any(one.ids is None for one in found):
            raise ValueError("url: the server tells no token ids (vLLM does), so nothing can be predicted on its texts")
        counted = after - before if after and before else None
        return [one.ids or [] for one in found], seconds, counted

    return ask


def parity(plan: Plan, ask: Ask, k: int, at_once: int) -> Parity:
    """Served and own tau on the same prompts, drafting as the plan says. Raises ValueError for a server whose counters
    stood still."""
    draft = plan.proposer()
    prompts = plan.final(0, plan.bench.prompts)
    tokens, seconds, counted = ask(prompts, at_once)
    if not counted or not counted.rounds:
        raise ValueError("url: the server counted no drafts: it serves without a draft, or hides its metrics")
    own = engine_arm("own", plan.engine(k, BATCH, proposer=draft), plan.sampling, plan.bench.new_tokens)
    ours = interleave([own], prompts, BATCH, plan.bench.seed, warmup=0).texts("own")
    paid, sigma = rounds_expected(plan, draft, k, prompts, tokens)
    emitted = np.array([len(text) - 1 for text in tokens], dtype=np.float64)
    scale = counted.rounds / paid.sum()  # what the coins made of the expectation
    mine = np.array([(len(text), row.target_calls) for text, row in zip(ours.tokens, ours.counts, strict=True)])
    return Parity(
        tokens=int(emitted.sum()),
        speed=sum(map(len, tokens)) / seconds,
        rounds=counted.rounds,
        served=float(emitted.sum() / counted.rounds),
        predicted=float(emitted.sum() / paid.sum()),
        z=float((counted.rounds - paid.sum()) / sigma) if sigma else 0.0,
        ours=float(mine[:, 0].sum() / mine[:, 1].sum()),
        ratio=_ratio(np.stack([emitted, paid * scale], 1), mine),
    )


def rounds_expected(
    plan: Plan, draft: Proposer, k: int, prompts: list[list[int]], tokens: list[list[int]]
) -> tuple[np.ndarray, float]:
    """Rounds that each text was to take, its first token coming from the prefill -> (N,), and sigma of their sum."""
    begun = [[*prompt, text[0]] for prompt, text in zip(prompts, tokens, strict=True)]
    rest = Emitted(begun, row_ids(begun), [text[1:] for text in tokens], [Counts() for _ in tokens])
    engine = plan.engine(k, BATCH, proposer=draft)
    figures = pair_figures(engine, draft, rest, plan.sampling, plan.bench.new_tokens, 0.0)
    reach = reach_of(figures, "token")  # as servers verify
    assert reach is not None
    calls = prediction.calls_from(reach, figures.lengths)
    return calls.numpy(), float(prediction.variance_from(reach, figures.lengths).sum().sqrt())


def _ratio(served: np.ndarray, ours: np.ndarray) -> Interval:
    """Of sums of tokens / sums of rounds, both (N, 2), resampled by prompt."""

    def tau(pairs: np.ndarray) -> np.ndarray:
        total = pairs.sum(-2)
        return np.asarray(total[..., 0] / total[..., 1])

    drawn = np.random.default_rng(0).integers(len(ours), size=(RESAMPLES, len(ours)))
    low, high = np.quantile(tau(served[drawn]) / tau(ours[drawn]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(tau(served) / tau(ours)), float(low), float(high))
