"""Commands on arbitrary input: settings, prompts, data, draft folders, reports, and headers of GGUF and safetensors.

    python -m studies.fuzz outputs/results/trust.json [--cases 10000] [--seed 0] [--family NAME]

Each case is a command line of cotrain, run in this process on files that hypothesis made or damaged. A complaint is a
traceback, an exception or a signal that leaves the command, an exit status that does not fit what was printed or what
must follow from the case, a failure without a sentence, more than `HANG` seconds, and whatever Python writes outside
the output, opens on the network or starts; what libraries in other languages do is not seen. A command's work on its
settings is left out for the family `settings`, and target models are loaded once.
"""

import argparse
import gzip
import importlib
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from cotrain.cli import COMMANDS, main
from cotrain.commands import audit, generate, rollout, served_pair
from cotrain.config.base import Settings
from cotrain.config.settings import SCHEMAS, keys_of
from cotrain.page import html_page
from inference import Engine, Sampling
from inference.models import packing
from studies.trust import Watch, write_part
from tests.composing import composing_fast
from tests.draft_folders import draft_folder
from tests.folders import own_texts, target_folder
from tests.gguf_files import write_gguf
from tests.pages import full_report, record

HANG = 60  # seconds that no case takes, on a busy machine too
PART = 500  # cases, of all families, after which the report is written
SHARES = {"settings": 42, "prompts": 14, "data": 12, "texts": 6, "drafts": 6, "reports": 8, "gguf": 6, "safetensors": 6}
KINDS = ("independent", "eagle", "medusa")
Draw = Callable[[Any], Any]  # of hypothesis: strategy -> value


@dataclass(frozen=True)
class Case:
    """A command line, and what must follow. said: what the case is, for the report. status: "0", "not 0" or "" for
    either. stdin: the text on standard input."""

    argv: list[str]
    said: str
    status: str = ""
    stdin: str = ""


class Hang(BaseException):
    """Raised in a case that takes too long."""


@dataclass(frozen=True)
class Place:
    """The folders of a run. inputs are made once; `case` is emptied before each case."""

    root: Path

    @property
    def inputs(self) -> Path:
        return self.root / "inputs"

    @property
    def case(self) -> Path:
        return self.root / "case"

    @property
    def output(self) -> Path:
        return self.root / "output"

    def fresh(self) -> None:
        for folder in (self.case, self.output):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()


# --- odd values

WORDS = st.text(st.characters(codec="utf-8"), max_size=20)
HYDRA = st.text("[]{}(),:=${}'\"\\ ~+@/.-_*?#%&;|<>\n\tabc019éß中", max_size=16)
NUMBERS = st.sampled_from(
    ["-1", "0", "1", "2", "3", "1e3", "1e400", "-inf", "nan", "0.5", "1e-9", "9" * 30, "0x10", "1_0"]
)
PATHS = st.sampled_from(
    ["..", "../../etc/passwd", "/", "/dev/null", "/proc/self/mem", "~", "a/b", "a//b/", ".", "'", "a b", "-", "*"]
)
PLAIN = st.sampled_from(
    ["null", "true", "false", "", "???", "[]", "{}", "[1,2]", "{a:1}", "[[1]]", "${x}", "${output}", "${oc.env:HOME}"]
)
TYPED = st.one_of(PLAIN, NUMBERS, PATHS, WORDS, HYDRA)
ODD: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 1e308, float("inf"), float("nan"), 0.5, -0.5, 1e-300]),
    st.sampled_from(
        ["", "x" * 5000, "../../x", "/etc/passwd", "\x00", "\u202e", "<script>alert(1)</script>", "{{ 7*7 }}"]
    ),
    WORDS,
    st.sampled_from([[], {}, [[]], [None], {"a": {}}, [1, "a"], {"": 0}]),
)


