"""Hashes of targets, and problems of pairs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedTokenizerFast

from inference.drafts.compatibility import check_pair, hash_target
from inference.models.llama import in_int8_rows
from studies.pretrain.tokenizer import train_tokenizer
from tests.tiny import tiny


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"hidden_act": "gelu"},
        {"max_position_embeddings": 128},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 2},
    ],
)
def test_a_target_that_computes_otherwise_is_another(change: dict[str, Any]) -> None:
    """With the very tensors that the draft was made for: whoever serves it there is warned, or refused."""
    config, other = tiny().config, tiny().config
    for key, value in change.items():
        setattr(other, key, value)
    assert hash_target(config, None) == hash_target(tiny().config, None) != hash_target(other, None)


TEXTS = ["def add(a, b):\n    return a + b\n", "the cat sat on the mat and the dog sat on the cat"]


VOCAB = 300


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, VOCAB, 256)


def test_hash_is_of_what_matters(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny(VOCAB, layers=1)
    first = hash_target(model.config, tokenizer)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert hash_target(AutoConfig.from_pretrained(tmp_path), tokenizer) == first  # path, dtype, version
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = padded.eos_token
    assert hash_target(model.config, padded) == first
    ended = copy.deepcopy(tokenizer)
    ended.eos_token = "<|pad|>"
    assert hash_target(model.config, ended)["tokenizer"] != first["tokenizer"]
    assert hash_target(tiny(VOCAB, hidden=32).config, None) != {"config": first["config"], "tokenizer": None}
    assert hash_target(model.config, None) == {"config": first["config"], "tokenizer": None}


def shape(vocab: int, positions: int = 256) -> LlamaConfig:
    return tiny(vocab, layers=1, positions=positions).config


def test_a_fitting_pair_has_no_problems(tokenizer: PreTrainedTokenizerFast) -> None:
    assert check_pair(shape(VOCAB, 64), tokenizer, shape(VOCAB, 128), copy.deepcopy(tokenizer)) == []
    assert check_pair(shape(VOCAB), None, shape(VOCAB), None) == []


def test_problems_of_a_pair_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>"])
    other.eos_token = "<|pad|>"
    size = len(tokenizer)
    problems = check_pair(shape(304, 128), tokenizer, shape(size, 64), other)
    assert len(problems) == 5
    assert f"first at token '<new>': id None in the target's, {size} in the draft's" in problems[0]
    assert "eos_token_id is 0 for the target, 1 for the draft" in problems[1]
    assert f"vocab_size: the draft has {size} ids, but its tokenizer has {size + 1}" in problems[2]
    assert f"the draft has {size} rows, but the target has 304" in problems[3]
    assert problems[4].startswith("warning: max_position_embeddings: the draft's 64 is below the target's 128")


def test_vocabularies_of_one_size_may_differ() -> None:
    one, other = (train_tokenizer([text], 262, 256) for text in ("aaaa aaaa bbbb bbbb", "xyxy xyxy zzzz zzzz"))
    assert len(one) == len(other)
    (problem,) = check_pair(shape(VOCAB), one, shape(VOCAB), other)
    assert "vocabularies differ, first at token" in problem


@pytest.mark.parametrize("tied", [False, True])
def test_a_rounded_target_is_the_same_target(tied: bool) -> None:
    """Its head is rounded apart from the embeddings; a draft of one serves the other."""
    model = tiny()
    model.config.tie_word_embeddings = tied
    before = hash_target(model.config, None)
    assert hash_target(in_int8_rows(model).config, None) == before
    assert before == hash_target(tiny().config, None) or tied
