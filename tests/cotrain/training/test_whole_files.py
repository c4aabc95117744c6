"""Every file that is saved is whole or as it was, wherever a process dies, and on any file system."""

import ast
import faulthandler
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch

from cotrain.errors import UserError
from cotrain.training.callbacks import MeasureSpeed
from cotrain.training.interrupts import Checkpoints, read_saved
from tests.cotrain.commands.test_train import job
from tests.folders import network

ROOT = Path(__file__).resolve().parents[3]
WRITERS = {
    "save",
    "save_file",
    "save_pretrained",
    "to_parquet",
    "write_text",
    "write_bytes",
    "copytree",
    "copy",
    "copy2",
    "copyfile",
    "savez",
    "dump",
    "open",
}
WHOLE = {"new_file", "new_folder"}
# Who writes otherwise, and why that leaves nothing half-written.
OTHERS = {
    "inference/drafts/draft_folder.py:write": "fills the folder of a caller's new_folder",
    "inference/drafts/draft_folder.py:describe": "the same",
    "inference/proposers/eagle.py:save_pretrained": "the same",
    "inference/drafts/gguf_target.py:_write": "the same",
    "inference/drafts/gguf_target.py:_dequantised": "an empty file whose lock is held",
    "cotrain/export/eagle3.py:_as_speculators": "the same",
    "cotrain/export/eagle3.py:_as_dflash": "the same",
    "cotrain/export/eagle3.py:_as_assistant": "the same",
    "cotrain/export/eagle3.py:_replace_config": "the same",
    "cotrain/students/base.py:save": "the same",
    "cotrain/rollout/samplers.py:collect": "lines are appended, and a last one that is cut short is dropped",
    "studies/pretrain/sequence_pretraining.py:run": "a line is appended",
}


def writes(call: ast.Call) -> bool:
    """Whether a call is one of a writer: `open` with a mode to write in, `save` of torch, numpy or a store."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "open":
        modes = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        return any(set(mode) & set("wax+") and len(mode) < 4 for mode in modes)
    owner = getattr(getattr(call.func, "value", None), "id", "")
    return name in WRITERS and (name not in ("save", "copy", "dump") or owner in ("torch", "np", "shutil", "json"))


def half_written(tree: ast.AST, name: str, whole: bool = False) -> Iterator[str]:
    """The functions in which something is written outside a block of WHOLE."""
    for node in ast.iter_child_nodes(tree):
        inside = whole
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items]
            inside = whole or any(isinstance(one, ast.Call) and getattr(one.func, "id", "") in WHOLE for one in calls)
        if isinstance(node, ast.Call) and writes(node) and not whole:
            yield name
        yield from half_written(node, node.name if isinstance(node, ast.FunctionDef) else name, inside)


@cache
def parsed(package: str) -> dict[str, ast.Module]:
    """The files of a package."""
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in (ROOT / package).rglob("*.py")}


def test_every_writer_of_both_packages_writes_a_new_file_and_renames_it() -> None:
    """A new one that does not is either mended or says in OTHERS why it may."""
    trees = parsed("cotrain") | parsed("inference") | parsed("studies/pretrain")
    writers = {f"{file}:{name}" for file, tree in trees.items() for name in half_written(tree, "")}
    assert writers == set(OTHERS)


def test_every_trainer_writes_its_checkpoints_whole() -> None:
    for file, tree in (parsed("cotrain") | parsed("studies/pretrain")).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lightning.Trainer":
                settings = {one.arg: ast.unparse(one.value) for one in node.keywords}
                assert settings.get("plugins") == "[Checkpoints()]" or settings["enable_checkpointing"] == "False", file


class Net(lightning.LightningModule):
    """Weights of 400 kB, all of one value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((100_000,), value))


def checkpoint(folder: Path, value: int) -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, plugins=[Checkpoints()])
    trainer.strategy.connect(Net(float(value)))
    trainer.save_checkpoint(folder / "last.ckpt")


def step_folder(folder: Path, value: int) -> None:
    draft = network(layers=1)
    with torch.no_grad():
        draft.model.norm.weight.fill_(value)
    callback = MeasureSpeed(lambda _: {"speedup": 1.0}, lambda: 1.0, folder)
    trainer: Any = SimpleNamespace(
        global_step=0, is_global_zero=True, logger=None, loggers=[], strategy=SimpleNamespace(barrier=int)
    )
    callback.on_validation_end(trainer, SimpleNamespace(assembled=lambda: nullcontext(draft)))