def changed(draw: Draw, value: Any) -> tuple[Any, str]:
    """Return a copy of a JSON value with one entry replaced, removed or added, and the place as text."""
    value, path, at = json.loads(json.dumps(value)), list[str](), None
    parent = value
    while isinstance(parent, dict | list) and parent:
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        at = draw(st.sampled_from(keys))
        path.append(str(at))
        if not isinstance(parent[at], dict | list) or not parent[at] or draw(st.integers(0, 3)) == 0:
            break
        parent = parent[at]
    how = draw(st.sampled_from(["replace", "replace", "remove", "add", "nest"]))
    if at is None or how == "add" and isinstance(parent, dict):
        parent = value if at is None else parent
        if isinstance(parent, dict):
            parent[draw(WORDS)] = draw(ODD)
        return value, f"{how} at {'/'.join(path)}"
    if how == "remove":
        del parent[at]
    elif how == "nest":
        parent[at] = [parent[at]]
    else:
        parent[at] = draw(ODD)
    return value, f"{how} {'/'.join(path)}"


def damaged(draw: Draw, content: bytes, begin: int = 0, end: int | None = None) -> tuple[bytes, str]:
    """Return bytes that were cut, or changed between `begin` and `end`, and how, as text."""
    end = len(content) if end is None else min(end, len(content))
    at = draw(st.integers(min(begin, end), end))
    how = draw(st.sampled_from(["cut", "flip", "put", "drop", "zeros", "twice"]))
    if how == "cut":
        return content[:at], f"cut at {at}"
    if how == "flip":
        bit = draw(st.integers(0, 7))
        flipped = bytes(one ^ (1 << bit) for one in content[at : at + 1])
        return content[:at] + flipped + content[at + 1 :], f"flip {at}.{bit}"
    if how == "put":
        more = draw(st.binary(min_size=1, max_size=9))
        return content[:at] + more + content[at + len(more) :], f"put {more!r} at {at}"
    size = draw(st.sampled_from([1, 2, 8, 100]))
    middle = {"drop": b"", "zeros": bytes(size), "twice": 2 * content[at : at + size]}[how]
    return content[:at] + middle + content[at + size :], f"{how} {size} at {at}"


# --- families


def classes_of(group: Settings, before: str = "") -> Iterator[str]:
    """Yield the text before each key of the class of this group, and of the classes inside it."""
    yield before
    for name in type(group).model_fields:
        if isinstance(value := getattr(group, name), Settings):
            yield from classes_of(value, f"{before}{name}.")


