"""A training whose teacher is a vLLM, while both are killed at random moments, beside an undisturbed one.

    python -m studies.served_teacher_kills OUT.json VLLM_PYTHON TARGET [--kills 30] [--steps 200]

Each kill is a SIGKILL of the server's or of the training's processes, in turn, 5 to 20 seconds after both run. A server
starts again after 5 seconds; the same command resumes the training. Compared are the held-out acceptance and the
weights of both drafts. States are read in every step (trainer.remember_mb=0).
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from safetensors.torch import load_file

from cotrain.commands.teacher import serving
from cotrain.config.drafts import DRAFTS
from cotrain.config.settings import TeacherConfig
from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment

PORT, AFTER = 8432, 5.0  # seconds after which a killed server starts again
ALONE = (5.0, 20.0)  # seconds from when both run to a kill
MOST = 20  # times that the training may fail at its start


class Server(threading.Thread):
    """A vLLM that is started again whenever it has ended, until `over` is set."""

    def __init__(self, command: list[str], variables: dict[str, str], log: Path) -> None:
        super().__init__(daemon=True)
        self.command, self.variables, self.log = command, variables, log
        self.over = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def run(self) -> None:
        while not self.over.is_set():
            with self.log.open("a") as file:
                self.process = subprocess.Popen(
                    self.command, env=os.environ | self.variables, stdout=file, stderr=file, start_new_session=True
                )
                self.process.wait()
            time.sleep(AFTER)

    def kill(self) -> None:
        assert self.process
        os.killpg(self.process.pid, signal.SIGKILL)

    def answers(self) -> bool:
        try:
            urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=2).close()
            return True
        except OSError:
            return False


def trained(command: list[str], server: Server, kills: int, rng: random.Random) -> dict[str, int]:
    """Run a training to its end. Return how many kills there were of each. kills: at most so many."""
    done = {"server": 0, "training": 0, "refused": 0}
    while done["refused"] < MOST:
        while not server.answers():
            time.sleep(1)
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            wait, began = rng.uniform(*ALONE), None
            while process.poll() is None and (began is None or time.monotonic() < began + wait):
                began = began or (time.monotonic() if server.answers() else None)
                time.sleep(0.2)
            if process.poll() is not None or done["server"] + done["training"] >= kills:
                continue
            if done["server"] <= done["training"]:
                done["server"] += 1
                server.kill()
            else:
                done["training"] += 1
                os.killpg(process.pid, signal.SIGKILL)
            print(done, flush=True)
        if process.wait() == 0:
            return done
        done["refused"] += process.returncode != -signal.SIGKILL  # it began while no server ran
    raise RuntimeError(f"the training has failed {MOST} times")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("python")
    parser.add_argument("target")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        values = {"target": {"path": asked.target}, "draft": DRAFTS["eagle"](kind="eagle"), "port": PORT, "gpus": 0}
        command, variables = serving(
            TeacherConfig.model_validate(values | {"output": str(folder / "states"), "python": asked.python})
        )
        server = Server(command, variables, folder / "vllm.log")
        train = f"""-m cotrain train target.path={asked.target} draft=eagle init=scratch measure=false
        trainer.corpus_steps=0 trainer.steps={asked.steps} trainer.validations=2 trainer.remember_mb=0
        trainer.checkpoint_minutes=0.1 rollout.texts=100 rollout.held_out_texts=8 rollout.temperatures=[1.0]
        rollout.new_tokens=64 rollout.folder={folder / "texts"} teacher.url=http://127.0.0.1:{PORT}""".split()
        while not server.answers():
            time.sleep(1)
        report: dict[str, Any] = {"environment": environment(), "steps": asked.steps}
        for name, kills in (("undisturbed", 0), ("killed", asked.kills)):
            clock = time.monotonic()
            done = trained([sys.executable, *train, f"output={folder / name}"], server, kills, random.Random(0))
            alpha = json.loads((folder / name / "held_out.json").read_text())["texts"]["1"]["alpha"]
            report[name] = {"kills": done, "alpha": alpha, "seconds": time.monotonic() - clock}
        one, two = (load_file(folder / run / "draft" / "model.safetensors") for run in ("undisturbed", "killed"))
        gaps = {key: float((value.float() - two[key].float()).abs().max()) for key, value in one.items()}
        report["largest_difference_of_weights"] = max(gaps.values())
        report["equal_weights"] = all(torch.equal(value, two[key]) for key, value in one.items())
        server.over.set()
        server.kill()
        write_atomic(asked.out, json.dumps(report, indent=1) + "\n")
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
