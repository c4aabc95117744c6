"""Trees of every kind of draft: predicted tokens per call beside measured ones, the planned shape beside others.

    python -m tests.studies.trees OUT.json KIND=FOLDER [KIND=FOLDER ...] [--prompts 8] [--tokens 48] [--minutes 60]
        [--temperatures 0,0.3,0.7,1] [--batches 1,8] [--rules tree,traversal]

Folders are of `cotrain train`, for the bundled target. A row is a kind, a temperature, a batch, a shape and a rule: tau
measured on prompts that nothing was fitted on, tau predicted from the very texts that came out, with its standard
error, and seconds. Shapes: nothing, chains, full trees, the planned one (grown by exact calls on other texts under the
cost table), Sequoia's of as many nodes, and one that each row's own laws decide, whose calls are not predicted. Speeds
are of one run each and mean little where other processes share the cores; calls are exact.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from inference import Engine, Sampling
from inference.drafts.atomic import write_atomic
from inference.drafts.bundled_target import resolve
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import read
from inference.measure.costs import measure_costs
from inference.measure.environment import environment
from inference.measure.shapes import positional, round_seconds, sequoia
from inference.measure.timing import Emitted
from inference.measure.tree_laws import laws_of_rounds
from inference.measure.tree_plan import Laws, accept_of, laws_of, plan, reach_under
from inference.models.dtypes import widened
from inference.models.lm import LM, load_model
from inference.noise import row_ids
from inference.policy import Fixed
from inference.proposers import kind_of
from inference.proposers.base import Beside
from inference.proposers.growing import Dynamic, Shape
from inference.proposers.topology import chain, full
from inference.verify.prediction import calls_from, variance_from
from inference.verify.rules import rule_of
from inference.verify.tree import depths_of

MOST, CHILDREN, DEPTH, TOGETHER = 16, 4, 4, 8
FIXED = {"chain 2": chain(2), "chain 4": chain(4), "full 2,2": full((2, 2)), "full 4,2,1": full((4, 2, 1))}


class Target:
    """The bundled target, and prompts: `fitted` to plan with, `held` to measure on."""

    def __init__(self, count: int, tokens: int) -> None:
        path = resolve("bundled")
        self.model, self.tokens = widened(load_model(path)), tokens
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        lines = Path("data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines[:: max(1, len(lines) // (2 * count))]]
        prompts = [self.tokenizer(text).input_ids[:64] for text in texts][: 2 * count]
        self.fitted, self.held = prompts[:count], prompts[count:]

    def run(self, engine: Engine, prompts: list[list[int]], sampling: Sampling) -> tuple[Emitted, float]:
        """What the engine emits, and its seconds."""
        keys, start = row_ids(prompts), time.perf_counter()
        out = engine.generate(prompts, max_new_tokens=self.tokens, sampling=sampling, ids=keys, ignore_eos=True)
        return Emitted(prompts, keys, out.tokens, out.stats.rows), time.perf_counter() - start

    @cache  # noqa: B019 - one object a study
    def plain(self, temperature: float, rows: int) -> tuple[Emitted, float]:
        """Texts to plan with, and the seconds that the held prompts take without drafts."""
        engine, sampling = Engine(self.model, rows=rows), Sampling(temperature)
        return self.run(engine, self.fitted, sampling)[0], self.run(engine, self.held, sampling)[1]


class Study:
    """One kind of draft beside the target."""

    def __init__(self, kind: str, folder: str, target: Target) -> None:
        found = read(folder)
        if found.kind != kind:
            raise ValueError(f"{kind}={folder}: the folder is of kind {found.kind}")
        self.kind, self.target, self.proposes = kind, target, kind_of(kind)
        hashes = hash_target(target.model.config, target.tokenizer)
        beside = Beside(target.model, hashes, found.metadata, None, target.tokenizer)
        self.network = widened(self.proposes.network_beside(found.path, beside))

    def drafts(self, shape: Shape = None, likeliest: bool = False) -> Any:
        """A proposer of chains, or of trees."""
        given = (self.network, self.target.model) if self.kind == "early_exit" else (self.network,)
        return self.proposes(*given, likeliest, shape=shape)  # type: ignore[call-arg]

    def laws(self, texts: Emitted, sampling: Sampling) -> Laws:
        """Of a language model from two passes, of any other kind from forced rounds."""
        model, rows = self.target.model, min(TOGETHER, len(texts.prompts))
        draft = self.drafts().language_model(rows, model.config.vocab_size)
        if draft is not None:
            return laws_of(LM(model, rows, draft.vocabulary), draft, texts, sampling)
        engine = Engine(model, rows=rows)
        return laws_of_rounds(engine, self.drafts(), DEPTH, texts, sampling, self.target.tokens)

    def rows(self, temperature: float, batch: int, rules: list[str]) -> Iterator[dict[str, Any]]:
        """What was planned with which costs, then every shape under every rule."""
        sampling, most = Sampling(temperature), self.drafts().depths or DEPTH
        depths = range(1, min(DEPTH, most) + 1)
        texts, seconds = self.target.plain(temperature, batch)
        fitted = self.laws(texts, sampling)
        costs = measure_costs(LM(self.target.model, batch), self.drafts(), MOST, context=96, repeats=3)
        best = plan(fitted, round_seconds(costs), MOST, CHILDREN, depths)
        whole = plan(fitted, lambda parents: 1.0, MOST, CHILDREN, depths)
        sure = {"planned": best.likeliest, "most calls saved": whole.likeliest, "sequoia": whole.likeliest}
        ours, chances = whole.shape.parents, positional(accept_of(fitted, CHILDREN, whole.likeliest), fitted.lengths)
        shapes = {name: parents for name, parents in FIXED.items() if max(depths_of(parents)) <= depths[-1]}
        shapes |= {"planned": best.shape.parents, "most calls saved": ours}
        shapes |= {"sequoia": sequoia(chances, len(ours), depths[-1])}
        cell = {"kind": self.kind, "temperature": temperature, "rows": batch}
        yield cell | {"shape": "plan", "rule": best.rule, "likeliest": best.likeliest, "parents": best.shape.parents,
                      "most_rule": whole.rule, "plain_seconds": seconds, "costs": vars(costs)}  # fmt: skip
        for rule in rules:
            for name, parents in shapes.items():
                if parents:
                    likeliest = temperature == 0 or sure.get(name, False)
                    yield cell | {"shape": name, "rule": rule} | self.row(parents, rule, likeliest, batch, sampling)
            dynamic = Dynamic(nodes=8, depth=depths[-1], width=3, children=3)
            yield cell | {"shape": "dynamic 8", "rule": rule} | self.row(dynamic, rule, True, batch, sampling)

    def row(self, shape: Shape, rule: str, likeliest: bool, batch: int, sampling: Sampling) -> dict[str, Any]:
        """One shape under one rule, and its prediction where there is one."""
        engine = Engine(self.target.model, self.drafts(shape, likeliest), verify=rule, policy=Fixed(DEPTH), rows=batch)
        texts, seconds = self.target.run(engine, self.target.held, sampling)
        tokens, calls = sum(map(len, texts.tokens)), sum(row.target_calls for row in texts.counts)
        found = {"likeliest": likeliest, "tokens": tokens, "calls": calls, "tau": tokens / calls, "seconds": seconds}
        if isinstance(shape, Dynamic):
            return found | vars(shape)
        return found | {"parents": shape} | self.predicted(texts, shape, rule, likeliest, sampling, calls)

    def predicted(
        self, texts: Emitted, shape: Any, rule: str, likeliest: bool, sampling: Sampling, measured: int
    ) -> dict[str, float]:
        """The calls that these texts must cost, and how far those measured are from them, in standard errors."""
        laws = self.laws(texts, sampling)
        reach = reach_under(laws, shape, rule, likeliest)
        calls = float(calls_from(reach, laws.lengths).sum())
        sigma = math.sqrt(max(float(variance_from(reach, laws.lengths).sum()), 0.0))
        apart = (measured - calls) / sigma if sigma > 1e-6 else 0.0
        tau = sum(map(len, texts.tokens)) / calls
        return {"predicted_calls": calls, "sigma": sigma, "z": apart, "predicted_tau": tau}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.studies.trees")
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", metavar="KIND=FOLDER")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no cell is begun after these")
    parser.add_argument("--temperatures", default="0,0.3,0.7,1")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rules", default="tree,traversal")
    asked = parser.parse_args(arguments)
    start, rules = time.perf_counter(), [rule_of(name).name for name in asked.rules.split(",")]
    target = Target(asked.prompts, asked.tokens)
    studies = [Study(*one.split("=", 1), target) for one in asked.folders]
    about, command = environment(), " ".join(["python -m tests.studies.trees", *arguments])
    report: dict[str, Any] = {"environment": about, "command": command, "rows": []}
    for temperature in map(float, asked.temperatures.split(",")):
        for batch in map(int, asked.batches.split(",")):
            for study in studies:
                if time.perf_counter() - start > 60 * asked.minutes:
                    return
                for row in study.rows(temperature, batch, rules):
                    report["rows"].append(row)
                    print(row, flush=True)
                    write_atomic(asked.out, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