def settings(draw: Draw, place: Place) -> Case:
    """One to three settings of a command: of its own keys or of none, with values of any type. Its work is left out."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    keys, status = sorted(keys_of(name)), ""
    words, new = list[str](), set[str]()
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(keys))
        how = draw(st.sampled_from(["value"] * 6 + ["typo", "sign", "bare", "word", "new"]))
        if how == "typo":
            at = draw(st.integers(0, len(key)))
            key = key[:at] + draw(st.sampled_from(["x", "q", "zz", "."])) + key[at:]
            status = "" if key in keys else "not 0"
        sign = draw(st.sampled_from(["+", "++", "~", "@", "--", "-"])) if how == "sign" else ""
        value = draw(TYPED)
        if how == "new":  # a key that no class has
            group = draw(st.sampled_from(sorted(classes_of(SCHEMAS[name]()))))
            sign, key = draw(st.sampled_from(["", "+", "++"])), group + draw(st.sampled_from(["zz", "zz.y"]))
            value, status = draw(st.one_of(PLAIN, NUMBERS)), "not 0"
            new.add(f"{sign}{key}={value}")
        words.append(key if how == "bare" else value if how == "word" else f"{sign}{key}={value}")
    if any(word.startswith(("-", "+", "~")) or "hydra" in word for word in {*words} - new):
        status = ""
    words = [word for word in words if "\0" not in word and not word.startswith(("--", "-m", "-h"))]
    return Case([name, *words], f"{words}", status if len(words) else "")


def prompts(draw: Draw, place: Place) -> Case:
    """A prompt on the command line, in a file of any type, or on standard input."""
    how = draw(st.sampled_from(["prompt", "prompt", "txt", "jsonl", "stdin", "bytes"]))
    argv = ["generate", f"target.path={place.inputs / 'target'}", "max_new_tokens=1"]
    odd = st.sampled_from(["a" * 700, "\ud800", "", " ", "<s>", "\r\n", "null"])
    text, stdin = draw(st.one_of(WORDS, HYDRA, odd)), ""
    if how == "prompt":
        argv.append(f"prompt={text}".replace("\0", ""))
    elif how == "stdin":
        argv, stdin = [*argv, "prompts=-"], text
    else:
        file = place.case / f"prompts.{'txt' if how == 'bytes' else how}"
        rows = [{draw(st.sampled_from(["prompt", "text", "messages", "x"])): draw(ODD)} for _ in range(2)]
        content = text.encode(errors="surrogatepass") if how == "txt" else draw(st.binary(max_size=40))
        file.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode() if how == "jsonl" else content)
        argv.append(f"prompts={file}")
    return Case(argv, f"{how} {text[:60]!r}", stdin=stdin)


@cache
def _data(root: Path) -> dict[str, bytes]:
    rows = [{"prompt": f"say {i}", "completion": f"it is {i}"} for i in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    answer = {"role": "assistant", "content": "a"}
    chat = [{"messages": [{"role": "user", "content": f"q {i}"}, answer]} for i in range(40)]
    return {
        "jsonl": lines,
        "json": json.dumps(rows).encode(),
        "csv": b"prompt,completion\n" + b"".join(b'"say %d","it, is"\n' % i for i in range(40)),
        "txt": b"".join(b"a line %d\n" % i for i in range(40)),
        "parquet": bytes(sink.getvalue()),
        "chat.jsonl": "".join(json.dumps(row) + "\n" for row in chat).encode(),
        "jsonl.gz": gzip.compress(lines),
    }


def data(draw: Draw, place: Place) -> Case:
    """A file of data with damaged bytes, or with a row of other values."""
    kinds = _data(place.root)
    kind = draw(st.sampled_from(sorted(kinds)))
    content = kinds[kind]
    if "jsonl" in kind and "gz" not in kind and draw(st.booleans()):
        row, said = changed(draw, json.loads(content.splitlines()[0]))
        content = json.dumps(row).encode() + b"\n" + content
    else:
        content, said = damaged(draw, content)
    file = place.case / f"own.{kind}"
    file.write_bytes(content)
    argv = ["rollout", f"target.path={place.inputs / 'target'}", f"data.path={file}", f"output={place.output}"]
    sizes = ["rollout.texts=1", "rollout.prompt_tokens=16", "rollout.new_tokens=1", "rollout.rows=1", "kind=train"]
    return Case([*argv, *sizes], f"{kind}: {said}")


def texts(draw: Draw, place: Place) -> Case:
    """A file of texts to audit with damaged bytes, or with a row of other values."""
    kind = draw(st.sampled_from(["ids.jsonl", "words.jsonl", "ids.parquet"]))
    how = draw(st.sampled_from(["damage", "damage", "change", "change", "pair", "deep"]))
    content = (place.inputs / kind).read_bytes()
    if how == "damage" or kind == "ids.parquet":
        content, said = damaged(draw, content)
    else:
        row, said = json.loads(content.splitlines()[0]), how
        if how == "change":
            row, said = changed(draw, row)
        elif how == "pair":
            row[draw(st.sampled_from(sorted(row)))] = draw(WORDS) + "\ud800\u2028"
        deep = "[" * 100_000 if how == "deep" else json.dumps(row, ensure_ascii=how != "change")
        content = f"{deep}\n\n".encode(errors="replace") + content
    file = place.case / f"own.{kind}"
    file.write_bytes(content)
    argv = ["audit", f"target.path={place.inputs / 'target'}", f"texts={file}", f"output={place.output}"]
    temperature = draw(st.sampled_from(["0", "1"]))
    return Case([*argv, f"regime.temperature={temperature}"], f"{kind}, {temperature}: {said}")


def _served(inputs: Path, target: Path) -> None:
    """Write the target's texts at temperature 0, as ids and as words."""
    model, tokenizer = generate.load_pair(str(target))
    asked = [[3, 4, 5 + i] for i in range(10)]
    texts = Engine(model, rows=10).generate(asked, max_new_tokens=40, sampling=Sampling(0), ignore_eos=True).tokens
    rows = [{"prompt": prompt, "completion": text} for prompt, text in zip(asked, texts, strict=True)]
    words = [{name: tokenizer.decode(ids) for name, ids in row.items()} for row in rows]
    for name, chosen in (("ids", rows), ("words", words)):
        (inputs / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), inputs / "ids.parquet")


