"""Costs of a round on this machine, in seconds. Together with the expected tokens of a round they give the draft length
with the fewest seconds per token.

`measure_costs` times each part of a round alone and warm. In a real call the parts evict each other from the caches,
threads must wake up, and the host works between the parts; a draft can then take two to five times as long. Therefore
only the ratios between draft lengths come from this table. The scale comes from `measure_rounds`, which times real
calls of the engine to be served; `calibrated` applies it to the table. B rows, K longest draft. All times are wall
seconds of B rows together, as medians of interleaved repeats.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from inference.engine import Engine
from inference.models.encoder_decoder import any_source
from inference.models.lm import LM, store_prompts
from inference.models.passes import wait_for
from inference.output import Output, Stats
from inference.policy import Fixed, Policy
from inference.proposers.base import Host, Outcome, Proposer
from inference.request import Request
from inference.round import DecodingRound
from inference.sampling import Sampling
from inference.sampling.noise import Uniforms
from inference.scheduler import Call
from inference.source import SourcedText, source_in_text
from inference.verify.rules import RULES

Key = TypeVar("Key", bound=Hashable)
LEAST, MOST = 2, 5  # timed calls at each draft length
SPANS = (2, 8)  # draft lengths that are timed, see `spans_of`; the others are on the line through them
CPU = torch.device("cpu")
SPREAD = 7  # tokens between the lengths of one text and the next


@dataclass(frozen=True)
class Costs:
    """A table of measured seconds, for all parts of a round at every draft length.

    target[n-1]: a target pass over n ids per row, n = 1 to K+1. draft: one draft step (pass, distribution, draw).
    first: the time that drafting takes per round in addition to its steps (ids not read yet, weights not in the CPU's
    cache). rest[k]: the rest of a round that drafted k tokens, k = 0 to K (distributions, verification, draws, results
    on the host). rows, context: number of rows and tokens per text in the measurement. target_dtype, draft_dtype:
    dtypes of the models' weights. encoder: an encoder's pass over one source per row, needed once per text; 0 without
    an encoder.
    """

    target: tuple[float, ...]
    draft: float
    rest: tuple[float, ...]
    rows: int = 1
    context: int = 0
    target_dtype: str = ""
    draft_dtype: str = ""
    first: float = 0.0
    encoder: float = 0.0

    def round(self, k: int) -> float:
        """Return the seconds of a round that drafts k tokens: drafting(k) + target[k] + rest[k]."""
        return self.drafting(k) + self.target[k] + self.rest[k]

    @property
    def rounds(self) -> tuple[float, ...]:
        """Return the seconds of a round for each draft length 0 to K. None is above that of a longer length: there the
        machine was busy, and a speed-up above tau would be forecast."""
        seconds = [self.round(k) for k in reversed(range(len(self.target)))]
        return tuple(map(float, np.minimum.accumulate(seconds)))[::-1]

    def drafting(self, k: int) -> float:
        """Return the seconds that drafting k tokens takes in a round."""
        return k * self.draft + self.first * (k > 0)

    @property
    def ratio(self) -> float:
        """Return the seconds of one draft step divided by the seconds of one plain target step. Reports call this
        `cost`."""
        return self.draft / self.round(0)


@torch.inference_mode()
def measure_costs(
    target: LM,
    proposer: Proposer,
    K: int,
    *,
    context: int = 256,
    source: int | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    repeats: int = 9,
    warmup: int = 2,
) -> Costs:
    """Return the costs of target and proposer for rounds that draft k = 0 to K tokens. Both must have the form (dtype,
    CUDA graphs or not) in which they will run. Each row has one text of about `context` tokens; lengths differ, as
    after some rounds. source: the length of an encoder-decoder's sources, None for `context`. repeats: number of runs
    of each part that count. warmup: number of runs before them. sampling: the settings of every row.

    Raises ValueError if the context of target or proposer is shorter than `context` and the longest timed drafts.
    """
    proposer.open(Host(target.rows, target.spare, target.vocabulary, target.context, target))
    room = min(target.context, proposer.context or target.context)
    spans = spans_of(proposer)
    longest = max(K, *spans)
    if context < 1 or context + longest + 1 > room:
        raise ValueError(
            f"context={context}, K={K}: both models need room for context + {longest + 1} tokens, but have room for "
            f"only {room}; give a smaller context"
        )
    seeded = torch.Generator().manual_seed(0)
    apart = min(SPREAD, context // target.rows)
    lengths = [context + apart * (row - target.rows // 2) for row in range(target.rows)]
    texts: list[list[int]] = [
        torch.randint(target.vocabulary, (min(length, room - longest - 1),), generator=seeded).tolist()
        for length in lengths
    ]
    if target.encodes:
        texts = [
            SourcedText(text, any_source(target.model, source or context, seed)) for seed, text in enumerate(texts)
        ]
    proposer.admit(0, texts, store_prompts(target, 0, texts, states=proposer.reads))
    seconds = interleaved(_tasks(target, proposer, texts, K, spans, sampling), repeats, warmup, target.device)
    first, step = fit_line({span: seconds["draft", span] for span in spans})
    return Costs(
        never_falling([seconds["target", n] for n in range(1, K + 2)]),
        step,
        tuple(seconds["rest", k] for k in range(K + 1)),
        target.rows,
        context,
        target.weights,
        proposer.weights or "",
        first,
        seconds.get(("encoder", 1), 0.0),
    )


def never_falling(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the sequence nearest to `seconds`, by least squares, in which no value is below the one before it (pool
    adjacent violators: Ayer et al. 1955). A pass over more ids takes no less time, so a falling value is noise, and
    would mislead the choice of a length."""
    blocks: list[tuple[float, int]] = []  # mean, number of values
    for one in seconds:
        blocks.append((one, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (right, n), (left, m) = blocks.pop(), blocks.pop()
            blocks.append(((m * left + n * right) / (m + n), m + n))
    return tuple(mean for mean, count in blocks for _ in range(count))


def spans_of(proposer: Proposer) -> tuple[int, int]:
    """Return the two draft lengths at which a proposer is timed: `SPANS`, or shorter ones if the proposer cannot draft
    that far."""
    short, long = SPANS
    long = min(long, proposer.depths or long)
    return min(short, long - 1), long


def interleaved(
    tasks: Mapping[Key, Callable[[], object]],
    repeats: int = 9,
    warmup: int = 2,
    device: torch.device = CPU,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, float]:
    """Return the median seconds of each task, by its key. The work that a task launched on the device is included. Each
    repeat runs every task once, so that drift of the machine's speed affects all tasks. warmup: number of runs of each
    task that do not count. clock: returns seconds."""
    seconds: dict[Key, list[float]] = {key: [] for key in tasks}
    wait_for(device)
    for repeat in range(warmup + repeats):
        for key, task in tasks.items():
            start = clock()
            task()
            wait_for(device)
            if repeat >= warmup:
                seconds[key].append(clock() - start)
    return {key: median(values) for key, values in seconds.items()}


def _tasks(
    target: LM, proposer: Proposer, texts: list[list[int]], K: int, lengths: tuple[int, int], sampling: Sampling
) -> dict[tuple[str, int], Callable[[], object]]:
    """Return every part of a round as a task, by (name of the part, number of ids or drafts), in the engine's order.
    The order matters, because it decides what a CPU's caches contain. lengths: the two draft lengths to time."""
    rows = [Request(i, i, text, K + 1, sampling, frozenset()) for i, text in enumerate(texts)]
    at = [len(text) - 1 for text in texts]
    ids = torch.tensor([text[-1:] * (K + 1) for text in texts], device=target.device)
    seen = target.forward(ids, at, states=proposer.reads)
    logits, states = seen.logits.clone(), {layer: part.clone() for layer, part in seen.states.items()}  # (B, K+1, V)

    noise = Uniforms(0, target.device)

    def decoding_round(k: int) -> DecodingRound:
        return DecodingRound(rows, [k] * len(rows), RULES["token"], noise, target.vocabulary, target.device)

    # as if one of several rows had accepted every draft: two ids are not stored
    stored = [len(text) - 1 - (len(texts) > 1) for text in texts]
    outcome = Outcome(stored, torch.zeros(len(stored), dtype=torch.int64, device=target.device), states)
    drafting = {k: copy(proposer) for k in lengths}  # copies on the same slots, each of which drafts only one length

    def drafts(k: int) -> None:
        drafting[k].propose(decoding_round(k))
        drafting[k].commit(outcome)

    spans = dict(enumerate(lengths, 2))
    tasks: dict[tuple[str, int], Callable[[], object]] = {("before", 1): partial(target.forward, ids[:, :1], at)}
    for n in range(1, max(K + 1, *spans) + 1):
        if n > 1:
            tasks["draft" if n in spans else "before", spans.get(n, n)] = partial(drafts, spans.get(n, lengths[0]))
        if n <= K + 1:
            tasks["target", n] = partial(target.forward, ids[:, :n], at)
            tasks["rest", n - 1] = _rest(decoding_round, logits[:, :n], ids[:, : n - 1])
    if target.encodes:
        sources = [source for text in texts if (source := source_in_text(text)) is not None]
        tasks["encoder", 1] = partial(target.encode, 0, sources)
    return tasks


def _rest(decoding_round: Callable[[int], DecodingRound], logits: Tensor, x: Tensor) -> Callable[[], object]:
    """Return a task with the distributions, the verification and the last draw of a round. The target's distributions
    are used as the draft's too, since only the time matters. logits (B, k+1, V). x (B, k): the drafts. decoding_round:
    returns a round with a given number of drafts."""
    k = [x.shape[1]] * x.shape[0]

    def run() -> object:
        one = decoding_round(x.shape[1])
        p = one.target_probs(logits, x, k)
        verification = one.rule.verify(p, p[:, :-1], x, one.test_noise, one.length(k))
        return one.last(verification.probs).tolist(), verification.accepted.tolist()

    return run


@dataclass(frozen=True)
class RealRound:
    """The seconds of a round in a real call, for all its rows together. draft: drafting. target: the target pass. rest:
    distributions, verification, draws and bookkeeping on the host."""

    draft: float
    target: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.draft + self.target + self.rest


def of_stats(stats: Stats, k: int) -> RealRound:
    """Return the mean round of a call that drafted k tokens per round. Without drafts (k = 0) the drafting phase is
    added to the rest."""
    rounds = stats.times["target"]
    draft, target, verify, other = (stats.seconds[name] / rounds for name in ("draft", "target", "verify", "other"))
    return RealRound(draft if k else 0.0, target, verify + other + (0.0 if k else draft))


def measure_rounds(
    engines: Mapping[Key, tuple[Engine, int]],
    prompts: Sequence[list[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int = 0,
    until: float = inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, RealRound]:
    """Return the median round of each engine, by its key, from interleaved calls. The first call of each engine is not
    counted.

    engines: by key, an engine and the number of tokens (for trees: levels) that it drafts. prompts: token ids of each
    prompt. Each call decodes one prompt per row; the next call has other prompts, until all were used. A call ends
    before its first round in which some row has ended or cannot draft that many tokens. The engines' policies are
    restored afterwards. until: time limit, in seconds of the clock; each engine runs at least `LEAST` times. Raises
    ValueError without prompts or engines, and RequestError if a prompt ends in an error. sampling, max_new_tokens,
    seed: of each call.
    """
    if not prompts or not engines:
        raise ValueError(
            f"there is nothing to time with {len(prompts)} prompts and {len(engines)} draft lengths; give one at least "
            "of each"
        )
    rounds: dict[Key, list[RealRound]] = {key: [] for key in engines}
    for repeat in range(MOST + 1):
        if repeat > LEAST and clock() > until:
            break
        for key, (engine, k) in engines.items():
            batch = [prompts[(repeat * engine.rows + row) % len(prompts)] for row in range(engine.rows)]
            with drafting_by(engine, Fixed(k)):
                call = engine.begin(batch, max_new_tokens, sampling, seed + repeat, None, True)
                stats = _full_rounds(engine, call, k)
            if repeat:  # the first call captures graphs and warms up
                rounds[key].append(of_stats(stats, k))
    return {key: _medians(calls) for key, calls in rounds.items()}


def _full_rounds(engine: Engine, call: Call, k: int) -> Stats:
    """Decode as long as rounds are full (every row is active and can draft k tokens), and return the statistics. Later
    rounds have fewer rows or fewer drafts, so they take less time than the rounds to be timed. The first round counts
    even if it is not full. Raises RequestError if a prompt ends in an error."""
    context = (engine.proposer.context if engine.proposer else None) or inf
    for _ in engine.rounds(call):
        if len(call.active) < engine.rows:
            break
        if min(min(row.limit - row.emitted - 1, context - len(row.text)) for row in call.active) < k:
            break
    return Output([], None, [], call.stats, [row.error for row in call.rows]).whole().stats


@contextmanager
def drafting_by(engine: Engine, policy: Policy) -> Iterator[None]:
    """Within the `with` block, let the engine draft by another policy. Afterwards restore its own."""
    own, engine.policy = engine.policy, policy
    try:
        yield
    finally:
        engine.policy = own


def _medians(rounds: Sequence[RealRound]) -> RealRound:
    return RealRound(*(median(getattr(one, part) for one in rounds) for part in ("draft", "target", "rest")))


def calibrated(table: Costs, rounds: Mapping[int, RealRound]) -> Costs:
    """Return the table, scaled to real rounds. rounds: timed rounds, by draft length. `target` and `rest` are
    multiplied by real seconds / table seconds; this factor is interpolated between the timed lengths, and constant
    beyond them. Drafting becomes a line fitted to the timed rounds."""
    lengths = range(len(table.target))
    known = sorted(k for k in rounds if k < len(table.target))

    def scaled(part: str, seconds: Sequence[float]) -> tuple[float, ...]:
        factors = [getattr(rounds[k], part) / seconds[k] for k in known]
        return tuple(float(value) for value in np.array(seconds) * np.interp(lengths, known, factors))

    first, step = _line(table, {k: rounds[k].draft for k in rounds if k})
    return replace(
        table, target=scaled("target", table.target), rest=scaled("rest", table.rest), draft=step, first=first
    )


def _line(table: Costs, drafting: Mapping[int, float]) -> tuple[float, float]:
    """Return (first, step) of the line seconds = first + k * step that fits the drafting best. drafting: measured
    seconds of drafting, by draft length k. For one length, return the table's values, scaled to it; for none, the
    table's values."""
    if not drafting:
        return table.first, table.draft
    if len(drafting) == 1:
        ((k, seconds),) = drafting.items()
        factor = seconds / table.drafting(k)
        return table.first * factor, table.draft * factor
    return fit_line(drafting)


def fit_line(drafting: Mapping[int, float]) -> tuple[float, float]:
    """Return (first, step) of the line seconds = first + k * step that fits best. Neither the first draft (first +
    step) nor a further one (step) takes less than 0 seconds. drafting: seconds of drafting, by draft length k; at least
    two lengths."""
    one, step = not_negative(np.array([[1.0, k - 1] for k in drafting]), list(drafting.values()))
    return float(one - step), float(step)


def not_negative(features: np.ndarray, seconds: Sequence[float]) -> np.ndarray:
    """Return the coefficients of a least-squares fit, none of them below 0, so that no extrapolated time is negative.
    features: (samples, coefficients). seconds (samples,). While some coefficient is negative, the feature with the
    lowest coefficient is dropped; its coefficient is 0."""
    columns = list(range(features.shape[1]))
    coefficients = np.zeros(features.shape[1])
    while columns:
        parts = np.linalg.lstsq(features[:, columns], np.array(seconds), rcond=None)[0]
        if parts.min() >= 0:
            coefficients[columns] = parts
            break
        columns.pop(int(parts.argmin()))
    return coefficients
