"""Commands that are killed, ended, short of disk or given damaged files, and then repeated: what they come to.

    python -m studies.chaos outputs/results/trust.json [--kills 50] [--faults 10] [--job NAME] [--step NAME]
        [--part NAME] [--seed 0]

Each command runs in a process that is forked from this one after all imports, with models of two layers. Half of the
kills (SIGKILL) come at a random moment of the command's usual duration, half at a random one of its writes: the opening
of a file to write, a new folder, a rename, a removal. The same command is repeated until it ends, and may be killed
again up to `AGAIN` times before. What it then leaves must be equal, bit for bit, to what an undisturbed run left. After
every fault, each file under a final name must be whole. SIGTERM is sent after the first step of the optimiser: the
command must end with status 143, and say that it resumes. A file that was changed and that the same command neither
reads nor writes again is left as it is: such cases are counted apart, and are not among the equal ones.

With --job or --step the other commands stay in the part of the report, which then lists the environment of each process
that added to it.

Full disks and read-only ones are file systems in memory that this study mounts, so it needs root. The teacher on a
server is the stand-in of `tests/fake_vllm.py`; `studies/served_teacher_kills.py` kills a real vLLM.
"""

import argparse
import faulthandler
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from safetensors import safe_open
from torch.optim.optimizer import register_optimizer_step_post_hook

from cotrain.cli import main
from cotrain.commands import bench, export, plan, rollout, train  # noqa: F401 - imported before the fork
from cotrain.teacher import servers
from cotrain.teacher.server_states import asked_layers
from cotrain.training.interrupts import read_saved
from studies.trust import WRITES, environments, opens_to_write, write_part
from tests.composing import composing_fast
from tests.draft_folders import draft_folder
from tests.fake_vllm import FakeVLLM, running
from tests.folders import network, own_texts, target_folder

AGAIN = 6  # kills of one run, at most
PATIENCE = 240.0  # seconds after which a command counts as hanging
GRACE = 30.0  # seconds from SIGTERM to the end of a process
SIZES = """data.block=64 rollout.texts=8 rollout.held_out_texts=2 rollout.prompt_tokens=8 rollout.new_tokens=16
rollout.temperatures=[1.0] trainer.steps=12 trainer.corpus_steps=0 trainer.batch=2 trainer.validations=2
trainer.threads=1 trainer.checkpoint_minutes=0.002 init.layers=[0,1] measure=false""".split()
BENCH = """bench.prompts=2 bench.quick_prompts=1 bench.prompt_tokens=8 bench.new_tokens=8 bench.parity_tokens=60
bench.minutes=0""".split()  # the planned length: one of bench.depths is chosen by time, and so are the figures
ENDED = re.compile(r"interrupted( at step (?P<step>\d+), which is saved)?; the same command resumes")
STEPS = ("full disks", "read-only", "kills", "SIGTERM", "damages")
TEMPORARY = re.compile(r"\..+-\d+-[0-9a-f]{8}\.(new|old)")
Figures = dict[str, str]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def of_files(output: Path, *patterns: str) -> Figures:
    """Return hashes of the files of these patterns; of checkpoints, those of their tensors."""
    found = {}
    for file in sorted(one for pattern in patterns for one in output.glob(pattern) if one.is_file()):
        name = str(file.relative_to(output))
        if file.suffix == ".ckpt":
            state = torch.load(file, weights_only=True, map_location="cpu")["state_dict"]
            found[name] = sha(b"".join(key.encode() + state[key].numpy().tobytes() for key in sorted(state)))
        elif file.suffix == ".json":
            values = json.loads(file.read_text())
            values.pop("environment", None)  # with the date
            found[name] = sha(json.dumps(values, sort_keys=True).encode())
        else:
            found[name] = sha(file.read_bytes())
    return found


def of_training(output: Path) -> Figures:
    weights = ("**/draft/model.safetensors", "**/target/model.safetensors", "**/last.ckpt")
    return of_files(output, *weights, "**/held_out.json", "**/rollouts/*.parquet")


def of_bench(output: Path) -> Figures:
    report = json.loads((output / "report.json").read_text())
    return {"acceptance": json.dumps(report["acceptance"]), "parity": json.dumps(report["extra"]["parity"])}


def of_plan(output: Path) -> Figures:
    cells = json.loads((output / "plan.json").read_text())["cells"]
    return {f"T={cell['temperature']}, {cell['rows']} rows": json.dumps(cell["tau"]) for cell in cells}


