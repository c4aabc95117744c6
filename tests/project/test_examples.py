"""The examples of the documents run as they stand, at tiny sizes, and leave what they say."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cotrain.config.overrides import quote
from inference.drafts.weight_files import read_json
from inference.report.build import validate
from tests.settings import composed

pytestmark = pytest.mark.timeout(400)  # seconds each when nothing else runs; whole commands
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
TINY = """trainer.steps=4 trainer.batch=2 rollout.texts=8 rollout.held_out_texts=2 rollout.new_tokens=16 policy.k=2
bench.prompts=2 bench.quick_prompts=1 bench.new_tokens=8 bench.parity_tokens=60 bench.minutes=0
bench.depths=[2] rollout.temperatures=[1.0]""".split()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the examples write, beside no checkout; their target is hardly taught."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import small_target

    monkeypatch.setattr(small_target, "STEPS", 8)
    return tmp_path / "outputs" / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *TINY])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / "draft" / "report.json")
    validate(found)
    assert found["exactness"]["passed"] and (folder / "report.html").is_file()
    return found


@pytest.mark.thorough
def test_a_chat_target(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("chat_target", monkeypatch)
    assert set(report(place / "chat" / "run")["extra"]["held_out"]) >= {"alpha_T1/all"}
    said = capsys.readouterr().out
    assert "as the target reads it: '<user> Tell how " in said and "\\n<assistant> '" in said
    assert "$ cotrain generate" in said


@pytest.mark.thorough
def test_a_quantised_target(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("quantised_target", monkeypatch)
    report(place / "quantised" / "run")
    settings = read_json(place / "quantised" / "run" / "run.json")["settings"]
    assert settings["quantisation"]["kind"] == "nf4"
    assert "warning: quantisation=nf4 on a CPU" in capsys.readouterr().err


@pytest.mark.thorough
def test_own_data_from_parquet(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("parquet_data", monkeypatch)
    held = report(place / "parquet" / "run")["extra"]["held_out"]
    assert {"alpha_T1/letters", "alpha_T1/stories"} <= set(held)


@pytest.mark.thorough
def test_a_sweep(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("sweep", monkeypatch)
    compared = json.dumps(read_json(place / "sweep" / "compared.json"))
    assert "loss=kl_then_tv" in compared
    runs = sorted(path.name for path in (place / "sweep" / "runs").iterdir())
    assert runs == [f"loss={loss},trainer.seed={seed}" for loss in ("kl", "kl_then_tv") for seed in (0, 1)]


@pytest.mark.thorough
def test_serving_without_vllm_says_the_command(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    run("vllm_serving", monkeypatch)
    *_, said, command = capsys.readouterr().out.strip().splitlines()
    assert said.startswith("vLLM is not installed here (pip install vllm)")
    assert command.startswith(f"vllm serve {place / 'vllm' / 'target'} --speculative-config")
    assert load_file(place / "vllm" / "served" / "model.safetensors")


def cells(notebook: Path) -> list[str]:
    """Its code, as a kernel would run it."""
    found = read_json(notebook)["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@pytest.mark.thorough
def test_the_notebook(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, names = cells(EXAMPLES / "first_draft.ipynb"), dict[str, Any]()
    for number, cell in enumerate(code):
        exec(compile(cell, f"first_draft.ipynb, cell {number}", "exec"), names)
    found = report(tmp_path / "outputs" / "first_draft" / "run")
    said = capsys.readouterr().out
    assert f"acceptance {found['extra']['held_out']['alpha_T1/all']:.3f}," in said
    assert "equal to plain decoding: True" in said


def test_the_notebook_for_a_gpu_host_composes_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = (code for code in cells(EXAMPLES / "free_gpu.ipynb") if "TARGET = " in code)
    monkeypatch.delenv("COTRAIN_SHORT", raising=False)
    dtypes = []
    for gpu, capability in ((True, (9, 0)), (True, (7, 5)), (False, None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        names: dict[str, Any] = {"os": os}
        exec(cell, names)
        cfg = composed(*quote(names["settings"].split()))
        assert (cfg.target.path == names["TARGET"]) == gpu == cfg.data.from_target
        dtypes.append((cfg.target.dtype, cfg.trainer.precision, cfg.bench.draft_dtype))
    assert dtypes[:2] == [("auto", "bf16-mixed", "bfloat16"), ("float16", "16-mixed", "float16")]


@pytest.mark.thorough
def test_the_notebook_for_a_gpu_host(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COTRAIN_SHORT", "1")
    names = dict[str, Any]()
    for number, cell in enumerate(cells(EXAMPLES / "free_gpu.ipynb")):
        exec(compile(cell, f"free_gpu.ipynb, cell {number}", "exec"), names)
    for run in ("draft/draft", "bench"):
        found = read_json(tmp_path / "outputs" / run / "report.json")
        validate(found)
        assert found["exactness"]["passed"]
    measured = [line["y"] for line in names["by_depth"].data if line["name"] == "measured"]
    assert list(measured[0]) == names["report"]["acceptance"]["conditional"]["measured"] and names["by_step"].data
    assert (tmp_path / "outputs" / "served" / "config.json").is_file()
    assert "exact: True" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_has_no_output(path: Path) -> None:
    found = read_json(path)["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in found if cell["cell_type"] == "code")


def test_every_example_is_in_the_list() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(names) == 9 and all(f"({name})" in listed for name in names)
