"""A vLLM server of the environment that COTRAIN_VLLM names, on the loopback interface, as long as it is needed."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SERVE = Path(__file__).parents[2] / "inference" / "servers" / "vllm_serve.py"
SHIPPED = ("-m", "vllm.entrypoints.launchers.api_server.entry")
START = 1500  # seconds, on cores that others use too


@contextmanager
def serving(
    target: str, speculative: dict[str, Any] | None, log: Path, rows: int = 8, repaired: bool = True
) -> Iterator[str]:
    """The address of a running server. repaired: False for vLLM as it is shipped, see `vllm_repair`. Raises
    RuntimeError, with its last lines, when it does not start."""
    port = _free()
    command = [
        *(
            os.environ["COTRAIN_VLLM"],
            *([str(SERVE)] if repaired else SHIPPED),
            "--model",
            target,
            "--dtype",
            "bfloat16",
            "--enforce-eager",
        ),
        *("--max-model-len", "256", "--max-num-seqs", str(rows), "--host", "127.0.0.1", "--port", str(port)),
    ]
    if speculative:
        command += ["--speculative-config", json.dumps(speculative)]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, env=os.environ | settings)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError("vllm did not start: " + "\n".join(log.read_text(errors="replace").splitlines()[-12:]))
