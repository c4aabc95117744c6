"""Command `cotrain teacher`. It says how a vLLM serves the target to a training whose process does not have it."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import torch

from cotrain.config.settings import TeacherConfig
from cotrain.errors import UserError, user_errors
from cotrain.students.base import student_class
from cotrain.training.preconditions import TAUGHT, outline, served_layers
from inference.drafts.bundled_target import resolve
from inference.models.pretrained import length_of
from inference.servers import hidden_states

SERVE = Path(hidden_states.__file__).with_name("vllm_serve.py")


def run(cfg: TeacherConfig) -> None:
    """Print the command that serves the target with the states that the draft reads, and what to give to `cotrain
    train`. With python=, run it, until it is interrupted."""
    with user_errors():
        command, environment = serving(cfg)
    there = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    print(f"{there} {shlex.join(command)}".lstrip())
    same = [f"target.path={cfg.target.path}", f"draft={cfg.draft.kind}"]
    same += [f"draft.{key}={value}" for key, value in cfg.draft.model_dump(exclude_defaults=True).items()]
    url = f"teacher.url=http://127.0.0.1:{cfg.port}"
    print("then:", shlex.join(["cotrain", "train", *same, "init=scratch", "measure=false", url]), flush=True)
    if cfg.python:
        raise SystemExit(subprocess.run(command, env=os.environ | environment).returncode)


def serving(cfg: TeacherConfig) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves the target, as a list of arguments, and the environment variables that it needs.
    Raises UserError for a kind of draft that needs the target in the training's process, and for an interpreter without
    vLLM 0.18 or later."""
    if cfg.target.adapter:
        raise UserError("target.adapter: merge the adapter into the model, and name that by target.path=")
    if cfg.init.kind != "scratch":
        raise UserError(
            f"init={cfg.init.kind}: the layers that a draft reads follow from draft= alone: leave out init="
        )
    if cfg.draft.kind not in TAUGHT:
        raise UserError(f"draft={cfg.draft.kind}: it needs the target in its process: use one of {', '.join(TAUGHT)}")
    if cfg.python:
        _require_vllm(cfg.python)
    target, tokenizer = outline(str(cfg.target.path), cfg.target.trust_remote_code)
    with torch.device("meta"):
        network = student_class(cfg.draft.kind).initial(cfg.draft, cfg.init, target)
    layers = served_layers(cfg.draft.kind, network, target, tokenizer)
    cpu, model = not cfg.gpus, resolve(str(cfg.target.path))
    python = cfg.python or "python"
    command = [python, str(SERVE)] if cpu else ["vllm", "serve"] if not cfg.python else [python, "-m", "vllm", "serve"]
    command += ["--model", model] if cpu else [model]
    longest = length_of(target.config.get_text_config()) + 1  # a request for states asks for one token more
    command += ["--port", str(cfg.port), "--max-model-len", str(longest)]
    command += ["--trust-remote-code"] * cfg.target.trust_remote_code
    dtype = "float32" if cpu and cfg.target.dtype == "auto" else cfg.target.dtype
    command += [f"--dtype={dtype}", *(["--enforce-eager"] if cpu else ["--tensor-parallel-size", str(cfg.gpus)])]
    command += hidden_states.vllm_arguments(layers, Path(cfg.output).absolute(), cpu)
    longer = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    return command, longer | ({"PYTHONPATH": str(hidden_states.ON_VLLM), "VLLM_CPU_KVCACHE_SPACE": "1"} if cpu else {})


def _require_vllm(python: str) -> None:
    """Raise UserError if an interpreter has no vLLM that hands out hidden states."""
    code = (
        "import importlib.metadata as m; "
        "print(next(d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu', 'vllm_cpu')))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"python={python}: it cannot be started: {error}") from error
    version = done.stdout.strip()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if not numbers or tuple(map(int, numbers.groups())) < (0, 18):
        raise UserError(
            f"python={python}: it has {f'vLLM {version}' if version else 'no vLLM'}: install vLLM 0.18 or later"
        )
