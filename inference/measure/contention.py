"""CPU use by other processes during a timing, and the wait policy of threads. Both affect measured speeds.

CPU use by other processes is computed from /proc/stat: the busy time of the cores that this process may use, minus the
CPU time of this process and its ended children. It is None (unknown) on systems without /proc/stat (macOS, some
containers). This module does not import torch, because torch reads the wait policy of threads when it is first
imported.
"""

import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
SHARE = 0.05  # of the cores: an idle machine uses less
LOOK = 0.2  # seconds
WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # of libgomp and of LLVM's and Intel's libraries


class Reading(NamedTuple):
    """Three times in seconds, each since some fixed moment. wall: the clock's time. own: CPU time of this process and
    its ended children, on any core. busy: CPU time of all processes, and of other guests of a hypervisor, on the cores
    that this process may use; None if unknown."""

    wall: float
    own: float
    busy: float | None


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reading(stat: Path = STAT) -> Reading:
    """Return the present times. stat: the file with the times of the cores."""
    spent = os.times()
    own = spent.user + spent.system + spent.children_user + spent.children_system
    return Reading(time.perf_counter(), own, _busy(stat))


def _busy(stat: Path) -> float | None:
    """Return the seconds that the cores of this process spent in user, nice, system, irq, softirq and steal, or None if
    unknown."""
    if not stat.exists() or not hasattr(os, "sched_getaffinity"):
        return None
    mine, total, idle = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0, 0
    for line in stat.read_text(encoding="ascii", errors="replace").splitlines():
        name, *ticks = line.split()
        if name in mine and len(ticks) >= 8:
            user, nice, system, waits, io, irq, soft, steal = map(int, ticks[:8])
            total, idle = total + user + nice + system + irq + soft + steal, idle + waits + io
    return total / os.sysconf("SC_CLK_TCK") if total + idle else None


def others(before: Reading, after: Reading) -> float | None:
    """Return the mean number of cores that other processes used between two readings, or None if it is unknown or if
    too little time has passed. before, after: the two readings."""
    if before.busy is None or after.busy is None or after.wall - before.wall < LOOK / 2:
        return None
    return max((after.busy - before.busy) - (after.own - before.own), 0.0) / (after.wall - before.wall)


def disturbed(used: float | None, of: int) -> bool | None:
    """Return whether other processes used more than on an idle machine, or None if unknown. used: number of cores that
    they used, None if unknown. of: number of cores that this process may use."""
    return None if used is None else used > SHARE * of


def contention_line(used: float | None, of: int) -> str:
    """Return one line of a report: whether other processes used the machine during the timing. used: number of cores
    that they used, None if unknown. of: number of cores that this process may use."""
    if used is None:
        return "other work on this machine meanwhile: unknown, since the system does not report it"
    if disturbed(used, of):
        return (
            f"measured during other work: other processes used {used:.2f} of {of} cores meanwhile; speeds are "
            "lower and noisier than on a quiet machine"
        )
    return f"no other work meanwhile: other processes used {used:.2f} of {of} cores"


def set_waiting(environ: MutableMapping[str, str] = os.environ, stat: Path = STAT, look: float = LOOK) -> str:
    """Let waiting threads sleep instead of spin, unless the machine is idle or the user has set a wait policy. Call it
    before torch is first imported.

    environ: the environment, changed in place. stat: the file with the times of the cores. look: seconds of looking for
    other work. Returns "chosen" if the user has set a policy, "late" if torch is already imported, "idle" if the
    machine is idle, or "passive" if threads now sleep. Spinning threads occupy cores that the other threads need: with
    another process on as many cores, a pass takes ten times as long. On an idle machine spinning threads continue
    sooner, so the library's default is not changed.
    """
    if any(name in environ for name in WAITS):
        return "chosen"
    if "torch" in sys.modules:
        return "late"
    before = reading(stat)
    if before.busy is not None:
        time.sleep(look)
        if disturbed(others(before, reading(stat)), cores()) is False:
            return "idle"
    environ["OMP_WAIT_POLICY"] = "PASSIVE"
    environ["KMP_BLOCKTIME"] = "0"
    return "passive"
