"""Measuring a pair with the bundled engine: quickly at each checkpoint, in full for what is exported."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.config import Bench
from cotrain.prompts import shipped
from inference import Engine, Sampling, predict
from inference.costs import Costs, best_k, joined, measure_costs
from inference.exactness import check, check_calls
from inference.lean import can_round
from inference.measure import Texts, Timing, engine_arm, interleave, transformers_arm
from inference.parity import pair_figures
from inference.policy import Fixed
from inference.precision import cast, widened
from inference.proposer import Proposer
from inference.proposers import Independent, NGram
from inference.report import build

BATCH = 32  # rows where only counts matter, not clocks


class Compiled(NamedTuple):
    """What runs compiled: plain decoding's target, the target of rounds, the draft."""

    plain: bool = False
    target: bool = False
    draft: bool = False


@dataclass(frozen=True)
class Plan:
    """What is measured: a pair, its regime, its rule and how much."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel
    sampling: Sampling
    verify: str
    bench: Bench
    names: tuple[str, str]  # of target and draft, to print
    objective: str = "sampled"  # how it drafts; "greedy": its likeliest tokens
    compiled: Compiled = Compiled()
    own: Sequence[list[int]] = ()  # prompts of the user's, instead of those shipped

    @cached_property
    def served(self) -> PreTrainedModel:
        """The draft as it will be served, a copy unless it is that already."""
        wanted = self.bench.draft_dtype
        dtype = self.draft.dtype if wanted == "auto" else getattr(torch, wanted)
        if self.draft.dtype == dtype and not self.draft.training:
            return self.draft
        return cast(copy.deepcopy(self.draft).eval(), dtype)

    @property
    def int8(self) -> bool:
        return self.bench.draft_int8 and can_round(self.served)

    @cached_property
    def running(self) -> PreTrainedModel:
        """The served draft's numbers, in float32 where this machine would emulate their dtype; the 8-bit kernel does
        not."""
        return self.served if self.int8 else widened(self.served, copied=True)

    def proposer(self, counted: bool = False) -> Independent:
        """counted: for counts alone, which are not worth compiling on a CPU."""
        compile = None if counted else self.compiled.draft
        return Independent(self.running, self.objective == "greedy", compile=compile, int8=self.int8)

    def engine(self, k: int, rows: int | None = None, proposer: Proposer | None = None) -> Engine:
        """rows: for counts alone, so many at a time."""
        return Engine(self.target, proposer or self.proposer(bool(rows)), verify=self.verify, policy=Fixed(k),
                      tokenizer=self.tokenizer, rows=rows or self.bench.rows,
                      compile=None if rows else self.compiled.target)  # fmt: skip

    def plain(self, rows: int | None = None) -> Engine:
        compile = None if rows else self.compiled.plain
        return Engine(self.target, tokenizer=self.tokenizer, rows=rows or self.bench.rows, compile=compile)

    def prompts(self, first: int, count: int) -> list[list[int]]:
        """Prompts `first`, `first` + 1, ...: own ones, or shipped ones cut to the bench's length; they repeat when they
        run out."""
        if self.own:
            return [self.own[(first + i) % len(self.own)] for i in range(count)]
        texts = [row["text"] for row in shipped()]
        chosen = [texts[(first + i) % len(texts)] for i in range(count)]
        return [self.tokenizer(text)["input_ids"][: self.bench.prompt_tokens] for text in chosen]


def quick(plan: Plan, k: int) -> dict[str, float]:
    """Speed-up, tau and tokens per second on a few prompts, both sides interleaved: ranks checkpoints."""
    arms = [
        engine_arm("speculative", plan.engine(k), plan.sampling, plan.bench.new_tokens),
        engine_arm("plain", plan.plain(), plan.sampling, plan.bench.new_tokens),
    ]
    timing = interleave(arms, plan.prompts(0, plan.bench.quick_prompts), plan.bench.rows, plan.bench.seed)
    stats = timing.stats("speculative")
    return {
        "speedup": timing.ratio("speculative", "plain").value,
        "tau": stats.tau if stats else float("nan"),
        "tokens_per_second": timing.speed("speculative"),
    }


def refuse(size: Bench) -> None:
    """Raise ValueError, naming the key, for sizes that cannot be measured."""
    if not size.depths or min(size.depths) < 1:
        raise ValueError(f"bench.depths: {list(size.depths)} must be draft lengths of at least 1")


def measure(plan: Plan, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """The full report: draft length from measured costs, speed with intervals, exactness, parity, greedy beside."""
    size = plan.bench
    refuse(size)
    print("bench: costs of passes, and the draft length that they and the acceptance call for")
    plan, costs = settled(plan)
    choice = best_k(costs, taus(plan).__getitem__)
    k = max(size.depths, key=choice.speedups.__getitem__)
    print(f"bench: draft length {k}; {size.prompts} prompts in turn: speculative, plain, transformers")
    engine = plan.engine(k)
    timing = _timed(plan, engine, plan.sampling)
    print("bench: exactness on these prompts, and parity on more tokens")
    verdict = check(engine, timing.texts("speculative"), plan.sampling, size.new_tokens, size.seed, BATCH)
    found = {
        "costs": asdict(costs),
        "compiled": plan.compiled._asdict(),
        "planned_k": k,
        "prompts": "own" if plan.own else "shipped",
        "predicted_speedups": list(choice.speedups),
        "parity": parity(plan, k),
        "greedy": greedy(plan, k),
        "plain_over_transformers": timing.ratio("plain", "transformers")._asdict(),
    }
    target, draft = plan.names
    return build(
        timing, engine, "speculative", "plain", sampling=plan.sampling, max_new_tokens=size.new_tokens,
        target=target, draft=draft, verdict=verdict, extra=found | (extra or {}),
    )  # fmt: skip


def _timed(plan: Plan, engine: Engine, sampling: Sampling) -> Timing:
    size = plan.bench
    arms = [
        engine_arm("speculative", engine, sampling, size.new_tokens),
        engine_arm("plain", plan.plain(), sampling, size.new_tokens),
        transformers_arm("transformers", plan.target, sampling, size.new_tokens),
    ]
    return interleave(arms, plan.prompts(size.quick_prompts, size.prompts), size.rows, size.seed, progress=_bar)


def _bar(done: int, total: int) -> None:
    print(f"\rbench: {done}/{total} runs", end="" if done < total else "\n", flush=True)


def settled(plan: Plan) -> tuple[Plan, Costs]:
    """Each part compiled where that measures faster (with bench.compile, or on a GPU), and the table of costs that
    follows."""
    eager = costs_of(replace(plan, compiled=Compiled()))
    if not plan.bench.compile and plan.target.device.type != "cuda":
        return plan, eager
    both = eager, costs_of(replace(plan, compiled=Compiled(True, True, True)))
    k = sorted(plan.bench.depths)[len(plan.bench.depths) // 2]
    faster = Compiled(*(min(both, key=cost) is both[1] for cost in (
        lambda costs: costs.target[0], lambda costs: costs.target[k], lambda costs: costs.drafting(k)
    )))  # fmt: skip
    return replace(plan, compiled=faster), joined(*(both[on] for on in faster))


def costs_of(plan: Plan) -> Costs:
    """Costs in the middle of a text of the bench's length."""
    size = plan.bench
    prompt = sum(map(len, plan.own)) // len(plan.own) if plan.own else size.prompt_tokens
    context = prompt + size.new_tokens // 2
    target = plan.engine(1).target  # as rounds run it: other slots would be another graph
    return measure_costs(target, plan.proposer(), max(size.depths), context=context, sampling=plan.sampling)


