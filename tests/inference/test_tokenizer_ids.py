"""Ids of a tokenizer with gaps, and stop strings of many tokens."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from inference import Engine, Sampling
from inference.request import Request
from tests import folders
from tests.tiny import tiny


def test_ids_after_a_gap_of_the_tokenizer_have_mass() -> None:
    """Tokens that were added at high ids: the tokenizer has fewer tokens than its highest id."""
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 12}, unk_token="a"))
    engine = Engine(tiny(vocab=16), tokenizer=PreTrainedTokenizerFast(tokenizer_object=core))
    likely = Sampling(logit_bias={12: 1e3})
    assert engine.generate([[1]], max_new_tokens=2, sampling=likely).tokens == [[12, 12]]
    with pytest.raises(ValueError, match="the vocabulary size is 13"):  # rows after the highest id are padding
        engine.generate([[1]], sampling=Sampling(logit_bias={13: 1.0}))


def test_a_stop_string_of_many_tokens_ends_a_text() -> None:
    tokenizer = folders.tokenizer()
    stop = "漢字🙂" * 20
    ids = tokenizer(f"a {stop}", add_special_tokens=False)["input_ids"]
    row = Request(0, 0, [2], 10**6, Sampling(stop=(stop,)), frozenset(), tokenizer)
    assert len(ids) > 200 and row.take([*ids, 5, 6]) == ids and row.finish == "stop"