@dataclass(frozen=True)
class Job:
    """A command. argv: without output=. figures: a function of the output that must be equal. server: whether its
    teacher is on a server. saves: whether SIGTERM leaves a checkpoint."""

    argv: list[str]
    figures: Callable[[Path], Figures]
    server: bool = False
    saves: bool = False


@dataclass
class Ended:
    """How a command ended. status: negative for a signal. seconds: of its time. said: what it printed to stderr.
    late: seconds from the signal to the end. stepped: seconds to the end of the optimiser's first step, None without
    one."""

    status: int
    seconds: float
    said: str
    late: float = 0.0
    stepped: float | None = None


@dataclass
class Chaos:
    """Runs commands in `root`: `inputs` are read, `work` is written. url: of the server with a teacher. wrong: what was
    not as it should be, of one command. counts: of faults and comparisons, of one command."""

    root: Path
    rng: random.Random
    url: str = ""
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def inputs(self) -> Path:
        return self.root / "inputs"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def output(self) -> Path:
        return self.work / "output"

    def fresh(self) -> None:
        self.work.mkdir(exist_ok=True)
        for entry in self.work.iterdir():
            shutil.rmtree(entry)

    def jobs(self) -> dict[str, Job]:
        given = [f"target.path={self.inputs / 'target'}", f"data.path={self.inputs / 'own.jsonl'}"]
        draft = f"draft.path={self.inputs / 'draft'}"
        quick = ["trainer.steps=4", "trainer.validations=1"]
        joint = [
            "mode=joint",
            "rollout.held_out_texts=12",
            "joint.warm_steps=4",
            "joint.steps=4",
            "joint.rank=2",
            "joint.epsilon=0.5",
            *quick,
        ]
        states = [f"trainer.cache={self.work / 'states'}", "trainer.remember_mb=0"]
        eagle = ["draft=eagle", "init=scratch", "draft.intermediate=64", "trainer.remember_mb=0"]
        sizes = [one for one in SIZES if not one.startswith("init.layers")]
        texts = ["kind=train", "rollout.texts=24", "rollout.prompt_tokens=8", "rollout.new_tokens=24", "rollout.rows=2"]
        few = [
            "texts=16",
            "batches=[1]",
            "threads=1",
            "bench.new_tokens=8",
            "bench.depths=[1,2]",
            "bench.quick_prompts=1",
        ]
        return {
            "distil": Job(["train", *given, *SIZES], of_training, saves=True),
            "joint": Job(["train", *given, *SIZES, *joint], of_training, saves=True),
            "cache": Job(["train", *given, *SIZES, *states], of_training, saves=True),
            "server": Job(["train", *given, *sizes, *eagle, f"teacher.url={self.url}"], of_training, True, True),
            "rollout": Job(["rollout", *given, *texts], lambda output: of_files(output, "*.parquet", "*.json")),
            "bench": Job(["bench", draft, given[1], *BENCH], of_bench),
            "plan": Job(["plan", draft, given[1], *few, "overwrite=true"], of_plan),
            "export": Job(["export", draft, "engine=vllm", "overwrite=true"], lambda output: of_files(output, "*")),
        }

    def run(
        self, job: Job, after: float | None = None, write: int | None = None, number: int = signal.SIGKILL
    ) -> Ended:
        """Run a command to its end. after: seconds until it gets the signal `number`; SIGTERM comes so long after the
        first step of its optimiser. write: at which of its writes it is killed."""
        log, step, stepped = self.root / "log", self.root / "stepped", None
        step.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            _child(job, self.output, log, self.root, write)
        clock, sent = time.monotonic(), None
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            now = time.monotonic() - clock
            if stepped is None and step.exists():
                stepped = now
            begin = stepped if number == signal.SIGTERM else 0.0
            if done:
                said = log.read_text(errors="replace") if log.exists() else ""
                late = now - sent if sent is not None else 0.0
                return Ended(os.waitstatus_to_exitcode(status), now, said, late, stepped)
            if after is not None and sent is None and begin is not None and now >= begin + after:
                sent = now
                os.kill(pid, number)
            if now > PATIENCE:
                self.wrong.append(f"a command hangs: {job.argv}: {log.read_text(errors='replace')[-3000:]}")
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def whole(self, when: str) -> None:
        """Note each file under a final name that is not whole."""
        for file in self.work.rglob("*"):
            parts = file.relative_to(self.work).parts
            if any(TEMPORARY.fullmatch(part) for part in parts) or not file.is_file():
                continue
            try:
                if file.suffix == ".json":
                    json.loads(file.read_text())
                elif file.suffix == ".safetensors":
                    with safe_open(file, "pt") as tensors:
                        list(tensors.keys())
                elif file.suffix == ".parquet":
                    pyarrow.parquet.read_table(file)
                elif file.suffix == ".ckpt":
                    torch.load(file, weights_only=True)
            except Exception as error:
                self.wrong.append(f"{when}: {'/'.join(parts)} is not whole: {error}")

    def compare(self, job: Job, wanted: Figures, when: str, apart: str | None = None) -> None:
        """Note figures that are not those of an undisturbed run, and temporary files that are left. apart: the name of
        a file that is still damaged, since nothing read it again: the rest is compared, and the case counted apart."""
        try:
            found = job.figures(self.output)
        except Exception as error:
            self.wrong.append(f"{when}: no figures: {error!r}")
            return
        differ = sorted(key for key in (wanted.keys() | found.keys()) - {apart} if wanted.get(key) != found.get(key))
        self.counts["compared"] += 1
        self.counts["damaged and not read again" if apart else "equal"] += not differ
        if differ:
            self.wrong.append(f"{when}: not equal: {', '.join(differ)}")
        left = [one.name for one in self.work.rglob("*") if TEMPORARY.fullmatch(one.name)]
        if left:
            self.wrong.append(f"{when}: temporary files are left: {left}")

    def repeated(self, job: Job, wanted: Figures, when: str) -> None:
        """Repeat a command after a fault, to its end."""
        ended = self.run(job)
        if ended.status:
            self.wrong.append(f"{when}: the same command ends with {ended.status}: {ended.said.strip()[-300:]}")
        else:
            self.compare(job, wanted, when)

    def undisturbed(self, job: Job) -> tuple[Figures, Ended, int]:
        """Return the figures, the end and the number of writes of an undisturbed run, after two that must agree."""
        figures, ended, writes = list[Figures](), Ended(0, 0.0, ""), ""
        for _ in range(2):
            self.fresh()
            ended = self.run(job)
            if ended.status:
                raise RuntimeError(f"{job.argv} ends with {ended.status}: {ended.said[-2000:]}")
            figures.append(job.figures(self.output))
            writes, *modules = (self.root / "writes").read_text().split("\n")
            for name in modules:  # so that processes forked from here on need not
                with suppress(Exception):
                    importlib.import_module(name)
        if figures[0] != figures[1]:
            self.wrong.append(f"two undisturbed runs differ: {job.argv[0]}")
        return figures[0], ended, int(writes)

    def kills(self, job: Job, wanted: Figures, seconds: float, writes: int, kills: int) -> None:
        """Kill the command `kills` times, and repeat it each time."""
        while self.counts["kills"] < kills:
            self.fresh()
            for attempt in range(AGAIN + 1):
                last = attempt == AGAIN or self.counts["kills"] >= kills
                by_time = self.rng.random() < 0.5
                when = f"kill {self.counts['kills'] + 1}"
                if last:
                    ended = self.run(job)
                elif by_time:
                    ended = self.run(job, after=self.rng.uniform(0, seconds))
                else:
                    ended = self.run(job, write=self.rng.randrange(writes))
                if ended.status == -signal.SIGKILL:
                    self.counts["kills"] += 1
                    self.counts["kills by time" if by_time else "kills at a write"] += 1
                    self.whole(when)
                    continue
                if ended.status:
                    self.wrong.append(f"{when}: ends with {ended.status}: {ended.said.strip()[-300:]}")
                else:
                    self.compare(job, wanted, when)
                break

    def terms(self, job: Job, wanted: Figures, left: float, faults: int) -> None:
        """Send SIGTERM at random moments after the first step: the process ends in time, with the status and the
        sentence of an ended run, and the command resumes. left: seconds from the first step to the end."""
        slowest = 0.0
        for _ in range(3 * faults):
            if self.counts["ended by SIGTERM"] == faults:
                break
            self.fresh()
            ended = self.run(job, after=self.rng.uniform(0, left), number=signal.SIGTERM)
            if ended.status == 0:  # it was done before: this run was faster than the undisturbed one
                left = min(left, ended.seconds - (ended.stepped or 0))
                continue
            self.counts["ended by SIGTERM"] += 1
            when = f"SIGTERM {self.counts['ended by SIGTERM']}"
            slowest = max(slowest, ended.late)
            sentence = ENDED.search(ended.said)
            if ended.status != 128 + signal.SIGTERM or not sentence or ended.late > GRACE:
                self.wrong.append(
                    f"{when}: status {ended.status} after {ended.late:.1f} s: {ended.said.strip()[-300:]}"
                )
            saved = [read_saved(one)["global_step"] for one in self.output.rglob("last.ckpt")]
            self.counts["with a checkpoint"] += bool(saved)
            if sentence and sentence["step"] and int(sentence["step"]) not in saved:
                self.wrong.append(f"{when}: step {sentence['step']} is not saved: {saved}")
            self.whole(when)
            self.repeated(job, wanted, when)
        if self.counts["ended by SIGTERM"] < faults:
            self.wrong.append(f"SIGTERM: only {self.counts['ended by SIGTERM']} of {faults} came before the end")
        self.counts["slowest end, ms"] = round(1000 * slowest)

    def full_disks(self, job: Job, wanted: Figures, faults: int) -> None:
        """Let the disk be full after a random number of bytes, and repeat with room."""
        size = _bytes(self.work)
        for number in range(faults):
            room = self.rng.randrange(4096, size)
            when = f"full disk {number + 1} ({room} bytes)"
            shutil.rmtree(self.work)
            self.work.mkdir()
            with _mounted(self.work, f"size={room}"):
                ended = self.run(job)
                self.whole(when)
                if ended.status:
                    self.counts["full disks"] += 1
                    if ended.status != 1 or "no space left" not in ended.said or "Traceback" in ended.said:
                        self.wrong.append(f"{when}: {ended.status}: {ended.said.strip()[-400:]}")
                    _mount(self.work, "remount,size=200m")
                    self.repeated(job, wanted, when)

    def read_only(self, job: Job, wanted: Figures) -> None:
        """Repeat the command on a disk that became read-only, and on one that was so from the start."""
        for begun in (False, True):
            shutil.rmtree(self.work)
            self.work.mkdir()
            with _mounted(self.work, "size=200m"):
                if begun:
                    self.run(job, after=0.7 * self.rng.random() + 0.2)
                _mount(self.work, "remount,ro")
                ended = self.run(job)
                self.counts["read-only disks"] += 1
                if ended.status != 1 or "Traceback" in ended.said or str(self.work) not in ended.said:
                    self.wrong.append(f"read-only, begun {begun}: {ended.status}: {ended.said.strip()[-400:]}")
                _mount(self.work, "remount,rw")
                self.repeated(job, wanted, f"read-only, begun {begun}")

    def damages(self, job: Job, wanted: Figures, seconds: float, faults: int) -> None:
        """Change one byte of a stored file of an unfinished run. Repeated, the command makes the file again, or refuses
        it by name; without the file, it ends as an undisturbed run."""
        for number in range(faults):
            files = list[Path]()
            for _ in range(20):  # until it left something
                self.fresh()
                ended = self.run(job, after=self.rng.uniform(0.4 * seconds, seconds))
                patterns = ("**/*.safetensors", "**/*.parquet", "**/last.ckpt")
                files = sorted(one for pattern in patterns for one in self.work.glob(pattern))
                files = [one for one in files if not TEMPORARY.fullmatch(one.name)]
                if ended.status and files:
                    break
            if not files:
                continue
            file = self.rng.choice(files)
            content = bytearray(file.read_bytes())
            at = self.rng.randrange(len(content))
            content[at] ^= 1 << self.rng.randrange(8)
            file.write_bytes(content)
            name = str(file.relative_to(self.work))
            when = f"damage {number + 1}, byte {at} of {len(content)} of {name}"
            self.counts["damaged files"] += 1
            ended = self.run(job)
            if ended.status == 0:
                same = file.is_file() and file.read_bytes() == bytes(content)
                self.counts["made again"] += not same
                self.compare(job, wanted, when, name.partition("/")[2] if same else None)
            elif ended.status == 1 and file.name in ended.said and "Traceback" not in ended.said:
                self.counts["refused by name"] += 1
                for stored in (file, file.with_suffix(".json")):
                    stored.unlink(missing_ok=True)
                self.repeated(job, wanted, when)
            else:
                self.wrong.append(f"{when}: {ended.status}: {ended.said.strip()[-400:]}")


