"""Chains of a feature draft on a CPU: compiled, and with weights of 8 bits."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import inference.proposers.eagle as eagle_module
from cotrain.students.base import Seen
from cotrain.students.block import BlockStudent
from cotrain.students.eagle import EagleStudent
from cotrain.teacher.target_model import served
from inference import Engine, Sampling, load
from inference.drafts.draft_folder import Metadata, save
from inference.models import llama, packing
from inference.models.replay import Compiled, _Bound
from inference.policy import Fixed
from inference.proposers.eagle import Eagle
from inference.proposers.quantised import round_bits
from inference.sampling import draw
from tests import kinds
from tests.inference import test_drafting
from tests.inference.test_shared_proposers import Short
from tests.often import often
from tests.tiny import compiles, tiny, traced

PROMPTS = [[i % 30 + 1 for i in range(n)] for n in (3, 9, 1, 6, 14)]
WHOLE: dict[str, Any] = {"max_new_tokens": [14, 4, 22, 9, 16], "seed": 2, "ignore_eos": True}
REGIMES = {name: rows for name, rows in test_drafting.REGIMES.items() if " by " not in name}
REGIMES["with a processor"] = [Sampling(0.8, processors=(lambda ids, logits: logits / 2,))] * 5
OFTEN = {("sampled", 1), ("each its own", 3), ("mixed with greedy", 3), ("with history", 3)}
UNCOMPILED = {"truncated", "with history", "with a processor", "mixed with greedy"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is compiled runs as it is; the numbers of drafts that were made at once."""
    made: list[int] = []

    def counted(module: torch.nn.Module, *_: Any) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            made.extend([module.K] if isinstance(module, _Bound) else [])
            return module(**inputs)

        return run

    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr(Compiled, "failed", False)
    monkeypatch.setattr(eagle_module, "FIRST_SLOTS", 8)  # slots grow
    return made


def generated(proposer: Eagle, sampling: Any, rows: int = 3, policy: Any = None, **settings: Any) -> tuple[Any, Any]:
    """What an engine generates, and q of every draft."""
    seen, propose = [], proposer.propose

    def watched(round: Any) -> Any:
        x, q, k, _ = proposal = propose(round)
        seen.extend(q[b, j].clone() for b, n in enumerate(k) for j in range(n))
        return proposal

    proposer.propose = watched  # type: ignore[method-assign]
    target = tiny()
    engine = Engine(target, proposer, rows=rows, policy=policy or Fixed(3), compile=False, **settings)
    return engine.generate(PROMPTS, sampling=sampling, **WHOLE), torch.stack(seen)


def both(size: int | None, *arguments: Any, greedy: bool = False, **settings: Any) -> None:
    """Text, counts and q of compiled rounds are those of others: in float64 hardly anything may change."""
    network = kinds.eagle(tiny(), draft_vocab_size=size)
    (out, q), (wanted, p) = (
        generated(Eagle(network, greedy, compile=compile), *arguments, **settings) for compile in (True, False)
    )
    assert out.tokens == wanted.tokens and out.stats.rows == wanted.stats.rows
    torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-12)
    assert sum(out.stats.drafted) > 50


@pytest.mark.parametrize(
    ("name", "rows", "size"),
    [
        *often([*((name, 3, 16) for name in REGIMES), ("sampled", 1, 16)], lambda case: case[:2] in OFTEN),
        pytest.param("mixed with greedy", 1, None, marks=pytest.mark.thorough),
        ("greedy", 3, None),
    ],
)
def test_text_and_distributions_are_those_of_single_steps(
    calls: list[int], name: str, rows: int, size: int | None
) -> None:
    """Rows come and go, of one token too; drafts are cut at a row's limit; slots grow."""
    both(size, REGIMES[name], rows)
    assert set(calls) == (set() if name in UNCOMPILED and (name, rows) != ("mixed with greedy", 1) else {3})


@pytest.mark.parametrize(
    "settings", often([{"greedy": True}, {"verify": "match", "context": 24}], lambda case: "verify" in case)
)
def test_under_other_rules_too(calls: list[int], settings: dict[str, Any]) -> None:
    both(16, Sampling(0.8), **settings)
    assert calls


def test_shared_noise_is_drawn_step_by_step(calls: list[int]) -> None:
    both(16, Sampling(0.8), verify="coupled")
    assert not calls


