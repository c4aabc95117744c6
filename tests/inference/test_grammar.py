"""A grammar as a processor: texts obey it and have the target's masked distribution, whatever drafts. It begins to act
in the middle of drafts, and its state must follow drafts that are rejected."""

import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers import Independent
from tests.exact import chi_square
from tests.inference.test_distribution import pair, pooled, uncollected
from tests.inference.test_every_proposer import Uneven
from tests.inference.test_mixed_settings import SHAPES
from tests.kinds import KINDS, SHAPED
from tests.often import EACH_WAY, often
from tests.reference import spoken
from tests.tiny import near, tiny

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "json_grammar.py"
OPEN, CLOSE, FIRST = 0, 1, 2


def allowed(new: Sequence[int], V: int) -> list[bool]:
    """Which ids may follow the new tokens: after OPEN first FIRST, then even ids until CLOSE; all but CLOSE elsewhere.
    Raises ValueError if the tokens break this themselves."""
    state, fits = "outside", [id != CLOSE for id in range(V)]
    for token in new:
        if not fits[token]:
            raise ValueError(f"{new} breaks the grammar at {token}")
        if state == "outside" and token == OPEN:
            state, fits = "first", [id == FIRST for id in range(V)]
        elif state != "outside" and token != CLOSE:
            state, fits = "inside", [id == CLOSE or id % 2 == 0 < id for id in range(V)]
        else:
            state, fits = "outside", [id != CLOSE for id in range(V)]
    return fits


class Automaton:
    """The grammar as a processor. prompt: number of tokens that it ignores. broken: texts that break the grammar."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.broken = prompt, list[str]()

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        try:
            fits = torch.tensor(allowed(ids[0, self.prompt :].tolist(), logits.shape[-1]))
        except ValueError as error:
            self.broken.append(str(error))
            raise
        return logits.masked_fill(~fits, -torch.inf)


PROMPTS = [[3, 0, 5], [1], [7, 7, 2, 9], [0], [4, 30], [2]]
SAMPLING = [
    Sampling(0.9 * (i % 3), processors=(Automaton(len(prompt)),), logit_bias={OPEN: 4.0, CLOSE: 2.0})
    for i, prompt in enumerate(PROMPTS)
]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """The texts of the rows alone, with shared noise."""
    rows = zip(PROMPTS, SAMPLING, strict=True)
    texts = [spoken(tiny(), prompt, one, i, 3, 12, [], str)[0] for i, (prompt, one) in enumerate(rows)]
    assert sum(OPEN in text[1:-2] for text in texts) > 2 and sum(CLOSE in text for text in texts) > 2
    return texts


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (None, None),
        *often(
            [(kind, None) for kind in KINDS], lambda case: case[0] in {*EACH_WAY, "ngram", "eagle, pruned", "hybrid"}
        ),
        *often([(kind, SHAPES["static"]) for kind in SHAPED], lambda case: case[0] in {"eagle", "eagle, pruned"}),
    ],
    ids=lambda part: {SHAPES["static"]: "tree", None: "plain"}.get(part, part),
)
def test_text_is_that_of_plain_decoding(kind: str | None, shape: Any, wanted: list[list[int]]) -> None:
    """Of an independent reference with the same noise; no text that breaks the grammar reaches it."""
    target = tiny()
    proposer = KINDS[kind].proposer(target, **({"shape": shape} if shape else {})) if kind else None
    engine = Engine(target, proposer, verify="coupled", policy=Uneven(), rows=3)
    out = engine.generate(PROMPTS, sampling=SAMPLING, max_new_tokens=12, seed=3, ids=range(6), ignore_eos=True)
    assert out.errors == [None] * 6
    assert out.tokens == wanted
    assert [processor.broken for one in SAMPLING for processor in one.processors] == [[]] * 6  # type: ignore[attr-defined]


@torch.no_grad()
def masked_joint(model: Any, prompt: list[int], tokens: int) -> torch.Tensor:
    """The model's masked distribution of that many tokens, (V^tokens,), by enumeration of all texts."""
    V = model.config.vocab_size
    texts, joint = [list[int]()], torch.ones(1, dtype=torch.float64)
    for _ in range(tokens):
        logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1].double()
        fits = torch.tensor([allowed(text, V) if mass else [True] * V for text, mass in zip(texts, joint, strict=True)])
        joint = (joint.unsqueeze(-1) * logits.masked_fill(~fits, -torch.inf).softmax(-1)).flatten()
        texts = [[*text, id] for text in texts for id in range(V)]
    return joint


@pytest.mark.parametrize(
    ("kind", "shape", "rule"),
    [
        ("independent", None, "block"),
        *often([("eagle, pruned", (-1, -1, 0), "traversal"), ("ngram", None, "token")], lambda case: case[1]),
    ],
)
def test_the_distribution_is_the_targets_under_the_grammar(kind: str, shape: Any, rule: str) -> None:
    """Three tokens of several rounds, by chi-square; the grammar begins to act after any of them."""
    target, _ = pair()
    rows, prompt = 1500, [3, 3]
    proposer = KINDS[kind].proposer(target, **({"shape": shape} if shape else {}))
    engine = Engine(target, proposer, verify=rule, policy=Fixed(2), rows=rows)
    automaton = Automaton(len(prompt))
    with uncollected():
        out = engine.generate([prompt] * rows, max_new_tokens=3, sampling=Sampling(processors=(automaton,)), seed=2)
    counts = (torch.tensor(out.tokens) @ 4 ** torch.arange(2, -1, -1)).bincount(minlength=64)
    wanted = masked_joint(target, prompt, 3) * rows
    assert not automaton.broken and not counts[wanted == 0].any() and (wanted == 0).sum() > 20
    assert chi_square(*pooled(counts[wanted > 0], wanted[wanted > 0])) > 1e-4


def test_a_matcher_that_rolls_back_gives_the_same_text(
    wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor of docs/examples, with a matcher and masks of the interface of xgrammar."""

    class Matcher:
        def __init__(self) -> None:
            self.text, self.undone = list[int](), 0

        def rollback(self, count: int) -> None:
            self.text, self.undone = self.text[: len(self.text) - count], self.undone + count

        def accept_token(self, token: int) -> bool:
            self.text.append(token)
            return allowed(self.text[:-1], 32)[token]

        def fill_next_token_bitmask(self, mask: torch.Tensor, row: int) -> None:
            mask[row] = torch.tensor(allowed(self.text, 32))

    monkeypatch.setitem(
        sys.modules,
        "xgrammar",
        SimpleNamespace(
            allocate_token_bitmask=lambda rows, V: torch.zeros(rows, V, dtype=torch.bool),
            apply_token_bitmask_inplace=lambda logits, mask: logits.masked_fill_(~mask, -torch.inf),
        ),
    )
    Grammar = runpy.run_path(str(EXAMPLE))["Grammar"]
    matchers = [Matcher() for _ in PROMPTS]
    grammars = [Grammar(matcher, len(prompt), 32) for matcher, prompt in zip(matchers, PROMPTS, strict=True)]
    sampling = [replace(one, processors=(grammar,)) for one, grammar in zip(SAMPLING, grammars, strict=True)]
    target = tiny()
    engine = Engine(target, Independent(near(target, 0.15), shape=SHAPES["static"]), verify="coupled", policy=Fixed(3))
    out = engine.generate(PROMPTS, sampling=sampling, max_new_tokens=12, seed=3, ids=range(6), ignore_eos=True)
    assert out.tokens == wanted and sum(matcher.undone for matcher in matchers) > 20
