"""Trees of an independent draft: predicted tokens per call beside measured ones, the planned shape beside others.

    python -m tests.studies.trees DRAFT_FOLDER outputs/results/trees.json [prompts] [tokens] [heat,...] [rows,...]

A cell is a temperature, a batch, a shape and a rule: tau measured on prompts that nothing was fitted on, tau predicted
from the very texts that came out, with its standard error, and seconds. Shapes: nothing, chains, full trees, the
planned one (grown by exact calls on other texts under the cost table) and Sequoia's of as many nodes. Speeds are of one
run each and mean little where other processes share the cores; calls are exact.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from inference import Engine, Sampling
from inference.drafts.bundled_target import resolve
from inference.drafts.draft_folder import load_draft
from inference.measure.costs import measure_costs
from inference.measure.environment import environment
from inference.measure.shapes import positional, round_seconds, sequoia
from inference.measure.timing import Emitted
from inference.measure.tree_plan import accept_of, laws_of, plan, reach_under
from inference.models.dtypes import widened
from inference.models.lm import LM, load_model
from inference.noise import row_ids
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.topology import chain, full
from inference.verify.prediction import calls_from, variance_from

MOST, CHILDREN, DEPTHS = 16, 4, (1, 2, 3, 4)
FIXED = {"chain 2": chain(2), "chain 4": chain(4), "full 2,2": full((2, 2)), "full 4,2,1": full((4, 2, 1))}


class Study:
    """One pair of models and its prompts."""

    def __init__(self, folder: str, count: int, tokens: int) -> None:
        path = resolve("bundled")
        self.target, self.draft = widened(load_model(path)), widened(load_draft(folder)[0])
        self.tokens, tokenizer = tokens, AutoTokenizer.from_pretrained(path)
        lines = Path("data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines[:: max(1, len(lines) // (2 * count))]]
        prompts = [tokenizer(text).input_ids[:64] for text in texts][: 2 * count]
        self.fitted, self.held = prompts[:count], prompts[count:]

    def run(self, engine: Engine, prompts: list[list[int]], sampling: Sampling) -> tuple[Emitted, Any]:
        keys = row_ids(prompts)
        out = engine.generate(prompts, max_new_tokens=self.tokens, sampling=sampling, ids=keys, ignore_eos=True)
        return Emitted(prompts, keys, out.tokens, out.stats.rows), out.stats

    def laws(self, texts: Emitted, sampling: Sampling) -> Any:
        rows, V = min(8, len(texts.prompts)), self.target.config.vocab_size
        return laws_of(LM(self.target, rows, V), LM(self.draft, rows, V), texts, sampling)

    def cells(self, temperature: float, rows: int) -> Iterator[dict[str, Any]]:
        """What was planned with which costs, then every shape under every rule."""
        sampling = Sampling(temperature)
        plain = Engine(self.target, rows=rows)
        fitted = self.laws(self.run(plain, self.fitted, sampling)[0], sampling)
        costs = measure_costs(LM(self.target, rows), Independent(self.draft), MOST, context=96, repeats=3)
        best = plan(fitted, round_seconds(costs), MOST, CHILDREN, DEPTHS)
        whole = plan(fitted, lambda parents: 1.0, MOST, CHILDREN, DEPTHS)
        likeliest = {"planned": best.likeliest, "most calls saved": whole.likeliest, "sequoia": whole.likeliest}
        ours = whole.shape.parents
        theirs = sequoia(
            positional(accept_of(fitted, CHILDREN, whole.likeliest), fitted.lengths), len(ours), max(DEPTHS)
        )
        shapes = FIXED | {"planned": best.shape.parents, "most calls saved": ours, "sequoia": theirs}
        yield {"temperature": temperature, "rows": rows, "planned_rule": best.rule, "most_rule": whole.rule,
                  "planned_likeliest": best.likeliest, "costs": vars(costs)}  # fmt: skip
        for name, parents in shapes.items():
            for rule in ("tree", "traversal") if parents else ():
                sure = temperature == 0 or likeliest.get(name, False)
                cell = self.cell(parents, rule, sure, rows, sampling)
                yield {"temperature": temperature, "rows": rows, "shape": name, "parents": parents, "rule": rule} | cell

    def cell(
        self, parents: tuple[int, ...], rule: str, likeliest: bool, rows: int, sampling: Sampling
    ) -> dict[str, Any]:
        """One shape under one rule."""
        depth = max(DEPTHS)
        proposer = Independent(self.draft, greedy=likeliest, shape=parents)
        engine = Engine(self.target, proposer, verify=rule, policy=Fixed(depth), rows=rows)
        texts, stats = self.run(engine, self.held, sampling)
        laws = self.laws(texts, sampling)
        reach = reach_under(laws, parents, rule, likeliest)
        tokens, calls = sum(map(len, texts.tokens)), float(calls_from(reach, laws.lengths).sum())
        measured = sum(row.target_calls for row in texts.counts)
        sigma = math.sqrt(float(variance_from(reach, laws.lengths).sum()))
        found = {"likeliest": likeliest, "tokens": tokens, "calls": measured, "predicted_calls": calls, "sigma": sigma}
        found |= {"z": (measured - calls) / sigma if sigma else 0.0, "tau": tokens / measured}
        return found | {"predicted_tau": tokens / calls, "seconds": stats.seconds}


def main(folder: str, out: str, count: str = "8", tokens: str = "48", heat: str = "0,1", rows: str = "8") -> None:
    study = Study(folder, int(count), int(tokens))
    cells: list[dict[str, Any]] = []
    found = {"cells": cells, "draft": folder, "environment": environment()}
    for temperature in map(float, heat.split(",")):
        for batch in map(int, rows.split(",")):
            for cell in study.cells(temperature, batch):
                cells.append(cell)
                print(cell, flush=True)
                Path(out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
