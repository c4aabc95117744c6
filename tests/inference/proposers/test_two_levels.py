"""A small draft guesses for the rounded target, which drafts for the target: drafts have the rounded target's
distribution, by enumeration of every draw and coin, on real models whose distributions are thirds."""

import itertools
import math
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from inference import Engine, Sampling
from inference.measure.costs import measure_costs
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers.base import Host, Proposal, Round
from inference.proposers.early_exit import EarlyExit
from inference.proposers.independent import Independent
from inference.proposers.quantised import Quantised
from inference.proposers.two_levels import COINS, DRAWS, LAST, OuterDrafts, TwoLevels
from inference.request import Request
from inference.round import DecodingRound
from inference.sampling import certain, probs
from inference.sampling.noise import Uniforms
from inference.sampling.penalties import process
from inference.verify.rules import RULES
from tests.inference.test_distribution import constant, p_value, small, uncollected
from tests.kinds import exit_network
from tests.tiny import near, tiny

# distributions after token 0 and after token 1: of the target, of what verifies the guesses, of what guesses
# distributions after token 0 and after token 1: of what verifies the guesses, of what guesses
MIDDLE = ([1 / 3, 2 / 3], [2 / 3, 1 / 3])
SMALL = MIDDLE[::-1]
PROMPT = [1, 0, 1]
# parts of [0, 1) that decide alike: coins of distributions of thirds, by rule
CELLS = {"token": 2, "block": 4, "match": 3}
F64 = torch.float64


def bigram(distributions: tuple[list[float], ...]) -> Any:
    """A model whose distribution hangs on the last token alone: its layers add nothing, each token has dimensions of
    its own."""
    model = small(vocab=2).double()
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.zero_()
        for token, probs in enumerate(distributions):
            own = slice(4 * token, 4 * token + 4)
            model.model.embed_tokens.weight[token] = 0
            model.model.embed_tokens.weight[token, own] = 1
            model.lm_head.weight[:, own] = torch.tensor(probs).log().unsqueeze(1).double() / (4 * math.sqrt(2))
    return model


def joint(distributions: tuple[list[float], ...], tokens: int) -> Tensor:
    """The joint distribution of that many tokens after PROMPT (2^tokens,)."""
    table, masses = torch.tensor(distributions, dtype=F64), []
    for text in itertools.product(range(2), repeat=tokens):
        steps = zip((PROMPT[-1], *text), text, strict=False)
        masses.append(math.prod(float(table[before, after]) for before, after in steps))
    return torch.tensor(masses, dtype=F64)


def numbers_of(k: int, inner: int, rule: str) -> tuple[Tensor, int]:
    """Every combination of the numbers that rounds of k tokens read (3, A, S), one of each cell of each of them."""
    read: list[tuple[int, int, int]] = []  # stream, column, cells
    for done in range(k):
        n, first = min(inner, k - done - 1), done * (inner + 1)
        read += [(DRAWS, first + i, 3) for i in range(n)]
        read += [(COINS, first + i, CELLS[rule]) for i in range(n + (rule == "match"))]
        read += [] if rule == "match" else [(LAST, first, 3)]
    numbers = torch.full((3, math.prod(cells for *_, cells in read), (k + 1) * (inner + 1)), 0.5, dtype=F64)
    grids = torch.cartesian_prod(*((torch.arange(cells, dtype=F64) + 0.5) / cells for *_, cells in read))
    for (stream, column, _), values in zip(read, grids.view(-1, len(read)).unbind(1), strict=True):
        numbers[stream, :, column] = values
    return numbers, numbers.shape[1]


class Other(Quantised):
    """Drafts with another model than the target in fewer bits, so that it is often wrong."""

    def __init__(self, target: Any, other: Any) -> None:
        self.other = other
        super().__init__(target)

    def _round(self) -> None:
        self.int8, self.model = False, self.other


def on_targets_cache(target: Any, middle: Any, text: list[int], held: int) -> Tensor:
    """The logits (V,) of `middle` after a text, of whose first `held` tokens it reads the target's keys and values."""
    past = target(torch.tensor([text[:held]]), use_cache=True).past_key_values if held else None
    return middle(torch.tensor([text[held:]]), past_key_values=past).logits[0, -1]


class GivenNumbers(DecodingRound):
    """A round whose inner numbers are given."""

    given: Tensor

    def inner(self, depths: int) -> Tensor:
        assert depths == self.given.shape[2]
        return self.given