def read_of(folder: Path) -> dict[str, bytes]:
    """What stands under names that are no temporary's."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    }


def killed(work: Callable[[], None], final: Path, limit: int) -> int:
    """The status of a forked process in which a write behind `limit` bytes of a file is its death, and opening what
    stands in `final` to write in it ends it with 3."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    stands = {str(file) for file in final.rglob("*")}

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]) in stands and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            os._exit(3)

    try:
        torch.set_num_threads(1)  # the parent's threads are not there
        faulthandler.dump_traceback_later(20, exit=True)
        sys.addaudithook(watch)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        work()
    except BaseException:
        os._exit(4)
    os._exit(0)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An output on another file system than the temporary directory."""
    output = Path(tempfile.mkdtemp(dir="/dev/shm"))
    assert output.stat().st_dev != Path(tempfile.gettempdir()).stat().st_dev
    yield output
    shutil.rmtree(output)


@pytest.mark.parametrize("save", [checkpoint, step_folder])
def test_a_writer_that_dies_in_its_save_leaves_the_old_one_on_any_file_system(
    save: Callable[[Path, int], None], elsewhere: Path
) -> None:
    save(elsewhere, 1)
    before = read_of(elsewhere)
    size = max(map(len, before.values()))
    for limit in (0, 1, size // 3, size - size // 50 - 1):  # the second file may be some bytes smaller
        assert os.WTERMSIG(killed(lambda: save(elsewhere, 2), elsewhere, limit)) == signal.SIGXFSZ, limit
        assert read_of(elsewhere) == before
    assert killed(lambda: save(elsewhere, 2), elsewhere, 10 * size) == 0
    after = read_of(elsewhere)
    assert after.keys() == before.keys() and after != before
    assert not [file for file in elsewhere.rglob("*") if file.name.endswith((".new", ".old"))]


def damage(file: Path, keep: float) -> None:
    held = file.read_bytes()
    file.write_bytes(held[: int(len(held) * keep)])


@pytest.mark.parametrize("keep", [0, 0.01, 0.9, "words", "a list"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(tmp_path: Path, keep: float | str) -> None:
    last = tmp_path / "last.ckpt"
    checkpoint(tmp_path, 1)
    assert read_saved(last)["state_dict"]["weight"][0] == 1
    if keep == "words":
        last.write_text("words")
    elif keep == "a list":
        torch.save([1], last)
    else:
        damage(last, float(keep))
    with pytest.raises(
        UserError, match=f"^{last} cannot be read .*: delete it, and the same command writes it"
    ) as said:
        read_saved(last)
    assert "\n" not in str(said.value)


def test_a_changed_byte_of_a_checkpoint_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    """torch itself reads nearly every one as other weights."""
    last, rng = tmp_path / "last.ckpt", random.Random(0)
    checkpoint(tmp_path, 1)
    content, refused = last.read_bytes(), 0
    for place in (rng.randrange(len(content)) for _ in range(80)):
        last.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            saved = read_saved(last)
        except UserError as error:
            assert str(error).startswith(f"{last} cannot be read (")
            refused += 1
        else:
            assert torch.equal(saved["state_dict"]["weight"], torch.ones(100_000)) and saved["global_step"] == 0
    assert refused > 70


def test_a_run_with_a_damaged_checkpoint_says_so_and_trains_anew_without_it(
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = "measure=false loss=kl rollout.temperatures=[1.0] trainer.corpus_steps=0 trainer.validations=1".split()
    assert job(place, "damaged", *settings, "trainer.steps=2") == 0
    last = place / "damaged" / "checkpoints" / "last.ckpt"
    figures = (place / "damaged" / "held_out.json").read_text()
    damage(last, 0.5)
    capsys.readouterr()
    assert job(place, "damaged", *settings, "trainer.steps=3") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"cotrain train: {last} cannot be read (") and said.count("\n") == 1
    last.unlink()
    assert job(place, "damaged", *settings, "trainer.steps=3") == 0
    assert read_saved(last)["global_step"] == 3 and (place / "damaged" / "held_out.json").read_text() != figures
