"""Rows with other settings among plain ones, for every setting, kind of draft and shape of trees: no row ends in an
error, plain rows have the same text as in a plain batch, and the other rows have the text of plain decoding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.policy import Fixed
from tests.kinds import KINDS, SHAPED
from tests.tiny import tiny


def shifted(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A processor that reads the text."""
    return logits + torch.nn.functional.one_hot(ids[:, -1] % 5, logits.shape[-1])


ODD = [
    Sampling(0.8, repetition_penalty=1.4),
    Sampling(0.8, presence_penalty=0.5),
    Sampling(0.8, frequency_penalty=0.7),
    Sampling(0.8, logit_bias={3: 2.0}),
    Sampling(0.8, banned=((5,), (3, 7))),
    Sampling(0.8, min_new_tokens=6),
    Sampling(0.8, processors=(shifted,)),
    Sampling(0.0, repetition_penalty=1.4),
    Sampling(0.8, top_k=4),
    Sampling(0.8, top_p=0.7),
    Sampling(0.8, min_p=0.1),
    Sampling(0.8, stop_ids=(4, 9)),
    Sampling(0.0),
    Sampling(2.5),
]
PLAIN = Sampling(0.8)
MIXED = [one for odd in ODD for one in (PLAIN, odd)]
PROMPTS = [[1 + i % 7, 2 + i % 5, 3 + i % 11] for i in range(len(MIXED))]
IDS = list(range(100, 100 + len(MIXED)))
SHAPES: dict[str, Any] = {"static": (-1, -1, 0, 0, 1)}

CASES = [
    *((kind, None, "coupled") for kind in KINDS),
    *((kind, shape, "coupled") for kind in SHAPED for shape in SHAPES),
    *(("independent", shape, rule) for shape in SHAPES for rule in ("tree", "traversal")),
    ("independent", None, "block"),
]


@pytest.fixture(scope="module")
def decode() -> Callable[..., list[list[int]]]:
    """Texts of a batch; kind None: of plain decoding."""
    target = tiny(eos=9)

    def run(kind: str | None, shape: str | None, rule: str, settings: list[Sampling]) -> list[list[int]]:
        shaped = {"shape": SHAPES[shape]} if shape else {}
        proposer = KINDS[kind].proposer(target, **shaped) if kind else None
        engine = Engine(target, proposer, verify=rule, policy=Fixed(3), rows=6)
        out = engine.generate(PROMPTS, max_new_tokens=10, sampling=settings, ids=IDS, seed=4)
        assert out.errors == [None] * len(PROMPTS)
        return out.tokens

    return run


@pytest.fixture(scope="module")
def wanted(decode: Callable[..., list[list[int]]]) -> list[list[int]]:
    """Plain decoding with shared noise, the text of every kind of draft under `coupled`: plain rows have here the text
    that they have in a plain batch, so they have it there too."""
    texts = decode(None, None, "coupled", MIXED)
    assert texts[::2] == decode(None, None, "coupled", [PLAIN] * len(MIXED))[::2]
    return texts


@pytest.mark.parametrize(("kind", "shape", "rule"), CASES)
def test_an_odd_row_changes_no_other_and_has_its_own_text(
    decode: Callable[..., list[list[int]]], wanted: list[list[int]], kind: str, shape: str | None, rule: str
) -> None:
    mixed = decode(kind, shape, rule, MIXED)
    if rule == "coupled":
        assert mixed == wanted
    else:
        assert mixed[::2] == decode(kind, shape, rule, [PLAIN] * len(MIXED))[::2]