def drafted(k: int, inner: int, rule: str) -> tuple[Tensor, Tensor]:
    """Drafts x (A, k) and distributions q (A, k, 2) of every combination of numbers, each as likely as any other."""
    given, rows = numbers_of(k, inner, rule)
    model = bigram(MIDDLE)
    proposer = TwoLevels(Quantised(model), Independent(bigram(SMALL)), inner, rule)
    target = LM(model, rows)
    proposer.open(Host(rows, 0, 2, target.context, target))
    texts = [list(PROMPT) for _ in range(rows)]
    proposer.admit(0, texts, {})
    requests = [Request(n, n, text, k + 1, Sampling(), frozenset()) for n, text in enumerate(texts)]
    round = GivenNumbers(requests, [k] * rows, RULES["token"], Uniforms(0, target.device), 2, target.device)
    round.given = given
    with torch.inference_mode():
        x, q, lengths, _ = proposer.propose(round)
    assert lengths == [k] * rows and x.shape[1] == k
    return x, q


@pytest.mark.thorough
@pytest.mark.parametrize("rule", CELLS)
@pytest.mark.parametrize(("k", "inner"), [(1, 1), (2, 1), (2, 3), (3, 1), (3, 2)])
def test_what_is_drafted_has_the_distribution_of_the_model_in_between(k: int, inner: int, rule: str) -> None:
    """For any number of drafted tokens, and whatever the small draft guesses: every token of an inner round is used."""
    with uncollected():
        x, q = drafted(k, inner, rule)
    counts = (x @ 2 ** torch.arange(k - 1, -1, -1)).bincount(minlength=2**k)
    torch.testing.assert_close(counts.double() / len(x), joint(MIDDLE, k), rtol=0, atol=1e-12)
    before = torch.cat([torch.tensor(PROMPT[-1:]).expand(len(x), 1), x[:, :-1]], 1)
    torch.testing.assert_close(q.double(), torch.tensor(MIDDLE, dtype=F64)[before], rtol=0, atol=0.02)  # 8 bits


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["token", "block"])
def test_inner_and_outer_rounds_share_no_number(rule: str) -> None:
    """By chi-square with the real random streams, of distributions where shared ones would show most."""
    target, middle, guess = constant([0.6, 0.3, 0.1]), constant([0.3, 0.2, 0.5]), constant([0.2, 0.6, 0.2])
    proposer = TwoLevels(Other(target, middle), Independent(guess), 2, rule)
    assert p_value(target, proposer, rule, 24_000, tokens=3, k=2, regime=Sampling()) > 1e-4


def two_levels(target: Any, **settings: Any) -> TwoLevels:
    return TwoLevels(Quantised(target), Independent(near(target, 0.15)), **settings)


PROMPTS = [[(7 * i + 5 * n) % 30 + 1 for i in range(n)] for n in (3, 9, 1, 6, 14, 2)]
MIXED = [
    Sampling(0.8),
    Sampling(1.1, top_k=5),
    Sampling(0),
    Sampling(0.9, repetition_penalty=1.2),
    Sampling(1.0),
    Sampling(0.7, frequency_penalty=0.3, banned=((3,),)),
]


