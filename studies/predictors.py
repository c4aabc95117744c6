"""How well acceptance figures predict tau, the best draft length, and the speed that is lost by a wrong one.

    python -m studies.predictors DRAFT [DRAFT ...] --output outputs/results/predictors.json [--add REPORT ...]

A cell is a draft, a domain of prompts and a temperature. Its texts are the target's. Each predictor sees figures of
one half of the texts, and is judged on the other half: exact expected tokens per call of the other half, and rounds of
the engine on its prompts. Predictors:

    exact      expected tokens per call of each text, from its own probabilities (what `cotrain plan` uses)
    iid        (1 - a^(k+1)) / (1 - a) with the mean acceptance a
    constant   the same acceptance by depth in every cell: the mean of all other drafts' cells
    one figure each of: mean acceptance, KL(p || q), KL(q || p), entropy of p, entropy of q, their difference, top-1
               agreement, perplexity of the draft, calibration error of q. A figure gives an acceptance by a regression
               on the cells of all other drafts, and tau by the formula of iid

The best draft length is that of the fewest seconds per token with the costs of the first draft of each kind on this
machine. Regret is the speed that is lost by choosing as the predictor does: 1 - speed(chosen) / speed(best).
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cotrain.acceptance import iid_tau
from cotrain.data.corpora import DOMAINS, shipped
from cotrain.planning.forecast import error_of_tau, mean_acceptance
from inference import Engine, Sampling, load
from inference.drafts.draft_folder import read
from inference.exactness.figures import Figures, predictable_reach
from inference.exactness.side_by_side import pair_figures
from inference.exactness.teacher_forced import teacher_forced
from inference.measure.costs import measure_costs
from inference.measure.environment import environment
from inference.models.lm import LM
from inference.output import Emitted
from inference.policy import Fixed
from inference.sampling import probs
from inference.verify import predict_chain

LONGEST, ROWS, JUDGED = 8, 16, 4  # drafts per round; rows of a pass; the draft length at which tau is compared
FIGURES = (
    "acceptance",
    "kl",
    "reverse_kl",
    "entropy_p",
    "entropy_q",
    "entropy_gap",
    "same_top",
    "perplexity",
    "calibration",
)
BINS = 10


def texts_of(engine: Engine, prompts: list[list[int]], tokens: int, temperature: float, seed: int) -> Emitted:
    """Return texts of an engine, with their counts."""
    ids = list(range(len(prompts)))
    out = engine.generate(
        prompts, max_new_tokens=tokens, sampling=Sampling(temperature), seed=seed, ids=ids, ignore_eos=True
    )
    return Emitted(prompts, ids, out.whole().tokens, out.stats.rows)


def half(texts: Emitted, part: int) -> Emitted:
    """Return every second text."""
    some = slice(part, None, 2)
    return Emitted(texts.prompts[some], texts.ids[some], texts.tokens[some], texts.counts[some])


def taus(figures: Figures, longest: int) -> list[float]:
    """Return the expected tokens per call at draft lengths 0 .. longest."""
    reaches = (predictable_reach(figures, "token", k) for k in range(1, longest + 1))
    return [1.0, *(float(predict_chain.tau_from(reach, figures.lengths)) for reach in reaches)]


def one_figures(target: LM, draft: LM, texts: Emitted, temperature: float) -> dict[str, float]:
    """Return the mean figures of both distributions over the tokens of texts. For temperature 0 they are those of
    temperature 1, since one-hot distributions have no KL."""
    settings = Sampling(temperature or 1.0)
    sums, count = dict.fromkeys(FIGURES, 0.0), 0
    bins = torch.zeros(BINS, 3, dtype=torch.float64)  # drafts, sum of q's top probability, how often it was right
    pairs = zip(
        teacher_forced(target, texts.prompts, texts.tokens, settings),
        teacher_forced(draft, texts.prompts, texts.tokens, settings),
        strict=True,
    )
    for ours, theirs in pairs:
        p, q = (probs(one.logits[ours.valid], settings).double().clamp(min=1e-12) for one in (ours, theirs))
        x = ours.x[ours.valid]
        entropy_p, entropy_q = (-(one * one.log()).sum(-1) for one in (p, q))
        top, best = q.max(-1)
        values = {
            "acceptance": torch.minimum(p, q).sum(-1),
            "kl": (p * (p.log() - q.log())).sum(-1),
            "reverse_kl": (q * (q.log() - p.log())).sum(-1),
            "entropy_p": entropy_p,
            "entropy_q": entropy_q,
            "entropy_gap": entropy_q - entropy_p,
            "same_top": (best == p.argmax(-1)).double(),
            "perplexity": -q.gather(-1, x.unsqueeze(-1)).squeeze(-1).log(),
        }
        for name, value in values.items():
            sums[name] += float(value.sum())
        count += len(x)
        place = (top * BINS).long().clamp(max=BINS - 1)
        bins.index_add_(0, place, torch.stack((torch.ones_like(top), top, (best == x).double()), 1))
    means = {name: value / count for name, value in sums.items()}
    means["perplexity"] = float(np.exp(means["perplexity"]))
    means["calibration"] = float((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum())
    return means


def cells_of(path: str, size: argparse.Namespace, plain: dict[tuple[str, float], Emitted]) -> list[Any]:
    """Return the cells of one draft. plain: texts of its target by domain and temperature, filled by the first
    draft."""
    engine = load(path, rows=ROWS, policy=Fixed(LONGEST))
    assert engine.proposer is not None and engine.tokenizer is not None
    longest = min(LONGEST, engine.proposer.depths or LONGEST)
    draft = engine.proposer.language_model(ROWS, engine.target.vocabulary)
    proposer = load(path, engine.target.model, rows=1).proposer
    assert proposer is not None
    one_row = LM(engine.target.model, 1, engine.target.vocabulary)
    costs = measure_costs(one_row, proposer, longest, context=96, repeats=5)
    found = []
    for domain in DOMAINS:
        rows = [row["text"] for row in shipped() if row["domain"] == domain][: size.texts]
        prompts = [engine.tokenizer(row)["input_ids"][:48] for row in rows]
        for t in size.temperatures:
            if (domain, t) not in plain:
                alone = Engine(engine.target.model, tokenizer=engine.tokenizer, rows=ROWS)
                plain[domain, t] = texts_of(alone, prompts, size.tokens, t, 0)
            began, parts = time.monotonic(), [half(plain[domain, t], part) for part in (0, 1)]
            engine.policy = Fixed(longest)
            seen, judged = (
                pair_figures(engine, engine.proposer, part, Sampling(t), size.tokens, 0.0) for part in parts
            )
            engine.policy = Fixed(min(JUDGED, longest))
            counts = texts_of(engine, parts[1].prompts, size.tokens, t, 1).counts
            calls, tokens = (
                torch.tensor(some, dtype=torch.float64)
                for some in ([one.target_calls for one in counts], [one.tokens for one in counts])
            )
            single = {} if draft is None else one_figures(engine.target, draft, parts[0], t)
            single["acceptance"] = mean_acceptance(seen)
            reach = predictable_reach(judged, "token", min(JUDGED, longest))
            expected = predict_chain.calls_from(reach, judged.lengths)
            said, measured = (float(a.sum() / b.sum()) for a, b in ((judged.lengths, expected), (tokens, calls)))
            errors = error_of_tau(judged.lengths, expected), error_of_tau(tokens, calls)
            conditional = predict_chain.depths_from(predictable_reach(seen, "token", longest), longest, seen.lengths)[1]
            found.append(
                {
                    "draft": path,
                    "domain": domain,
                    "temperature": t,
                    "longest": longest,
                    "figures": single,
                    "tau_seen": taus(seen, longest),
                    "tau": taus(judged, longest),
                    "conditional": conditional.tolist(),
                    "measured": measured,
                    "seconds": list(costs.rounds),
                    "z": (measured - said) / max(math.hypot(*errors), 1e-9),
                }
            )
            print(
                f"{path} {domain} T={t:g}: tau({JUDGED}) {found[-1]['tau'][min(JUDGED, longest)]:.3f} "
                f"measured {found[-1]['measured']:.3f} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return found


# --- judging the predictors


def predicted(cells: Sequence[Any]) -> dict[str, list[list[float]]]:
    """Return each predictor's tau at draft lengths 0 .. longest of every cell."""
    result = {
        "exact": [cell["tau_seen"] for cell in cells],
        "iid": [_iid(cell["figures"]["acceptance"], cell) for cell in cells],
        "constant": [_product(_others(cells, cell), cell) for cell in cells],
    }
    for name in FIGURES[1:]:
        if all(name in cell["figures"] for cell in cells):
            result[name] = [_iid(_regressed(cells, cell, name), cell) for cell in cells]
    return result