def _child(job: Job, output: Path, log: Path, root: Path, write: int | None) -> None:
    """Run a command in this forked process, and end it. root: where its number of writes is written, and that its
    optimiser made a step. write: the number of the write at which it is killed."""
    status, seen, before = 70, 0, set(sys.modules)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in WRITES and not (event == "open" and opens_to_write(arguments)):
            return
        if str(output.parent) not in str(arguments[0]):  # a folder is written beside its place
            return
        if seen == write:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        torch.set_num_threads(1)
        servers.PAUSE, servers.DOWN = 0.01, 0.02
        sys.addaudithook(watch)
        register_optimizer_step_post_hook(lambda *_: (root / "stepped").touch())
        faulthandler.dump_traceback_later(PATIENCE - 10, file=2)  # where it hangs
        status = main([*job.argv, f"output={output}"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the command has ended
        (root / "writes").write_text("\n".join([str(seen), *set(sys.modules) - before]))
    finally:
        sys.stderr.flush()
        os._exit(status)


def _bytes(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def _mount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True, capture_output=True)


@contextmanager
def _mounted(place: Path, options: str) -> Iterator[None]:
    _mount(place, options)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _served(inputs: Path, ready: Path) -> None:
    """Serve as a vLLM, in this forked process, as long as the study runs."""
    study = os.getppid()
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    target = network()
    with running(FakeVLLM(target, inputs / "served", asked_layers(target, [0, 0, 1]))) as fake:
        ready.write_text(fake.url)
        while os.getppid() == study:
            time.sleep(1)


def _inputs(inputs: Path) -> None:
    target = target_folder(inputs / "target")
    own_texts(inputs / "own.jsonl", 600)
    draft_folder(inputs / "draft", target, "independent")


def forked(work: Callable[[], None]) -> int:
    """Return the id of a forked process that does the work, and ends."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def studied(
    chaos: Chaos, name: str, kills: int, faults: int, mounts: bool, chosen: Sequence[str] = STEPS
) -> dict[str, Any]:
    """Return the figures of a command under the chosen kinds of faults."""
    job, clock = chaos.jobs()[name], time.monotonic()
    chaos.wrong, chaos.counts = [], Counter()
    wanted, ended, writes = chaos.undisturbed(job)
    seconds = ended.seconds
    steps: list[tuple[str, Callable[[], None]]] = []
    if mounts and not job.server:  # its states lie in another folder
        steps += [("full disks", partial(chaos.full_disks, job, wanted, faults))]
        steps += [("read-only", partial(chaos.read_only, job, wanted))]
    steps += [("kills", partial(chaos.kills, job, wanted, seconds, writes, kills))]
    if job.saves:
        steps += [("SIGTERM", partial(chaos.terms, job, wanted, seconds - (ended.stepped or 0), faults))]
        steps += [("damages", partial(chaos.damages, job, wanted, seconds, faults))]
    for title, step in steps:
        if title not in chosen:
            continue
        step()
        print(f"{time.strftime('%X')} {name}, {title}: {dict(chaos.counts)}, {len(chaos.wrong)} wrong", flush=True)
    return {
        "asked": {"kills": kills, "faults": faults, "steps": [*chosen]},
        "seconds_undisturbed": round(seconds, 2),
        "writes": writes,
        "equal_figures": sorted(wanted),
        **chaos.counts,
        "seconds": round(time.monotonic() - clock, 1),
        "wrong": chaos.wrong,
    }


def main_of_study() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.chaos")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--job", action="append")
    parser.add_argument("--step", action="append", choices=STEPS)
    parser.add_argument("--part", default="chaos", help="of the report")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    earlier, pids = dict[str, Any](), list[int]()
    if asked.job and asked.out.is_file():  # the other commands stay in the report
        earlier = json.loads(asked.out.read_text(encoding="utf-8")).get(asked.part, {})
    found, made = earlier.get("commands", {}), environments(earlier)
    command = " ".join(["python -m studies.chaos", *sys.argv[1:]])
    command = "; ".join([earlier["command"], command] if earlier else [command])
    with tempfile.TemporaryDirectory() as place, composing_fast():
        chaos = Chaos(Path(place), random.Random(asked.seed))
        chaos.work.mkdir()
        os.waitpid(forked(partial(_inputs, chaos.inputs)), 0)
        ready = chaos.root / "url"
        pids.append(forked(partial(_served, chaos.inputs, ready)))
        while not ready.exists() or not ready.read_text():
            time.sleep(0.05)
        chaos.url = ready.read_text()
        mounts = True
        try:
            with _mounted(chaos.work, "size=1m"):
                pass
        except (OSError, subprocess.CalledProcessError):
            mounts = False
            print("no disks can be mounted here (it needs root): full and read-only disks are left out")
        try:
            for name in asked.job or chaos.jobs():
                found[name] = studied(chaos, name, asked.kills, asked.faults, mounts, asked.step or STEPS)
                for one in found[name]["wrong"]:
                    print(f"  {name}: {one}", flush=True)
                part = {"environments": made, "command": command, "mounted_disks": mounts, "commands": found}
                write_part(asked.out, asked.part, part)
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main_of_study()
