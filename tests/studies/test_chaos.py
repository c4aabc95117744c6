"""The study of faults at random moments: what it notes of made-up folders, and of stub commands that get SIGTERM."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from studies import chaos as study
from studies.chaos import Chaos, Job, of_files, of_training
from studies.trust import environments

DRAFT = "draft/model.safetensors"
TRAINING = Job(["train"], of_training, saves=True)


def run_folder(output: Path, weights: bytes = b"weights") -> None:
    """A finished run, with a warm draft before."""
    for file, content in ((DRAFT, weights), (f"warm/{DRAFT}", b"warm"), ("held_out.json", b'{"tau": 2}')):
        (output / file).parent.mkdir(parents=True, exist_ok=True)
        (output / file).write_bytes(content)


@pytest.fixture
def chaos(tmp_path: Path) -> Chaos:
    one = Chaos(tmp_path, random.Random(0))
    one.fresh()
    return one


@pytest.mark.parametrize(
    ("change", "apart", "counted", "said"),
    [
        (lambda output: None, None, "equal", ""),
        (lambda output: (output / DRAFT).write_bytes(b"others"), None, "", f"not equal: {DRAFT}"),
        (lambda output: (output / DRAFT).unlink(), None, "", f"not equal: {DRAFT}"),
        (lambda output: (output / "held_out.json").write_text("{"), None, None, "no figures"),
        (lambda output: (output / "more" / "draft").mkdir(parents=True), None, "equal", ""),
        (lambda output: (output / ".draft.host-1-0123abcd.new").touch(), None, "equal", "temporary files are left"),
        (lambda output: (output / DRAFT).write_bytes(b"damaged"), DRAFT, "damaged and not read again", ""),
        (lambda output: run_folder(output / "warm", b"and another"), DRAFT, "", f"not equal: warm/{DRAFT}"),
    ],
)
def test_outputs_are_compared(
    change: Callable[[Path], None], apart: str | None, counted: str | None, said: str, chaos: Chaos
) -> None:
    run_folder(chaos.output)
    wanted = of_training(chaos.output)
    assert wanted.keys() == {DRAFT, f"warm/{DRAFT}", "held_out.json"}
    change(chaos.output)
    chaos.compare(TRAINING, wanted, "now", apart)
    assert +chaos.counts == ({} if counted is None else {"compared": 1} | ({counted: 1} if counted else {}))
    assert len(chaos.wrong) == bool(said) and said in "".join(chaos.wrong)


def stub(argv: Sequence[str], sentence: str = "", status: int = 143, saves: bool = True) -> int:
    """A command that makes a step and waits for SIGTERM; one that finds a checkpoint ends as it should."""
    output, ended = Path(argv[-1].partition("=")[2]), list[int]()
    if (output / "begun").exists():
        run_folder(output)
        return 0
    output.mkdir()
    (output / "begun").touch()
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    time.sleep(0.1)  # a signal now would come before the first step
    if saves:
        torch.save({"global_step": 7}, output / "last.ckpt")
    early = bool(ended)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
    end = time.monotonic() + 5
    while not ended and time.monotonic() < end:
        time.sleep(0.005)
    os.write(2, f"cotrain train: {'too early' if early else sentence}\n".encode())
    return status


SAVED = "interrupted at step 7, which is saved; the same command resumes"


@pytest.mark.parametrize(
    ("how", "checkpoint", "said"),
    [
        ({"sentence": SAVED}, True, ""),
        ({"sentence": "interrupted; the same command resumes", "saves": False}, False, ""),
        ({"sentence": SAVED, "saves": False}, False, "step 7 is not saved: []"),
        ({"sentence": SAVED.replace("7", "8")}, True, "step 8 is not saved: [7]"),
        ({"sentence": ""}, True, "status 143 after"),
        ({"sentence": SAVED, "status": 1}, True, "status 1 after"),
    ],
)
def test_sigterm_comes_after_a_step_and_ends_with_its_status_and_sentence(
    how: dict, checkpoint: bool, said: str, chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "main", partial(stub, **how))
    run_folder(chaos.output)
    job = Job(["train"], lambda output: of_files(output, "held_out.json"))
    chaos.terms(job, job.figures(chaos.output), 0.05, 1)
    assert chaos.counts["ended by SIGTERM"] == 1 and chaos.counts["with a checkpoint"] == checkpoint
    assert len(chaos.wrong) == bool(said) and said in "".join(chaos.wrong)


def test_a_report_lists_the_environment_of_each_process(tmp_path: Path) -> None:
    first = environments({})
    assert len(first) == 1 and environments({"environment": first[0]})[0] == first[0]
    assert len(json.loads(json.dumps(environments({"environments": first * 2, "environment": {}})))) == 3
