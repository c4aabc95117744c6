"""Token ids of one tokenizer converted to those of another: tokens of the same bytes, and texts."""

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

WINDOW = 64  # tokens at the end of a text that are told anew each round, at least

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_strings(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """What each id stands for, special ones left out: byte-level BPE, or SentencePiece's marks for spaces and bytes.
    Raises ValueError for other tokenizers, whose tokens are no parts of the text."""
    kinds = _decoders(tokenizer)
    if "ByteLevel" not in kinds and not kinds & {"ByteFallback", "Metaspace", "Replace"}:
        raise ValueError(f"{type(tokenizer).__name__}: its tokens are no byte strings, by its decoder "
                         f"({', '.join(sorted(kinds)) or 'none'}); byte-level BPE and SentencePiece are")  # fmt: skip
    table = _alphabet() if "ByteLevel" in kinds else None
    special = {*tokenizer.all_special_ids}
    literal = {token.content for token in tokenizer.added_tokens_decoder.values()}
    found = {}
    for name, number in tokenizer.get_vocab().items():
        if number not in special:
            found[number] = name.encode() if name in literal else _bytes(name, table)
    return found


def _decoders(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Kinds of the steps that make text of tokens."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(core.to_str())["decoder"] if core is not None else None
    steps = (decoder or {}).get("decoders", [decoder] if decoder else [])
    return {step["type"] for step in steps}


def _bytes(name: str, table: Mapping[str, int] | None) -> bytes:
    if table is not None:
        return bytes(table[one] for one in name) if set(name) <= table.keys() else name.encode()
    one = _BYTE.fullmatch(name)
    return bytes([int(one[1], 16)]) if one else name.replace("▁", " ").encode()


def _alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE names bytes (Radford et al. 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


@dataclass(frozen=True)
class Shared:
    """Pairs (target id, draft id) of equal byte strings, each id in one pair at most, and the ends of texts."""

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> "Shared":
        """Raises ValueError when no token is shared."""
        theirs, ours = _by_bytes(target), _by_bytes(draft)
        pairs = {theirs[name]: ours[name] for name in theirs.keys() & ours.keys()}
        if not pairs:
            raise ValueError("the draft's tokenizer shares no token with the target's")
        if target.eos_token_id is not None and draft.eos_token_id is not None:
            pairs[target.eos_token_id] = draft.eos_token_id
        return cls(tuple(sorted(pairs.items())))

    def tables(self, vocabulary: int, own: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Target id of each draft id (own,), 0 where there is none, and draft id of each target id (vocabulary,), `own`
        where there is none."""
        to_target = torch.zeros(own, dtype=torch.int64)
        to_draft = torch.full((vocabulary,), own, dtype=torch.int64)
        kept = torch.tensor([pair for pair in self.pairs if pair[0] < vocabulary and pair[1] < own]).view(-1, 2)
        to_target[kept[:, 1]], to_draft[kept[:, 0]] = kept[:, 0], kept[:, 1]
        return to_target.to(device), to_draft.to(device)


def _by_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """Id of each byte string; of several, one that is no single byte's stand-in, then the smallest."""
    found, names = byte_strings(tokenizer), {number: name for name, number in tokenizer.get_vocab().items()}
    order = sorted(found, key=lambda number: (_BYTE.fullmatch(names[number]) is not None, number), reverse=True)
    return {found[number]: number for number in order}


class Retelling:
    """Texts of target ids as draft ids. What is behind the last `WINDOW` tokens is told once and kept, up to a place
    where a word begins, so that a round costs the same however long the text is; where the draft's tokenizer does not
    treat the parts of a text alike, all is told anew."""

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self.draft, self.bytes = draft, byte_strings(target)
        for number in target.all_special_ids:
            self.bytes[number] = str(target.convert_ids_to_tokens(number)).encode()
        if target.bos_token_id is not None:
            self.bytes[target.bos_token_id] = b""  # the draft's texts have a start of their own
        self.begin: list[int] = list(draft("")["input_ids"]) or [draft.eos_token_id or 0]
        self.local = self._encode("one two") == self._encode("one") + self._encode(" two")
        self.settled: dict[int, tuple[list[int], int, list[int]]] = {}

    def keep(self, texts: Sequence[list[int]]) -> None:
        """Forget all other texts."""
        self.settled = {id(text): self.settled[id(text)] for text in texts if id(text) in self.settled}

    def __call__(self, text: list[int]) -> list[int]:
        """Draft ids of a text, the start token first, without bytes at its end that are no whole character."""
        kept, count, told = self.settled.get(id(text), (text, 0, self.begin))
        if kept is not text or count > len(text):
            count, told = 0, self.begin
        cut = self._cut(text, count)
        if cut > count:
            told, count = told + self._encode(self._text(text[count:cut])), cut
        self.settled[id(text)] = text, count, told
        return told + self._encode(self._text(text[count:]))

    def whole(self, text: Sequence[int]) -> bool:
        """Whether a text ends with a whole character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(self._joined(text[-4:]))
        return not decoder.getstate()[0]

    def _cut(self, text: list[int], low: int) -> int:
        """The last place between `low` and the window where a word begins, once there are two windows of them."""
        if not self.local or len(text) - low < 2 * WINDOW:
            return low
        places = range(len(text) - WINDOW, low, -1)
        return next((at for at in places if self._joined(text[at : at + 1])[:1] == b" "), low)

    def _joined(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.bytes.get(number, b"") for number in ids)

    def _text(self, ids: Sequence[int]) -> str:
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self._joined(ids))

    def _encode(self, text: str) -> list[int]:
        return list(self.draft(text, add_special_tokens=False, verbose=False)["input_ids"])
