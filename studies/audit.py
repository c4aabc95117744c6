"""What `cotrain audit` sees: faults of speculative decoding planted in this engine, and runs without one.

    cotrain train regime=t07 init.layers=[0,1,-2,-1] trainer.steps=60 rollout.texts=80 rollout.held_out_texts=8 \
        rollout.temperatures=[0.7] trainer.validations=1 trainer.threads=1 measure=false output=outputs/audited
    python -m studies.audit outputs/results/audit.json outputs/audited/draft [--tokens 20000] [--clean 50]

The bundled target at temperature .7 with an independent draft, four drafts a round, in texts of
128 tokens, two of each prompt. Each fault is one that an engine could have. It is audited after a sixteenth, an eighth,
... of the tokens. Clean runs have other seeds; of four, one decodes in bfloat16, one without a draft, one with eight
rows instead of 32.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cotrain.commands.served_pair import load_network, measurable_folder
from cotrain.data.corpora import shipped_ids
from cotrain.teacher.target_model import load_pair
from cotrain.training.preconditions import ids_of
from inference import Engine, Sampling
from inference.drafts.atomic import write_atomic
from inference.exactness.audit import Audit, ServedText, audit, from_target
from inference.measure.environment import environment
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers import Independent
from inference.round import DecodingRound
from inference.sampling import noise
from inference.sampling.noise import Uniforms, row_ids
from inference.verify import chain
from inference.verify.rules import RULES, Rule

K, ROWS, NEW, REGIME = 4, 32, 128, Sampling(0.7)
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


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
}


class Runs:
    def __init__(self, tokens: int, draft: Path) -> None:
        self.target, self.tokenizer = load_pair("bundled")
        self.target.float()
        self.network = load_network(measurable_folder(str(draft)), self.target, self.tokenizer).float().eval()
        self.vocabulary, (_, self.prompts) = ids_of(self.tokenizer), shipped_ids(self.tokenizer, 32)
        self.texts = -(-tokens // NEW)
        self.draft = LM(self.network, 1, self.vocabulary)

    def sampled(self, rule: Rule, seed: int, **how: Any) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and texts of a run. how: rows, dtype, or draft=False."""
        prompts = [self.prompts[(7 * seed + i // 2) % len(self.prompts)] for i in range(self.texts)]
        dtype, rows = how.get("dtype", torch.float32), how.get("rows", ROWS)
        target, network = self.target.to(dtype), self.network.to(dtype)
        proposer = Independent(network) if how.get("draft", True) else None
        engine = Engine(target, proposer, verify=rule, policy=Fixed(K), rows=rows, tokenizer=self.tokenizer)
        found = engine.generate(prompts, max_new_tokens=NEW, sampling=REGIME, seed=seed, ids=row_ids(prompts))
        self.target.float(), self.network.float()
        return prompts, found.tokens

    def served(self, prompts: Any, texts: Any, regime: Sampling, draft: bool) -> list[tuple[int, ServedText]]:
        given = self.draft if draft else None
        return [*from_target(self.target, prompts, texts, regime, self.vocabulary, given)]


def judged(served: list[tuple[int, ServedText]], prompts: Any, texts: Any, share: float) -> Audit:
    count = max(1, round(share * len(texts)))
    return audit(served[:count], [tuple(prompt) for prompt in prompts[:count]], texts[:count])


def fault(runs: Runs, name: str) -> dict[str, Any]:
    rule, patched, regime = FAULTS[name]
    with patched():
        prompts, texts = runs.sampled(rule, 1)
    served = runs.served(prompts, texts, regime, True)
    audits = [judged(served, prompts, texts, share) for share in SHARES]
    moved, count = 0.0, 0  # of the probability that goes to tokens that the draft favours
    for _, one in served:
        if one.q is not None:
            likelier = one.q > one.p
            moved += float(likelier.gather(-1, one.x.unsqueeze(-1)).sum() - (one.p * likelier).sum())
            count += len(one.x)
    seen = next((one.tokens for one in audits if not one.passed), None)
    return {
        "seen_after": seen,
        "by": audits[-1].wrong,
        "tokens": audits[-1].tokens,
        "to_favoured": moved / max(count, 1),
        "scores": audits[-1].scores,
    }


def clean(runs: Runs, number: int) -> dict[str, Any]:
    how: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16}, {"draft": False}, {"rows": 8}]
    mine = how[number % len(how)]
    prompts, texts = runs.sampled(RULES["token"], 100 + number, **mine)
    found = judged(runs.served(prompts, texts, REGIME, True), prompts, texts, 1.0)
    return {"how": {name: str(value) for name, value in mine.items()}, "passed": found.passed, "scores": found.scores}


def steps(asked: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    runs = Runs(asked.tokens, asked.draft)
    for name in FAULTS:
        yield "faults", name, fault(runs, name)
    for number in range(asked.clean):
        yield "clean", str(number), clean(runs, number)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.audit")
    parser.add_argument("out", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--clean", type=int, default=50)
    asked = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "tokens": asked.tokens, "faults": {}, "clean": {}}
    report["command"] = (
        f"python -m studies.audit {asked.out} {asked.draft} --tokens {asked.tokens} --clean {asked.clean}"
    )
    for group, name, found in steps(asked):
        report[group][name] = found
        write_atomic(asked.out, json.dumps(report, indent=1) + "\n")
        said = found.get("seen_after", found.get("passed"))
        largest = max(found["scores"].values(), key=abs, default=0.0)
        print(f"{time.strftime('%X')} {group}, {name}: {said}, largest z {largest:+.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