def rule(verify: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """tau of a verification rule, and what of the laws it takes."""
    return (predict.tau_block, predict.l_from) if verify == "block" else (predict.tau, predict.r_from)


def taus(plan: Plan) -> dict[int, float]:
    """Predicted tau by draft length, from texts decoded plainly that are not timed."""
    size, longest = plan.bench, max(plan.bench.depths)
    prompts = plan.prompts(size.quick_prompts + size.prompts, BATCH)
    arm = engine_arm("plain", plan.plain(BATCH), plan.sampling, size.new_tokens)
    texts = interleave([arm], prompts, BATCH, size.seed, warmup=0).texts("plain")
    figures = _figures(plan, plan.engine(longest, BATCH), texts)
    tau, of = rule(plan.verify)
    ratios = of(figures.logp, figures.logq)
    return {k: float(tau(ratios, k, figures.lengths)) for k in range(1, longest + 1)}


def _figures(plan: Plan, engine: Engine, texts: Texts) -> Any:
    return pair_figures(engine, plan.proposer(counted=True), texts, plan.sampling, plan.bench.new_tokens, 0.0)


def parity(plan: Plan, k: int) -> dict[str, Any] | None:
    """Target calls predicted and measured on at least `parity_tokens` tokens, prompts not timed before.

    None for the coupled rule, whose calls cannot be predicted from the text.
    """
    size = plan.bench
    count = -(-size.parity_tokens // size.new_tokens)
    engine = plan.engine(k, BATCH)
    arm = engine_arm("speculative", engine, plan.sampling, size.new_tokens)
    first = size.quick_prompts + size.prompts
    texts = interleave([arm], plan.prompts(first, count), BATCH, size.seed + 1, warmup=0).texts("speculative")
    calls = check_calls(_figures(plan, engine, texts), texts, plan.verify)
    if calls is None:
        return None
    measured = calls.tokens / calls.measured
    return asdict(calls) | {
        "tau_measured": measured, "tau_predicted": calls.tau, "z": calls.z, "relative": calls.tau / measured - 1,
        "passed": calls.passed, "line": calls.line(),
    }  # fmt: skip


def greedy(plan: Plan, k: int) -> dict[str, Any]:
    """Temperature 0: speculative and n-gram look-up beside plain decoding; small models loop there."""
    size, sampling = plan.bench, Sampling(temperature=0)
    arms = [
        engine_arm("speculative", plan.engine(k), sampling, size.new_tokens),
        engine_arm("ngram", plan.engine(k, proposer=NGram()), sampling, size.new_tokens),
        engine_arm("plain", plan.plain(), sampling, size.new_tokens),
    ]
    prompts = plan.prompts(size.quick_prompts, max(size.prompts // 2, 2))
    timing = interleave(arms, prompts, size.rows, size.seed)
    found: dict[str, Any] = {"prompts": len(prompts)}
    for arm in ("speculative", "ngram"):
        stats = timing.stats(arm)
        found[arm] = {"speedup": timing.ratio(arm, "plain")._asdict(), "tau": stats.tau if stats else None}
    return found
