"""Text to token blocks, or to conversations: embedded corpora, jsonl, parquet or any Hugging Face data set."""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from cotrain.chats import Chats, Template, chats_of, cleaned, is_chat
from cotrain.config import Data
from cotrain.corpora import Document, embedded

LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}


@dataclass
class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Token blocks ids (N, T), the domain of each as an index (N,) into `domains`; position_ids (N, T): the place of
    each token in its own text, None where a block is one text."""

    ids: torch.Tensor
    domain: torch.Tensor
    domains: list[str]
    position_ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self.ids[index].long(), "domain": self.domain[index]}

    def prompts(self, count: int, tokens: int, seed: int) -> list[tuple[str, list[int]]]:
        """(domain, prompt ids): the first `tokens` of blocks chosen by seed, `count` of each domain.

        Raises ValueError when a domain has fewer blocks, or blocks are shorter.
        """
        if tokens > self.ids.shape[1]:
            raise ValueError(f"rollout.prompt_tokens: {tokens} do not fit data.block={self.ids.shape[1]}")
        generator, found = torch.Generator().manual_seed(seed), []
        for index, domain in enumerate(self.domains):
            mine = (self.domain == index).nonzero().squeeze(1)
            if len(mine) < count:
                raise ValueError(f"rollout.texts, rollout.held_out_texts: {count} prompts asked of {domain}, there are "
                                 f"{len(mine)} blocks: ask for fewer, lower data.block, or give more text")  # fmt: skip
            chosen = mine[torch.randperm(len(mine), generator=generator)[:count]].tolist()
            found += [(domain, self.ids[at, :tokens].tolist()) for at in chosen]
        return found

    def several(self, tokens: int, seed: int) -> list[list[int]]:
        """The first `tokens` of every block, in an order of the seed."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return [row.tolist() for row in self.ids[order, :tokens]]


def embedded_texts(max_bytes: dict[str, int], split: str) -> datasets.Dataset:
    """Rows (text, domain) of the embedded corpora, each domain up to its own number of bytes."""
    rows = [
        {"text": document.text, "domain": domain}
        for domain, size in max_bytes.items()
        if size > 0
        for document in embedded(domain, split, size)
    ]
    return datasets.Dataset.from_list(rows)


def read_rows(path: str, split: str = "train") -> datasets.Dataset:
    """A jsonl, parquet or text file, or a data set by hub id or local folder.

    Raises ValueError, naming the key to change, for what cannot be found or read.
    """
    loader = LOADERS.get(Path(path).suffix)
    if loader and not Path(path).is_file():
        raise ValueError(f"data.path: no such file: {path}")
    if loader and not Path(path).stat().st_size:
        raise ValueError(f"data.path: {path} is empty")
    try:
        return datasets.load_dataset(loader, data_files=path, split="train") if loader else _open(path, split)
    except (ValueError, OSError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"data.path: {path} cannot be read: {error.__cause__ or error}") from error


def texts_of(rows: datasets.Dataset, path: str, column: str = "text") -> datasets.Dataset:
    """Rows (text, domain) of what was read of `path`.

    Raises ValueError, naming the key to change, for a missing column or one of other things than text, bytes that are
    no UTF-8, or no text.
    """
    if column not in rows.column_names:
        raise ValueError(f"data.column: {path} has no column {column!r}; it has {rows.column_names}")
    try:
        values = list(rows[column])
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path: {path} cannot be read: {error}") from error
    if not all(isinstance(value, str | None) for value in values):
        raise ValueError(f"data.column: {column!r} of {path} holds {rows.features[column]}, not text")
    domains = rows["domain"] if "domain" in rows.column_names else [None] * len(rows)
    kept = [(text, domain) for text, domain in zip(values, domains, strict=True) if text and text.strip()]
    if not kept:
        raise ValueError(f"data.path: {path} holds no text in column {column!r}")
    if len(kept) < len(values):
        print(f"data.path: {len(values) - len(kept)} of {len(values)} rows of {path} hold no text: left out")
    names = ["own" if domain is None else str(domain) for _, domain in kept]
    return datasets.Dataset.from_dict({"text": [text for text, _ in kept], "domain": names})


def _open(path: str, split: str) -> datasets.Dataset:
    return datasets.load_from_disk(path) if Path(path).is_dir() else datasets.load_dataset(path, split=split)


def source_of(
    data: Data, split: str, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = frozenset()
) -> Blocks | Chats:
    """The configured texts, split "train" or "held_out"; own ones are split by a hash. Rows of messages, or of prompt
    and response, are conversations, unless data.column names a column of text. ends: the target's end tokens.

    Raises ValueError as `read_rows`, `texts_of`, `pack` and `chats_of`.
    """
    if data.path is None:
        sizes = data.bytes if split == "train" else data.held_out_bytes
        return pack(embedded_texts(sizes, split), tokenizer, data.block)
    rows = read_rows(data.path, data.split)
    if data.column not in rows.column_names and is_chat(rows.column_names):
        return chats_of(_as_written(data.path, rows), split, Template(tokenizer, data.template, ends))
    texts = texts_of(rows, data.path, data.column)
    mine = texts.filter(lambda row: Document(row["text"], "").held_out == (split == "held_out"))
    if not len(mine):
        raise ValueError(f"data.path: none of {len(texts)} texts falls to the split {split}: give more")
    return pack(mine, tokenizer, data.block)


def _as_written(path: str, rows: datasets.Dataset) -> Iterable[dict[str, Any]]:
    """Rows whose objects have the keys that were written: a table gives all the keys of any."""
    if Path(path).suffix != ".jsonl":
        return map(cleaned, rows)
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def pack(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Blocks:
    """Tokenize each domain into one stream, an end token before every text, cut in blocks of `length`.

    Raises ValueError when there is less text than one block, or the tokenizer has no end token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("target.path: its tokenizer has no end token, which separates texts")
    ids, domain, names = [], [], sorted(set(texts["domain"]))
    for index, name in enumerate(names):
        part = texts.filter(lambda row, name=name: row["domain"] == name)
        stream = torch.tensor(list(_stream(part["text"], tokenizer)), dtype=torch.int32)
        blocks = stream[: len(stream) // length * length].view(-1, length)
        ids.append(blocks)
        domain.append(torch.full((len(blocks),), index))
    if not any(map(len, ids)):
        raise ValueError(f"data.block: {len(texts)} texts make less than one block of {length} tokens")
    whole = torch.cat(ids)
    return Blocks(whole, torch.cat(domain), names, restarted(whole, tokenizer.eos_token_id))


def restarted(ids: torch.Tensor, end: int) -> torch.Tensor:
    """Places that begin anew at every end token, which a text in a block starts with; ids (N, T) -> (N, T)."""
    places = torch.arange(ids.shape[1], dtype=torch.int32).expand(ids.shape)
    return places - torch.where(ids == end, places, 0).cummax(1).values


def _stream(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    for start in range(0, len(texts), 1000):
        encoded = tokenizer(list(texts[start : start + 1000]), add_special_tokens=False, verbose=False)["input_ids"]
        for text in encoded:
            yield tokenizer.eos_token_id
            yield from text


class SeededOrder(Sampler[int]):
    """Endless shuffled indices, a pure function of (seed, epoch); `start` skips what a run has seen."""

    def __init__(self, size: int, seed: int, start: int = 0) -> None:
        self.size, self.seed, self.start = size, seed, start

    def __iter__(self) -> Iterator[int]:
        epoch, skip = divmod(self.start, self.size)
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            yield from torch.randperm(self.size, generator=generator)[skip:].tolist()
            epoch, skip = epoch + 1, 0
