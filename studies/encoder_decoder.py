"""Drafts for the bundled encoder-decoder beside each other: tokens per call, speed, and what its encoder costs.

    python -m studies.encoder_decoder OUT.json NAME=FOLDER [NAME=FOLDER ...] [--minutes 10]

Folders are of `cotrain train target=bundled_t5`; look-up in the source, which needs no folder, is added. Sources are
the shipped records, whose sentences are longer than the tokens that are timed, so that few texts go on after their end.
A cell is a temperature and a number of rows, as in `studies.proposers`. Then the first draft that shares the target's
encoder is timed in turn with itself running that encoder once more, and the table says which share of the time of a
text the encoder has in plain decoding.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from cotrain.commands.served_pair import load_network, measurable_folder
from cotrain.config.overrides import quote
from cotrain.config.settings import checked, register
from cotrain.data.corpora import SOURCES, shipped
from cotrain.data.splits import Prompts, apart
from cotrain.paths import folder as shipped_folder
from cotrain.planning.plan import Plan
from cotrain.planning.planner import costs_of
from cotrain.students.independent import shares_encoder
from cotrain.teacher.target_model import load_pair
from inference import Engine, Sampling
from inference.drafts.atomic import write_atomic
from inference.drafts.draft_folder import Folder
from inference.measure.arms import engine_arm
from inference.measure.environment import environment
from inference.measure.timing import interleave
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.retrieval import LookupConfig, LookupNetwork
from studies.kinds_in_turn import Draft, Study, at
from studies.proposers import finite, line, trained

TARGET, TASK, TOKENS, K = "bundled_t5", "sentence", 32, 4
LOOK_UP = {"datastore": None, "shortest": 2}
SETTINGS = [f"bench.new_tokens={TOKENS}", "bench.prompts=12", "bench.depths=[2,3,4,6,8]", "bench.quick_prompts=4"]
TEMPERATURES, ROWS = [0.0, 1.0], [1, 8]


def sources(tokenizer: Any) -> Prompts:
    """The shipped records, a third of them to choose draft lengths on."""
    ids = [list(tokenizer(row["text"])["input_ids"]) for row in shipped(SOURCES) if row["domain"] == TASK]
    return apart(ids[::3], [one for place, one in enumerate(ids) if place % 3], [], "shipped")


def drafts(folders: dict[str, str]) -> list[Draft]:
    """The draft of each folder, and look-up."""
    register()
    with initialize_config_dir(str(shipped_folder("conf")), version_base="1.3"):
        cfg: Any = checked("bench", compose("bench", overrides=quote(SETTINGS)))
    target, tokenizer = load_pair(TARGET)
    given = sources(tokenizer)
    found = []
    for name, place in folders.items():
        folder = measurable_folder(place)
        found.append((name, folder, load_network(folder, target, tokenizer), trained(folder)))
    found.append(("look-up", Folder("retrieval", None, Path()), LookupNetwork(LookupConfig(LOOK_UP)), 0.0))
    return [
        Draft(
            name,
            folder,
            Plan(
                target,
                tokenizer,
                network,
                Sampling(),
                "block",
                cfg.bench,
                (TARGET, name),
                given=given,
                kind=folder.kind,
            ),
            sum(weight.numel() for weight in network.parameters()),
            seconds,
        )
        for name, folder, network, seconds in found
    ]


def encoder_share(draft: Draft, rows: int) -> dict[str, float]:
    """Seconds of the encoder and of plain steps, timed alone, and the encoder's share of a plain text."""
    costs = costs_of(at(draft.plan, 1.0, rows))
    return {
        "rows": rows,
        "encoder_seconds": costs.encoder,
        "step_seconds": costs.round(0),
        "share": costs.encoder / (costs.encoder + TOKENS * costs.round(0)),
    }


def sharing(draft: Draft, rows: int, texts: int = 24) -> dict[str, Any]:
    """A draft that reads the target's encoder, and the same one with its encoder running too: both over plain
    decoding, in turn, at temperature 1."""
    plan = at(draft.plan, 1.0, rows)
    engines = {"plain": plan.plain()} | {
        name: Engine(
            plan.target,
            Independent(plan.running, own_encoder=own),
            verify=plan.verify,
            policy=Fixed(K),
            rows=rows,
            tokenizer=plan.tokenizer,
        )
        for name, own in (("shared", False), ("run again", True))
    }
    arms = [engine_arm(name, engine, plan.sampling, TOKENS) for name, engine in engines.items()]
    timing = interleave(arms, plan.final(0, texts), rows, 1)
    return {
        "rows": rows,
        "draft": draft.name,
        "k": K,
        **{name: timing.ratio(name, "plain")._asdict() for name in ("shared", "run again")},
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.encoder_decoder")
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--minutes", type=float, default=10.0)
    asked = parser.parse_args(arguments)
    start = time.perf_counter()
    found = drafts(dict(one.split("=", 1) for one in asked.folders))
    about = environment()
    report: dict[str, Any] = {
        "environment": about,
        "commit": about["commit"],
        "target": TARGET,
        "task": TASK,
        "new_tokens": TOKENS,
        "command": " ".join(["python -m studies.encoder_decoder", *arguments]),
        "rows": [],
        "encoder": [],
        "sharing": [],
    }

    def write() -> None:
        write_atomic(asked.out, json.dumps(finite(report), indent=2, allow_nan=False) + "\n")

    shared = next(one for one in found if shares_encoder(one.plan.draft, one.plan.target))
    for rows in ROWS:
        report["encoder"].append(encoder_share(found[0], rows))
        report["sharing"].append(sharing(shared, rows))
        write()
        print(report["encoder"][-1], report["sharing"][-1], flush=True)
    study = Study(found, start + 60 * asked.minutes)
    for cells in study.cells(TEMPERATURES, ROWS, ["block"]):
        report["rows"] += cells
        write()
        print("\n".join(map(line, cells)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
