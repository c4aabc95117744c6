"""The circumstances of a measurement: machine, versions and command. Reports store them with every result."""

import datetime
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from inference.measure.contention import cores
from inference.models.packing import memory, of_cpu

CODE = Path(__file__)
CODE_ALONE = ("--", ":(top)", ":(top,exclude)outputs")  # a long study writes its report while it runs


def device() -> str:
    """Return the device for models: "cuda" if there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def environment() -> dict[str, Any]:
    """Return the circumstances by name: machine (cpu, cores, threads, memory_gib, accelerator), versions (python,
    torch, transformers), date (UTC), commit, dirty and command.

    cores: number of cores that this process may use. threads: number of threads that torch uses. memory_gib: memory in
    GiB, at most the limit of a container; None if unknown. dirty: whether tracked files outside outputs/ differ from
    the commit. commit and dirty are None if this code is not in a checkout.
    """
    # git does not track this file if this code is only installed in a folder below a checkout
    tracked = _git("ls-files", "--error-unmatch", CODE.name) is not None
    commit = _git("rev-parse", "HEAD") if tracked else None
    return {
        "cpu": of_cpu("model name").partition(":")[2].strip() or platform.processor() or platform.machine(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": None if sys.platform == "win32" else round(memory() / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no", *CODE_ALONE)) if commit else None,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _git(*words: str) -> str | None:
    """Return the output of git in the folder of this code, or None if git fails or is absent."""
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, cwd=CODE.parent, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
