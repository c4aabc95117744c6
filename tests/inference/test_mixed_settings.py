"""Rows with all settings among plain ones, for every kind of draft and shape of trees, as rows enter, leave and move:
each row has the text, and in each round the distributions, of `tests.reference`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.base import Proposal
from inference.round import DecodingRound
from inference.verify.rules import RULES
from tests.kinds import KINDS, SHAPED
from tests.reference import grid, reference, spoken
from tests.tiny import near, tiny

ENDS, PLAIN = [9, 6, 1], Sampling(0.75)
MIXED = [one for number, odd in enumerate(grid(9, seed=8)) for one in
         (replace(odd, stop=("b.c", "f") if number % 3 == 0 else ()), PLAIN)]  # fmt: skip
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
    [(None, None), *((kind, None) for kind in KINDS), *((kind, shape) for kind in SHAPED for shape in SHAPES)],
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


class Watched(Engine):
    """Keeps what each round drafted, and the rows it drafted for."""

    def propose(self, round: DecodingRound) -> Proposal:
        rows = [(list(row.text), row.prompt, row.sampling, row.ends) for row in round.rows]
        proposal = super().propose(round)
        self.seen = [*getattr(self, "seen", []), (rows, proposal)]
        return proposal


@pytest.mark.parametrize(("rule", "shape"), [("token", None), ("tree", "static"), ("traversal", "static")])
@torch.inference_mode()
def test_the_distributions_of_every_round_are_those_of_the_reference(target: Any, rule: str, shape: str | None) -> None:
    """p at every column, and q of every draft, that the rule verifies."""
    ps: list[torch.Tensor] = []

    def verify(p: torch.Tensor, *rest: Any, **more: Any) -> Any:
        ps.append(p)
        return RULES[rule].verify(p, *rest, **more)

    draft, known = near(target), dict[Any, torch.Tensor]()
    proposer = Independent(draft, **({"shape": SHAPES[shape]} if shape else {}))
    watched: Any = engine(target, proposer, replace(RULES[rule], verify=verify), Watched)
    watched.generate(PROMPTS, max_new_tokens=LIMITS, sampling=MIXED, ids=IDS, seed=5).whole()

    def right(model: Any, text: list[int], prompt: int, one: Sampling) -> torch.Tensor:
        key = model is target, id(one), prompt, tuple(text)
        if key not in known:
            known[key] = reference(model(torch.tensor([text])).logits[0, -1], text, prompt, one, ENDS)
        return known[key]

    columns = [0, 0]
    for p, (rows, (x, q, k, tree)) in zip(ps, watched.seen, strict=True):
        for a, (text, prompt, one, ends) in enumerate(rows):
            parents = [*range(-1, x.shape[1] - 1)] if tree is None else tree.parents.expand(len(rows), -1)[a].tolist()
            paths: list[list[int]] = [[]]
            for node in range(k[a]):
                paths.append([*paths[parents[node] + 1], node])
            for column, path in enumerate(paths):
                drafts = x[a, path].tolist()
                if not ends.isdisjoint(drafts):  # nothing follows these
                    continue
                torch.testing.assert_close(p[a, column], right(target, text + drafts, prompt, one))
                columns[0] += 1
                if column and q is not None:
                    wanted = right(draft, text + drafts[:-1], prompt, one)
                    if one.temperature == 0:  # the likeliest tokens in their order, each of them certain
                        wanted = torch.nn.functional.one_hot(x[a, path[-1]], wanted.numel()).to(wanted)
                    torch.testing.assert_close(q[a, column - 1], wanted)
                    columns[1] += 1
    assert columns[0] > 100 and (columns[1] > 60 or shape is not None)
