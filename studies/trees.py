"""Trees of every kind of draft: predicted tokens per call beside measured ones, the planned shape beside the best.

    python -m studies.trees OUT.json KIND=FOLDER [KIND=FOLDER ...] [--prompts 8] [--texts 24] [--tokens 48]
        [--temperatures 0,0.3,0.7,1] [--batches 1,8] [--small 5] [--minutes 60]

Folders are of `cotrain train`, for the bundled target. `rows`: a kind, a temperature, a batch, a shape and a rule: tau
measured on prompts that nothing was fitted on, tau predicted from the very texts that came out, with its standard
error, and seconds. Shapes: the best chain, the planned shape, the tree of 16 nodes that saves most calls, and one that
each row's own distributions decide. `cells`: what every shape is worth by exact calls on held texts, decoded plainly,
under the costs measured here and under those of a GPU's shape (`tree_cells`): the plan, made on other texts, beside the
best of brute force. Speeds of rows are of one run each and mean little where other processes share the cores; calls are
exact.
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
from inference.exactness.forced import forced
from inference.exactness.ties import MARGIN, noise_of
from inference.measure.costs import Costs, measure_costs
from inference.measure.environment import environment
from inference.measure.tree_plan import Distributions, distributions_of, distributions_of_rounds, reach_under
from inference.models.lm import LM
from inference.models.pretrained import load_model, widened
from inference.output import Emitted
from inference.policy import Fixed
from inference.proposers import kind_of
from inference.proposers.base import LoadArguments
from inference.proposers.trees import TreeShape
from inference.sampling.noise import row_ids
from inference.verify.predict_chain import calls_from, variance_from
from inference.verify.tree import depths_of
from studies.tree_cells import LONGEST, MOST, Choice, Exact, cell, flat, orders
from studies.tree_summary import summary

TOGETHER = 8


class Target:
    """The bundled target, and prompts: `fitted` to plan with, `held` to rate and to measure on."""

    def __init__(self, texts: int, tokens: int) -> None:
        path = resolve("bundled")
        self.model, self.tokens = widened(load_model(path)), tokens
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        lines = Path("data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
        found = [json.loads(line)["text"] for line in lines[:: max(1, len(lines) // (3 * texts))]][: 3 * texts]
        prompts = [self.tokenizer(text).input_ids[:64] for text in found]
        self.fitted, self.held = [*prompts[0::3], *prompts[2::3]], prompts[1::3]

    def run(self, engine: Engine, prompts: list[list[int]], sampling: Sampling) -> tuple[Emitted, float]:
        """What the engine emits, and its seconds."""
        keys, start = row_ids(prompts), time.perf_counter()
        out = engine.generate(prompts, max_new_tokens=self.tokens, sampling=sampling, ids=keys, ignore_eos=True)
        return Emitted(prompts, keys, out.tokens, out.stats.rows), time.perf_counter() - start

    @cache  # noqa: B019 - one object a study
    def plain(self, temperature: float) -> tuple[Emitted, Emitted]:
        """Texts to plan with and to rate on: at temperature 0 a text says less of others, and its distributions cost
        less, so twice as many to plan with."""
        engine, sampling = Engine(self.model, rows=TOGETHER), Sampling(temperature)
        fitted = self.fitted if temperature == 0 else self.fitted[: len(self.held)]
        return self.run(engine, fitted, sampling)[0], self.run(engine, self.held, sampling)[0]


class Study:
    """One kind of draft beside the target."""

    def __init__(self, kind: str, folder: str, target: Target) -> None:
        found = read(folder)
        if found.kind != kind:
            raise ValueError(f"{kind}={folder}: the folder is of kind {found.kind}")
        self.kind, self.target, self.proposes = kind, target, kind_of(kind)
        hashes = hash_target(target.model.config, target.tokenizer)
        beside = LoadArguments(target.model, hashes, found.metadata)
        self.network = widened(self.proposes.load_network(found.path, beside))
        self.known: dict[tuple[Any, ...], tuple[float, float]] = {}

    def drafts(self, shape: TreeShape = None, likeliest: bool = False) -> Any:
        """A proposer of chains, or of trees."""
        given = (self.network, self.target.model) if self.kind == "early_exit" else (self.network,)
        return self.proposes(*given, likeliest, shape=shape)

    @cache  # noqa: B019 - one object a study
    def costs(self, batch: int) -> Costs:
        """Of rounds with up to `MOST` drafts."""
        return measure_costs(LM(self.target.model, batch), self.drafts(), MOST, context=96, repeats=3)

    def distributions(self, texts: Emitted, sampling: Sampling, depth: int) -> Distributions:
        """Of a language model from two passes, of any other kind from forced rounds."""
        model, rows = self.target.model, min(TOGETHER, len(texts.prompts))
        draft = self.drafts().language_model(rows, model.config.vocab_size)
        if draft is not None:
            return distributions_of(LM(model, rows, draft.vocabulary), draft, texts, sampling)
        engine = Engine(model, rows=rows)
        return distributions_of_rounds(engine, self.drafts(), depth, texts, sampling, self.target.tokens)

    def exact(self, temperature: float, small: int) -> Exact:
        """What shapes are worth at a temperature."""
        fitted, held = (
            self.distributions(texts, Sampling(temperature), LONGEST) for texts in self.target.plain(temperature)
        )
        return Exact(fitted, held, temperature, MOST, small)

    def cells(self, exact: Exact, batches: list[int]) -> Iterator[dict[str, Any]]:
        """Every batch, under the costs measured here and those of a GPU's shape."""
        for batch in batches:
            for name, costs in (("here", self.costs(batch)), ("flat", flat(self.costs(batch)))):
                about = {"kind": self.kind, "temperature": exact.temperature, "rows": batch, "costs": name}
                yield about | cell(exact, costs) | {"table": vars(costs)}

    def rows(self, exact: Exact, cells: list[dict[str, Any]], batch: int, count: int) -> Iterator[dict[str, Any]]:
        """Shapes that are run, each once."""
        temperature = exact.temperature
        here = next(one for one in cells if (one["rows"], one["costs"]) == (batch, "here"))["choices"]["planned"]
        planned = here["parents"], here["rule"], here["likeliest"]
        rules = ["tree"] if temperature == 0 else ["tree", "traversal"]
        named: dict[str, Choice] = {"best chain": exact.chain(), "planned": planned}
        named |= {f"{MOST} nodes, {rule}": exact.largest(rule) for rule in rules}
        done: set[Choice] = set()
        about = {"kind": self.kind, "temperature": temperature, "rows": batch}
        for name, choice in named.items():
            if choice[0] and choice not in done:
                done.add(choice)
                yield about | {"shape": name} | self.row(*choice, batch, count, Sampling(temperature))

    def row(
        self, shape: TreeShape, rule: str, likeliest: bool, batch: int, count: int, sampling: Sampling
    ) -> dict[str, Any]:
        """One shape under one rule on the first `count` held prompts, and its prediction."""
        proposer = self.drafts(shape, likeliest or sampling.temperature == 0)
        engine = Engine(self.target.model, proposer, verify=rule, policy=Fixed(MOST), rows=batch)
        texts, seconds = self.target.run(engine, self.target.held[:count], sampling)
        tokens, calls = sum(map(len, texts.tokens)), sum(row.target_calls for row in texts.counts)
        found = {
            "rule": rule,
            "likeliest": likeliest,
            "tokens": tokens,
            "calls": calls,
            "tau": tokens / calls,
            "seconds": seconds,
            "parents": shape,
        }
        expected, sigma = self.predicted(texts, shape, rule, likeliest, sampling)
        # a difference of rounding is none, as in the verdict
        apart = 0.0 if abs(calls - expected) <= 1e-5 * expected else (calls - expected) / sigma if sigma else math.inf
        return found | {"predicted_calls": expected, "sigma": sigma, "z": apart, "predicted_tau": tokens / expected}

    def predicted(
        self, texts: Emitted, shape: Any, rule: str, likeliest: bool, sampling: Sampling
    ) -> tuple[float, float]:
        """The calls that these texts must cost, and their standard deviation; other batches may have given the same
        texts, which are then remembered."""
        drafted = (shape, rule, likeliest, sampling)
        keys = [(*drafted, *ids, -1, *text) for ids, text in zip(texts.prompts, texts.tokens, strict=True)]
        if any(key not in self.known for key in keys):
            if sampling.temperature == 0:
                reach, lengths, near = self.forced(texts, shape, rule, sampling)
            else:
                distributions = self.distributions(texts, sampling, max(depths_of(shape)))
                reach, lengths = reach_under(distributions, shape, rule, likeliest), distributions.lengths
                near = torch.zeros(())
            spread = variance_from(reach, lengths) + near
            each = zip(calls_from(reach, lengths).tolist(), spread.tolist(), strict=True)
            self.known |= dict(zip(keys, each, strict=True))
        calls, variances = zip(*(self.known[key] for key in keys), strict=True)
        return sum(calls), math.sqrt(max(sum(variances), 0.0))

    def forced(
        self, texts: Emitted, shape: TreeShape, rule: str, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Reach (B, T, D+1) of likeliest children from forced rounds, the texts' lengths (B,), and how many drafts of
        each (B,) rounding could turn, a call each, as the verdict counts them."""
        rows = min(TOGETHER, len(texts.prompts))
        engine = Engine(self.target.model, self.drafts(shape, True), verify=rule, policy=Fixed(MOST), rows=rows)
        greedy, lm = Sampling(0), LM(self.target.model, rows)
        noise = MARGIN * noise_of(lm, texts.prompts[:rows], texts.tokens[:rows], greedy, width=2)
        figures = forced(engine, texts, sampling, self.target.tokens, noise)
        assert figures.reach is not None
        return figures.reach, figures.lengths, figures.near_q.flatten(1).sum(1)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.trees")
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", metavar="KIND=FOLDER")
    parser.add_argument("--prompts", type=int, default=8, help="of the held ones, on which shapes are run")
    parser.add_argument("--texts", type=int, default=24, help="to rate on; to plan with as many, 2x at 0")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--small", type=int, default=5, help="nodes of trees of which brute force looks at all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="nothing is begun after these")
    parser.add_argument("--temperatures", default="0,0.3,0.7,1")
    parser.add_argument("--batches", default="1,8")
    asked = parser.parse_args(arguments)
    start, batches = time.perf_counter(), [int(batch) for batch in asked.batches.split(",")]
    target = Target(max(asked.texts, asked.prompts), asked.tokens)
    studies = [Study(kind, path, target) for kind, _, path in (one.partition("=") for one in asked.folders)]
    command = " ".join(["python -m studies.trees", *arguments])
    report: dict[str, Any] = {"environment": environment(), "command": command, "cells": [], "orders": [], "rows": []}

    def keep(part: str, found: dict[str, Any]) -> None:
        report[part].append(found)
        report["summary"] = summary(report)
        print(f"{time.perf_counter() - start:.0f} s", part, found, flush=True)
        write_atomic(asked.out, json.dumps(report, indent=1) + "\n")

    for temperature in map(float, asked.temperatures.split(",")):
        for study in studies:
            if time.perf_counter() - start > 60 * asked.minutes:
                break
            exact = study.exact(temperature, asked.small)
            keep("orders", {"kind": study.kind, "temperature": temperature} | orders(exact))
            cells = list(study.cells(exact, batches))
            for found in cells:
                keep("cells", found)
            for batch in batches:
                count = asked.prompts if batch > 1 else -(-asked.prompts // 2)  # one by one they take long
                for row in study.rows(exact, cells, batch, count):
                    keep("rows", row)
    print(json.dumps(summary(report), indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
