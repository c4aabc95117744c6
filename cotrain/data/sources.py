"""Read texts of data.path, or of the embedded corpora, and turn them into prompts, conversations or token blocks.

data.path is a file, a glob pattern, a folder of files, a saved data set, or a hub id. `datasets` reads all of them. The
name of an existing file is never treated as a pattern, even if it contains `*`, `?` or `[`.
"""

import glob
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from cotrain.config.groups import Data
from cotrain.data.conversations import Template, chats_of, cleaned, is_chat
from cotrain.data.corpora import embedded, pieces
from cotrain.data.fingerprints import contents, stamps
from cotrain.data.prompt_rows import PromptRows, TextStarts, prompt_rows, start_token
from cotrain.data.sequence_tasks import embedded_pairs
from cotrain.data.splits import in_split

LOADERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv",
           ".txt": "text"}  # fmt: skip
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
LINES = {".jsonl", ".ndjson"}
SAVED = ("dataset_dict.json", "state.json")  # written by `save_to_disk` for several splits, or for one
MAGIC = set("*?[")
UNREADABLE = (ValueError, OSError, EOFError, StopIteration, RuntimeError, datasets.exceptions.DatasetsError)


def kind_of(path: Path) -> str | None:
    """The extension that selects the loader, without that of a compression; None if no loader reads the file."""
    ending = (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix
    return ending if ending in LOADERS else None


def files_of(path: str) -> dict[str, Path]:
    """The local files that data.path names, by their names relative to it; empty for a hub id.

    Raises ValueError for a missing file, a pattern that matches nothing, and a folder without data.
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
    """Read the rows of data.path, data.config and data.split; with data.streaming, the first data.take of them.

    Raises ValueError, naming the key to change, if they are missing or unreadable.
    """
    if data.streaming and data.take < 1:
        raise ValueError(f"data.take={data.take}: with data.streaming=true give at least 1")
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
    """A JSON value that identifies the settings and the files from which the prompts of a split come.

    Files are hashed whole; streamed files are identified by size and modification time. For the embedded corpora the
    value contains only the sizes, not the texts, which may differ between machines.
    """
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
    """The name, config and current revision of a hub data set. Raises the errors of `read_rows`."""
    try:
        builder = datasets.load_dataset_builder(str(data.path), name=data.config)
    except UNREADABLE as error:
        raise unreadable(data, error) from error
    return f"{data.path} {builder.config.name} {builder.hash}"


def lines_of(data: Data) -> Iterator[dict[str, Any]] | None:
    """The rows of JSON-lines files, each with only the keys that it has in the file (`datasets` would fill in the keys
    of all rows). None if data.path is a folder or names other files."""
    files = files_of(data.path or "")
    if not files or {kind_of(path) for path in files.values()} - LINES or Path(data.path or "").is_dir():
        return None
    lines = datasets.load_dataset("text", data_files=_literal(files), split="train", streaming=True)
    rows = (json.loads(line["text"]) for line in lines if line["text"].strip())
    return islice(rows, data.take if data.streaming else None)


def _literal(files: dict[str, Path]) -> list[str]:
    """Paths with pattern characters escaped, since `datasets` expands patterns."""
    return [glob.escape(str(file)) for file in files.values()]


def _opened(data: Data, files: dict[str, Path]) -> datasets.Dataset | datasets.IterableDataset:
    path = str(data.path)
    if any((Path(path) / name).is_file() for name in SAVED):
        return _saved(data, path)
    if not files or data.config:
        return datasets.load_dataset(path, name=data.config, split=data.split, streaming=data.streaming)
    loader = _loader(path, files)
    if Path(path).is_dir():  # `datasets` derives splits from the names of its files
        return datasets.load_dataset(loader, data_dir=glob.escape(path), split=data.split, streaming=data.streaming)
    return datasets.load_dataset(loader, data_files=_literal(files), split="train", streaming=data.streaming)


def _loader(path: str, files: dict[str, Path]) -> str:
    """The name of the `datasets` loader for all of the files."""
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
            raise ValueError(f"no split {data.split!r}, it has {', '.join(saved)}: set data.split=")
        saved = saved[data.split]
    return saved.to_iterable_dataset() if data.streaming else saved


def _not_utf8(files: dict[str, Path]) -> str | None:
    """The first line of the files that is not UTF-8, as `file, line 6,`; None if there is none."""
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
    """The ValueError to raise for an error of `datasets`: it names the key and gives the reason."""
    return ValueError(f"data.path: {data.path} cannot be read: {_reason(data, error)}")


def _reason(data: Data, error: BaseException) -> str:
    cause = error.__cause__ or error
    if "codec can't decode" in str(cause) and (place := _not_utf8(files_of(str(data.path)))):
        return f"{place} is not UTF-8 text: save it as UTF-8"
    if isinstance(cause, StopIteration):
        return "it holds no rows"
    first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    if "JSON parse error" in first:
        return f"its lines are not JSON objects ({first}); a file of plain text, one prompt per line, must end in .txt"
    if not files_of(str(data.path)):
        return f"there is no such file or folder, and the hub gave no data set of this name: {first}"
    return first


PROMPT, TEXT = "prompt", "text"  # columns: of whole prompts; the default of data.column
SOURCE = "source"  # column: of whole sources, which an encoder reads


@dataclass
class Blocks(Dataset[dict[str, torch.Tensor]]):
    """N packed blocks of T tokens: ids (N, T), and domain (N,), an index into `domains`. position_ids (N, T): the
    position of each token in its text; None if each block is one text."""

    ids: torch.Tensor
    domain: torch.Tensor
    domains: list[str]
    position_ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self.ids[index].long(), "domain": self.domain[index]}


def embedded_texts(max_bytes: dict[str, int], split: str) -> datasets.Dataset:
    """Rows (text, domain) of the embedded corpora. max_bytes: by domain, see `embedded`."""
    rows = [
        {"text": document.text, "domain": domain}
        for domain, size in max_bytes.items()
        if size > 0
        for document in embedded(domain, split, size)
    ]
    return datasets.Dataset.from_list(rows)


def texts_of(rows: datasets.Dataset, path: str, column: str = "text") -> datasets.Dataset:
    """Turn rows that were read from `path` into rows (text, domain); rows without text are left out.

    Raises ValueError, naming the key to change, if the column is missing, is not of strings, or has no text, and
    UnicodeDecodeError for bytes that are not UTF-8.
    """
    if column not in rows.column_names:
        raise ValueError(f"data.column: {path} has no column {column!r}; it has {rows.column_names}: name the one to "
                         "read")  # fmt: skip
    values = list(rows[column])
    if not all(isinstance(value, str | None) for value in values):
        raise ValueError(f"data.column: {column!r} of {path} holds {rows.features[column]}, not text")
    domains = rows["domain"] if "domain" in rows.column_names else [None] * len(rows)
    filled = [(text, domain) for text, domain in zip(values, domains, strict=True) if text and text.strip()]
    if not filled:
        raise ValueError(f"data.path: {path} holds no text in column {column!r}")
    if len(filled) < len(values):
        print(f"data.path: {len(values) - len(filled)} of {len(values)} rows of {path} hold no text: left out")
    names = ["own" if domain is None else str(domain) for _, domain in filled]
    return datasets.Dataset.from_dict({"text": [text for text, _ in filled], "domain": names})


def source_of(
    data: Data, split: str, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = frozenset(),
    encoder: bool = False,
) -> PromptRows | TextStarts:  # fmt: skip
    """The prompts of one split of `splits.SPLITS`, as data.path and the other settings ask.

    `splits.ALL_ROWS` stands for all rows. A hash assigns the user's rows to splits; the embedded corpora have no split
    "final". If data.column is not set, rows with messages, or with a prompt and a response, are conversations, and rows
    with a prompt alone are whole prompts. With data.chat each text becomes a user's message in the target's chat
    template. ends: the target's end tokens. encoder: whether the target has an encoder. Each row is then a whole
    source: its column "source", else "prompt" or "text"; those of the embedded corpora are of `sequence_tasks`. Raises
    the errors of `read_rows`, `texts_of` and `chats_of`.
    """
    if data.path is None and encoder:
        pairs = embedded_pairs(dict(data.bytes if split == "train" else data.held_out_bytes), split)
        return prompt_rows(pairs.rename_column(SOURCE, TEXT), tokenizer)
    if data.path is None:
        sizes = data.bytes if split == "train" else data.held_out_bytes
        texts = embedded_texts(sizes, split)
        return TextStarts(_cut(texts), texts, tokenizer)
    rows, template = read_rows(data), Template(tokenizer, data.template, ends)
    try:
        if encoder:
            return prompt_rows(_in_split(_column_of_sources(data, rows), split), tokenizer)
        return _own(data, split, rows, template)
    except UnicodeDecodeError as error:  # `datasets` decodes a row only when it is read
        raise unreadable(data, error) from error


def _own(data: Data, split: str, rows: datasets.Dataset, template: Template) -> PromptRows | TextStarts:
    """The prompts of a split of the user's files: conversations, whole prompts or texts."""
    columns, column, tokenizer = rows.column_names, data.column, template.tokenizer
    if column == TEXT not in columns:  # no column was named
        if is_chat(columns, rows[0]):
            return chats_of(lines_of(data) or map(cleaned, rows), split, template)
        column = PROMPT if PROMPT in columns else TEXT
    texts = texts_of(rows, str(data.path), column)
    if data.chat:
        return chats_of(_asked(texts, template), split, template)
    mine = _in_split(texts, split)
    if column == PROMPT:
        return prompt_rows(mine, tokenizer)
    return TextStarts(mine, mine, tokenizer)


def _column_of_sources(data: Data, rows: datasets.Dataset) -> datasets.Dataset:
    """The sources of the user's rows, as rows (text, domain)."""
    column = data.column
    if column == TEXT:  # no other column was named
        column = next((one for one in (SOURCE, PROMPT) if one in rows.column_names), TEXT)
    return texts_of(rows, str(data.path), column)


def _in_split(texts: datasets.Dataset, split: str) -> datasets.Dataset:
    """The rows (text, domain) that are in a split. Raises ValueError if there is none."""
    mine = texts.select(in_split(texts["text"], split))
    if not len(mine):
        raise ValueError(f"data.path: none of {len(texts)} texts falls to the split {split}: give more")
    return mine


def _asked(texts: datasets.Dataset, template: Template) -> Iterator[dict[str, Any]]:
    """Yield each text as a conversation with one message of the user. Raises ValueError if the target has no chat
    template."""
    if template.tokenizer.chat_template is None:
        raise ValueError("data.chat: the target's tokenizer has no chat template; with data.chat=false texts are used "
                         "unchanged")  # fmt: skip
    for row in texts:
        yield {"messages": [{"role": "user", "content": row["text"]}], "domain": row["domain"]}


def _cut(texts: datasets.Dataset) -> datasets.Dataset:
    """Cut documents into `pieces`, so that a document gives several prompts."""
    rows = [{"text": piece, "domain": row["domain"], "document": number}
            for number, row in enumerate(texts) for piece in pieces(row["text"])]  # fmt: skip
    return datasets.Dataset.from_list(rows)


def pack(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Blocks:
    """Tokenize the texts of each domain into one stream, and cut it into blocks of `length` tokens for corpus steps.

    Each text starts with the tokenizer's start token, or its end token if it writes no start token. Raises ValueError
    if there is less text than one block, or the tokenizer has no end token.
    """
    refuse_short(texts, tokenizer, length)
    ids, domain, names, start = [], [], sorted(set(texts["domain"])), start_token(tokenizer)
    for index, name in enumerate(names):
        stream = torch.tensor(list(_stream(_domain(texts, name), tokenizer, start)), dtype=torch.int32)
        blocks = stream[: len(stream) // length * length].view(-1, length)
        ids.append(blocks)
        domain.append(torch.full((len(blocks),), index))
    whole = torch.cat(ids)
    return Blocks(whole, torch.cat(domain), names, restarted(whole, start))


def refuse_short(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """Raise the errors of `pack`. It reads texts only until they fill a block."""
    if tokenizer.eos_token_id is None:
        raise ValueError("target.path: its tokenizer has no end token, which separates texts")
    start = start_token(tokenizer)
    streams = (_stream(_domain(texts, name), tokenizer, start) for name in sorted(set(texts["domain"])))
    if not any(next(islice(stream, length - 1, None), None) is not None for stream in streams):
        raise ValueError(f"data.block: {len(texts)} texts make less than one block of {length} tokens: lower it, or "
                         "set trainer.corpus_steps=0")  # fmt: skip


def _domain(texts: datasets.Dataset, name: str) -> list[str]:
    return [text for text, domain in zip(texts["text"], texts["domain"], strict=True) if domain == name]


def restarted(ids: torch.Tensor, start: int) -> torch.Tensor:
    """Position ids of packed blocks: they restart at 0 at every token `start`; ids (N, T) -> (N, T)."""
    places = torch.arange(ids.shape[1], dtype=torch.int32).expand(ids.shape)
    return places - torch.where(ids == start, places, 0).cummax(1).values


def _stream(texts: list[str], tokenizer: PreTrainedTokenizerBase, start: int) -> Iterator[int]:
    for first in range(0, len(texts), 1000):
        encoded = tokenizer(list(texts[first : first + 1000]), add_special_tokens=False, verbose=False)["input_ids"]
        for text in encoded:
            yield start
            yield from text


class SeededOrder(Sampler[int]):
    """Endless shuffled indices, which depend only on the seed and the epoch; `start` skips the first ones."""

    def __init__(self, size: int, seed: int, start: int = 0) -> None:
        self.size, self.seed, self.start = size, seed, start

    def __iter__(self) -> Iterator[int]:
        epoch, skip = divmod(self.start, self.size)
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            yield from torch.randperm(self.size, generator=generator)[skip:].tolist()
            epoch, skip = epoch + 1, 0