def _folder(draw: Draw, place: Place) -> tuple[Path, str]:
    kind = draw(st.sampled_from(KINDS))
    return shutil.copytree(place.inputs / kind, place.case / "draft"), kind


def _used(draw: Draw, place: Place, folder: Path) -> list[str]:
    if draw(st.integers(0, 2)):
        return ["export", f"check={folder}"]
    target = f"target.path={place.inputs / 'target'}"
    return ["generate", f"draft.path={folder}", "prompt=say it", "max_new_tokens=2", target]


def drafts(draw: Draw, place: Place) -> Case:
    """A draft folder of which one file was changed, damaged, removed, or made a link or a folder."""
    folder, kind = _folder(draw, place)
    file = folder / draw(st.sampled_from(sorted(one.name for one in folder.iterdir())))
    how, status = (
        draw(st.sampled_from(["change", "change", "change", "damage", "remove", "link", "folder", "index"])),
        "",
    )
    if how == "change" and file.suffix == ".json":
        value, said = changed(draw, json.loads(file.read_text(encoding="utf-8")))
        file.write_text(json.dumps(value), encoding="utf-8")
    elif how == "index":
        weights, said = folder / "model.safetensors", "an index that names a file elsewhere"
        outside = shutil.move(weights, place.case / "other.safetensors")
        name = draw(st.sampled_from(["../other.safetensors", str(outside), "./../other.safetensors", "..", ""]))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        status = "not 0"
    elif how in ("remove", "link", "folder"):
        file.unlink()
        said = f"{how} {file.name}"
        if how == "link":
            file.symlink_to(draw(st.sampled_from(["/nowhere", file.name, "..", "config.json"])))
        elif how == "folder":
            file.mkdir()
        status = "not 0" if file.name == "model.safetensors" else ""
    else:
        content, said = damaged(draw, file.read_bytes())
        file.write_bytes(content)
    return Case(_used(draw, place, folder), f"{kind}, {file.name}: {said}", status)


@cache
def _documents() -> dict[str, Any]:
    marker = {"cotrain": "0.1.0", "command": "train", "state": "finished", "settings": {"policy": {"k": 2}}}
    calls = {"4": [4.0, 5.0], "8": [3.0, 4.0]}
    texts = {"alpha": 0.5, "kl": 1.0, "entropy": 2.0, "calibration": 0.1, "lengths": [9, 9], "calls": calls}
    figures = {"label": "kl", "seed": 0, "steps": 4, "tau": 2.0, "texts": {"1": texts | {"hashes": ["a", "b"]}}}
    return {"report": full_report(), "replay": record(), "run": marker, "held_out": figures}


def reports(draw: Draw, place: Place) -> Case:
    """A run's folder with one of its files changed or damaged: its page, or its comparison with another run."""
    folder = place.case / "runs" / "one"
    folder.mkdir(parents=True)
    for name, value in _documents().items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    file = folder / f"{draw(st.sampled_from(sorted(_documents())))}.json"
    if draw(st.integers(0, 4)):
        value, said = changed(draw, json.loads(file.read_text()))
        file.write_text(json.dumps(value))
    else:
        content, said = damaged(draw, file.read_bytes())
        file.write_bytes(content)
    if draw(st.integers(0, 5)) == 0:
        shutil.copytree(folder, folder.with_name("two"))
        return Case(["compare", f"folder={folder.parent}"], f"compare, {file.name}: {said}")
    return Case(["report", f"run={folder}", f"page={place.output / 'page.html'}"], f"report, {file.name}: {said}")


