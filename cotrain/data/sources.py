"""Reads the texts in data.path, or the embedded corpora, and turns them into prompts, conversations or token blocks.

data.path is a file, a glob pattern, a folder of files, a saved data set, or a hub id. The name of an existing file is
never treated as a pattern, even if it contains `*`, `?` or `[`.
"""

import codecs
import csv
import glob
import io
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerBase

from cotrain.config.groups import Data
from cotrain.data.conversations import Template
from cotrain.data.corpora import embedded, text_pieces
from cotrain.data.fingerprints import contents, stamps
from cotrain.data.prompt_rows import PromptRows, Source, TextStarts, prompt_rows, start_token
from cotrain.data.rows import (
    COLUMNS,
    SOURCE,
    TEXT,
    DataRow,
    Reader,
    Skipped,
    has_objects,
    nothing_skipped,
    of_one_kind,
    remarks,
)
from cotrain.data.sequence_tasks import embedded_pairs
from cotrain.data.splits import PART, in_split
from cotrain.data.texts import Texts
from cotrain.errors import first_line
from inference.drafts.weight_files import CONFIG

LOADERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": None}  # extension -> its name in pyarrow
SAVED = ("dataset_dict.json", "state.json")  # written by `save_to_disk` for several splits, or for one
MAGIC = set("*?[")
NOT_UTF8 = "it is not UTF-8 text: save the file as UTF-8"
BLANKS = re.compile(r"\s*")
POINTER = b"version https://git-lfs.github.com/spec/"  # begins a file that Git LFS has not fetched
UNREADABLE = (
    ValueError,
    OSError,
    EOFError,
    RuntimeError,
    OverflowError,  # a date of Arrow that Python has not
    csv.Error,
    lzma.LZMAError,
    pyarrow.ArrowException,
    datasets.exceptions.DatasetsError,
)