class Pausing:
    """Lengths of a row change, and no row drafts in some rounds: accepted tokens wait, some more than a pass reads."""

    def __init__(self, every: int) -> None:
        self.round, self.every = 0, every

    def lengths(self, texts: list[list[int]]) -> list[int]:
        self.round += 1
        return [(len(text) + n) % 4 * (self.round % self.every == 0) for n, text in enumerate(texts)]


@pytest.mark.parametrize("every", often([1, 2, 5, 24], {2, 24}.__contains__))
def test_pairs_that_wait_are_read(calls: list[int], every: int) -> None:
    network = kinds.eagle(tiny(), draft_vocab_size=16)
    (out, q), (wanted, p) = (
        generated(Eagle(network, compile=compile), Sampling(0.8), 2, Pausing(every)) for compile in (True, False)
    )
    assert out.tokens == wanted.tokens and out.stats.rows == wanted.stats.rows
    torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-12)
    assert calls or every == 24


def test_rounds_are_compiled_with_the_target(calls: list[int]) -> None:
    """compile=None; p_eagle and block drafts run as they are."""
    target = tiny()
    for kind, compile, wanted in (
        ("eagle", True, True),
        ("eagle", False, False),
        ("p_eagle", True, False),
        ("block", True, False),
    ):
        calls.clear()
        proposer = kinds.KINDS[kind].proposer(target)
        Engine(target, proposer, rows=1, policy=Fixed(2), compile=compile).generate([[1, 2, 3]], max_new_tokens=6)
        assert bool(calls) == wanted, kind


@pytest.mark.thorough
def test_few_graphs_serve_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths, slots and uniforms differ from round to round; other weights are read."""
    traced(monkeypatch)
    torch._dynamo.reset()
    monkeypatch.setattr(eagle_module, "FIRST_SLOTS", 8)
    target = tiny()
    network = kinds.eagle(target, draft_vocab_size=16)
    for change in (0.0, 0.3):
        with torch.no_grad():
            network.lm_head.weight += change * torch.randn_like(network.lm_head.weight)
        (out, q), (wanted, p) = (generated(Eagle(network, compile=c), Sampling(0.8), 1) for c in (True, False))
        torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-12)
        assert out.tokens == wanted.tokens and not Compiled.failed
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    dead = weakref.ref(network)
    del network, out, wanted
    gc.collect()
    assert dead() is None, "a compiled round holds the network that it was made for"


def half(size: int | None) -> tuple[Any, Any]:
    """A target and a draft that int8 kernels can run."""
    target = tiny(hidden=32, dtype=torch.bfloat16)
    return target, kinds.eagle(target, draft_vocab_size=size)


def engine_of(target: Any, proposer: Eagle) -> Engine:
    return Engine(target, proposer, rows=1, policy=Fixed(3), compile=False)


def proposals(engine: Engine, n: int = 24) -> list[Any]:
    """The rounds of one text: the text before each, drafts, distributions and uniforms."""
    seen: list[Any] = []
    proposer: Any = engine.proposer
    propose = proposer.propose

    def watched(round: Any) -> Any:
        x, q, _, _ = proposal = propose(round)
        seen.append((list(round.texts[0]), x.clone(), q.clone(), round._streams(x.shape[1])[0].clone()))
        return proposal

    proposer.propose = watched
    engine.generate([[1, 2, 3, 4, 5]], max_new_tokens=n, sampling=Sampling(0.8), seed=1, ignore_eos=True)
    proposer.propose = propose
    return seen


@pytest.mark.thorough
@compiles
@pytest.mark.parametrize(("size", "int8"), [(16, True), (None, False)])
def test_compiled_drafts_are_drawn_from_the_distributions_they_come_with(size: int | None, int8: bool) -> None:
    """In code for this machine: the engine's exactness rests on it."""
    target, network = half(size)
    rounds = proposals(engine_of(target, Eagle(network, compile=True, int8=int8)))
    assert not Compiled.failed and len(rounds) > 3
    for _, x, q, u in rounds:
        assert torch.equal(x, draw(q, u))
        assert (q.sum(-1) - 1).abs().max() < 1e-5
    (_, _, q, _), (_, _, p, _) = rounds[0], proposals(engine_of(target, Eagle(network, int8=int8)))[0]
    torch.testing.assert_close(q[:, 0], p[:, 0], rtol=0.1, atol=0.01)


