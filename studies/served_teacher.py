"""What a vLLM as teacher costs and changes, beside the target in the process.

    python -m studies.served_teacher OUT.json VLLM_PYTHON TARGET [--texts 70] [--steps 300] [--kinds eagle,block,...]
    python -m studies.served_teacher OUT.json VLLM_PYTHON bundled --dtype bfloat16 --kinds eagle

For each kind of draft a vLLM serves the target on this machine's CPU as `cotrain teacher` says. The states of the same
texts are read from it and from transformers: largest and mean difference by layer, tokens per second of both and, for
the first kind, of two servers together. Then the same draft is trained twice, with equal seeds and texts, and judged on
held-out texts by the states of its teacher. Texts are those that the server samples for the first kind. With --dtype
both sides compute in it, nothing is trained, and the texts are those of data/rollouts.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cotrain.cli import main as cotrain
from cotrain.commands.teacher import serving
from cotrain.config.drafts import DRAFTS
from cotrain.config.groups import Init
from cotrain.config.settings import TeacherConfig
from cotrain.rollout.training_texts import read_rows
from cotrain.students.base import student_class
from cotrain.teacher.server_states import load_ends, served_elsewhere
from cotrain.teacher.target_model import load_target, served
from cotrain.training import job
from cotrain.training.job import Job
from cotrain.training.preconditions import ids_of, outline
from inference.drafts.atomic import write_atomic
from inference.drafts.bundled_target import resolve
from inference.measure.environment import environment

PORT, STARTS = 8431, 180.0  # seconds in which a vLLM must start


@contextmanager
def vllm(
    python: str, target: str, kind: str, folder: Path, log: Path, port: int = PORT, dtype: str = "auto"
) -> Iterator[str]:
    """Serve the target for a kind of draft within the block. Yield the address."""
    draft = DRAFTS[kind](kind=kind)
    command, variables = serving(
        TeacherConfig.model_validate(
            {
                "target": {"path": target, "dtype": dtype},
                "draft": draft,
                "output": str(folder),
                "port": port,
                "gpus": 0,
                "python": python,
            }
        )
    )
    with log.open("w") as file:
        process = subprocess.Popen(command, env=os.environ | variables, stdout=file, stderr=file)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + STARTS
        while True:
            try:
                urlopen(f"{url}/v1/models", timeout=2).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"vLLM did not start: see {log}") from None
                time.sleep(1)
        try:
            yield url
        finally:
            process.terminate()
            process.wait(60)


def compared(
    servers: dict[str, list[str]], target: str, kind: str, texts: list[list[int]], dtype: str = "auto"
) -> dict[str, Any]:
    """Return differences of states by layer, and tokens per second of each way. servers: way -> addresses."""
    path = resolve(target)
    _, tokenizer = outline(target)
    whole, ends = load_target(path, dtype=dtype), load_ends(path, dtype)
    draft = DRAFTS[kind](kind=kind)
    network = student_class(kind).initial(draft, Init(kind="scratch"), whole)
    reads = student_class(kind)(network, whole, ids_of(tokenizer)).reads
    here, _ = served(whole, ids_of(tokenizer), reads)
    ways = {way: served_elsewhere(urls, ends, ids_of(tokenizer), reads)[0] for way, urls in servers.items()}
    largest: dict[int, float] = {}
    sums: dict[int, list[float]] = {}
    seconds = dict.fromkeys(("process", *ways), 0.0)
    by_length = sorted(texts, key=len)
    for first in range(0, len(by_length), 8):
        batch = by_length[first : first + 8]
        width = max(map(len, batch))
        ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in batch])
        clock = time.perf_counter()
        with torch.no_grad():
            own = here(ids)
        seconds["process"] += time.perf_counter() - clock
        for way, there in ways.items():
            clock = time.perf_counter()
            other = there(ids)
            seconds[way] += time.perf_counter() - clock
            for layer, states in own.items():
                for row, text in enumerate(batch):
                    gap = (states[row, : len(text)].float() - other[layer][row, : len(text)].float()).abs()
                    largest[layer] = max(largest.get(layer, 0.0), float(gap.max()))
                    size = float(states[row, : len(text)].abs().mean())
                    sums.setdefault(layer, []).append(float(gap.mean()) / size)
    tokens = sum(map(len, texts))
    return {
        "texts": len(texts),
        "tokens": tokens,
        "largest_difference": largest,
        "mean_difference_over_mean_size": {layer: sum(parts) / len(parts) for layer, parts in sums.items()},
        "tokens_per_second": {way: tokens / spent for way, spent in seconds.items()},
    }


def trained(output: Path, texts: Path, *settings: str) -> dict[str, Any]:
    """Return the last held-out figures of a training."""
    clock, said = time.perf_counter(), io.StringIO()
    with redirect_stdout(said):
        if cotrain(["train", *settings, f"rollout.folder={texts}", f"output={output}"]):
            raise RuntimeError(f"the training of {output} has failed")
    figures = json.loads((output / "held_out.json").read_text())
    alpha = figures["texts"]["1"]["alpha"]
    found = {"tau": figures["tau"], "alpha": alpha, "seconds": time.perf_counter() - clock}
    waited = re.search(r"waited ([0-9.]+) s of ([0-9.]+) s", said.getvalue())
    return found | ({"waited": float(waited[1]), "training": float(waited[2])} if waited else {})


def of_dtype(out: Path, python: str, target: str, kinds: list[str], count: int, dtype: str) -> None:
    """Write the differences of states where both sides compute in a dtype, for `count` texts of data/rollouts."""
    rows = read_rows(Path("data/rollouts/train_T1"))
    texts = [[*row["prompt"], *row["completion"]] for row in rows.take(count)]
    found = dict[str, Any]()
    for kind in kinds:
        with tempfile.TemporaryDirectory() as place:
            serve = (python, target, kind, Path(place) / "states", Path(place) / "log", PORT, dtype)
            with vllm(*serve) as url:
                found[kind] = {"states": compared({"server": [url]}, target, kind, texts, dtype)}
    report = {"environment": environment(), "target": target, "dtype": dtype, "kinds": found}
    write_atomic(out, json.dumps(report, indent=1) + "\n")


MEMORY = """
import sys
from pathlib import Path
from cotrain.teacher.server_states import load_ends
import cotrain.training.run