def extension_of(path: Path) -> str | None:
    """Return the file extension that selects the loader, such as ".jsonl". The extension of a compression is skipped.
    Return None if no loader reads the file."""
    ending = (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()
    return ending if ending in LOADERS else None


def files_of(path: str) -> dict[str, Path]:
    """Return the local files that data.path names, keyed by their names relative to it. It is empty if `path` may be a
    hub id.

    Raises ValueError for a missing file, a pattern without a match, a folder without data, a model's folder, and a link
    to nothing among the files.
    """
    place = Path(path)
    if place.is_dir():
        if (place / CONFIG).is_file() and any(place.glob("*.safetensors")):
            raise ValueError(f"data.path: {path} is the folder of a model, not of texts: name a file of texts")
        saved = any((place / name).is_file() for name in SAVED)
        matching_files = {
            str(file.relative_to(place)): file
            for file in _present(place.rglob("*"))
            if (saved or extension_of(file)) and not file.name.startswith(".")
        }
        if not matching_files:
            raise ValueError(
                f"data.path: {path} has neither files {', '.join(LOADERS)} nor a saved data set: name another folder"
            )
        return matching_files
    if place.is_file():
        return {place.name: place}
    if MAGIC & set(path):
        matching = {str(file): file for file in _present(map(Path, glob.glob(path, recursive=True)))}
        if not matching:
            raise ValueError(f"data.path: no such file, and none that matches: {path}")
        return {name: file for name, file in matching.items() if extension_of(file)} or matching
    if extension_of(place) or place.is_absolute() or path.startswith(".") or path.count("/") > 1:
        raise ValueError(f"data.path: no such file: {path}")
    return {}


def _present(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that are files, sorted. Raises ValueError if one with the extension of data is a link to
    nothing; its rows would be missed in silence."""
    ordered = sorted(paths)
    for path in ordered:
        if extension_of(path) and not path.name.startswith(".") and not path.exists():
            raise ValueError(f"data.path: {path} is a link to a file that is not there: restore it, or remove the link")
    return [path for path in ordered if path.is_file()]


def read_data(data: Data) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for each row that data.path, data.config and data.split select. With data.streaming, only the
    first data.take rows are read.

    The pairs are those of `rows_in`. Raises ValueError, which names the key to change, if the data are missing or
    unreadable.
    """
    if data.streaming and data.take < 1:
        raise ValueError(f"data.take={data.take}: with data.streaming=true it must be at least 1")
    files = files_of(data.path or "")
    for path in files.values():
        if not path.stat().st_size and extension_of(path):
            raise ValueError(f"data.path: {path} is empty: name a file with rows")
    table = next((path for path in files.values() if path.suffix == ".parquet"), None)
    if table and is_rollout(table):
        raise ValueError(
            f"data.path: {table} has texts that a target sampled, not prompts: set rollout.folder={table.parent} to "
            "use them, and data.path= to the prompts"
        )
    none = True
    try:
        for row in islice(_rows(data, files), data.take if data.streaming else None):
            none = False
            yield row
    except UNREADABLE as error:
        raise unreadable(data, error) from error
    if none:
        raise ValueError(f"data.path: {data.path} has no rows: name data with rows, or another data.split=")


def is_rollout(path: Path) -> bool:
    """Return whether a rollout wrote this Parquet file. In such a file the prompts are token ids. False if the file
    cannot be read."""
    try:
        schema = pyarrow.parquet.read_schema(path)
    except UNREADABLE:  # said where its rows are read
        return False
    return {"prompt", "completion"} <= {*schema.names} and str(schema.field("prompt").type).endswith("int32>")


def prompt_origin(data: Data, split: str) -> dict[str, Any]:
    """Return a JSON object that identifies the origin of a split's prompts: the settings and the files. Two equal
    objects mean the same prompts. split: "train", "held_out" or "final".

    Whole files are hashed. Streamed files are identified by size and modification time. For the embedded corpora the
    object has only their sizes in bytes, because the texts may differ between machines.
    """
    if data.path is None:
        return {"path": "embedded", "bytes": dict(data.bytes if split == "train" else data.held_out_bytes)}
    files = files_of(data.path)
    held = stamps if data.streaming else contents
    return {
        "contents": held(files) if files else _revision(data),
        "config": data.config,
        "split": data.split,
        # "text" was none in earlier versions
        "column": {None: TEXT, TEXT: [TEXT]}.get(data.column, data.column),
        "chat": data.chat,
        "template": json.loads(json.dumps(data.template, default=str)),
        "take": data.take if data.streaming else None,
    }


def _revision(data: Data) -> str:
    """Return the name, config and current revision of the hub data set in data.path, as one text. Raises ValueError,
    which names the key to change, if the data set cannot be read."""
    try:
        builder = datasets.load_dataset_builder(str(data.path), name=data.config)
    except UNREADABLE as error:
        raise unreadable(data, error) from error
    return f"{data.path} {builder.config.name} {builder.hash}"


def _rows(data: Data, files: Mapping[str, Path]) -> Iterator[tuple[str, Any]]:
    path = str(data.path)
    saved = any((Path(path) / name).is_file() for name in SAVED)
    if files and not saved and not data.config:
        loader = _loader(path, files)
        if Path(path).is_dir():  # `datasets` derives splits from the names of its files
            splits = datasets.load_dataset_builder(loader, data_dir=glob.escape(path)).config.data_files
            if data.split not in splits:
                raise ValueError(
                    f"it has no split {data.split!r}, but {', '.join(map(str, splits))}: set data.split= to one of them"
                )
            texts = filter(extension_of, map(Path, splits[data.split]))
            files = {str(file.relative_to(Path(path).absolute())): file for file in texts}
        yield from rows_in(files)
        return
    if saved:
        rows = _saved(data, path)
    else:
        rows = datasets.load_dataset(path, name=data.config, split=data.split, streaming=data.streaming)
    for number, row in enumerate(rows, 1):
        yield f"row {number}", {name: _cleaned(value) for name, value in row.items()}


def rows_in(files: Mapping[str, Path]) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for each row of the files. files: path by name; the name becomes part of `place`.

    place: where the row is, such as "own.jsonl, line 3". A row is a mapping. A line that is not JSON is yielded as
    text, and a row that cannot be read as the exception that says why. Raises ValueError, which names the file and the
    last row before it, if the rest of a file cannot be read.
    """
    readers = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".txt": _lines}
    for name, path in files.items():
        place = name
        try:
            with path.open("rb") as file:
                if file.read(len(POINTER)) == POINTER:
                    raise ValueError("it is only a pointer of Git LFS: fetch the file with `git lfs pull`")
            for number, row in readers.get(extension_of(path) or "", _json)(path):
                place = f"{name}, {number}"
                yield place, row
        except UNREADABLE as error:
            raise ValueError(f"{'after ' * (place != name)}{place}: {first_line(error)}") from error


def _bytes(path: Path) -> Any:
    """Return an open binary file whose content is decompressed as it is read."""
    if (end := path.suffix.lower()) == ".xz":
        return lzma.open(path)
    return io.BufferedReader(pyarrow.input_stream(str(path), compression=COMPRESSED.get(end)))


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for each line that is not blank. place: for example "line 3". A line of a .txt file becomes
    {TEXT: line}; any other line is read as JSON."""
    with _bytes(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")  # files that were joined have marks inside
            except UnicodeDecodeError:
                yield f"line {number}", ValueError(NOT_UTF8)
                continue
            if text.strip():
                yield f"line {number}", {TEXT: text} if extension_of(path) == ".txt" else _parsed(text)


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for each row of a JSON file: a list of objects, an object that wraps such a list, objects over
    several lines, or JSON lines. The file's extension does not matter."""
    with _bytes(path) as file:
        begin = file.read(1024)
        start = begin.removeprefix(codecs.BOM_UTF8).lstrip()
        whole = start[:1] == b"[" or start.split(b"\n")[0].strip() == b"{"
        values = _values(begin + file.read()) if whole else None
    if values is None:
        lines = _lines(path)
        first = list(islice(lines, 2))
        values = [row for _, row in first]
        if len(values) != 1 or _wrapped(values[0]) is None:
            yield from chain(first, lines)
            return
    rows = _wrapped(values[0]) if len(values) == 1 else None
    yield from ((f"row {number}", row) for number, row in enumerate(values if rows is None else rows, 1))


def _values(content: bytes) -> list[Any] | None:
    """Return the JSON values of a file that begins with a list or with an object over several lines. Return None if it
    is to be read by lines. Raises ValueError if it is neither."""
    try:
        text = content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(NOT_UTF8) from error
    decoder, values, at = json.JSONDecoder(object_pairs_hook=_object), list[Any](), 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            values.append(value)
            at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
    except json.JSONDecodeError as error:
        if isinstance(_parsed(text.partition("\n")[0]), list):
            return None
        raise ValueError(f"it is no whole JSON: {error}") from error
    return values


def _wrapped(value: Any) -> list[Any] | None:
    """Return the rows of a JSON value that is all of a file: a list, or the only list of objects in an object that is
    no row itself. Return None if there are no such rows."""
    if not isinstance(value, Mapping) or {*COLUMNS, SOURCE} & value.keys():
        return value if isinstance(value, list) else None
    lists = [one for one in value.values() if has_objects(one)]
    return lists[0] if len(lists) == 1 else None


def _parsed(line: str) -> Any:
    """Return the value of a line of JSON, an exception if the line begins like JSON and cannot be read, or else the
    line."""
    try:
        return json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        said = ValueError(f"it is no whole JSON: {error.msg}, at character {error.pos}")
        return said if line.lstrip().startswith(("{", "[")) else line
    except (ValueError, RecursionError) as error:  # a number that is too long, values that are nested too deeply
        return error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        _refuse_twice([name for name, _ in pairs])
    return values


def _refuse_twice(names: Sequence[str]) -> None:
    """Raise ValueError if two columns or keys have the same name; only one of the values would be read."""
    if len({*names}) < len(names):
        raise ValueError(f"it has {Counter(names).most_common(1)[0][0]!r} twice: leave one out, or rename it")


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    # bytes that are not UTF-8 are refused in the cells that are read
    with io.TextIOWrapper(_bytes(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        # strict: otherwise a quote that is not closed takes all rows after it into its cell
        rows = csv.DictReader(file, delimiter="\t" if extension_of(path) == ".tsv" else ",", strict=True)
        names = rows.fieldnames or ()
        _refuse_twice(names)
        if any("\ud800" <= one <= "\udfff" for one in "".join(names)):
            raise ValueError(NOT_UTF8)
        for row in rows:
            yield f"line {rows.line_num}", row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    file = pyarrow.parquet.ParquetFile(path)
    _refuse_twice(file.schema_arrow.names)
    for number, row in enumerate((row for batch in file.iter_batches() for row in batch.to_pylist()), 1):
        yield f"row {number}", {name: _cleaned(value) for name, value in row.items()}


def _cleaned(value: Any) -> Any:
    """Return the value without keys that are null, at any depth. Arrow gives every row the keys of all rows."""
    if isinstance(value, Mapping):
        return {key: _cleaned(one) for key, one in value.items() if one is not None}
    return [_cleaned(one) for one in value] if isinstance(value, list) else value


def _loader(path: str, files: Mapping[str, Path]) -> str:
    """Return the name of the `datasets` loader for all the files. path: data.path, for the error message. Raises
    ValueError unless exactly one loader reads them."""
    counts = Counter(kind for kind in map(extension_of, files.values()) if kind)
    kinds = [kind for kind, _ in counts.most_common()]
    loaders = {LOADERS[kind] for kind in kinds}
    if not loaders:
        raise ValueError(f"it ends in none of {', '.join(LOADERS)}")
    if len(loaders) > 1:
        raise ValueError(
            f"it holds files of several types, {', '.join(kinds)}: name one with a pattern, as in "
            f"data.path={path}/*{kinds[0]}"
        )
    return loaders.pop()


def _saved(data: Data, path: str) -> datasets.Dataset | datasets.IterableDataset:
    saved = datasets.load_from_disk(path)
    if isinstance(saved, datasets.DatasetDict):
        if data.split not in saved:
            raise ValueError(f"it has no split {data.split!r}, but {', '.join(saved)}: set data.split= to one of them")
        saved = saved[data.split]
    return saved.to_iterable_dataset() if data.streaming else saved


def unreadable(data: Data, error: BaseException) -> ValueError:
    """Return a ValueError for an error that was raised while data.path was read. Its message names data.path and the
    reason."""
    cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else None
    reason = first_line(cause or error)
    if not files_of(str(data.path)):
        reason = f"there is no such file or folder, and no data set of this name was read from the hub: {reason}"
    return ValueError(f"data.path: {data.path} cannot be read: {reason}")


def embedded_texts(max_bytes: dict[str, int], split: str) -> datasets.Dataset:
    """Return rows (text, domain) of the embedded corpora. max_bytes: how many bytes of UTF-8 text to read, keyed by
    domain. split: "train" or "held_out". Raises ValueError for any other domain or split, or if a domain has no
    document."""
    return datasets.Dataset.from_list(
        [
            {"text": document.text, "domain": domain}
            for domain, size in max_bytes.items()
            if size > 0
            for document in embedded(domain, split, size)
        ]
    )


def source_of(data: Data, split: str, template: Template, encoder: bool = False) -> Source:
    """Return the prompts of one split: rows that are whole prompts, or texts that begin with a prompt.

    data: the settings of the data. split: "train", "held_out", "final" or `splits.ALL_ROWS`. template: renders the
    messages of rows. encoder: whether the target has an encoder; each row is then one whole encoder input. Raises
    ValueError, which names the key to change, if the data cannot be read or the split has no row.
    """
    return sources_of(data, (split,), template, encoder)[split]


def sources_of(data: Data, splits: Collection[str], template: Template, encoder: bool = False) -> dict[str, Source]:
    """Return the rows of each split, keyed by split: prompts, or texts that begin with a prompt.

    Args:
        data: the settings of the data. data.path=null selects the embedded corpora.
        splits: some of "train", "held_out" and "final", to which a hash assigns the user's rows; `splits.ALL_ROWS`
            stands for all rows. The embedded corpora have no split "final".
        template: renders the messages of rows.
        encoder: whether the target has an encoder. Each row is then one whole encoder input; with the embedded corpora
            these are the inputs of the sequence tasks.

    Raises ValueError, which names the key to change, if the data are missing or unreadable, if more than a tenth of the
    rows cannot be read, or if a split has none.
    """
    if data.path is None:
        return {split: _embedded(data, split, template.tokenizer, encoder) for split in splits}
    templated = template.tokenizer.chat_template is not None
    if data.chat and not templated:
        raise ValueError(
            "data.chat=true: the target's tokenizer has no chat template: set data.chat=false, which uses texts as "
            "they are"
        )
    reader, skipped = Reader(data.column, data.chat, templated, encoder), nothing_skipped()
    rows, total, read = list[DataRow](), 0, set[str]()
    for total, (place, values) in enumerate(read_data(data), 1):  # noqa: B007
        read.add(place.rpartition(", ")[0])
        try:
            rows.append(reader.row(values, place))
        except ValueError as error:
            skipped.add(place, error)
    key = "data.column" if data.column and not rows else "data.path"
    rows = of_one_kind(rows, skipped)
    skipped.refuse(f"{key}: {data.path}", total)
    if not rows:
        raise ValueError(f"data.path: {data.path} has no text, all rows are skipped: {skipped.said()}")
    lost, sources = nothing_skipped(), dict[str, Source]()
    for split in splits:
        openings = [row.opening for row in rows]
        mine = [rows[place] for place in in_split(openings, split)]
        if not mine:
            raise ValueError(
                f"data.path: the split {split} gets none of the {len(rows)} rows: they begin with {len({*openings})} "
                f"different prompts, and at least {PART} are needed: give more rows"
            )
        sources[split] = _texts(mine, template.tokenizer) if mine[0].text else _turns(mine, template, skipped, lost)
        skipped.refuse(f"data.path: {data.path}", total)
        if not len(sources[split]):
            raise ValueError(f"data.path: no row of the split {split} can be read; rows skipped: {skipped.said()}")
    said = remarks(rows, reader, skipped, total)
    if "" not in read and (unread := [name for name in files_of(data.path) if name not in read]):
        said[0] += f"; files not read ({len(unread)}): {', '.join(unread[:3])}"
    if lost.reasons:
        said.append(
            f"data.path: {lost.reasons.total()} answers are not learnt from, but their prompts are used: {lost.said()}"
        )
    return {split: replace(source, remarks=tuple(said)) for split, source in sources.items()}


def sources_apart(
    data: Data, splits: Collection[str], template: Template, encoder: bool, limit: Callable[[Mapping[str, Source]], int]
) -> dict[str, Source]:
    """Return the rows of each split, keyed by split: prompts, or texts that begin with a prompt (`sources_of`). If both
    "train" and "held_out" are among the splits, held-out prompts that share a prefix with a training prompt are left
    out.

    data: the settings of the data. template: renders the messages of rows. encoder: whether the target has an encoder.
    limit: a function from the rows of each split to the most tokens of a prompt; longer prompts are not compared.
    Raises ValueError, which names the key, if the data cannot be read or a split has no row left.
    """
    sources = sources_of(data, splits, template, encoder)
    tokens = limit(sources)
    if {"train", "held_out"} <= sources.keys():
        sources["held_out"] = sources["held_out"].without(sources["train"].each(tokens), tokens)
    return sources


def _embedded(data: Data, split: str, tokenizer: PreTrainedTokenizerBase, encoder: bool) -> Source:
    sizes = dict(data.bytes if split == "train" else data.held_out_bytes)
    if encoder:
        return prompt_rows(embedded_pairs(sizes, split).rename_column(SOURCE, TEXT), tokenizer)
    texts = embedded_texts(sizes, split)
    return TextStarts(_cut(texts), texts, tokenizer)


def _texts(rows: Sequence[DataRow], tokenizer: PreTrainedTokenizerBase) -> TextStarts:
    whole = datasets.Dataset.from_dict({"text": [row.text for row in rows], "domain": [row.domain for row in rows]})
    return TextStarts(whole, whole, tokenizer)


def _turns(rows: Sequence[DataRow], template: Template, skipped: Skipped, lost: Skipped) -> PromptRows:
    """Return the prompts of rows, with their completions. Two arguments are changed in place: a row that the chat
    template cannot render is added to `skipped`, and an answer that cannot be used is added to `lost`. The prompt of
    such an answer has no completion."""
    sources = list[dict[str, Any]]()
    for unit, row in enumerate(rows):
        try:
            turns = list(template.turns(row))
        except ValueError as error:
            skipped.add(row.place, error)
            continue
        sources += [
            {"domain": row.domain, "prompt": turn.prompt, "completion": turn.completion, "unit": unit} for turn in turns
        ]
        for turn in turns:
            if turn.lost:
                lost.add(row.place, turn.lost)
    return PromptRows(sources, rendered=any(row.messages for row in rows))


def _cut(texts: datasets.Dataset) -> datasets.Dataset:
    """Return documents cut into `text_pieces`, so that one document gives several prompts."""
    return datasets.Dataset.from_list(
        [
            {"text": piece, "domain": row["domain"], "document": number}
            for number, row in enumerate(texts)
            for piece in text_pieces(row["text"])
        ]
    )


def pack_blocks(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Texts:
    """Tokenize the texts of each domain into one stream, and return the streams cut into blocks of `length` tokens. The
    last tokens of a stream, too few for a block, are dropped. The first token of a block is its prompt, so that every
    later token counts in the loss.

    texts: rows (text, domain). Each text begins with the tokenizer's start token, or its end token if the tokenizer
    writes no start token. Raises ValueError if the texts fill less than one block, or if the tokenizer has no end
    token.
    """
    refuse_short(texts, tokenizer, length)
    ids, domains, start = [], list[str](), start_token(tokenizer)
    for name in sorted(set(texts["domain"])):
        stream = torch.tensor(list(_stream(texts, name, tokenizer, start)), dtype=torch.int64)
        ids.append(stream[: len(stream) // length * length].view(-1, length))
        domains += [name] * len(ids[-1])
    whole = torch.cat(ids)
    first = torch.ones(len(whole), dtype=torch.int64)
    return Texts(whole, first, torch.full_like(first, length), domains, restarted(whole, start))


def refuse_short(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """Raise ValueError if `pack_blocks` would: the texts fill less than one block of `length` tokens, or the tokenizer
    has no end token. Texts, rows (text, domain), are tokenized only until one block is full."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "target.path: its tokenizer has no end token to separate texts: set eos_token in tokenizer_config.json"
        )
    start = start_token(tokenizer)
    streams = (_stream(texts, name, tokenizer, start) for name in sorted(set(texts["domain"])))
    if not any(next(islice(stream, length - 1, None), None) is not None for stream in streams):
        raise ValueError(
            f"data.block={length}: {len(texts)} texts make less than one block of {length} tokens: lower data.block=, "
            "or set trainer.corpus_steps=0"
        )


def restarted(ids: torch.Tensor, start: int) -> torch.Tensor:
    """Return the position ids (N, T) of packed blocks ids (N, T). Positions restart at 0 at every token `start`."""
    places = torch.arange(ids.shape[1], dtype=torch.int32).expand(ids.shape)
    return places - torch.where(ids == start, places, 0).cummax(1).values


def _stream(texts: datasets.Dataset, name: str, tokenizer: PreTrainedTokenizerBase, start: int) -> Iterator[int]:
    """Yield the ids of the texts of a domain, one after the other, each behind the token `start`."""
    own = [text for text, domain in zip(texts["text"], texts["domain"], strict=True) if domain == name]
    for first in range(0, len(own), 1000):
        encoded = tokenizer(own[first : first + 1000], add_special_tokens=False, verbose=False)["input_ids"]
        for text in encoded:
            yield start
            yield from text