def gguf(draw: Draw, place: Place) -> Case:
    """A GGUF file with a damaged header, used as a target."""
    content = (place.inputs / "tiny.gguf").read_bytes()
    content, said = damaged(draw, content, 0, draw(st.sampled_from([32, 400, 20_000, len(content)])))
    file = place.case / "own.gguf"
    file.write_bytes(content)
    return Case(["generate", f"target.path={file}", "prompt=say it", "max_new_tokens=1"], said)


def safetensors(draw: Draw, place: Place) -> Case:
    """A draft folder whose weights have a damaged header, or tensors of other names, shapes and dtypes."""
    folder, kind = _folder(draw, place)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    if draw(st.booleans()):
        header, said = changed(draw, json.loads(content[8 : 8 + size]))
        packed = json.dumps(header).encode()
        content = len(packed).to_bytes(8, "little") + packed + content[8 + size :]
    else:
        content, said = damaged(draw, content, 0, draw(st.sampled_from([9, 8 + size])))
    file.write_bytes(content)
    return Case(_used(draw, place, folder), f"{kind}: {said}")


FAMILIES: dict[str, Callable[[Draw, Place], Case]] = {
    "settings": settings,
    "prompts": prompts,
    "data": data,
    "texts": texts,
    "drafts": drafts,
    "reports": reports,
    "gguf": gguf,
    "safetensors": safetensors,
}


# --- one case

WATCH: list[Watch] = []
ADDRESS = re.compile(r"0x[0-9a-f]+|\d+")


def _late(*_: int | FrameType | None) -> None:
    raise Hang


def complaints(case: Case, place: Place) -> list[str]:
    """Run a case, and return what is wrong with it; [] if nothing is."""
    if not WATCH:
        WATCH.append(Watch())
    out, err, escaped, status = io.StringIO(), io.StringIO(), "", 0
    before, stdin = signal.signal(signal.SIGALRM, _late), sys.stdin
    sys.stdin = io.StringIO(case.stdin)
    allowed = [place.output, place.root / "tmp", place.root / "cache"]
    with WATCH[0].recording(allowed) as seen, redirect_stdout(out), redirect_stderr(err):
        left, clock = signal.setitimer(signal.ITIMER_REAL, HANG)[0], time.monotonic()  # a test has a time limit too
        try:
            status = main(case.argv)
        except Hang:
            escaped = f"more than {HANG} s"
        except BaseException as error:  # a panic of Rust is no Exception
            escaped = f"{type(error).__name__} leaves the command: {error}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if time.monotonic() - clock > HANG:  # a command that catches all exceptions too
            escaped = f"more than {HANG} s"
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, left)
    sys.stdin = stdin
    said = err.getvalue()
    found = [f"outside: {one}" for one in dict.fromkeys(seen)]
    if escaped:
        return [escaped, *found]
    sentence = re.search(rf"^cotrain( {case.argv[0]})?: \S.*\S", said, re.M)
    if "Traceback (most recent call last)" in said:
        found.append(f"a traceback: {said.strip().splitlines()[-1]}")
    elif status and not sentence:
        found.append(f"status {status} without a sentence: {said.strip()[-200:]!r}")
    elif not status and sentence and case.argv[0] != "generate":  # which prints texts
        found.append(f"status 0 beside {sentence[0]!r}")
    if status not in ((0, 1, 2, audit.OTHERS, audit.FEW) if case.argv[0] == "audit" else (0, 1, 2)):
        found.append(f"status {status}")
    if case.status and (status == 0) != (case.status == "0"):
        found.append(f"status {status} where it should be {case.status}")
    return found


