"""Use of the processor by other processes, and how threads wait."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cotrain import cli
from inference.measure import contention
from inference.measure.contention import Reading, disturbed, others, set_waiting


def test_time_of_ended_children_is_this_processes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "times", lambda: SimpleNamespace(user=1, system=2, children_user=4, children_system=8))
    assert contention.reading().own == 15


def stat(path: Path, *ticks: int) -> Path:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    lines = [f"cpu{cores[0]} {' '.join(map(str, ticks))}", *(f"cpu{core} 0 0 0 9 0 0 0 0 0 0" for core in cores[1:])]
    path.write_text("\n".join([f"cpu {' '.join(['7'] * 10)}", *lines, "cpu9999 5 5 5 5 5 5 5 5 0 0"]))
    return path


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="other systems do not tell")
def test_busy_time_is_of_the_cores_of_this_process_and_holds_stolen_time(tmp_path: Path) -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    case = contention.reading(stat(tmp_path / "stat", 100, 20, 30, 4000, 500, 6, 7, 80, 9, 9))
    assert case.busy == pytest.approx((100 + 20 + 30 + 6 + 7 + 80) / hertz)
    assert contention.reading(tmp_path / "none").busy is None
    (tmp_path / "zeros").write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")  # some containers
    assert contention.reading(tmp_path / "zeros").busy is None


def test_what_others_used_is_what_is_left() -> None:
    used = others(Reading(10.0, 1.0, 50.0), Reading(20.0, 16.0, 80.0))
    assert used == pytest.approx(1.5) and disturbed(used, 2) is True
    assert disturbed(others(Reading(0, 0, 0.0), Reading(10, 19, 19.5)), 2) is False
    assert others(Reading(0, 0, None), Reading(9, 9, None)) is None and disturbed(None, 2) is None
    assert "measured during other work: other processes used 1.50 of 2 cores" in contention.contention_line(1.5, 2)
    assert "unknown" in contention.contention_line(None, 2) and "no other work" in contention.contention_line(0.01, 2)


def test_threads_wait_passively_unless_the_machine_is_idle(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    for busy, case in ((True, "passive"), (False, "idle"), (None, "passive")):
        monkeypatch.setattr(contention, "others", lambda *_, busy=busy: None if busy is None else 2.0 * busy)
        environ: dict[str, str] = {}
        assert set_waiting(environ, stat(tmp_path / "stat", *range(10)), 0.0) == case
        assert environ.get("OMP_WAIT_POLICY") == (None if case == "idle" else "PASSIVE")
    assert set_waiting({"GOMP_SPINCOUNT": "5"}) == "chosen"
    assert set_waiting({}, tmp_path / "no such file") == "passive"


def test_the_command_line_decides_before_torch_is_there() -> None:
    code = (
        "import sys, cotrain.cli\nassert 'inference.measure.contention' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    source = Path(cli.__file__).read_text(encoding="utf-8")
    assert source.index("set_waiting()") < source.index("status = _hydra(name")
