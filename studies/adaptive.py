"""What an adaptive policy gains over the best fixed draft length, and how much of an oracle's gain that is.

    cotrain plan draft.path=DRAFT batches=[1,8] output=outputs/plan
    python -m studies.adaptive outputs/plan --output outputs/results/adaptive.json

Prompts are the shipped ones of mixed tasks that no plan reads, and texts have three lengths in turn, since texts of
one length would end together in plain decoding alone. Each way of drafting decodes all of them. Two speeds are
reported. `by_table` counts the rounds of each number of rows and drafts, and adds up the plan's seconds of such rounds:
it has no noise of the clock, so fixed lengths can be compared one by one. `timed` is wall time of the arms in turn,
with intervals over batches. The oracle knows where each round would be rejected, and drafts the length of the highest
rate; all rows draft equally many, as with the policy. Its rounds are those of the longest fixed length, so its share of
the gain, (policy - best fixed) / (oracle - best fixed), is in tokens per second of the table.

`--beside-plain` names further numbers of rows, at which the policy is timed beside plain decoding alone. At every
number of rows an arm `k = 0` is timed: the policy with a draft that costs so much that it never drafts.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotrain.data.corpora import shipped_ids
from inference import Sampling, load
from inference.adaptive_policy import Adaptive, seconds_of
from inference.engine import Engine
from inference.measure.adaptive import Wanted, until_known
from inference.measure.arms import Arm, ArmResult
from inference.measure.costs import drafting_by
from inference.measure.environment import environment
from inference.policy import Fixed, Policy

QUEUE = 3  # prompts per row, so that rows that end are replaced
BATCHES = 5  # different batches that are timed at least
PLAIN, ADAPTIVE, NEVER = "plain", "adaptive", "k = 0"


class Rounds:
    """A recorder of rounds: (rows, drafts of the longest row, accepted drafts of each row)."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int, list[int]]] = []

    def begin(self, rule: str, rows: Any) -> None:
        self.rounds = []

    def note(self, rows: Sequence[Any], starts: Any, proposal: Any, table: Sequence[Sequence[int]]) -> None:
        self.rounds.append((len(rows), proposal.x.shape[1], [line[0] for line in table]))


def by_table(engine: Engine, policy: Adaptive, prompts: list[list[int]], tokens: int, sampling: Sampling) -> Any:
    """Return tokens per second by the table of `policy`, tau, drafts per round, and the oracle's tokens per second.
    Rounds of an adaptive policy have the seconds of its decisions too."""
    engine.record = rounds = Rounds()
    out = engine.generate(
        prompts, max_new_tokens=lengths(prompts, tokens), sampling=sampling, seed=1, ignore_eos=True
    ).whole()
    engine.record = None
    decides = isinstance(engine.policy, Adaptive) and engine.proposer is not None
    seconds = sum(
        seconds_of(policy.seconds, rows)[k] + decides * k * (policy.decision(rows) or 0.0)
        for rows, k, _ in rounds.rounds
    )
    drafts = sum(rows * k for rows, k, _ in rounds.rounds) / sum(rows for rows, _, _ in rounds.rounds)
    return {
        "tokens_per_second": out.stats.tokens / seconds,
        "tau": out.stats.tau,
        "drafts": drafts,
        "oracle": oracle(policy, rounds.rounds),
    }


def oracle(policy: Adaptive, rounds: Sequence[tuple[int, int, list[int]]]) -> float:
    """Return the highest rate, tokens per second of the table, of rounds that draft no more than these did, with each
    length chosen after the outcome. It is reached by rounds that maximise tokens - rate * seconds (Dinkelbach 1967)."""
    rate = 0.0
    for _ in range(20):
        tokens = total = 0.0
        for rows, most, good in rounds:
            seconds = seconds_of(policy.seconds, rows)
            gains = [sum(min(one, k) + 1 for one in good) for k in range(most + 1)]
            k = max(range(most + 1), key=lambda k: gains[k] - rate * seconds[k])
            tokens, total = tokens + gains[k], total + seconds[k]
        rate = tokens / total
    return rate


