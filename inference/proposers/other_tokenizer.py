"""A draft with another tokenizer. Texts are converted to its ids, and it drafts the tokens that both vocabularies
share.

A rows, V vocabulary of the target, Vd of the draft.
"""

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.drafts.causal_lm import CausalLM
from inference.drafts.draft_folder import load_tokenizer, read, require_class
from inference.drafts.weight_files import load_weights
from inference.lookup.suffixes import common_prefix
from inference.models.pretrained import widened
from inference.proposers.base import Host, LoadArguments, Outcome, Proposal, Proposer, Round, RoundView, States
from inference.proposers.independent import Independent

WINDOW = 64  # at least so many tokens at the end of a text are converted again each round

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class OtherTokenizer(Proposer):
    """A proposer for an independent draft of another vocabulary (Timor et al. 2025, token-level intersection,
    2502.05202). Its distribution is the draft model's over the shared tokens (equal byte strings), renormalised under
    the row's settings. Drafts are drawn from exactly this distribution, so the text's distribution is the target's.

    model: the draft model, with its own ids. shared, converter: see `between`. greedy, compile: as in `Independent`.
    """

    network_class: Any = CausalLM
    own_tokenizer = True

    def __init__(
        self,
        model: PreTrainedModel,
        shared: "SharedTokens",
        converter: "TextConverter",
        greedy: bool = False,
        compile: bool | None = None,
    ) -> None:
        self.inner, self.greedy = Independent(model, greedy, compile=compile), greedy
        self.shared, self.converter = shared, converter
        self.size = model.config.get_text_config().vocab_size
        self.host: Host
        self.rows: list[list[int]] = []  # each row's text in draft ids, as of the last round that drafted for it
        self.staged: dict[int, list[int]] = {}
        self.vocabulary = 0  # ids of the target in the tables
        self.tabled: Any = None  # the LM whose CUDA graphs read the tables

    @classmethod
    def between(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        greedy: bool = False,
        compile: bool | None = None,
    ) -> "OtherTokenizer":
        """Return a proposer for a draft, its tokenizer and the target's. Raises ValueError for tokenizers whose tokens
        are no byte strings, or that share no token."""
        shared = SharedTokens.of(target_tokenizer, tokenizer)
        return cls(model, shared, TextConverter(target_tokenizer, tokenizer), greedy, compile)

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "OtherTokenizer":
        """Return a proposer for a Hugging Face folder with its own tokenizer. Raises ValueError if the folder's kind
        holds no causal LM, if the weights cannot be read, or if the folder or the target has no tokenizer."""
        require_class(read(folder), cls.network_class)
        model, problems, _ = load_weights(folder, network=cls.network_class)
        tokenizer = load_tokenizer(folder)
        if problems or tokenizer is None or arguments.tokenizer is None:
            raise ValueError("; ".join(problems) or f"{folder}: the draft and its target each need a tokenizer")
        torch.nn.Module.to(model, arguments.target.device)
        return cls.between(widened(model), tokenizer, arguments.tokenizer, arguments.greedy, arguments.compile)

    @property
    def weights(self) -> str | None:
        return self.inner.weights

    def open(self, host: Host) -> None:
        self.host = host
        # a text may be longer in the draft's tokens; no drafts for a text that its slot cannot hold
        own = Host(host.rows, host.spare, self.size, 4 * host.context, host.target)
        if host.vocabulary != self.vocabulary:
            self.vocabulary, self.inner.opened = host.vocabulary, None  # a new LM with new CUDA graphs
        self.inner.open(own)
        self.rows, self.staged = [], {}
        self.converter.keep([])
        if self.tabled is not self.inner.lm:  # its CUDA graphs read the memory of these tables, so they live as long
            self.tabled = self.inner.lm
            self.to_target, self.to_draft = self.shared.tables(host.vocabulary, self.size, self.inner.lm.device)

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        texts = self._converted(prompts)
        self.inner.admit(low, texts, {})
        self.rows[low:] = texts

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        texts = self._converted(prompts)
        self.inner.stage(low, texts, {})
        self.staged |= dict(enumerate(texts, low))

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        ids = self.staged.pop(source)
        self.inner.enter(source, target, ids)
        self.rows.append(ids)

    def move(self, source: int, target: int) -> None:
        self.inner.move(source, target)
        last = self.rows.pop()
        if target < len(self.rows):
            self.rows[target] = last

    def commit(self, outcome: Outcome) -> None:
        """Count no draft as stored, since the longer text may convert to other draft ids."""
        valid = [len(ids) if length else 0 for ids, length in zip(self.rows, outcome.valid, strict=True)]
        self.inner.commit(Outcome(valid, outcome.accepted, {}))

    def propose(self, round: Round) -> Proposal:
        self.converter.keep(round.texts)
        texts = self._converted(round.texts)
        same = [min(common_prefix(old, new), len(new) - 1) for old, new in zip(self.rows, texts, strict=True)]
        self.inner.stored = [min(pair) for pair in zip(self.inner.stored, same, strict=True)]
        self.rows = texts
        whole = [k if self.converter.whole(text) else 0 for text, k in zip(round.texts, round.k, strict=True)]
        x, q, k, _ = self.inner.propose(DraftVocabularyRound(round, texts, whole, self.to_target, self.to_draft))
        return Proposal(self.to_target[x], q, k)

    def _converted(self, texts: Sequence[list[int]]) -> list[list[int]]:
        return [self.converter(text) for text in texts]


