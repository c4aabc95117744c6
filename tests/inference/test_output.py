"""Texts that are decoded while they come."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
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


STREAMS = ["\U0001f389" * 200, "\ud55c\uad6d\uc5b4" * 80, "a\U0001f389\ud55c \u00e9" * 60, "aaa a " * 80,
           "\U0001f469\u200d\U0001f469\u200d\U0001f467" * 30, "\ufffd" * 3 + "a" * 99]  # fmt: skip


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
