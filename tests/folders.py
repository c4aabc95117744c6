"""A target's folder that trains and decodes in seconds, and texts of its own to learn from."""

import json
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cotrain.data import corpora
from cotrain.data.corpora import records
from studies.pretrain.tokenizer import train_tokenizer

VOCABULARY, CONTEXT = 300, 128


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 ids, made of some generated records."""
    return train_tokenizer([records(number) for number in range(4)], VOCABULARY, CONTEXT)


def network(layers: int = 2, hidden: int = 64, seed: int = 0, context: int = CONTEXT) -> LlamaForCausalLM:
    """A random Llama in float32 whose distributions are far from uniform; sizes are multiples of 64."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=context,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def target_folder(path: Path, **shape: int) -> Path:
    """Weights in float32 and a tokenizer, as a user has them."""
    network(**shape).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@cache
def _first_files(walk: Callable[[], list[tuple[str, Path]]]) -> list[tuple[str, Path]]:
    return walk()[:400]


def few_files(patch: pytest.MonkeyPatch) -> None:
    """Embedded corpora of few source files, walked once."""
    patch.setattr(corpora, "_distributions", lambda: ["packaging"])
    found = _first_files(corpora._source_files)
    patch.setattr(corpora, "_source_files", lambda: found)


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """A jsonl of the rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def own_texts(path: Path, count: int = 300) -> Path:
    """A jsonl of generated records; some 5 % of them fall to the held-out split."""
    rng = random.Random(0)
    rows = [{"text": records(rng.randrange(10**6))[:400]} for _ in range(count)]
    return write_rows(path, rows)


def target_and_texts(place: Path, count: int = 300) -> Path:
    """The folder, with a target and texts of its own in it."""
    target_folder(place / "target")
    own_texts(place / "own.jsonl", count)
    return place


def run_paths(place: Path, output: str | Path, target: str = "target") -> list[str]:
    """The settings of a run on both."""
    return [f"target.path={place / target}", f"data.path={place / 'own.jsonl'}", f"output={place / output}"]
