"""Texts that are decoded while they come."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from inference.output import IncrementalDecoder


def bytes_of(token: str) -> str:
    return "".join(bytes_to_unicode()[byte] for byte in token.encode())


def across_characters() -> Tokenizer:
    """Byte-level BPE with a token of the last bytes of an emoji and the first of the next one, as real ones have."""
    party = bytes_of("\U0001f389")
    vocabulary = [*bytes_to_unicode().values(), party[2:], party[:2], party[2:] + party[:2]]
    merges = [(party[2], party[3]), (party[0], party[1]), (party[2:], party[:2])]
    model = Tokenizer(BPE({token: index for index, token in enumerate(vocabulary)}, merges))
    model.pre_tokenizer, model.decoder = ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    return model


def byte_fallback() -> Tokenizer:
    """Tokens of bytes for what the vocabulary lacks: a run of them that ends inside a character decodes to none."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, " ": 257}
    model = Tokenizer(BPE(vocabulary, [], byte_fallback=True, fuse_unk=True))
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return model


STREAMS = [
    "\U0001f389" * 200,
    "\ud55c\uad6d\uc5b4" * 80,
    "a\U0001f389\ud55c \u00e9" * 60,
    "aaa a " * 80,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467" * 30,
    "\ufffd" * 3 + "a" * 99,
]


@pytest.mark.parametrize("make", [across_characters, byte_fallback])
@pytest.mark.parametrize("text", STREAMS)
def test_a_stream_decodes_few_ids_per_token(make: Callable[[], Tokenizer], text: str) -> None:
    """Its pieces are the text, each character comes with its last token, and the ids decoded are linear in the text."""
    model, counts = make(), list[int]()

    def decode(ids: list[int]) -> str:
        counts.append(len(ids))
        return str(model.decode(ids, skip_special_tokens=False))

    ids = model.encode(text, add_special_tokens=False).ids
    assert model.decode(ids, skip_special_tokens=False) == text and len(ids) > 100
    decoder, shown = IncrementalDecoder(decode), ""
    for n, token in enumerate(ids, 1):
        shown += decoder.add(token)
        whole = model.decode(ids[:n], skip_special_tokens=False)
        assert text.startswith(shown) and (whole.endswith("\ufffd") or shown == whole)
    assert shown + decoder.rest() == text
    assert sum(counts) < 40 * len(ids)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["\u2581", "\u2581a", "a", "\u2581\u2581", "b\u2581", "\u2581\u00e9", "."]
DECODERS: dict[str, tuple[Any, list[str]]] = {
    "Metaspace": (decoders.Metaspace(), PIECES),
    "Metaspace, never prepended": (decoders.Metaspace(prepend_scheme="never"), PIECES),
    "Llama": (
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        PIECES + BYTES,
    ),
    "Strip first": (
        decoders.Sequence(
            [decoders.Strip("\u2581", 1, 0), decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        ),
        [*PIECES[2:3], *PIECES[5:], *BYTES],
    ),
    "WordPiece": (decoders.WordPiece(), ["do", "##ing", "##s", "##", "a", ".", "n't", "'"]),
    "byte-level": (decoders.ByteLevel(), [*bytes_to_unicode().values()]),
}


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_of_a_stream_join_to_the_whole_text(name: str) -> None:
    """Decoders treat the first token, or the first space, of what they decode in a way of their own."""
    decoder, tokens = DECODERS[name]
    model = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0]))
    model.decoder, rng = decoder, random.Random(0)
    for length in [*range(1, 12), 40] * 8:
        pieces = [place for place, token in enumerate(tokens) if token not in BYTES]
        words = rng.choices(pieces, k=length)
        if BYTES[0] in tokens:  # characters of several tokens
            words += [tokens.index(f"<0x{byte:02X}>") for byte in "\n\U0001f389\ud55c".encode()]
            words += rng.choices(pieces, k=3)
        stream = IncrementalDecoder(lambda ids: str(model.decode(ids, skip_special_tokens=False)))
        assert "".join(map(stream.add, words)) + stream.rest() == model.decode(words, skip_special_tokens=False)


def test_a_stream_of_broken_bytes_is_linear_and_recovers() -> None:
    model, counts = across_characters(), list[int]()

    def decode(ids: list[int]) -> str:
        counts.append(len(ids))
        return str(model.decode(ids))

    half = model.encode("\U0001f389").ids[:1]
    ids = half * 300 + model.encode(" a").ids
    decoder = IncrementalDecoder(decode)
    text = "".join(map(decoder.add, ids)) + decoder.rest()
    assert text == model.decode(ids) and text.endswith("\ufffd a") and sum(counts) < 40 * len(ids)
