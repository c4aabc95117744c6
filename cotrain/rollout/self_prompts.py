"""Prompts that the target samples itself, so that a run needs no data set (`data=self`; Magpie, arXiv 2406.08464).

The context is the text that a chat template writes before the user's message. A target that was trained on chats
continues it with such a message. Every second context also has the first words of the message, or a system message, so
that prompts of many tasks come up. A target without a chat template continues its start token with a text, whose
beginning is a prompt. Prompts that pass the filters are written as rows of JSON, and read like a data set of the user:
split by a hash, rendered by the template.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cotrain.data.conversations import Template
from cotrain.data.prompt_rows import start_token
from cotrain.data.rows import Message, Reader
from cotrain.data.splits import PERCENT, SPLITS, splits_of
from cotrain.data.texts import short_hash
from cotrain.errors import UserError
from cotrain.paths import folder
from cotrain.ranks import awaited, rank
from cotrain.rollout.samplers import Sampler, collect
from inference import Sampling
from inference.drafts.atomic import write_atomic, write_json
from inference.drafts.weight_files import read_json

SELF = "self"  # the domain
GIVEN = "openings.jsonl"  # in the folder data: first words for many tasks, which seldom come up by themselves
NAME = "self_prompts"  # .jsonl: the rows; .json: what they were sampled from, and how many were dropped
CONTENT = "content0of0the0user"  # stands for the user's content while a template is rendered
LONGEST = 256  # tokens of a prompt; one that is longer has not ended, and is dropped
SHORTEST = 4  # tokens of a prompt
PIECE, REPEATED = 3, 0.5  # at least this share of the pieces of so many tokens must be distinct
MOST = 4  # times as many prompts are asked for as a run needs, if the filters drop most of them
MARGIN = 1.1  # of the first request, since filters drop some
FILTERS = ("unfinished", "empty", "short", "markup", "repetitive", "duplicate")  # in this order
WORDS, ALIKE = 4, 0.7  # prompts are duplicates if they share more than this share of their sequences of so many words


@dataclass(frozen=True)
class Opening:
    """Where the target begins to write a prompt.

    Args:
        ids: token ids of the context that the target continues.
        ends: token ids that end the prompt.
        close: a text that also ends the prompt, or "".
        chat: whether the prompt is a user's message; otherwise it is a text.
        special: token ids that no prompt may have.
        begin: the first words of the user's message, which end the context.
        before: the messages before the user's.
    """

    ids: list[int]
    ends: frozenset[int]
    close: str = ""
    chat: bool = False
    special: frozenset[int] = frozenset()
    begin: str = ""
    before: tuple[Message, ...] = ()


def opening(template: Template, begin: str = "", before: Sequence[Message] = ()) -> Opening:
    """Return where the target begins to write a prompt: at the place of the user's content in its chat template or,
    without a template, after its start token.

    begin: the first words of the content, which are given. before: messages before the user's. The text that the
    template writes after the content ends the prompt: its first special token, or else its first line. Raises
    ValueError if the template changes the content, or fails.
    """
    tokenizer, ends = template.tokenizer, frozenset(template.ends)
    if tokenizer.chat_template is None:
        return Opening([start_token(tokenizer)], ends, special=template_ids(tokenizer))
    try:
        text = template.text([*before, {"role": "user", "content": CONTENT}], None, prompt=True)
    except ValueError as error:
        raise ValueError(
            f"data=self: {error}: correct the template, or set data.path= to messages that it renders"
        ) from error
    context, content, after = text.partition(CONTENT)
    if not content:
        raise ValueError(
            "data=self: the target's chat template changes the user's content, so prompts cannot be sampled: set "
            "data.path= to a file of prompts"
        )
    # a space belongs to the first word that follows it
    ids, after = template.ids(context + begin if begin else context.rstrip(" ")), after.strip()
    closing = template.ids(after)[:1]
    special = template_ids(tokenizer)
    if closing and closing[0] in special:
        ends, after = ends | {closing[0]}, ""
    close = after.split("\n")[0].strip()
    return Opening(ids or [start_token(tokenizer)], ends, close, True, special, begin, tuple(before))


def openings(template: Template) -> list[Opening]:
    """Return where the target begins to write prompts in turn: every second time without anything given, otherwise
    behind the messages of a row of `GIVEN`, whose last one is the beginning of the user's message. Rows that the chat
    template does not render are left out. Without a template there is one. Raises ValueError as `opening` does."""
    plain = opening(template)
    turns = [plain]
    for row in (folder("data") / GIVEN).read_text(encoding="utf-8").splitlines() if plain.chat else ():
        *before, last = json.loads(row)["messages"]
        with suppress(ValueError):  # some templates have no system message
            given = opening(template, last["content"], before)
            turns += [given, plain] if given.ids != plain.ids else []  # others leave it out
    return turns[:-1] or turns


def unended(template: Template) -> str | None:
    """Return the special token with which the chat template ends an answer, if it is no end token of the target: the
    target's texts then continue after it. Return None if there is no such token, or no chat template that renders an
    answer."""
    messages = [{"role": "user", "content": CONTENT}, {"role": "assistant", "content": CONTENT}]
    if template.tokenizer.chat_template is None:
        return None
    try:
        after = template.text(messages, None, prompt=False).rpartition(CONTENT)[2].strip()
    except ValueError:
        return None
    closing = template.ids(after)[:1]
    end = closing and closing[0] in template_ids(template.tokenizer) - frozenset(template.ends)
    return str(template.tokenizer.decode(closing)) if end else None


def needed(texts: int, held_out_texts: int, timed: int) -> dict[str, int]:
    """Return how many prompts a run needs, keyed by split. texts: the number to learn from. held_out_texts: the number
    to rank checkpoints with. timed: the number to time the draft with."""
    return dict(zip(SPLITS, (texts, held_out_texts, timed), strict=True))


@dataclass(frozen=True)
class SelfPrompts:
    """Prompts that a target samples itself.

    Args:
        template: the target's chat template.
        folder: where the file of prompts is written.
        identity: the target's fingerprint, a JSON object (`fingerprints.identity`).
        wanted: how many prompts are needed, keyed by split.
        tokens: the most tokens of a prompt.
        seconds: the most time for sampling; None for no limit.
    """

    template: Template
    folder: Path
    identity: Mapping[str, Any]
    wanted: Mapping[str, int]
    seed: int
    tokens: int = LONGEST
    seconds: float | None = None

    @property
    def path(self) -> Path:
        return self.folder / f"{NAME}.jsonl"

    def file(self, by: Callable[[], Sampler]) -> Path:
        """Return the path of the file of prompts. If the file does not have enough prompts of this target, they are
        sampled first. by: returns the sampler. A line with the numbers of sampled, kept and dropped prompts is printed.

        Only the first of several processes samples. An interrupted call is continued by the next one. Raises UserError
        if a split gets no prompt.
        """
        about = self.folder / f"{NAME}.json"
        if rank():
            awaited(lambda: self._fits(about), "the process that samples prompts")
            return self.path
        if not self._fits(about):
            rows, counts = self._sampled(by())
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in rows))
            write_json(about, self._origin() | {"counts": counts}, 2)
            self._partial.unlink(missing_ok=True)
        print(counts_line(read_json(about)["counts"]))
        return self.path

    @property
    def _partial(self) -> Path:
        return self.folder / f"{NAME}.{short_hash(self._origin())}.partial.jsonl"

    def _origin(self) -> dict[str, Any]:
        turns = openings(self.template)
        values = {
            "target": dict(self.identity),
            "seed": self.seed,
            "tokens": self.tokens,
            "wanted": dict(self.wanted),
            "openings": [one.ids for one in turns],
            "ends": sorted(turns[0].ends),
            "close": turns[0].close,
            "seconds": self.seconds,
        }
        return dict(json.loads(json.dumps(values)))

    def _fits(self, about: Path) -> bool:
        """Return whether the file of prompts has at least the prompts that would be sampled now. about: the JSON file
        that describes how it was sampled."""
        if not about.is_file() or not self.path.is_file():
            return False
        stored, asked = read_json(about), self._origin()
        enough = not self._missing(Counter(stored.pop("counts", {}).get("splits", {})))
        same = {**stored, "wanted": asked["wanted"]} == asked
        return same and (enough or stored["wanted"] == asked["wanted"])

    def _sampled(self, sampler: Sampler) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Sample until each split has enough prompts, and filter them. Return the rows, and the counts for
        `counts_line`. Raises UserError if a split stays empty."""
        turns = openings(self.template)
        opened, opening_of = turns[0], {tuple(one.ids): one for one in turns}
        sampling = Sampling(1.0, stop_ids=tuple(sorted(opened.ends)), stop=(opened.close,) if opened.close else ())
        first = self._missing(Counter())
        asked, most = math.ceil(MARGIN * first), MOST * first
        while True:
            asked = math.ceil(asked / sampler.rows) * sampler.rows  # whole batches
            whole = [(SELF, turn.ids) for turn in islice(cycle(turns), asked)]
            sampled = collect(
                sampler,
                whole,
                sampling,
                self.tokens,
                self.seed,
                self._partial,
                seconds=self.seconds,
                title="prompts of the target",
                window=1,  # more may be asked for
            )
            written = [(opening_of[tuple(row["prompt"])], row["completion"]) for row in sampled]
            rows, dropped = filtered(written, self.template)
            splits = Counter(splits_of([split_content(row) for row in rows]))
            missing = self._missing(splits)
            if not missing or asked >= most or len(sampled) < asked:
                break
            asked = min(asked + math.ceil(missing * len(sampled) / max(len(rows), len(sampled) / MOST)), most)
        counts = {
            "asked": len(sampled),
            "kept": len(rows),
            "dropped": dropped,
            "splits": {split: splits[split] for split in SPLITS},
        }
        if lacking := [split for split in SPLITS if self.wanted[split] and not splits[split]]:
            raise UserError(
                f"{counts_line(counts)}; none for the split {', '.join(lacking)}: raise rollout.texts= or minutes=, or "
                "set data.path= to a file of prompts"
            )
        return rows, counts

    def _missing(self, splits: Mapping[str, int]) -> int:
        """Return how many more prompts must pass the filters, so that each split is expected to have as many as wanted.
        splits: the number that each has now."""
        share = {split: PERCENT.get(split, 100 - sum(PERCENT.values())) / 100 for split in SPLITS}
        return max(math.ceil(max(self.wanted[split] - splits.get(split, 0), 0) / share[split]) for split in SPLITS)