def resident():
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 2**10

before = resident()
model = load_ends(sys.argv[1], "bfloat16")
[float(part.sum()) for part in model.parameters()]
print(sum(part.numel() * part.element_size() for part in model.parameters()) / 2**20, resident() - before)
"""


def memory(folder: Path) -> dict[str, float]:
    """Return sizes in MiB: of a random target, of its embeddings, norm and head, and the memory that a process takes
    for them beyond what it had."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    model = LlamaForCausalLM(config).bfloat16()
    whole = sum(part.numel() * part.element_size() for part in model.parameters()) / 2**20
    model.save_pretrained(folder, max_shard_size="500MB")
    done = subprocess.run([sys.executable, "-c", MEMORY, str(folder)], capture_output=True, text=True, check=True)
    parts, taken = map(float, done.stdout.split())
    return {"target": whole, "parts": parts, "taken": taken}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("python")
    parser.add_argument("target")
    parser.add_argument("--texts", type=int, default=70)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kinds", default="eagle,block,medusa,independent")
    parser.add_argument("--dtype")
    asked = parser.parse_args()
    if asked.dtype:
        of_dtype(asked.out, asked.python, asked.target, asked.kinds.split(","), asked.texts, asked.dtype)
        return
    # both trainings read the same files of texts, though a target without layers has another fingerprint
    Job.identity = property(lambda _: {"study": asked.target})  # type: ignore[assignment,method-assign]
    made = job.sampled_texts
    job.sampled_texts = lambda *given, **named: replace(made(*given, **named), server=job.TEACHER)
    found = dict[str, Any]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for kind in asked.kinds.split(","):
            common = f"""target.path={asked.target} draft={kind} init=scratch measure=false trainer.corpus_steps=0
            trainer.steps={asked.steps} trainer.validations=2 trainer.remember_mb=0 rollout.texts={asked.texts}
            rollout.temperatures=[1.0] rollout.new_tokens=96""".split()
            with ExitStack() as stack:
                serve = (asked.python, asked.target, kind, folder / "states")
                url = stack.enter_context(vllm(*serve, folder / f"{kind}.log"))
                one = trained(folder / kind, folder / "texts", *common, f"teacher.url={url}")
                rows = read_rows(folder / "texts" / "train_T1")
                texts = [[*row["prompt"], *row["completion"]] for row in rows]
                servers = {"server": [url]}
                if not found:
                    second = stack.enter_context(vllm(*serve, folder / f"{kind} 2.log", PORT + 1))
                    servers["two servers"] = [url, second]
                states = compared(servers, asked.target, kind, texts)
            two = trained(folder / f"{kind} here", folder / "texts", *common)
            found[kind] = {"states": states, "server": one, "process": two}
            print(kind, {name: part["alpha"] for name, part in (("server", one), ("process", two))}, flush=True)
            report: dict[str, Any] = {"environment": environment(), "target": asked.target, "kinds": found}
            write_atomic(asked.out, json.dumps(report, indent=1) + "\n")
        write_atomic(asked.out, json.dumps(report | {"memory": memory(folder / "large")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
