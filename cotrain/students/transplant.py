"""An independent draft that begins with a small causal LM of another tokenizer (init=transplant).

The LM's embedding and head are rebuilt for the target's token ids; all its other weights are kept. Each id of the
target gets the row of the LM's token with the same bytes. A token that the LM does not have gets the mean of the rows
of the pieces that the LM's tokenizer spells it with, and a token that it cannot spell the mean of all rows.

D width of the LM's states.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from transformers import GenerationConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cotrain.config.drafts import Draft
from cotrain.errors import warn
from cotrain.ranks import rank
from cotrain.students.base import DEFAULT, KINDS, refuse_keys, student_class
from cotrain.students.independent import checked_path, config_of, read_lm, with_small_head
from cotrain.teacher.target_model import load_words
from inference.drafts.causal_lm import CausalLM
from inference.drafts.compatibility import tokenizer_problems
from inference.models.pretrained import head_weight, special_ids

BYTES = bytes_to_unicode()  # byte -> its character in byte-level BPE
CHARACTERS = {character: byte for byte, character in BYTES.items()}
SPACE = "\u2581"  # SentencePiece's character for a space
FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's token of a single byte
BROKEN = re.compile("([\udc80-\udcff])")  # a byte that is no UTF-8, as surrogateescape writes it
ROLES = ("eos", "bos", "pad", "unk")


class Pieces:
    """The bytes that a tokenizer's ids stand for. Byte-level BPE and SentencePiece write them in different ways; here
    they have one form.

    rows: the number of ids that the model has a row for; later ids are left out. where: the beginning of error
    messages, a setting. Raises ValueError for a tokenizer of another family.

    texts: id -> its bytes; special tokens have none. ids: (bytes, whether the token is SentencePiece's `<0xNN>`) -> id.
    added: text -> id of the tokens that are added to the vocabulary, special ones included. special: id -> text.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int, where: str) -> None:
        core: Any = getattr(tokenizer, "backend_tokenizer", None)
        about = json.loads(core.to_str()) if core is not None else {}
        self.byte_level = '"ByteLevel"' in json.dumps(about.get("decoder"))
        ways = json.dumps([about.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
        if not self.byte_level and SPACE not in ways:
            raise ValueError(
                f"{where}: init=transplant compares the tokens of byte-level BPE and of SentencePiece, and its "
                f"tokenizer ({type(tokenizer).__name__}) is of neither family: set init=scratch or init=target_layers"
            )
        self.model, self.tokenizer = core.model, tokenizer
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if i < rows}
        self.added = {str(token.content): i for i, token in added.items()}
        self.special = {i: str(token.content) for i, token in added.items() if token.special}
        self.texts: dict[int, bytes] = {}
        self.ids: dict[tuple[bytes, bool], int] = {}
        for name, i in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            if i < rows and i not in self.special:
                byte = None if self.byte_level else FALLBACK.fullmatch(name)
                self.texts[i] = bytes([int(byte[1], 16)]) if byte else self._bytes(name, i in added)
                self.ids.setdefault((self.texts[i], bool(byte)), i)

    def _bytes(self, name: str, added: bool) -> bytes:
        """Return the bytes of a token. added: whether it is no part of the model's vocabulary; byte-level BPE writes
        such tokens as they are."""
        if not self.byte_level:
            return name.replace(SPACE, " ").encode()
        return name.encode() if added else bytes(CHARACTERS[character] for character in name)

    def find(self, text: bytes, fallback: bool) -> int | None:
        """Return the id of the token with these bytes, or None. fallback: which one, if both a piece and a `<0xNN>`
        have them."""
        return self.ids.get((text, fallback), self.ids.get((text, not fallback)))

    def spell(self, text: bytes) -> list[int]:
        """Return the ids of the pieces of a token's bytes, or [] if the tokenizer cannot write them.

        The tokenizer's model alone is asked. The rules that cut a text into words, and the space that SentencePiece
        puts before a text, are for whole texts and not for a token.
        """
        if self.byte_level:
            ids = self._model("".join(BYTES[byte] for byte in text))
        else:  # bytes that are no whole character have tokens of their own
            parts = [part for part in BROKEN.split(text.decode(errors="surrogateescape")) if part]
            ids = [i for part in parts for i in (self._byte(part) if BROKEN.match(part) else self._model(part))]
        return ids if b"".join(self.texts.get(i, b"") for i in ids) == text else []

    def _byte(self, character: str) -> list[int]:
        i = self.ids.get((character.encode(errors="surrogateescape"), True))
        return [] if i is None else [i]

    def _model(self, text: str) -> list[int]:
        return [token.id for token in self.model.tokenize(text if self.byte_level else text.replace(" ", SPACE))]


def sources(theirs: Pieces, ours: Pieces) -> list[list[int]]:
    """Return, for each id of the target's tokenizer, the ids of the LM whose rows it gets the mean of: one id with the
    same bytes, the pieces that spell it, or [] for the mean of all rows. theirs: the target's. ours: the LM's.

    An added token gets the row of the LM's added token with the same text. A special token without one gets the row
    of the LM's token of the same role (`ROLES`)."""
    names = {i: text for text, i in theirs.added.items()}
    roles = {_id(theirs, role): _id(ours, role) for role in reversed(ROLES)}
    fallbacks = {i for (_, fallback), i in theirs.ids.items() if fallback}
    rows: list[list[int]] = []
    for i in range(1 + max((*theirs.texts, *theirs.special), default=-1)):
        text = theirs.texts.get(i)
        if (row := ours.added.get(names.get(i, ""))) is None:
            row = roles.get(i) if text is None else ours.find(text, i in fallbacks)
        spelt = ours.spell(text) if row is None and text is not None else []
        rows.append(spelt if row is None else [row])
    return rows


def _id(pieces: Pieces, role: str) -> int | None:
    i: int | None = getattr(pieces.tokenizer, f"{role}_token_id")
    return i if i in pieces.special else None


def means(weight: Tensor, rows: Sequence[Sequence[int]], every: Iterable[int]) -> Tensor:
    """Return the means (len(rows), ...) of rows of `weight`; a mean of one row is that row exactly. rows: the indices
    of each mean; [] stands for the mean over `every`."""
    flat = weight.reshape(len(weight), -1)
    ids = torch.tensor([i for row in rows for i in row], dtype=torch.long)
    offsets = torch.tensor([0, *(len(row) for row in rows[:-1])]).cumsum(0)
    averages = embedding_bag(ids, flat, offsets, mode="mean")
    averages[[not row for row in rows]] = flat[sorted(every)].mean(0)
    return averages.reshape(len(rows), *weight.shape[1:])


@torch.no_grad()
def rebuild(network: PreTrainedModel, rows: Sequence[Sequence[int]], every: Iterable[int]) -> None:
    """Give the causal LM `network` an embedding and a head of len(rows) ids, in place. rows, every: as in `means`, of
    its own ids."""
    embedding: Any = network.get_input_embeddings()
    head: Any = network.get_output_embeddings()
    every = list(every)
    parts = [means(module.weight, rows, every) for module in (embedding, head)]  # (len(rows), D)
    bias = None if getattr(head, "bias", None) is None else means(head.bias, rows, every)
    network.resize_token_embeddings(len(rows), mean_resizing=False)
    for module, weight in zip((network.get_input_embeddings(), network.get_output_embeddings()), parts, strict=True):
        module.weight.copy_(weight)
    if bias is not None:
        network.get_output_embeddings().bias = nn.Parameter(bias)


def transplanted(draft: Draft, target: PreTrainedModel, words: Tokenizer) -> PreTrainedModel:
    """Return the causal LM draft.path= with the embedding and the head for the target's ids, in float32. words: the
    target's tokenizer. If the target is on the meta device, which stores no weights, the returned model is too, and a
    line says how many rows are copied.

    Raises ValueError, which names the key, for another kind of draft, for an encoder-decoder, for equal tokenizers, for
    tokenizers of other families, and as `read_lm` does.
    """
    student = student_class(draft.kind)
    if draft.kind != DEFAULT:
        later = [kind for kind in KINDS if DEFAULT in student_class(kind).begins_with]
        raise ValueError(
            f"init=transplant: only {DEFAULT} drafts begin with an LM of another tokenizer, not {draft.kind} drafts: "
            f"set draft={DEFAULT}; {', '.join(later)} drafts can then begin with its folder, with init=pretrained"
        )
    path = checked_path(student, draft, "transplant")
    where, config = f"draft.path={path}", config_of(path)
    for key, model in (("target.path", target.config), (where, config)):
        if model.is_encoder_decoder:
            raise ValueError(
                f"init=transplant: {key} is an encoder-decoder, and only a causal LM can be given other token ids: set "
                "init=target_layers, or name a causal LM"
            )
    if CausalLM.has_parts(config):
        raise ValueError(f"{where}: init=transplant cannot rebuild its small head or Markov head: name another LM")
    own = load_words(path, key="draft.path")
    if not tokenizer_problems(words, own):
        raise ValueError(f"init=transplant: {where} has the target's own tokenizer: set init=pretrained")
    refuse_keys(draft, "encoder_layers")
    text, ids = target.config.get_text_config(), config.get_text_config().vocab_size
    ours = Pieces(own, ids, where)
    rows = sources(Pieces(words, text.vocab_size, "target.path"), ours)
    meta = target.device.type == "meta"
    special = special_ids(text)
    config.get_text_config().update(special)  # of a model on the meta device; another reads its own
    network = read_lm(path, config, target.device, text.vocab_size if meta else ids)
    if not meta:
        rebuild(network, rows + [[]] * (text.vocab_size - len(rows)), (*ours.texts, *ours.special))
    elif not rank():
        warn(summary(rows))
    network.config.get_text_config().update(special)
    network.generation_config = GenerationConfig.from_model_config(network.config)
    embedding: Any = network.get_input_embeddings()
    embedding.padding_idx = special["pad_token_id"]  # a row that gets no gradient
    return with_small_head(network, draft, head_weight(network))


def summary(rows: Sequence[Sequence[int]]) -> str:
    """Return the line that says how the rows of the target's tokens were made, from `sources`."""
    copied, neither = sum(len(row) == 1 for row in rows), sum(not row for row in rows)
    return (
        f"init=transplant: of the target's {len(rows)} tokens, {copied} have the row of the same token of draft.path=, "
        f"{len(rows) - copied - neither} the mean of the pieces that spell them, {neither} the mean of all rows"
    )