@pytest.mark.parametrize(("size", "compile"), often([(16, False), (None, True)], lambda case: case[1]))
def test_q_is_that_of_the_rounded_weights(calls: list[int], size: int | None, compile: bool) -> None:
    """Before each round, also of weights that have changed since; the network itself is not rounded."""
    target, network = half(size)
    proposer = Eagle(network, compile=compile, int8=True)
    engine = engine_of(target, proposer)
    assert proposer.weights == "int8" and EagleStudent.takes_int8(network)
    runs = []
    for _ in range(2):
        weights = [weight.clone() for weight in network.parameters()]
        runs.append((weights, proposals(engine, 16)))
        assert all(torch.equal(a, b) for a, b in zip(weights, network.parameters(), strict=True))
        network.lm_head.weight.data.mul_(0.5)  # torch does not count this change
    for weights, rounds in runs:
        errors = []
        with torch.no_grad():
            for own, weight in zip(network.parameters(), weights, strict=True):
                own.copy_(weight)
        for text, _, q, _ in rounds:
            near, far = ((q[0, 0] - first(network, target, text, int8)).abs().max() for int8 in (True, False))
            errors.append([float(near), float(far)])
        near, far = torch.tensor(errors).mean(0).tolist()
        assert near < 0.02 and near < 0.8 * far, (near, far)  # products of bfloat16 differ in their last bits
    assert bool(calls) == compile


def first(network: Any, target: Any, text: list[int], int8: bool) -> torch.Tensor:
    """The distribution of the first draft after a text, as the student has it in training. int8: with rounded
    weights."""
    network = copy.deepcopy(network)
    with torch.no_grad():
        for module in network.modules():
            if int8 and isinstance(module, torch.nn.Linear):
                module.weight.copy_(round_bits(module.weight, "int8"))
        ids = torch.tensor([text])
        seen = Seen(served(target, layers=network.config.layers)[0](ids))
        guess = EagleStudent(network, target).guesses({"ids": ids}, seen)[0]
        return (guess.head(guess.states)[-1].float() / 0.8).softmax(-1)


def test_a_folder_measured_with_8_bits_is_served_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every CPU."""
    target, network = half(16)
    hashes = {"name": "none", "config": None, "tokenizer": None}
    for int8 in (True, False):
        save(network, None, tmp_path / f"{int8}", Metadata(hashes, 3, kind="eagle", int8=int8), None)
        for kernels in {packing.has_kernels(), False}:
            monkeypatch.setattr(packing, "has_kernels", lambda kernels=kernels: kernels)
            proposer: Any = load(tmp_path / f"{int8}", target).proposer
            assert proposer.int8 == (proposer.weights == "int8") == int8
    assert not EagleStudent.takes_int8(kinds.eagle(tiny())), "there is no kernel for float64"
    narrow = tiny(hidden=24, dtype=torch.bfloat16)
    assert not EagleStudent.takes_int8(kinds.eagle(narrow)), "the kernel reads 16 inputs at a time"
    assert BlockStudent.takes_int8(kinds.block(tiny(hidden=32, dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("kind", "shape"), [("eagle", None), ("eagle", (-1, -1, 0, 0, 1)), ("p_eagle", None), ("block", (-1, -1, 0, 0, 1))]
)
def test_kinds_and_trees_are_served_in_8_bits(kind: str, shape: Any) -> None:
    target = tiny(hidden=32, dtype=torch.bfloat16)
    proposer: Any = kinds.KINDS[kind].proposer(target, **({"shape": shape} if shape else {}))
    proposer.int8 = True
    out = Engine(target, proposer, rows=2, policy=Fixed(2), verify="tree" if shape else "token").generate(
        PROMPTS[:3], max_new_tokens=9, seed=1, ignore_eos=True
    )
    assert sum(out.stats.accepted) > 0
    assert any(isinstance(part, llama.RoundedLinear) for part in proposer.served.modules())


def test_what_is_compiled_is_of_its_temperature_vocabulary_and_target(calls: list[int]) -> None:
    """Calls and engines that share a draft share nothing that was compiled for another choice."""
    network, targets, words = kinds.eagle(tiny(), draft_vocab_size=16), (tiny(), tiny(seed=5)), Short()
    for target, tokenizer, temperature in ((0, None, 0.8), (0, None, 0), (0, words, 0.8), (1, None, 0.8)):
        compiled, single = (
            Engine(
                targets[target],
                Eagle(network, compile=compile),
                rows=1,
                policy=Fixed(3),
                compile=False,
                tokenizer=tokenizer,  # type: ignore[arg-type]
            ).generate([[1, 2, 3, 4]], max_new_tokens=24, sampling=Sampling(temperature), seed=1, ignore_eos=True)
            for compile in (True, False)
        )
        assert compiled.tokens == single.tokens and compiled.stats.accepted == single.stats.accepted
    assert set(calls) == {3}
