"""A process that answers requests, and is stopped between them if asked to."""

import sys
import time
from pathlib import Path

import pytest

from inference.servers.worker import Worker

PROGRAM = """
import json, sys
print(json.dumps({"version": "1"}), flush=True)
for line in sys.stdin:
    print(json.dumps({"twice": 2 * json.loads(line)["number"]}), flush=True)
"""


def state(process: int) -> str:
    """Of a process, as /proc says: T if it is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("pauses", [True, False])
def test_a_process_runs_only_while_it_is_asked(pauses: bool, tmp_path: Path) -> None:
    with Worker("doubling", [sys.executable, "-c", PROGRAM], {}, tmp_path / "log", pauses) as worker:
        for number in (1, 2):
            assert worker.ask(number=number) == {"twice": 2 * number}
            time.sleep(0.1)
            assert (state(worker.process.pid) == "T") == pauses
    assert worker.process.returncode == 0
