"""Rows with all settings among plain ones, for every kind of draft and shape of trees, as rows enter, leave and move:
each row has the text, and in each round the distributions, of `tests.reference`."""

from dataclasses import replace
from typing import Any

import pytest

from inference import Engine, Sampling
from inference.policy import Fixed
from tests.kinds import KINDS, SHAPED
from tests.often import often
from tests.reference import grid, spoken
from tests.tiny import tiny

ENDS, PLAIN = [9, 6, 1], Sampling(0.75)
MIXED = [
    one
    for number, odd in enumerate(grid(9, seed=8))
    for one in (replace(odd, stop=("b.c", "f") if number % 3 == 0 else ()), PLAIN)
]
PROMPTS = [[1 + i % 7, 2 + i % 5, 3 + i % 11][: 1 + i % 3] for i in range(len(MIXED))]
LIMITS = [4 + 3 * i % 8 for i in range(len(MIXED))]
IDS = list(range(100, 100 + len(MIXED)))
SHAPES: dict[str, Any] = {"static": (-1, -1, 0, 0, 1)}


class Letters:
    """A tokenizer whose ids are a letter and a dot, so that a stop string may end inside a token."""

    pad_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {chr(97 + id): id for id in range(32)}

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{chr(97 + id)}." for id in ids)


def engine(target: Any, proposer: Any, rule: Any, made: type[Engine] = Engine) -> Engine:
    return made(target, proposer, verify=rule, policy=Fixed(3), rows=4, tokenizer=Letters())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target() -> Any:
    model = tiny(seed=2)
    model.generation_config.eos_token_id = ENDS
    return model


@pytest.fixture(scope="module")
def wanted(target: Any) -> list[tuple[list[int], str]]:
    """The texts of the rows alone, with shared noise, and why each ended."""
    rows = zip(PROMPTS, MIXED, IDS, LIMITS, strict=True)
    texts = [spoken(target, prompt, one, id, 4, limit, ENDS, Letters().decode) for prompt, one, id, limit in rows]
    assert {text[-1] for text, why in texts if why == "stop"} >= {*ENDS} and "length" in {why for _, why in texts}
    return texts


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (None, None),
        *((kind, None) for kind in KINDS),
        *often([(kind, shape) for kind in SHAPED for shape in SHAPES], lambda case: case[0] == "eagle"),
    ],
)
def test_every_row_has_its_own_text(
    target: Any, wanted: list[tuple[list[int], str]], kind: str | None, shape: str | None
) -> None:
    """Of plain decoding with the same noise, whatever the draft."""
    shaped = {"shape": SHAPES[shape]} if shape else {}
    proposer = KINDS[kind].proposer(target, **shaped) if kind else None
    out = engine(target, proposer, "coupled").generate(PROMPTS, max_new_tokens=LIMITS, sampling=MIXED, ids=IDS, seed=4)
    assert out.errors == [None] * len(PROMPTS)
    assert list(zip(out.tokens, out.finish, strict=True)) == wanted
