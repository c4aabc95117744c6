"""Opening what data.path names: a file, several by a pattern, a folder of files, a saved data set, or a hub id.

Everything is read by `datasets`. Patterns' characters in a name that exists are the name's own.
"""

import glob
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from cotrain.config.groups import Data
from cotrain.data.fingerprints import contents, stamps

LOADERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv",
           ".txt": "text"}  # fmt: skip
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
LINES = {".jsonl", ".ndjson"}
SAVED = ("dataset_dict.json", "state.json")  # of `save_to_disk`: several splits, or one
MAGIC = set("*?[")
UNREADABLE = (ValueError, OSError, EOFError, StopIteration, RuntimeError, datasets.exceptions.DatasetsError)


def kind_of(path: Path) -> str | None:
    """The ending that says how a file is read, without that of its compression; None for others."""
    ending = (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix
    return ending if ending in LOADERS else None


def files_of(path: str) -> dict[str, Path]:
    """The local files that a path names, by their names among themselves; none of a hub id.

    Raises ValueError, naming the key, for a file or pattern that is not there and a folder without data.
    """
    place = Path(path)
    if place.is_dir():
        saved = any((place / name).is_file() for name in SAVED)
        matching_files = {str(file.relative_to(place)): file for file in sorted(place.rglob("*"))
                 if file.is_file() and (saved or kind_of(file)) and not file.name.startswith(".")}  # fmt: skip
        if not matching_files:
            raise ValueError(f"data.path: {path} cannot be read: it holds none of {', '.join(LOADERS)}, and no saved "
                             "data set")  # fmt: skip
        return matching_files
    if place.is_file():
        return {place.name: place}
    if MAGIC & set(path):
        matching = {name: Path(name) for name in sorted(glob.glob(path, recursive=True)) if Path(name).is_file()}
        if not matching:
            raise ValueError(f"data.path: no such file, and none that matches: {path}")
        return matching
    if kind_of(place) or place.is_absolute() or path.startswith(".") or path.count("/") > 1:
        raise ValueError(f"data.path: no such file: {path}")
    return {}


def read_rows(data: Data) -> datasets.Dataset:
    """The rows that data.path names, of data.config and data.split; of a stream the first data.take.

    Raises ValueError, naming the key to change, for what cannot be found or read.
    """
    if data.streaming and data.take < 1:
        raise ValueError(f"data.take: {data.take} rows of a stream are none: at least 1")
    files = files_of(data.path or "")
    for path in files.values():
        if not path.stat().st_size and kind_of(path):
            raise ValueError(f"data.path: {path} is empty")
    try:
        rows = _opened(data, files)
        if isinstance(rows, datasets.IterableDataset):
            rows = datasets.Dataset.from_list(list(rows.take(data.take)))
    except UNREADABLE as error:
        raise unreadable(data, error) from error
    if not len(rows):
        raise ValueError(f"data.path: {data.path} holds no rows")
    return rows


def prompt_origin(data: Data, split: str) -> dict[str, Any]:
    """What prompts of a split are made from, as far as the settings and files say: a JSON value to compare. Embedded
    corpora are this machine's: of them only the sizes count. Files that are streamed count by size and time."""
    if data.path is None:
        return {"path": "embedded", "bytes": dict(data.bytes if split == "train" else data.held_out_bytes)}
    files = files_of(data.path)
    held = stamps if data.streaming else contents
    return {
        "contents": held(files) if files else _revision(data),
        "config": data.config,
        "split": data.split,
        "column": data.column,
        "chat": data.chat,
        "template": json.loads(json.dumps(dict(data.template), default=str)),
        "take": data.take if data.streaming else None,
    }


def _revision(data: Data) -> str:
    """Of a data set of the hub: its name, config and what the hub has now. Raises ValueError as `read_rows`."""
    try:
        builder = datasets.load_dataset_builder(str(data.path), name=data.config)
    except UNREADABLE as error:
        raise unreadable(data, error) from error
    return f"{data.path} {builder.config.name} {builder.hash}"


def lines_of(data: Data) -> Iterator[dict[str, Any]] | None:
    """Rows of files of JSON lines with the keys that were written, as a table, which gives all the keys of any, would
    not; None where data.path names other files, or a split of theirs."""
    files = files_of(data.path or "")
    if not files or {kind_of(path) for path in files.values()} - LINES or Path(data.path or "").is_dir():
        return None
    lines = datasets.load_dataset("text", data_files=_literal(files), split="train", streaming=True)
    rows = (json.loads(line["text"]) for line in lines if line["text"].strip())
    return islice(rows, data.take if data.streaming else None)


def _literal(files: dict[str, Path]) -> list[str]:
    """As `datasets` takes files by patterns."""
    return [glob.escape(str(file)) for file in files.values()]


def _opened(data: Data, files: dict[str, Path]) -> datasets.Dataset | datasets.IterableDataset:
    path = str(data.path)
    if any((Path(path) / name).is_file() for name in SAVED):
        return _saved(data, path)
    if not files or data.config:
        return datasets.load_dataset(path, name=data.config, split=data.split, streaming=data.streaming)
    loader = _loader(path, files)
    if Path(path).is_dir():  # its files' names may say of which split they are
        return datasets.load_dataset(loader, data_dir=glob.escape(path), split=data.split, streaming=data.streaming)
    return datasets.load_dataset(loader, data_files=_literal(files), split="train", streaming=data.streaming)


def _loader(path: str, files: dict[str, Path]) -> str:
    """What reads all of the files."""
    kinds = sorted({kind for kind in map(kind_of, files.values()) if kind})
    loaders = {LOADERS[kind] for kind in kinds}
    if not loaders:
        raise ValueError(f"it ends in none of {', '.join(LOADERS)}")
    if len(loaders) > 1:
        raise ValueError(
            f"it holds files of several kinds, {', '.join(kinds)}: give a pattern, as in {path}/*{kinds[0]}"
        )
    return loaders.pop()


def _saved(data: Data, path: str) -> datasets.Dataset | datasets.IterableDataset:
    saved = datasets.load_from_disk(path)
    if isinstance(saved, datasets.DatasetDict):
        if data.split not in saved:
            raise ValueError(f"no split {data.split!r}, it has {', '.join(saved)}: data.split=")
        saved = saved[data.split]
    return saved.to_iterable_dataset() if data.streaming else saved


def _not_utf8(files: dict[str, Path]) -> str | None:
    """The first line of any that is no UTF-8, as `file, line 6`."""
    for name, path in files.items():
        if not kind_of(path) or path.suffix in {*COMPRESSED, ".parquet"}:
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    return f"{name}, line {number},"
    return None


def unreadable(data: Data, error: BaseException) -> ValueError:
    """What to raise for an error of `datasets`: it names the key, and the line of a text that is not UTF-8."""
    return ValueError(f"data.path: {data.path} cannot be read: {_reason(data, error)}")


def _reason(data: Data, error: BaseException) -> str:
    cause = error.__cause__ or error
    if "codec can't decode" in str(cause) and (place := _not_utf8(files_of(str(data.path)))):
        return f"{place} is not UTF-8 text: save it as UTF-8"
    if isinstance(cause, StopIteration):
        return "it holds no rows"
    first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    if "JSON parse error" in first:
        return (
            f"it holds no JSON objects, one a line ({first}); plain text, a prompt a line, is a file that ends in .txt"
        )
    if not files_of(str(data.path)):
        return f"it is no file, no folder, and no data set that the hub gave: {first}"
    return first
