"""How far the acceptance of a draft falls when its target is tuned, and what a short refresh gives back.

    python -m studies.refresh WORK outputs/results/refresh.json [--steps 60 240] [--old-steps 240] [--tuning 60]
        [--starts pretrained target_layers scratch]

The target is the bundled one, with and without a LoRA adapter that is tuned here on pages of Python's documentation as
`pydoc` prints them, a layout that the target has not seen. All drafts are independent ones of the shape of two of the
target's layers. The old draft learns from the target without its adapter. Then each number of steps is learnt from the
target with its adapter by three drafts: the old one (init=pretrained, the refresh), one that begins with layers of the
target (init=target_layers), and one from random weights (init=scratch). Prompts and seeds are the same; each target
continues them itself. A number of steps costs the same for each draft, so a machine with other work does not favour
one; seconds are reported too.

tau is the exact expectation on held-out texts at four drafts a round, temperature 1; gains are over the old draft that
was not refreshed, with 95 % intervals that resample texts, the same on both sides. A step that WORK has is not
repeated.
"""

import argparse
import json
import pydoc
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerBase

from cotrain.evaluation.comparison import FIGURES, compare
from cotrain.teacher.target_model import load_pair
from cotrain.training.fit import START
from inference.drafts.atomic import write_atomic
from inference.drafts.draft_folder import METADATA
from inference.measure.environment import environment

LENGTH, BATCH = 256, 4  # tokens and texts of a tuning step
PAGE = 4_000  # characters of a text
AT_ONCE = 1  # trainings
TUNED = "tuning.json"  # the figures of the tuning, in the adapter's folder
STARTS = {
    "pretrained": [],
    "target_layers": ["init.layers=[0,-1]"],
    "scratch": ["draft.width=256", "draft.layers=2", "draft.intermediate=768"],
}
SETTINGS = """data.chat=false trainer.corpus_steps=0 measure=false trainer.validations=1 rollout.texts=800
rollout.held_out_texts=48 rollout.prompt_tokens=48 rollout.new_tokens=96 rollout.temperatures=[1.0]""".split()


def pages() -> list[str]:
    """Return the documentation of the standard library's public modules as `pydoc` prints it, cut into texts."""
    texts = []
    for name in sorted(name for name in sys.stdlib_module_names if not name.startswith("_")):
        if name in ("antigravity", "this", "idlelib", "turtledemo", "lib2to3"):
            continue
        try:
            page = pydoc.plain(pydoc.render_doc(name))
        except (ImportError, pydoc.ErrorDuringImport):  # of another system
            continue
        texts += [page[at : at + PAGE] for at in range(0, len(page) - PAGE // 4, PAGE)]
    return texts


def rows_of(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    """Return (N, LENGTH): the texts one after another, as ids."""
    ids = [token for text in texts for token in [0, *tokenizer(text)["input_ids"]]]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


@torch.no_grad()
def nats(model: Any, rows: torch.Tensor) -> float:
    """Return the mean cross-entropy of a token in nats."""
    losses = [float(model(input_ids=some, labels=some).loss) * len(some) for some in rows.split(BATCH)]
    return sum(losses) / len(rows)


def tuned(folder: Path, texts: list[str], steps: int) -> None:
    """Tune a LoRA adapter of the bundled target on the texts, and write it to `folder` with its figures."""
    torch.manual_seed(0)
    target, tokenizer = load_pair("bundled", dtype="float32")
    rows = rows_of(tokenizer, texts)
    rows = rows[torch.randperm(len(rows))]
    test, train = rows[:16], rows[16:]
    before, began = nats(target, test), time.perf_counter()
    model: Any = get_peft_model(target.train(), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    learnt = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        at = torch.arange(step * BATCH, (step + 1) * BATCH) % len(train)
        model(input_ids=train[at], labels=train[at]).loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    figures = {
        "steps": steps,
        "seconds": time.perf_counter() - began,
        "weights": sum(weight.numel() for weight in learnt),
        "tokens": steps * BATCH * LENGTH,
        "nats": [before, nats(model.eval(), test)],
    }
    model.save_pretrained(folder)
    write_atomic(folder / TUNED, json.dumps(figures) + "\n")


def trained(folder: Path, words: list[str]) -> float:
    """Run `cotrain train` into `folder` unless it has ended, and return the seconds of its steps, without sampling and
    validations."""
    if not (folder / "draft" / METADATA).is_file():
        with (folder.parent / f"{folder.name}.log").open("w") as log:
            given = [sys.executable, "-m", "cotrain", "train", *words, *SETTINGS, f"output={folder}"]
            subprocess.run(given, stdout=log, stderr=log, check=True)
    return float(json.loads((folder / "draft" / METADATA).read_text())["made"]["seconds"])


def run_of(label: str, file: Path) -> dict[str, Any]:
    """Return the figures of a run, or of its start, as `compare` reads them."""
    figures = json.loads(file.read_text())
    return {"label": label, "seed": 0, "texts": figures.get("texts", figures)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[60, 240])
    parser.add_argument("--old-steps", type=int, default=240)
    parser.add_argument("--tuning", type=int, default=60)
    parser.add_argument("--starts", nargs="+", default=[*STARTS], choices=[*STARTS])
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    adapter, data, old = work / "adapter", work / "pages.jsonl", work / "old"
    texts = [] if (adapter / TUNED).is_file() else pages()
    if texts:  # odd pages are tuned on, even ones are continued by both targets
        data.write_text("".join(json.dumps({"text": text, "domain": "pydoc"}) + "\n" for text in texts[::2]))
    words = [f"data.path={data}", *STARTS["target_layers"], f"trainer.steps={given.old_steps}"]
    seconds = {"old": trained(old, [*words, f"rollout.folder={work}/texts"])}
    if texts:
        shutil.rmtree(adapter, ignore_errors=True)
        tuned(adapter, texts[1::2], given.tuning)
    runs = {}
    names = [(start, steps) for steps in given.steps for start in given.starts]

    def go(name: tuple[str, int]) -> float:
        start, steps = name
        words = [f"data.path={data}", f"init={start}", *STARTS[start], f"trainer.steps={steps}"]
        words += [f"target.adapter={adapter}", *[f"draft.path={old}/draft"] * (start == "pretrained")]
        return trained(work / f"{start}_{steps}", [*words, f"rollout.folder={work}/texts_tuned"])

    go(names[0])  # it samples the texts
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for (start, steps), spent in zip(names, pool.map(go, names), strict=True):
            label = f"{start} {steps}"
            seconds[label] = spent
            runs[label] = [run_of(label, work / f"{start}_{steps}" / FIGURES)]
    first = next(work.glob("pretrained_*")) / START
    gains = compare({"not refreshed": [run_of("not refreshed", first)]} | runs, "not refreshed")
    before = json.loads((old / FIGURES).read_text())["texts"]["1"]
    report = {
        "environment": environment(),
        "command": f"python -m studies.refresh {' '.join(sys.argv[1:])}",
        "settings": STARTS | {"all": SETTINGS},
        "old_steps": given.old_steps,
        "tuning": json.loads((adapter / TUNED).read_text()),
        "seconds": seconds,
        "old_target": {"alpha": before["alpha"], "tau": sum(before["lengths"]) / sum(before["calls"]["4"])},
        "tuned_target": [asdict(gain) for gain in gains if gain.k == 4],
    }
    write_atomic(given.report, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