def _iid(acceptance: float, cell: Any) -> list[float]:
    return [iid_tau(min(max(acceptance, 1e-3), 1 - 1e-3), k) for k in range(cell["longest"] + 1)]


def _others(cells: Sequence[Any], cell: Any) -> list[float]:
    """Return the mean conditional acceptance by depth of the cells of other drafts."""
    rows = [one["conditional"] for one in cells if one["draft"] != cell["draft"]]
    depths = max(map(len, rows))
    return [float(np.nanmean([row[d] for row in rows if len(row) > d])) for d in range(depths)]


def _product(conditional: list[float], cell: Any) -> list[float]:
    more = [conditional[-1]] * (cell["longest"] - len(conditional))  # no other draft is as long
    return np.cumsum(np.cumprod([1.0, *conditional[: cell["longest"]], *more])).tolist()


def _regressed(cells: Sequence[Any], cell: Any, name: str) -> float:
    """Return the acceptance that a figure says, by a line through the cells of all other drafts."""
    rows = [one["figures"] for one in cells if one["draft"] != cell["draft"]]
    slope, start = np.polyfit([row[name] for row in rows], [row["acceptance"] for row in rows], 1)
    return float(slope * cell["figures"][name] + start)


def judged(cells: Sequence[Any], taus: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return how well a predictor says tau(JUDGED) and the best draft length: rank correlation, R^2 and mean absolute
    error of tau, share of cells whose best length is hit, mean regret, and share of cells whose regret is at most 3
    %."""
    at = [min(JUDGED, cell["longest"]) for cell in cells]
    truth = np.array([cell["tau"][k] for cell, k in zip(cells, at, strict=True)])
    said = np.array([row[k] for row, k in zip(taus, at, strict=True)])
    regrets, hits = [], 0
    for cell, row in zip(cells, taus, strict=True):
        seconds = np.array(cell["seconds"])
        speeds = np.array(cell["tau"][: len(seconds)]) / seconds
        chosen = int((np.array(row) / seconds).argmax())
        regrets.append(1 - speeds[chosen] / speeds.max())
        hits += chosen == int(speeds.argmax())
    ranks = [np.argsort(np.argsort(values)) for values in (truth, said)]
    return {
        "rank_correlation": float(np.asarray(np.corrcoef(np.stack(ranks)))[0, 1]),
        "r2": float(1 - ((said - truth) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()),
        "error": float(np.abs(said / truth - 1).mean()),
        "best_length": hits / len(cells),
        "regret": float(np.mean(regrets)),
        "within_3_percent": float(np.mean(np.array(regrets) <= 0.03)),
    }


def report(cells: Sequence[Any]) -> dict[str, Any]:
    """Return the table of predictors. Cells whose drafts are no language model have no single figures but acceptance,
    and are judged in a table of their own."""
    whole = [cell for cell in cells if len(cell["figures"]) > 1]
    tables = {"all": cells, "language_models": whole}
    errors = [abs(cell["measured"] / cell["tau"][min(JUDGED, cell["longest"])] - 1) for cell in cells]
    return {
        "tables": {
            name: {key: judged(some, taus) for key, taus in predicted(some).items()}
            for name, some in tables.items()
            if len({cell["draft"] for cell in some}) > 1
        },
        "measured": {
            "cells": len(cells),
            "error": float(np.mean(errors)),
            "within": float(np.mean([_as_predicted(cell) for cell in cells])),
        },
    }


def _as_predicted(cell: Any) -> bool:
    """Return whether measured rounds agree with the exact expectation: within 2 %, or 3 standard errors."""
    expected = cell["tau"][min(JUDGED, cell["longest"])]
    return bool(abs(cell["measured"] / expected - 1) <= 0.02 or abs(cell["z"]) <= 3)


def main() -> None:
    """Write the report and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="*")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="reports whose cells are judged too")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument(
        "--temperatures", type=lambda text: [float(one) for one in text.split(",")], default=[0.0, 0.3, 0.5, 0.7, 1.0]
    )
    size = parser.parse_args()
    others = [json.loads(file.read_text(encoding="utf-8")) for file in size.add]
    texts, cells = dict[str, dict[tuple[str, float], Emitted]](), [cell for one in others for cell in one["cells"]]
    commands = [*(command for one in others for command in one["commands"]), " ".join(sys.argv[1:])]
    for path in [*size.drafts, None]:
        if path is not None:
            metadata = read(path).metadata
            assert metadata is not None
            cells += cells_of(path, size, texts.setdefault(str(metadata.target["name"]), {}))
        content = {"environment": environment(), "commands": commands, **report(cells), "cells": cells}
        size.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, table in content["tables"].items():
        print(name)
        for key, row in table.items():
            print(f"  {key:14} " + "  ".join(f"{part} {value:.3f}" for part, value in row.items()))


if __name__ == "__main__":
    main()