def filtered(
    written: Iterable[tuple[Opening, Sequence[int]]], template: Template
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the rows of the prompts that pass all filters, and how many each of `FILTERS` drops. written: for each
    prompt where it begins, and the token ids that the target wrote there."""
    dropped, seen = dict.fromkeys(FILTERS, 0), EarlierTexts()
    rows: list[dict[str, Any]] = []
    for opened, ids in written:
        text, ended = _text(list(ids), opened, template)
        reason = _reason(text, ended, opened, template) or ("duplicate" if seen.alike(text) else None)
        if reason is not None:
            dropped[reason] += 1
            continue
        seen.add(text)
        rows.append(_row(text, opened))
    return rows, dropped


class EarlierTexts:
    """The texts that were kept so far, by their sequences of `WORDS` words."""

    def __init__(self) -> None:
        self.texts: list[int] = []  # sequences of each
        self.having: dict[tuple[str, ...], list[int]] = {}

    def add(self, text: str) -> None:
        """Keep a text."""
        pieces = _pieces(text)
        for piece in pieces:
            self.having.setdefault(piece, []).append(len(self.texts))
        self.texts.append(len(pieces))

    def alike(self, text: str) -> bool:
        """Return whether the text and a kept one have more than `ALIKE` of their sequences in common: shared ones over
        those of either (Jaccard). Case and spaces do not matter."""
        pieces = _pieces(text)
        shared = Counter(other for piece in pieces for other in self.having.get(piece, ()))
        return any(count > ALIKE * (len(pieces) + self.texts[other] - count) for other, count in shared.items())


def _pieces(text: str) -> set[tuple[str, ...]]:
    """Return the sequences of `WORDS` words in the text, or its words if they are fewer."""
    words = text.casefold().split()
    return {tuple(words[place : place + WORDS]) for place in range(max(1, len(words) - WORDS + 1))}


def _text(ids: list[int], opened: Opening, template: Template) -> tuple[str, bool]:
    """Return the text of a prompt, up to the token or text that ended it, and whether one of these ended it. ids: what
    the target sampled. opened: where it began, with what ends it."""
    end = next((place for place, token in enumerate(ids) if token in opened.ends), None)
    decode = partial(template.tokenizer.decode, skip_special_tokens=False)
    context = opened.ids if opened.begin else []  # behind words, a decoder may keep a space
    text = str(decode([*context, *ids[:end]]))[len(str(decode(context))) :]
    text = opened.begin + text
    closed = bool(opened.close) and opened.close in text
    text = text.partition(opened.close)[0] if closed else text
    return text.strip() if opened.chat else text, end is not None or closed


def _reason(text: str, ended: bool, opened: Opening, template: Template) -> str | None:
    """Return the name of the filter that drops a prompt, or None if it passes. ended: whether the target ended the
    text; without a chat template it need not."""
    ids = template.ids(text)
    pieces = [tuple(ids[place : place + PIECE]) for place in range(len(ids) - PIECE + 1)]
    own = text[len(opened.begin) :]  # the target's
    failed = {
        "unfinished": opened.chat and not ended,
        "empty": not own.strip(),
        "short": len(template.ids(own)) < SHORTEST,
        "markup": not opened.special.isdisjoint(ids) or "\ufffd" in text,
        "repetitive": bool(pieces) and len({*pieces}) < REPEATED * len(pieces),
    }
    return next((name for name, fails in failed.items() if fails), None)


def _row(text: str, opened: Opening) -> dict[str, Any]:
    said = {"messages": [*opened.before, {"role": "user", "content": text}]} if opened.chat else {"text": text}
    return said | {"domain": SELF}


def split_content(row: Mapping[str, Any]) -> str:
    """Return the text whose hash decides the split of a row: its beginning up to the first answer, as for rows of
    data.path. row: a row of the file of prompts."""
    return Reader(templated="messages" in row).row(row).opening


def template_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the tokenizer's special tokens, which only templates write, so no prompt may have one."""
    return frozenset(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)


def counts_line(counts: Mapping[str, Any]) -> str:
    """Return a line for the user with the numbers of sampled, kept and dropped prompts. counts: the JSON object that
    `SelfPrompts` stores next to its file."""
    dropped = [f"{count} {name}" for name, count in counts["dropped"].items() if count]
    splits = ", ".join(f"{split} {count}" for split, count in counts["splits"].items())
    said = f"data=self: {counts['asked']} prompts sampled from the target, {counts['kept']} kept ({splits})"
    return said + (f"; dropped: {', '.join(dropped)}" if dropped else "")