@contextmanager
def prepared(root: Path) -> Iterator[Place]:
    """Yield the folders with all inputs. Commands compose settings fast, load targets once, and cache in `root`."""
    place = Place(root)
    for folder in (place.inputs, root / "tmp", root / "cache"):
        folder.mkdir(parents=True)
    target = target_folder(place.inputs / "target", hidden=64)
    own_texts(place.inputs / "own.jsonl", 60)
    write_gguf(place.inputs / "tiny.gguf")
    _served(place.inputs, target)
    for kind in KINDS:
        draft_folder(place.inputs / kind, target, kind)
    here = os.getcwd()
    packing.has_kernels()  # compiled once, and not in the folder of this run
    with composing_fast(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setenv("HF_HOME", str(root / "cache" / "hf"))
        patch.setattr(tempfile, "tempdir", str(root / "tmp"))
        patch.setattr(html_page, "_plotly", lambda: "var Plotly")
        known = str(target)
        for module, name in (
            (generate, "load_pair"),
            (generate, "load_config"),
            (served_pair, "outline"),
            (audit, "outline"),
            (rollout, "outline"),
        ):
            _once(patch, module, name, known)
        models = rollout.models
        loaded = cache(lambda: generate.load_pair(known))
        for command in (rollout, audit):
            patch.setattr(command, "models", lambda cfg: loaded() if cfg.target.path == known else models(cfg))
        place.fresh()
        os.chdir(place.output)
        try:
            yield place
        finally:
            os.chdir(here)


def _once(patch: pytest.MonkeyPatch, module: Any, name: str, known: str) -> None:
    """Let a function of a module load the target `known` once."""
    load, made = getattr(module, name), dict[Any, Any]()

    def loaded(path: str, *more: Any) -> Any:
        if path != known:
            return load(path, *more)
        if more not in made:
            made[more] = load(path, *more)
        return made[more]

    patch.setattr(module, name, loaded)


@contextmanager
def idle(family: str) -> Iterator[None]:
    """Leave out what commands do with their settings, for the family `settings`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in COMMANDS if family == "settings" else ():
            patch.setattr(importlib.import_module(f"cotrain.commands.{name}"), "run", lambda cfg: None)
        yield


def fuzz(family: str, cases: int, seed: int, place: Place, say: Callable[..., None] = print) -> dict[str, Any]:
    """Run cases of a family. Return their number, seconds of this process, and one case of each complaint."""
    found, counts = dict[str, dict[str, Any]](), Counter[str]()
    clock = time.process_time()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def each(source: Any) -> None:
        place.fresh()
        os.chdir(place.output)
        case = FAMILIES[family](source.draw, place)
        counts["cases"] += 1
        for complaint in complaints(case, place):
            counts["complaints"] += 1
            key = ADDRESS.sub("N", complaint.replace(str(place.root), ""))[:160]
            if key not in found:
                found[key] = {"argv": case.argv, "case": case.said, "complaint": complaint[:600]}
                say(f"{family}: {complaint[:300]}\n    {case.said[:200]} {case.argv}", flush=True)

    with idle(family):
        each()
    seconds = round(time.process_time() - clock, 1)
    return {
        "cases": counts["cases"],
        "complaints": counts["complaints"],
        "cpu_seconds": seconds,
        "found": [*found.values()],
    }


def main_of_study() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fuzz")
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES)
    asked = parser.parse_args()
    out, families = asked.out.absolute(), dict[str, Any]()
    command = f"python -m studies.fuzz {asked.out} --cases {asked.cases} --seed {asked.seed}"
    command += f" --family {asked.family}" if asked.family else ""
    shares = {asked.family: sum(SHARES.values())} if asked.family else SHARES
    with tempfile.TemporaryDirectory() as root, prepared(Path(root) / "fuzz") as place:
        for part in range(-(-asked.cases // PART)):
            for family, share in shares.items():
                cases = PART * share // sum(SHARES.values())
                done = fuzz(family, cases, asked.seed + part, place)
                total = families.setdefault(family, dict.fromkeys(done, 0) | {"found": []})
                families[family] = {key: total[key] + value for key, value in done.items()}
            counts = {key: sum(one[key] for one in families.values()) for key in ("cases", "complaints", "cpu_seconds")}
            write_part(out, "fuzz", {"command": command, **counts, "families": families})
            print(f"{time.strftime('%X')} {counts}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main_of_study()