@pytest.mark.thorough
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("held", [64, 14])
def test_every_distribution_is_that_of_its_model_given_the_text(
    held: int, greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts have the distribution of the rounded target on the target's keys and values, and guesses that of the small
    draft, compared with a fresh pass over each prefix: slots hold the text and no rejected token, inside a round and
    after it. held: the small draft's context in tokens; it guesses nothing for longer texts while it guesses for other
    rows of the batch."""
    target = tiny()
    guesser = near(target, 0.15)
    guesser.config.max_position_embeddings = held
    proposer = TwoLevels(Quantised(target, greedy=greedy), Independent(guesser, greedy))
    middle, guesses, seen = proposer.model.model, proposer.small.model, [0, 0]
    sampling = Sampling(0.8)
    propose = proposer.small.propose

    def probs(logits: Tensor) -> Tensor:
        q = (logits / 0.8).softmax(-1)
        return certain(q) if greedy else q

    def guessed(round: Round) -> Proposal:
        proposal = propose(round)
        for b, k in enumerate(proposal.k):
            for i in range(k):
                text = [*round.texts[b], *proposal.x[b, :i].tolist()]
                torch.testing.assert_close(
                    proposal.q[b, i], probs(guesses(torch.tensor([text])).logits[0, -1]), rtol=1e-9, atol=1e-9
                )
                seen[0] += 1
        return proposal

    def checked(outer: OuterDrafts) -> Proposal:
        proposal = original(outer)
        assert proposal.q is not None and outer.done == outer.k  # every drafted token is used
        for b, k in enumerate(proposal.k):
            for i in range(k):
                text, held = [*outer.round.texts[b], *proposal.x[b, :i].tolist()], len(outer.round.texts[b]) - 1
                logits = on_targets_cache(target, middle, text, held)
                torch.testing.assert_close(proposal.q[b, i], probs(logits), rtol=1e-9, atol=1e-9)
                seen[1] += 1
        return proposal

    original = OuterDrafts.proposal
    monkeypatch.setattr(OuterDrafts, "proposal", checked)
    proposer.small.propose = guessed  # type: ignore[method-assign]
    engine = Engine(target, proposer, rows=4, policy=Fixed(4))
    engine.generate(PROMPTS, max_new_tokens=[14, 9, 17, 12, 8, 16], sampling=sampling, ignore_eos=True)
    assert seen[0] > (60 if held > 14 else 15) and seen[1] > 60


def test_guesses_save_passes_of_the_rounded_target() -> None:
    """As many tokens as without them, in fewer passes of the rounded target."""
    target, passes = tiny(), []
    proposer = TwoLevels(Quantised(target), Independent(near(target, 0.05)))
    read = proposer._read

    def counted(*given: Any) -> Tensor:
        passes.append(1)
        return read(*given)

    proposer._read = counted  # type: ignore[method-assign]
    out = Engine(target, proposer, rows=1, policy=Fixed(6)).generate(PROMPTS[:2], max_new_tokens=40, ignore_eos=True)
    assert len(passes) < 0.6 * sum(out.stats.drafted)


def test_with_shared_noise_the_drafts_are_those_of_the_rounded_target_alone() -> None:
    """Counts too: what the small draft guesses changes nothing but the time."""
    target, settings = tiny(), {"max_new_tokens": 20, "sampling": MIXED, "ids": range(6), "ignore_eos": True}
    other = near(target, 0.3)
    results = []
    for proposer in (Other(target, other), TwoLevels(Other(target, other), Independent(near(target, 0.15)))):
        out = Engine(target, proposer, verify="coupled", rows=4, policy=Fixed(3)).generate(PROMPTS, **settings)
        results.append((out.tokens, out.stats.drafted, out.stats.accepted))
    assert results[0] == results[1] and 0 < sum(results[0][2]) < sum(results[0][1])


def test_distributions_of_rows_that_read_history_are_penalised_by_what_was_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every draft has the rounded target's distribution with the row's settings, given its text and the drafts
    before."""
    target, seen = tiny(), []
    proposer, own = two_levels(target), Sampling(0.9, repetition_penalty=1.5, frequency_penalty=0.4)
    original = OuterDrafts.proposal

    def checked(outer: OuterDrafts) -> Proposal:
        proposal = original(outer)
        for i in range(proposal.k[0]):
            text = [*outer.round.texts[0], *proposal.x[0, :i].tolist()]
            logits = on_targets_cache(target, proposer.model.model, text, len(outer.round.texts[0]) - 1)
            distribution = probs(process(logits[None], [text], [len(text) - len(PROMPTS[0])], own), own)[0]
            torch.testing.assert_close(proposal.q[0, i].double(), distribution.double(), rtol=1e-5, atol=1e-6)
            seen.append(1)
        return proposal

    monkeypatch.setattr(OuterDrafts, "proposal", checked)
    engine = Engine(target, proposer, rows=2, policy=Fixed(4))
    engine.generate(PROMPTS[:1] * 2, max_new_tokens=[30, 20], sampling=[own, Sampling()], ignore_eos=True)
    assert len(seen) > 20


def test_copies_share_nothing_that_is_stored() -> None:
    """Costs are measured with copies: a copy changes no state of another copy, nor of the original."""
    target = tiny(positions=64)
    proposer = two_levels(target)
    costs = measure_costs(LM(target, 3), proposer, 4, context=12, repeats=1, warmup=0)
    assert costs.draft > 0 or costs.first > 0
    one, other = copy(proposer), copy(proposer)
    one.small.stored = [1]
    assert one.model is not other.model is not proposer.model and one.small is not proposer.small
    before = list(proposer.small.stored), list(other.small.stored)
    one.small.stored = [7, 7, 7]
    assert (proposer.small.stored, other.small.stored) == before


def test_a_target_that_changes_is_rounded_again() -> None:
    """One that does not change is rounded once, for all that draft with it."""
    target = tiny()
    first = Quantised(target).model
    assert Quantised(target).model is first and Quantised(target).model is not target
    with torch.no_grad():
        target.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    again = Quantised(target).model
    assert again is not first
    assert not torch.equal(again(torch.tensor([PROMPT])).logits, first(torch.tensor([PROMPT])).logits)


def test_wrong_small_drafts_and_rules_raise() -> None:
    target = tiny(layers=3)
    model = Quantised(target)
    with pytest.raises(ValueError, match="give an Independent as the small one, not a EarlyExit"):
        TwoLevels(model, EarlyExit(exit_network(target), target))
    with pytest.raises(ValueError, match="make both drafts without shape=, and give an Independent"):
        TwoLevels(model, Independent(near(target), shape=(-1, 0, 0)))
    with pytest.raises(ValueError, match="inner must be at least 1, not 0"):
        TwoLevels(model, Independent(near(target)), 0)
    for rule in ("coupled", "tree", "lossy_typical", "none"):
        with pytest.raises(ValueError, match=f"rule must be one of token, block, match, not '{rule}'"):
            TwoLevels(model, Independent(near(target)), 2, rule)
