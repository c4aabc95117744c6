"""What `cotrain audit` sees: faults of speculative decoding planted in this engine, and runs without one.

    cotrain train regime=t07 init.layers=[0,1,-2,-1] trainer.steps=60 rollout.texts=80 rollout.held_out_texts=8 \
        rollout.temperatures=[0.7] trainer.validations=1 trainer.threads=1 measure=false output=outputs/audited
    python -m studies.audit outputs/results/audit.json outputs/audited/draft [--tokens 20000] [--faults 9] [--clean 0] \
        [--references 8]
    python -m studies.audit outputs/results/audit_clean.json outputs/audited/draft --faults 0 [--clean 50] \
        [--clean-tokens 20000]

The bundled target at temperature .7 with an independent draft, four drafts a round, in texts of
128 tokens, two of each prompt. Each fault is one that an engine could have. It is audited after a sixteenth, an eighth,
... of the tokens; `strength` is the largest score of the texts over its limit, `strength_of_calls` that of the target
calls, which a server's counters say. Clean runs have other seeds and prompts; of four, one
decodes without a draft, one with eight rows instead of 64; of twelve, one in bfloat16.

The same texts are judged by RUT (`studies.rank_uniformity`), with --references texts of the target for each: its
strength is the standard score of its probability over that of the audit's level. `python -m studies.audit_picture`
draws both.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from cotrain.commands.served_pair import load_network, measurable_folder
from cotrain.data.corpora import shipped_ids
from cotrain.teacher.target_model import load_pair
from cotrain.training.preconditions import ids_of
from inference import Engine, Sampling
from inference.drafts.atomic import write_atomic
from inference.exactness.audit import CALLS, LEVEL, Audit, ServedCalls, ServedText, audit, from_target
from inference.measure.environment import environment
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers import Independent
from inference.round import DecodingRound
from inference.sampling import noise
from inference.sampling.noise import Uniforms, row_ids
from inference.verify import chain, predict_chain
from inference.verify.rules import RULES, Rule
from studies.rank_uniformity import cramer_von_mises, log_ranks, tail, uniform_rank
from studies.trust import environments

K, ROWS, NEW, REGIME = 4, 64, 128, Sampling(0.7)
SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
NONE = "no fault"
SELDOM = 12  # of so many clean runs one is in bfloat16: some four times as long without its instructions


def heated(p: Tensor, power: float) -> Tensor:
    return p.pow(power) / p.pow(power).sum(-1, keepdim=True)


def _with(verify: Callable[..., chain.Verification]) -> Rule:
    """The token rule with another way to verify rounds that have drafts."""

    def rule(p: Tensor, q: Tensor | None, x: Tensor, u: Tensor, k: Tensor) -> Any:
        return (RULES["token"].verify if q is None else verify)(p, q, x, u, k)

    return replace(RULES["token"], verify=rule)


def of_block_and_token(p: Tensor, q: Tensor, x: Tensor, u: Tensor, k: Tensor) -> chain.Verification:
    accepted = chain.block(p, q, x, u[:, : x.shape[1]], k).accepted
    return chain.Verification(accepted, chain._residual(p, q, accepted, k, None))


def of_another_temperature(p: Tensor, q: Tensor, x: Tensor, u: Tensor, k: Tensor) -> chain.Verification:
    return chain.token(p, heated(q, 0.7), x, u[:, : x.shape[1]], k)


def without_the_temperature(p: Tensor, q: Tensor, x: Tensor, u: Tensor, k: Tensor) -> chain.Verification:
    return chain.token(heated(p, 0.7), q, x, u[:, : x.shape[1]], k)


def lenient(p: Tensor, q: Tensor, x: Tensor, u: Tensor, k: Tensor) -> chain.Verification:
    return chain.token(p, q, x, 0.8 * u[:, : x.shape[1]], k)


def cut_by_token(p: Tensor, q: Tensor, x: Tensor, u: Tensor, k: Tensor) -> chain.Verification:
    """Take back the last accepted draft if it was unlikely, and draw again."""
    found = chain.token(p, q, x, u[:, : x.shape[1]], k)
    last = (found.accepted - 1).clamp(min=0)
    px = chain._at(p.gather(-1, torch.nn.functional.pad(x, (0, 1)).unsqueeze(-1)).squeeze(-1), last)
    back = (found.accepted > 0) & (px < 0.2)
    accepted = torch.where(back, last, found.accepted)
    return chain.Verification(accepted, torch.where(back.unsqueeze(-1), chain._at(p, last), found.probs))


def reused(self: Uniforms, rows: Tensor, starts: Tensor, depths: int) -> None:
    """Fill the table with the same numbers for drafts and for their tests."""
    filled(self, rows, starts, depths)
    self.table[noise.ACCEPT - 1] = self.table[noise.DRAFT - 1]


filled = Uniforms.fill
PLAIN: Callable[[], AbstractContextManager[Any]] = nullcontext
# name -> rule, what is patched, the settings that the texts should have
FAULTS: dict[str, tuple[Rule, Callable[[], AbstractContextManager[Any]], Sampling]] = {
    "random numbers of drafts used again": (RULES["token"], lambda: patch.object(Uniforms, "fill", reused), REGIME),
    "block's tests with token's residual": (_with(of_block_and_token), PLAIN, REGIME),
    "q of another temperature": (_with(of_another_temperature), PLAIN, REGIME),
    "temperature lost in verification": (_with(without_the_temperature), PLAIN, REGIME),
    "lenient acceptance": (_with(lenient), PLAIN, REGIME),
    "a cut that looks at the token": (_with(cut_by_token), PLAIN, REGIME),
    "top-p of the draft alone": (RULES["token"], PLAIN, replace(REGIME, top_p=0.95)),
    "greedy drafts verified with a soft q": (
        RULES["token"],
        lambda: patch.object(DecodingRound, "draw", lambda self, probs, depth: probs.argmax(-1)),
        REGIME,
    ),
    NONE: (RULES["token"], PLAIN, REGIME),
}


class Run(NamedTuple):
    """Prompts, texts and target calls."""

    prompts: list[list[int]]
    texts: list[list[int]]
    calls: list[int]


class Runs:
    def __init__(self, tokens: int, draft: Path, references: int) -> None:
        self.target, self.tokenizer = load_pair("bundled")
        self.target.float()
        self.network = load_network(measurable_folder(str(draft)), self.target, self.tokenizer).float().eval()
        self.vocabulary, (_, self.prompts) = ids_of(self.tokenizer), shipped_ids(self.tokenizer, 32)
        self.texts = -(-tokens // NEW)  # of a run
        self.draft = LM(self.network, 1, self.vocabulary)
        self.number = references

    def prompts_of(self, seed: int) -> list[list[int]]:
        return [self.prompts[(7 * seed + i // 2) % len(self.prompts)] for i in range(self.texts)]

    @cached_property
    def references(self) -> Tensor:
        """RUT's scores (texts, number) of the target's own texts of the prompts of the faults."""
        asked = [prompt for prompt in self.prompts_of(1) for _ in range(self.number)]
        engine = Engine(self.target, rows=2 * ROWS, tokenizer=self.tokenizer)
        own = engine.generate(asked, max_new_tokens=NEW, sampling=REGIME, seed=2, ids=[*range(len(asked))])
        rows = range(0, len(asked), self.number)
        return torch.stack([log_ranks(self.target, asked[i], own.tokens[i : i + self.number]) for i in rows])

    def sampled(self, rule: Rule, seed: int, **how: Any) -> Run:
        """Return a run. how: rows, dtype, or draft=False."""
        prompts = self.prompts_of(seed)
        dtype, rows = how.get("dtype", torch.float32), how.get("rows", ROWS)
        target, network = self.target.to(dtype), self.network.to(dtype)
        proposer = Independent(network) if how.get("draft", True) else None
        engine = Engine(target, proposer, verify=rule, policy=Fixed(K), rows=rows, tokenizer=self.tokenizer)
        found = engine.generate(prompts, max_new_tokens=NEW, sampling=REGIME, seed=seed, ids=row_ids(prompts))
        self.target.float(), self.network.float()
        return Run(prompts, found.tokens, [row.target_calls for row in found.stats.rows])

    def served(self, run: Run, regime: Sampling) -> Iterator[tuple[int, ServedText]]:
        return from_target(self.target, run.prompts, run.texts, regime, self.vocabulary, self.draft)


def calls_of(served: Sequence[tuple[int, ServedText]], counted: Sequence[int]) -> ServedCalls:
    """Return the target calls of texts, each from the first token on. counted: of each text."""
    lengths = torch.tensor([len(one.x) for _, one in served])
    logs = torch.zeros(2, len(served), int(lengths.max()), dtype=torch.float64)
    for row, (_, one) in enumerate(served):
        assert one.q is not None
        for log, probs in zip(logs, (one.p, one.q), strict=True):
            log[row, : len(one.x)] = probs.gather(-1, one.x.unsqueeze(-1)).squeeze(-1).double().log()
    reach = predict_chain.reach(predict_chain.r_from(*logs), K, lengths)
    variance = float(predict_chain.variance_from(reach, lengths).sum())
    return ServedCalls(sum(counted), float(predict_chain.calls_from(reach, lengths).sum()), variance**0.5)


def judged(served: list[tuple[int, ServedText]], run: Run, share: float = 1.0, drafted: bool = True) -> Audit:
    count = max(1, round(share * len(run.texts)))
    calls = calls_of(served[:count], run.calls[:count]) if drafted else None
    return audit(served[:count], [*map(tuple, run.prompts[:count])], run.texts[:count], calls)


def strength(found: Audit) -> float:
    """Return the largest score of the texts over the limit."""
    scores = [abs(z) / found.limit for name, z in found.scores.items() if name != CALLS]
    return max([found.impossible / (found.allowed + 0.5), *scores])


def rut(runs: Runs, run: Run) -> list[dict[str, float]]:
    """Return probability and strength of RUT after each share of the texts."""
    prompts, texts = run.prompts, run.texts
    scores = torch.cat([log_ranks(runs.target, prompts[i], texts[i : i + 2]) for i in range(0, len(texts), 2)])
    u = torch.rand(len(texts), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ranks, found = uniform_rank(scores, runs.references, u), []
    for share in SHARES:
        p = tail(cramer_von_mises(ranks[: max(1, round(share * len(texts)))]))
        z = NormalDist().inv_cdf(1 - max(p, 1e-15) / 2)
        found.append({"p": p, "strength": z / NormalDist().inv_cdf(1 - LEVEL / 2)})
    return found


def fault(runs: Runs, name: str) -> dict[str, Any]:
    rule, patched, regime = FAULTS[name]
    with patched():
        run = runs.sampled(rule, 1)
    served = [*runs.served(run, regime)]
    audits = [judged(served, run, share) for share in SHARES]
    moved, count = 0.0, 0  # of the probability that goes to tokens that the draft favours
    for _, one in served:
        if one.q is not None:
            likelier = one.q > one.p
            moved += float(likelier.gather(-1, one.x.unsqueeze(-1)).sum() - (one.p * likelier).sum())
            count += len(one.x)
    return {
        "seen_after": next((one.tokens for one in audits if strength(one) > 1), None),
        "seen_with_counters": next((one.tokens for one in audits if one.passed is False), None),
        "after": [one.tokens for one in audits],
        "strength": [strength(one) for one in audits],
        "strength_of_calls": [abs(one.scores[CALLS]) / one.limit for one in audits],
        "rut": rut(runs, run),
        "by": audits[-1].wrong,
        "tokens": audits[-1].tokens,
        "impossible": audits[-1].impossible,
        "to_favoured": moved / max(count, 1),
        "scores": audits[-1].scores,
    }


def clean(runs: Runs, number: int) -> dict[str, Any]:
    how: list[dict[str, Any]] = [{}, {}, {"draft": False}, {"rows": 8}]
    mine: dict[str, Any] = {"dtype": torch.bfloat16} if number % SELDOM == 1 else how[number % len(how)]
    run = runs.sampled(RULES["token"], 100 + number, **mine)
    found = judged([*runs.served(run, REGIME)], run, drafted=mine.get("draft", True))
    how_said = {name: str(value) for name, value in mine.items()}
    return {"how": how_said, "passed": found.passed, "tokens": found.tokens, "scores": found.scores}


def steps(asked: argparse.Namespace, report: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    runs = Runs(asked.tokens, asked.draft, asked.references)
    for name in [*FAULTS][: asked.faults]:
        if name not in report["faults"]:
            yield "faults", name, fault(runs, name)
    runs.texts = -(-asked.clean_tokens // NEW)
    for number in range(asked.clean):
        if str(number) not in report["clean"]:
            yield "clean", str(number), clean(runs, number)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.audit")
    parser.add_argument("out", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--faults", type=int, default=len(FAULTS), help="the first so many")
    parser.add_argument("--clean", type=int, default=50)
    parser.add_argument("--clean-tokens", type=int, default=20_000)
    parser.add_argument("--references", type=int, default=8)
    asked = parser.parse_args()
    report: dict[str, Any] = {
        "environment": environment(),
        "command": "python -m studies.audit " + " ".join(sys.argv[1:]),
    }
    report |= {"tokens": asked.tokens, "references": asked.references, "faults": {}, "clean": {}}
    if asked.out.exists() and (known := json.loads(asked.out.read_text()))["command"] == report["command"]:
        report = known | {"environments": environments(known)}  # an interrupted study goes on
    for group, name, found in steps(asked, report):
        report[group][name] = found
        write_atomic(asked.out, json.dumps(report, indent=1) + "\n")
        said = found.get("seen_after", found.get("passed"))
        largest = max(found["scores"].values(), key=abs, default=0.0)
        print(f"{time.strftime('%X')} {group}, {name}: {said}, largest z {largest:+.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
