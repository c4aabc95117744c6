"""What passes cost on this machine, and the draft length that pays best.

B rows, K longest draft. All times are wall seconds of B rows together, medians of interleaved repeats.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from inference.models.lm import LM
from inference.models.prefill import store_prompts
from inference.noise import Uniforms
from inference.proposers.base import Host, Outcome, Proposer
from inference.request import Request
from inference.round import DecodingRound
from inference.sampling import Sampling
from inference.verify.rules import RULES

Key = TypeVar("Key", bound=Hashable)
SPANS = (2, 8)  # draft lengths that are timed, see `spans_of`; every other one lies on their line
SPREAD = 7  # tokens between the lengths of one text and the next


@dataclass(frozen=True)
class Costs:
    """target[n-1]: a target pass over n ids a row, n = 1..K+1; draft: one draft step (pass, distribution, draw) of
    several;
    first: what drafting takes in a round besides its steps: ids that it lacked, weights that are not at hand; rest[k]:
    the rest of a round that drafted k, k = 0..K (distributions, verification, draws, results on the host).

    rows, context: the shapes measured; target_dtype, draft_dtype: of the models' weights.
    """

    target: tuple[float, ...]
    draft: float
    rest: tuple[float, ...]
    rows: int = 1
    context: int = 0
    target_dtype: str = ""
    draft_dtype: str = ""
    first: float = 0.0

    def round(self, k: int) -> float:
        """Seconds of a round that drafts k tokens: k t_draft + t_target(k+1) + t_round(k)."""
        return self.drafting(k) + self.target[k] + self.rest[k]

    def drafting(self, k: int) -> float:
        """Seconds of k drafts."""
        return k * self.draft + self.first * (k > 0)

    @property
    def ratio(self) -> float:
        """`cost`: seconds of one draft step / seconds of one plain target step."""
        return self.draft / self.round(0)


@dataclass(frozen=True)
class Choice:
    """k: the draft length of least seconds a token, 0 for none; speedup: predicted, over plain decoding;
    speedups[k]: of every length, k = 0..K."""

    k: int
    speedup: float
    speedups: tuple[float, ...]


def joined(plain: Costs, target: Costs, draft: Costs) -> Costs:
    """The table of an engine whose single target steps, passes over drafts and drafting are run in the ways that these
    were measured in."""
    return replace(
        target, target=(plain.target[0], *target.target[1:]),
        draft=draft.draft, first=draft.first, draft_dtype=draft.draft_dtype,
    )  # fmt: skip


def best_k(costs: Costs, tau: Callable[[int], float]) -> Choice:
    """Draft length by argmin over the whole table, which may have cliffs (Leviathan et al. 2023, arXiv
    2211.17192, with measured times): seconds per token = (k t_draft + t_target(k+1) + t_round(k)) / tau(k).

    tau(k): tokens per target call at draft length k, k = 1..K; plain decoding, k = 0, emits one a call by
    definition.
    """
    plain = costs.round(0)
    speedups = [1.0] + [plain * tau(k) / costs.round(k) for k in range(1, len(costs.target))]
    k = max(range(len(speedups)), key=speedups.__getitem__)
    return Choice(k, speedups[k], tuple(speedups))


def interleaved(
    tasks: Mapping[Key, Callable[[], object]],
    repeats: int = 9,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, float]:
    """Median seconds of each task; each round runs every task once, so that drift of the machine falls on
    all."""
    seconds: dict[Key, list[float]] = {key: [] for key in tasks}
    for repeat in range(warmup + repeats):
        for key, task in tasks.items():
            start = clock()
            task()
            if repeat >= warmup:
                seconds[key].append(clock() - start)
    return {key: median(values) for key, values in seconds.items()}


@torch.inference_mode()
def measure_costs(
    target: LM,
    proposer: Proposer,
    K: int,
    *,
    context: int = 256,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    repeats: int = 9,
    warmup: int = 2,
) -> Costs:
    """Time target and proposer, as they will be run, on as many texts as there are rows, for k = 0..K: texts of about
    `context` tokens, no two of the same length, as after some rounds.

    Raises ValueError when context and the longest drafts that are timed do not fit the target, or the proposer drafts
    fewer there.
    """
    proposer.open(Host(target.rows, target.spare, target.vocabulary, target.context, target))
    room = min(target.context, proposer.context or target.context)
    spans = spans_of(proposer)
    longest = max(K, *spans)
    if context < 1 or context + longest + 1 > room:
        raise ValueError(f"context={context} and K={K}: both models must hold context + {longest + 1}, at most {room}")
    seeded = torch.Generator().manual_seed(0)
    apart = min(SPREAD, context // target.rows)
    lengths = [context + apart * (row - target.rows // 2) for row in range(target.rows)]
    texts = [
        torch.randint(target.vocabulary, (min(length, room - longest - 1),), generator=seeded).tolist()
        for length in lengths
    ]
    proposer.admit(0, texts, store_prompts(target, 0, texts, states=proposer.reads))
    found = interleaved(_tasks(target, proposer, texts, K, spans, sampling), repeats, warmup)
    short, long = spans
    step = (found["draft", long] - found["draft", short]) / (long - short)
    return Costs(
        tuple(found["target", n] for n in range(1, K + 2)),
        step,
        tuple(found["rest", k] for k in range(K + 1)),
        target.rows,
        context,
        target.weights,
        proposer.weights or "",
        found["draft", short] - short * step,
    )


def spans_of(proposer: Proposer) -> tuple[int, int]:
    """The two draft lengths that a proposer is timed at: `SPANS`, or as far apart as it drafts."""
    short, long = SPANS
    long = min(long, proposer.depths or long)
    return min(short, long - 1), long


def _tasks(
    target: LM, proposer: Proposer, texts: list[list[int]], K: int, lengths: tuple[int, int], sampling: Sampling
) -> dict[tuple[str, int], Callable[[], object]]:
    """Every part of a round, as the engine makes it and after what comes before it there: what a processor keeps at
    hand is what was used last."""
    rows = [Request(i, i, text, K + 1, sampling, frozenset()) for i, text in enumerate(texts)]
    at = [len(text) - 1 for text in texts]
    ids = torch.tensor([text[-1:] * (K + 1) for text in texts], device=target.device)
    seen = target.forward(ids, at, states=proposer.reads)
    logits, states = seen.logits.clone(), {layer: part.clone() for layer, part in seen.states.items()}  # (B, K+1, V)

    noise = Uniforms(0, target.device)

    def decoding_round(k: int) -> DecodingRound:
        return DecodingRound(rows, [k] * len(rows), RULES["token"], noise, target.vocabulary, target.device)

    # of several rows, some accepted every draft and lacks two ids
    stored = [len(text) - 1 - (len(texts) > 1) for text in texts]
    outcome = Outcome(stored, torch.zeros(len(stored), dtype=torch.int64, device=target.device), states)
    drafting = {k: copy(proposer) for k in lengths}  # each as if it had never made more, on the same slots

    def drafts(k: int) -> None:
        made = drafting[k].propose(decoding_round(k))
        wait_for(made.x.device)
        drafting[k].commit(outcome)

    spans = dict(enumerate(lengths, 2))
    tasks: dict[tuple[str, int], Callable[[], object]] = {("before", 1): _pass(target, ids[:, :1], at)}
    for n in range(1, max(K + 1, *spans) + 1):
        if n > 1:
            tasks["draft" if n in spans else "before", spans.get(n, n)] = partial(drafts, spans.get(n, lengths[0]))
        if n <= K + 1:
            tasks["target", n] = _pass(target, ids[:, :n], at)
            tasks["rest", n - 1] = _rest(decoding_round, logits[:, :n], ids[:, : n - 1])
    return tasks


def _pass(lm: LM, ids: Tensor, at: list[int]) -> Callable[[], object]:
    def run() -> None:
        lm.forward(ids, at)
        lm.wait()

    return run


def _rest(decoding_round: Callable[[int], DecodingRound], logits: Tensor, x: Tensor) -> Callable[[], object]:
    """Distributions, verdict and the last draw of a round; the draft's distribution is the target's own, since cost is
    all that counts."""
    k = [x.shape[1]] * x.shape[0]

    def run() -> object:
        one = decoding_round(x.shape[1])
        p = one.target_probs(logits, x, k)
        verdict = one.verdict(p, p[:, :-1], x, k)
        return one.last(verdict.probs).tolist(), verdict.accepted.tolist()

    return run


def wait_for(device: torch.device) -> None:
    """Until the work that was launched there is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