def prompts_of(engine: Engine, least: int) -> list[list[int]]:
    """Return the shipped prompts, from the first again if there are too few: at least `QUEUE` for each row, in whole
    batches of so many."""
    assert engine.tokenizer is not None
    given, batch = shipped_ids(engine.tokenizer, 48)[1], QUEUE * engine.rows
    return [given[i % len(given)] for i in range(-(-least // batch) * batch)]


def cell(draft: str, policy: Adaptive, rows: int, temperature: float, size: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one number of rows at one temperature."""
    sampling = Sampling(temperature)
    engine = load(draft, rows=rows, policy=policy)
    plain = Engine(engine.target.model, tokenizer=engine.tokenizer, rows=rows)
    prompts = prompts_of(engine, size.prompts)
    counted = {
        PLAIN: by_table(plain, policy, prompts, size.tokens, sampling),
        ADAPTIVE: by_table(engine, policy, prompts, size.tokens, sampling),
    }
    for k in range(1, policy.longest + 1):
        engine.policy = Fixed(k)
        counted[f"k = {k}"] = by_table(engine, policy, prompts, size.tokens, sampling)
    speeds = {name: one["tokens_per_second"] for name, one in counted.items()}
    best = max((name for name in speeds if name != ADAPTIVE), key=speeds.__getitem__)
    oracle = counted[f"k = {policy.longest}"]["oracle"]
    found = {
        "rows": rows,
        "temperature": temperature,
        "by_table": counted,
        "best_fixed": best,
        "oracle": oracle,
        "gain": speeds[ADAPTIVE] / speeds[best] - 1,
        "oracle_gain": oracle / speeds[best] - 1,
        "over_plain": speeds[ADAPTIVE] / speeds[PLAIN],
    }
    print(
        f"{rows} rows, T = {temperature:g}: best fixed {best}, adaptive {100 * found['gain']:+.1f} %, oracle "
        f"{100 * found['oracle_gain']:+.1f} %, over plain {found['over_plain']:.3f}",
        flush=True,
    )
    return found | {"timed": timed(engine, plain, policy, best, sampling, size)}


def timed(
    engine: Engine, plain: Engine, policy: Adaptive, best: str, sampling: Sampling, size: argparse.Namespace
) -> dict[str, Any] | None:
    """Return speeds of the arms in turn: plain, the best fixed length of the table, and the adaptive policy."""
    if not size.seconds:
        return None
    dear = {rows: (row[0], *(100 * row[0] for _ in row[1:])) for rows, row in policy.seconds.items()}
    policies: dict[str, Policy] = {ADAPTIVE: policy, NEVER: Adaptive(dear, policy.estimates)}
    if best != PLAIN:
        policies[best] = Fixed(int(best.removeprefix("k = ")))
    arms = [arm(PLAIN, plain, None, sampling, size.tokens)]
    arms += [arm(name, engine, own, sampling, size.tokens) for name, own in policies.items()]
    wanted = Wanted(1, 0.02, time.perf_counter() + size.seconds)
    batch = QUEUE * engine.rows
    prompts = prompts_of(engine, max(size.prompts, BATCHES * batch))
    timing, reached = until_known(arms, prompts, batch, (ADAPTIVE, best), wanted)
    over_plain, decoding = (
        {one.name: timing.ratio(one.name, PLAIN, decode=part)._asdict() for one in arms} for part in (False, True)
    )
    return {
        "adaptive_over_best": timing.ratio(ADAPTIVE, best)._asdict(),
        "over_plain": over_plain,
        "over_plain_decoding": decoding,
        "runs": reached.runs,
        "others": reached.others,
    }


def lengths(prompts: Sequence[list[int]], tokens: int) -> list[int]:
    """Return the number of new tokens of each prompt: half, all, and one and a half of `tokens` in turn."""
    return [tokens * (1 + i % 3) // 2 for i in range(len(prompts))]


def arm(name: str, engine: Engine, policy: Any, sampling: Sampling, tokens: int) -> Arm:
    """Return the arm of an engine with this policy, None for its own. See `engine_arm`, whose texts have one length."""

    def run(prompts: Sequence[list[int]], ids: Sequence[int], seed: int) -> ArmResult:
        start = time.perf_counter()
        with drafting_by(engine, policy or engine.policy):
            out = engine.generate(
                prompts, max_new_tokens=lengths(prompts, tokens), sampling=sampling, seed=seed, ids=ids, ignore_eos=True
            ).whole()
        seconds = time.perf_counter() - start
        return ArmResult(out.tokens, seconds, seconds - out.stats.seconds["prefill"], out.stats)

    return Arm(name, run)


def beside_plain(draft: str, policy: Adaptive, rows: int, temperature: float, size: argparse.Namespace) -> Any:
    """Return the speeds of the policy beside plain decoding."""
    engine = load(draft, rows=rows, policy=policy)
    plain = Engine(engine.target.model, tokenizer=engine.tokenizer, rows=rows)
    found = timed(engine, plain, policy, PLAIN, Sampling(temperature), size)
    print(f"{rows} rows, T = {temperature:g}: {found}", flush=True)
    return {"rows": rows, "temperature": temperature, "timed": found}


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8])
    parser.add_argument("--temperatures", type=lambda text: [float(one) for one in text.split(",")], default=[1.0])
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing per cell; 0: none")
    parser.add_argument("--beside-plain", type=lambda text: [int(one) for one in text.split(",")], default=[])
    size = parser.parse_args()
    file = size.plan / "policy.json"
    given, policy = json.loads(file.read_text(encoding="utf-8")), Adaptive.load(file)
    cells = [cell(given["draft"], policy, rows, t, size) for rows in size.rows for t in size.temperatures]
    more = [
        beside_plain(given["draft"], policy, rows, t, size) for rows in size.beside_plain for t in size.temperatures
    ]
    report = {
        "environment": environment(),
        "command": " ".join(sys.argv[1:]),
        "policy": given,
        "prompts": size.prompts,
        "tokens": size.tokens,
        "cells": cells,
        "beside_plain": more,
    }
    size.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
