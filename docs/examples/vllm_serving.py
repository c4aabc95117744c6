"""Serve a draft with vLLM and compare its acceptance there with this engine's.

    python docs/examples/vllm_serving.py [key=value ...]

Without vLLM the draft is trained and exported all the same, and the command that would serve it is printed.
"""

import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from small_target import SIZES, cotrain, jsonl, sentences, target

from cotrain.export.engines import launch
from inference.drafts.draft_folder import read

PORT, PATIENCE = 8123, 600  # seconds until the server must answer
place = Path("outputs/examples/vllm")
place.mkdir(parents=True, exist_ok=True)


def answers(url: str) -> bool:
    """Whether a server is ready there."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


def compare(command: str, draft: Path) -> None:
    """Serve until the acceptance of both engines was compared."""
    url, server = f"http://127.0.0.1:{PORT}", subprocess.Popen(f"exec {command} --port {PORT}", shell=True)
    try:
        end = time.monotonic() + PATIENCE
        while not answers(url):
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit("vLLM did not start: its last lines say why")
            time.sleep(1)
        cotrain(
            "serve_check",
            f"url={url}",
            f"draft.path={draft}",
            "prompts=8",
            "prompt_tokens=12",
            "new_tokens=48",
            f"output={place / 'check'}",
            "overwrite=true",
        )
    finally:
        server.terminate()
        server.wait()


texts = sentences(400)
model = target(place / "target", texts)
prompts = jsonl(place / "prompts.jsonl", [{"text": text} for text in texts])

cotrain(
    "train",
    f"target.path={model}",
    f"data.path={prompts}",
    f"output={place / 'run'}",
    *SIZES,
    "overwrite=true",
    *sys.argv[1:],
)
draft, served = place / "run" / "draft", place / "served"
cotrain("export", f"draft.path={draft}", "engine=vllm", f"output={served}", "overwrite=true")

about = read(served).metadata
assert about is not None
command = launch("vllm", str(served.absolute()), str(model.absolute()), max(about.k, 1), about.objective)
if shutil.which("vllm"):
    compare(command, draft)
else:
    print(f"\nvLLM is not installed here (pip install vllm). Where it is, this serves target and draft:\n{command}")
