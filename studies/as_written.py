"""Run the commands of a page as they are written, in a fresh clone whose path has a space, and say what each printed.

    python -m studies.as_written outputs/results/tutorial_cpu.json docs/tutorial-cpu.md
    python -m studies.as_written outputs/results/tutorial_gpu.json docs/tutorial-gpu.md --stand-in --few
    python -m studies.as_written outputs/results/readme.json README.md --stand-in --few --set-up

Commands are the lines of blocks without a language. --set-up: those that install packages and `make` run too, so that
the clone has an environment of its own; otherwise it has this one's packages, with its own code. --stand-in: a small
random Qwen3 lies in the clone's Qwen/Qwen3-8B and gets the draft that an 8B gets, prompts.jsonl are chats that ship,
`trainer=gpu` is left out where there is no GPU, and servers that answer as vLLM does stand for the page's addresses.
--few: commands get the few texts and steps of SMALL besides, so that they show that they run, and nothing else. Ends
with status 1 if a command fails, or if `serve_check` or `audit` does not fail beside a stand-in, whose counters are no
draft's.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment
from tests.fake_vllm import FakeVLLM, running

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 60  # last lines of a command's output that the report has
SET_UP = re.compile(r"make |\. \.venv|(\.venv/bin/)?(python -m )?pip ")
TARGET = "Qwen/Qwen3-8B"
OF_8B = "draft=eagle draft.vocabulary=32000"  # the defaults for that size
ADDRESSES = {"http://127.0.0.1:8000": True, "http://127.0.0.1:8001": False}  # whether that server has a draft
SMALL = {
    "train": "trainer.steps=8 trainer.batch=2 rollout.texts=8 rollout.held_out_texts=2 rollout.new_tokens=16 "
    "rollout.temperatures=[1] policy.k=2 bench.prompts=2 bench.quick_prompts=1 bench.new_tokens=8 "
    "bench.parity_tokens=60 bench.minutes=0 bench.depths=[2]",
    "serve_check": "prompts=4 new_tokens=16 k=2",  # as the stand-in drafts
    "audit": "prompts=20 new_tokens=40",
    "bench": "bench.minutes=0 bench.prompts=32 bench.new_tokens=8 bench.parity_tokens=60",
}


def commands(page: Path) -> list[str]:
    """The lines of a page's blocks that have no language, with continued lines joined and comments left out."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if not language for line in block.replace("\\\n", " ").splitlines()]
    return [bare for line in lines if (bare := line.partition("  #")[0].strip())]


def small_target(folder: Path, tokenizer: Path) -> Any:
    """A random Qwen3 of 8 narrow layers, with the tokenizer and chat template of SmolLM2."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    ends = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": None}
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        **ends,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model


@contextmanager
def stand_in(clone: Path) -> Iterator[dict[str, str]]:
    """Put target and prompts into the clone, and yield the servers: the page's address -> the real one."""
    model = small_target(clone / TARGET, clone / "data" / "drafts" / "smollm2")
    chats = (clone / "studies" / "prompts_by_task.jsonl", clone / "data" / "drafts" / "smollm2" / "prompts.jsonl")
    (clone / "prompts.jsonl").write_text("".join(file.read_text() for file in chats))
    with ExitStack() as stack:
        servers = {}
        for address, drafts in ADDRESSES.items():
            server = stack.enter_context(running(FakeVLLM(model, clone / "states" / address[-4:], [1])))
            server.drafts, servers[address] = drafts, server.url
        yield servers


def changed(line: str, servers: dict[str, str], few: bool) -> str:
    """A line of a page for the stand-ins: their addresses, no GPU where there is none, few texts and steps."""
    for address, url in servers.items():
        line = line.replace(address, url)
    if servers and not torch.cuda.is_available():
        line = line.replace(" trainer=gpu", "")
    name = line.split()[1] if line.startswith("cotrain ") else ""
    given = [OF_8B] * (name == "train" and bool(servers)) + [SMALL.get(name, "")] * few
    return " ".join([line, *given]).strip()


def run(line: str, clone: Path) -> dict[str, Any]:
    """The outcome of a line in the clone: seconds, exit status and what it printed."""
    path = f"{clone / '.venv' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=clone,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(clone), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = [text.rpartition("\r")[2] for text in done.stdout.replace(str(clone), ".").splitlines()]
    found = {"command": line, "seconds": round(time.monotonic() - began, 1), "status": done.returncode}
    print(json.dumps(found), *said[-SHOWN:], sep="\n", flush=True)
    return found | {"printed": said[-SHOWN:]}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--set-up", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place) / "a clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        runs = []
        ways: AbstractContextManager[dict[str, str]] = stand_in(clone) if asked.stand_in else nullcontext({})
        with ways as servers:
            for line in commands(clone / asked.page):
                if SET_UP.match(line) and not asked.set_up:
                    continue
                runs.append(run(changed(line, servers, asked.few), clone))
    options = {"stand_in": asked.stand_in, "few": asked.few, "set_up": asked.set_up}
    report = {"environment": environment(), "page": str(asked.page), **options, "runs": runs}
    write_atomic(asked.report, json.dumps(report, indent=1) + "\n")
    doubted = ("cotrain serve_check", "cotrain audit") if asked.stand_in else ()
    failed = [one["command"] for one in runs if bool(one["status"]) != one["command"].startswith(doubted)]
    print(f"{len(runs)} commands, failed: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