class DraftVocabularyRound(RoundView):
    """A round for a draft of another vocabulary. Its texts and draws are in the draft's ids, its distributions over the
    target's."""

    def __init__(self, round: Round, texts: list[list[int]], k: list[int], to_target: Tensor, to_draft: Tensor) -> None:
        super().__init__(round, k)
        self.converted, self.to_target, self.to_draft = texts, to_target, to_draft

    @property
    def texts(self) -> Sequence[list[int]]:
        return self.converted

    @property
    def temperatures(self) -> None:
        """Return None, since distributions depend on more than a temperature."""
        return None

    def on(self, given: Mapping[str, Tensor]) -> "DraftVocabularyRound":
        return DraftVocabularyRound(self.round.on(given), self.converted, self.k, self.to_target, self.to_draft)

    def probs(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        """Return the distributions (A, V) for logits (A, Vd). Tokens that the draft lacks have no mass."""
        padded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)  # the last column: not shared
        return self.round.probs(padded[:, self.to_draft], [self.to_target[x] for x in drafted])

    def draw(self, probs: Tensor, depth: int) -> Tensor:
        """Return the draft ids (A,) of tokens drawn from distributions (A, V)."""
        return self.to_draft[self.round.draw(probs, depth)].clamp(max=len(self.to_target) - 1)


