"""Texts to prompts, conversations or packed token blocks: of the embedded corpora, or what `inputs` opens."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from cotrain.config.groups import Data
from cotrain.data.conversations import Template, chats_of, cleaned, is_chat
from cotrain.data.corpora import embedded, pieces
from cotrain.data.inputs import lines_of, read_rows, unreadable
from cotrain.data.prompt_rows import PromptRows, TextStarts, prompt_rows
from cotrain.data.splits import split_of

PROMPT, TEXT = "prompt", "text"  # the column whose rows are whole prompts; data.column= where none is named


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


def embedded_texts(max_bytes: dict[str, int], split: str) -> datasets.Dataset:
    """Rows (text, domain) of the embedded corpora, each domain up to its own number of bytes."""
    rows = [
        {"text": document.text, "domain": domain}
        for domain, size in max_bytes.items()
        if size > 0
        for document in embedded(domain, split, size)
    ]
    return datasets.Dataset.from_list(rows)


def texts_of(rows: datasets.Dataset, path: str, column: str = "text") -> datasets.Dataset:
    """Rows (text, domain) of what was read of `path`.

    Raises ValueError, naming the key to change, for a missing column, a column that holds no strings, or no text;
    UnicodeDecodeError for bytes that are no UTF-8.
    """
    if column not in rows.column_names:
        raise ValueError(f"data.column: {path} has no column {column!r}; it has {rows.column_names}")
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
    data: Data, split: str, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = frozenset()
) -> PromptRows | TextStarts:
    """The configured prompts of a split of `splits`; own ones are split by a hash, embedded ones have no "final". Rows
    of messages, or of prompt and response, are conversations, rows with a prompt alone are prompts, unless data.column=
    names a column of text. data.chat: a text is what a user says to the target, in its chat template. ends: the
    target's end tokens.

    Raises ValueError as `inputs.read_rows`, `texts_of` and `chats_of`.
    """
    if data.path is None:
        sizes = data.bytes if split == "train" else data.held_out_bytes
        texts = embedded_texts(sizes, split)
        return TextStarts(_cut(texts), texts, tokenizer)
    rows, template = read_rows(data), Template(tokenizer, data.template, ends)
    try:
        return _own(data, split, rows, template)
    except UnicodeDecodeError as error:  # `datasets` decodes a row only when it is read
        raise unreadable(data, error) from error


def _own(data: Data, split: str, rows: datasets.Dataset, template: Template) -> PromptRows | TextStarts:
    """Rows of the user's files as conversations, prompts or texts."""
    columns, column, tokenizer = rows.column_names, data.column, template.tokenizer
    if column == TEXT not in columns:  # no column was named
        if is_chat(columns, rows[0]):
            return chats_of(lines_of(data) or map(cleaned, rows), split, template)
        column = PROMPT if PROMPT in columns else TEXT
    texts = texts_of(rows, str(data.path), column)
    if data.chat:
        return chats_of(_asked(texts, template), split, template)
    mine = texts.filter(lambda row: split_of(row["text"]) == split)
    if not len(mine):
        raise ValueError(f"data.path: none of {len(texts)} texts falls to the split {split}: give more")
    if column == PROMPT:
        return prompt_rows(mine, tokenizer)
    return TextStarts(mine, mine, tokenizer)


def _asked(texts: datasets.Dataset, template: Template) -> Iterator[dict[str, Any]]:
    """Each text as the only message of a user. Raises ValueError where the target has no chat template."""
    if template.tokenizer.chat_template is None:
        raise ValueError("data.chat: the target's tokenizer has no chat template; with data.chat=false it is given the "
                         "texts as they are")  # fmt: skip
    for row in texts:
        yield {"messages": [{"role": "user", "content": row["text"]}], "domain": row["domain"]}


def _cut(texts: datasets.Dataset) -> datasets.Dataset:
    """The pieces of long documents, which are what prompts start."""
    rows = [{"text": piece, "domain": row["domain"]} for row in texts for piece in pieces(row["text"])]
    return datasets.Dataset.from_list(rows)


def pack(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Blocks:
    """Tokenize each domain into one stream, cut in blocks of `length`: what corpus steps learn from. Every text follows
    the token that the tokenizer starts a text with; an end token where it writes none.

    Raises ValueError when there is less text than one block, or the tokenizer has no end token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("target.path: its tokenizer has no end token, which separates texts")
    ids, domain, names, start = [], [], sorted(set(texts["domain"])), _start(tokenizer)
    for index, name in enumerate(names):
        part = texts.filter(lambda row, name=name: row["domain"] == name)
        stream = torch.tensor(list(_stream(part["text"], tokenizer, start)), dtype=torch.int32)
        blocks = stream[: len(stream) // length * length].view(-1, length)
        ids.append(blocks)
        domain.append(torch.full((len(blocks),), index))
    if not any(map(len, ids)):
        raise ValueError(f"data.block: {len(texts)} texts make less than one block of {length} tokens")
    whole = torch.cat(ids)
    return Blocks(whole, torch.cat(domain), names, restarted(whole, start))


def restarted(ids: torch.Tensor, start: int) -> torch.Tensor:
    """Places that begin anew at every token which a text in a block starts with; ids (N, T) -> (N, T)."""
    places = torch.arange(ids.shape[1], dtype=torch.int32).expand(ids.shape)
    return places - torch.where(ids == start, places, 0).cummax(1).values


def _start(tokenizer: PreTrainedTokenizerBase) -> int:
    """What a text starts with in a block: the token that the tokenizer writes before any text, as a server sees it."""
    first = tokenizer("a")["input_ids"][0]
    return int(first if first == tokenizer.bos_token_id else tokenizer.eos_token_id)


def _stream(texts: list[str], tokenizer: PreTrainedTokenizerBase, start: int) -> Iterator[int]:
    for first in range(0, len(texts), 1000):
        encoded = tokenizer(list(texts[first : first + 1000]), add_special_tokens=False, verbose=False)["input_ids"]
        for text in encoded:
            yield start
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
