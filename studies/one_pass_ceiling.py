"""What a draft of one pass could reach at most: the distributions of its depths know the text, and no token drafted
before; or, with a Markov head, the one token before.

    python -m studies.one_pass_ceiling OUT.json [--texts 48] [--samples 256] [--temperatures 1,0.7]
        [--set KEY=VALUE ...]

Behind each prompt the target samples many continuations. The best distribution of depth 1 is the target's; that of
depth n maximises, over the continuations, the sum of how probable it is that the n - 1 tokens before were accepted,
times sum_v min(p(v | continuation), q(v)). That is concave and piecewise linear in q, so it is found by filling
(`best_probs`). A distribution fitted to half of the continuations and judged by the same half is better than any
distribution can be ("above"); judged by the other half it is a distribution that there is ("below"). With a Markov
head a depth has one distribution for each token before it ("markov_below", "markov_above"), fitted to the continuations
with that token; where the fitted half lacks the token, the distribution is that of all. Reported are expected tokens of
a round that begins at the prompt's end, by depth: a depth's distribution is the best for its own depth, given those
before it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from cotrain.config.overrides import quote
from cotrain.config.settings import checked, register
from cotrain.data.corpora import shipped
from cotrain.paths import folder as shipped_folder
from cotrain.training.job import models
from inference import Engine, Sampling
from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment

DEPTHS, PROMPT = 8, 64


def best_probs(distributions: Tensor, weights: Tensor) -> Tensor:
    """q (V,) of sum 1 that maximises sum_s weights[s] sum_v min(distributions[s, v], q[v]), from distributions (S, V),
    weights (S,).

    The objective is concave in each q[v], with slopes that fall where q[v] passes a distribution's mass: the mass of q
    goes to the steepest segments first.
    """
    masses, order = distributions.sort(0)
    slopes = weights[order].flip(0).cumsum(0).flip(0)  # of the segment that ends at masses[s]
    widths = masses.diff(dim=0, prepend=torch.zeros_like(masses[:1]))
    steepest = slopes.flatten().argsort(descending=True, stable=True)
    widths = widths.flatten()[steepest]
    taken = torch.minimum(widths, (1 - (widths.cumsum(0) - widths)).clamp(min=0))
    filled = torch.zeros_like(taken).scatter(0, steepest, taken)
    return filled.view_as(masses).sum(0)


def best_after(distributions: Tensor, weights: Tensor, before: Tensor, fitted: Tensor) -> Tensor:
    """The best distribution (S, V) for each continuation, by the token before it (S,): fitted to those of the
    continuations `fitted` that have that token, or to all of `fitted` if none has it. distributions (S, V), weights
    (S,)."""
    best = best_probs(distributions[fitted], weights[fitted]).expand_as(distributions).clone()
    for token in before[fitted].unique():
        some = fitted[before[fitted] == token]
        best[before == token] = best_probs(distributions[some], weights[some])
    return best


def expected(
    distributions: Tensor, tokens: Tensor, fitted: Tensor, judged: Tensor, markov: bool = False
) -> list[float]:
    """Expected tokens of a round of k = 1..K drafts, the one after them included, with distributions fitted to some of
    the continuations and judged by some. distributions (S, K, V): the target's along them, tokens (S, K); fitted,
    judged: numbers of continuations; markov: whether a distribution knows the token before."""
    reach, whole, by_depth = torch.ones(len(tokens), dtype=distributions.dtype), 1.0, []
    for depth in range(tokens.shape[1]):
        here = distributions[:, depth]
        if depth == 0:
            q = here[:1].expand_as(here)
        elif markov:
            q = best_after(here, reach, tokens[:, depth - 1], fitted)
        else:
            q = best_probs(here[fitted], reach[fitted]).expand_as(here)
        whole += float((reach[judged] * torch.minimum(here[judged], q[judged]).sum(-1)).mean())
        ratio = (q / here).gather(1, tokens[:, depth : depth + 1])[:, 0]
        reach = reach * ratio.clamp(max=1)
        by_depth.append(whole)
    return by_depth


def distributions_along(
    engine: Engine, prompt: list[int], samples: int, sampling: Sampling, seed: int
) -> tuple[Tensor, Tensor]:
    """Continuations that the target samples (S, K) and its distributions along them (S, K, V)."""
    settings: Any = {"max_new_tokens": DEPTHS, "sampling": sampling, "ignore_eos": True, "seed": seed}
    tokens = torch.tensor(engine.generate([prompt] * samples, **settings).tokens)
    ids = torch.cat([torch.tensor([prompt] * samples), tokens[:, :-1]], 1)
    with torch.no_grad():
        logits = engine.target.model(ids, logits_to_keep=DEPTHS).logits
    return tokens, (logits.double() / sampling.temperature).softmax(-1)


def ceiling(engine: Engine, prompt: list[int], samples: int, sampling: Sampling, seed: int) -> dict[str, list[float]]:
    """Of one prompt: expected tokens of a round by depth, below and above, without a Markov head and with one."""
    tokens, distributions = distributions_along(engine, prompt, samples, sampling, seed)
    one, two = torch.arange(samples).chunk(2)
    sides = {"below": ((one, two), (two, one)), "above": ((one, one), (two, two))}
    return {
        f"{name}{side}": torch.tensor([expected(distributions, tokens, *pair, markov=bool(name)) for pair in pairs])
        .mean(0)
        .tolist()
        for name in ("", "markov_")
        for side, pairs in sides.items()
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means by domain and over all, rounded to three places."""
    domains = {row["domain"] for row in rows}
    groups = {"all": rows} | {name: [row for row in rows if row["domain"] == name] for name in sorted(domains)}
    return {
        name: {
            side: [round(sum(one) / len(one), 3) for one in zip(*(row[side] for row in some), strict=True)]
            for side in some[0]
            if side != "domain"
        }
        for name, some in groups.items()
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.one_pass_ceiling")
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--temperatures", default="1,0.7")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of cotrain train")
    asked = parser.parse_args(arguments)
    register()
    with initialize_config_dir(str(shipped_folder("conf")), version_base="1.3"):
        cfg: Any = checked("train", compose("train", overrides=quote(asked.set)))
    target, tokenizer = models(cfg)
    engine = Engine(target, tokenizer=tokenizer, rows=asked.samples)
    prompts = [(row["domain"], tokenizer(row["text"])["input_ids"][:PROMPT]) for row in shipped()[: asked.texts]]
    about, cells = environment(), {}
    for temperature in map(float, asked.temperatures.split(",")):
        rows = [
            {"domain": domain} | ceiling(engine, prompt, asked.samples, Sampling(temperature=temperature), seed)
            for seed, (domain, prompt) in enumerate(prompts)
        ]
        cells[f"{temperature:g}"] = summary(rows)
        print(f"T {temperature:g}: {cells[f'{temperature:g}']['all']}", flush=True)
    command = " ".join(["python -m studies.one_pass_ceiling", *arguments])
    report = {
        "environment": about,
        "commit": about["commit"],
        "command": command,
        "target": str(cfg.target.path),
        "texts": len(prompts),
        "samples": asked.samples,
        "tokens_of_a_round": cells,
    }
    write_atomic(asked.out, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