@dataclass(frozen=True)
class SharedTokens:
    """Pairs (target id, draft id) of equal byte strings, and the pair of end tokens. Each id is in at most one pair."""

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> "SharedTokens":
        """Return the shared tokens of two tokenizers. Raises ValueError if no token is shared."""
        theirs, ours = _by_bytes(target), _by_bytes(draft)
        pairs = {theirs[name]: ours[name] for name in theirs.keys() & ours.keys()}
        if not pairs:
            raise ValueError("the draft's tokenizer shares no token with the target's")
        if target.eos_token_id is not None and draft.eos_token_id is not None:
            pairs[target.eos_token_id] = draft.eos_token_id
        return cls(tuple(sorted(pairs.items())))

    def tables(self, vocabulary: int, own: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return two tables: the target id of each draft id (own,), 0 if it has none; and the draft id of each target
        id (vocabulary,), `own` if it has none."""
        to_target = torch.zeros(own, dtype=torch.int64)
        to_draft = torch.full((vocabulary,), own, dtype=torch.int64)
        pairs = torch.tensor([pair for pair in self.pairs if pair[0] < vocabulary and pair[1] < own]).view(-1, 2)
        to_target[pairs[:, 1]], to_draft[pairs[:, 0]] = pairs[:, 0], pairs[:, 1]
        return to_target.to(device), to_draft.to(device)


def _by_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """Return the id of each byte string. If several ids have it, prefer one that is not a single-byte token, then the
    smallest."""
    strings, names = byte_strings(tokenizer), {number: name for name, number in tokenizer.get_vocab().items()}
    order = sorted(strings, key=lambda number: (_BYTE.fullmatch(names[number]) is not None, number), reverse=True)
    return {strings[number]: number for number in order}


def byte_strings(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the bytes of each id except special ones, for byte-level BPE and SentencePiece. Raises ValueError for
    other tokenizers, whose tokens are not parts of the text."""
    decoders = _decoders(tokenizer)
    if "ByteLevel" not in decoders and not decoders & {"ByteFallback", "Metaspace", "Replace"}:
        raise ValueError(
            f"{type(tokenizer).__name__}: its tokens are no byte strings, judging by its decoder "
            # fmt: skip
            f"({', '.join(sorted(decoders)) or 'none'}); byte-level BPE and SentencePiece have such tokens"
        )
    table = _alphabet() if "ByteLevel" in decoders else None
    special = {*tokenizer.all_special_ids}
    literal = {token.content for token in tokenizer.added_tokens_decoder.values()}
    strings = {}
    for name, number in tokenizer.get_vocab().items():
        if number not in special:
            strings[number] = name.encode() if name in literal else _bytes(name, table)
    return strings


def _decoders(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the types of the tokenizer's decoding steps, from tokens to text."""
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
    """Return the printable characters that represent bytes in byte-level BPE (Radford et al. 2019), each with its
    byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


class TextConverter:
    """A converter of texts from target ids to draft ids. The part before the last `WINDOW` tokens is converted once and
    cached, up to a position at which a word begins. The time of a round therefore does not grow with the text. If the
    draft's tokenizer gives other ids for the parts of a text than for the whole, the whole text is converted each time.
    """

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self.draft, self.bytes = draft, byte_strings(target)
        for number in target.all_special_ids:
            self.bytes[number] = str(target.convert_ids_to_tokens(number)).encode()
        if target.bos_token_id is not None:
            self.bytes[target.bos_token_id] = b""  # texts of the draft begin with the draft's start token
        self.begin: list[int] = list(draft("")["input_ids"]) or [draft.eos_token_id or 0]
        self.local = self._encode("one two") == self._encode("one") + self._encode(" two")
        # by id of a text: the text, how many of its tokens are converted, and their draft ids
        self.cache: dict[int, tuple[list[int], int, list[int]]] = {}

    def keep(self, texts: Sequence[list[int]]) -> None:
        """Drop all texts except these from the cache."""
        self.cache = {id(text): self.cache[id(text)] for text in texts if id(text) in self.cache}

    def __call__(self, text: list[int]) -> list[int]:
        """Return the draft ids of a text, the start token first. A partial character at the text's end is omitted."""
        cached, count, ids = self.cache.get(id(text), (text, 0, self.begin))
        if cached is not text or count > len(text):
            count, ids = 0, self.begin
        cut = self._cut(text, count)
        if cut > count:
            ids, count = ids + self._encode(self._text(text[count:cut])), cut
        self.cache[id(text)] = text, count, ids
        return ids + self._encode(self._text(text[count:]))

    def whole(self, text: Sequence[int]) -> bool:
        """Return whether a text ends with a whole character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(self._joined(text[-4:]))
        return not decoder.getstate()[0]

    def _cut(self, text: list[int], low: int) -> int:
        """Return the last position at which a word begins, from `low` on and before the last `WINDOW` tokens. Return
        `low` if there is none, or if fewer than two windows of tokens follow it."""
        if not self.local or len(text) - low < 2 * WINDOW:
            return low
        positions = range(len(text) - WINDOW, low, -1)
        return next((at for at in positions if self._joined(text[at : at + 1])[:1] == b" "), low)

    def _joined(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.bytes.get(number, b"") for number in ids)

    def _text(self, ids: Sequence[int]) -> str:
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self._joined(ids))

    def _encode(self, text: str) -> list[int]:
        return list(self.draft(text, add_special_tokens=False, verbose=False)["input_ids"])
