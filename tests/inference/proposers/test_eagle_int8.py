"""Drafts over states on a CPU, with weights of 8 bits."""

import copy
from typing import Any

import pytest
import torch

from cotrain.students.base import Seen
from cotrain.students.block import BlockStudent
from cotrain.students.eagle import EagleStudent
from cotrain.teacher.target_model import served
from inference import Engine, Sampling, load
from inference.drafts.draft_folder import Metadata, save
from inference.models import llama, packing
from inference.policy import Fixed
from inference.proposers.eagle import Eagle
from inference.proposers.quantised import round_bits
from tests import kinds
from tests.inference.models.test_packing import needs_kernels
from tests.often import often
from tests.tiny import PROMPTS, tiny

pytestmark = needs_kernels
WHOLE: dict[str, Any] = {"max_new_tokens": [14, 4, 22, 9, 16], "seed": 2, "ignore_eos": True}


def half(size: int | None) -> tuple[Any, Any]:
    """A target and a draft that int8 kernels can run."""
    target = tiny(hidden=32, dtype=torch.bfloat16)
    return target, packing.widened_draft(kinds.eagle(target, draft_vocab_size=size))


def engine_of(target: Any, proposer: Eagle) -> Engine:
    return Engine(target, proposer, rows=1, policy=Fixed(3))


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


@pytest.mark.parametrize("size", often([16, None], {16}.__contains__))
def test_q_is_that_of_the_rounded_weights(size):
    """Before each round, also of weights that have changed since; the network itself is not rounded."""
    target, network = half(size)
    proposer = Eagle(network, int8=True)
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


def test_a_folder_measured_with_8_bits_is_served_with_them(tmp_path, monkeypatch):
    """Where the kernels are."""
    target, network = half(16)
    hashes = {"name": "none", "config": None, "tokenizer": None}
    for int8 in (True, False):
        save(network, None, tmp_path / f"{int8}", Metadata(hashes, 3, kind="eagle", int8=int8), None)
        for kernels in {packing.has_kernels(), False}:
            monkeypatch.setattr(packing, "has_kernels", lambda kernels=kernels: kernels)
            proposer: Any = load(tmp_path / f"{int8}", target).proposer
            assert proposer.int8 == (proposer.weights == "int8") == (int8 and kernels)
    monkeypatch.setattr(packing, "has_kernels", lambda: False)
    target, network = half(16)
    one = Eagle(network, int8=True)
    engine_of(target, one).generate([[1, 2, 3]], max_new_tokens=4, ignore_eos=True)
    assert one.weights != "int8"
    monkeypatch.undo()
    assert not EagleStudent.takes_int8(kinds.eagle(tiny())), "there is no kernel for float64"
    assert BlockStudent.takes_int8(kinds.block(tiny(hidden=32, dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("kind", "shape"), [("eagle", None), ("eagle", (-1, -1, 0, 0, 1)), ("p_eagle", None), ("block", (-1, -1, 0, 0, 1))]
)
def test_kinds_and_trees_are_served_in_8_bits(kind, shape):
    target = tiny(hidden=32, dtype=torch.bfloat16)
    proposer: Any = kinds.KINDS[kind].proposer(target, **({"shape": shape} if shape else {}))
    packing.widened_draft(proposer.network)
    proposer.int8 = True
    out = Engine(target, proposer, rows=2, policy=Fixed(2), verify="tree" if shape else "token").generate(
        PROMPTS[:3], max_new_tokens=9, seed=1, ignore_eos=True
    )
    assert sum(out.stats.accepted) > 0
    packed = [part for part in proposer.served.modules() if isinstance(part, llama.PackedLinear)]
    assert {part.product.weight.dtype for part in packed} == {torch.int8}
