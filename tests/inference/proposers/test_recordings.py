"""A recorded round returns what the same function returns now for the present inputs: no recording outlives what it
depends on, and every input is refreshed."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from inference import Engine, Sampling
from inference.models.replay import Recorded
from inference.policy import Fixed
from inference.proposers import Independent, NGram, Parallel
from inference.proposers.base import Host, Proposal, Proposer
from inference.proposers.hybrid import PartialRound
from inference.round import DecodingRound
from tests import kinds, standin
from tests.often import often
from tests.tiny import near, record_on_cpu, tiny

PROMPTS = [[i % 30 + 1 for i in range(n)] for n in (3, 7)]
# in turn on one engine: neighbours differ in one setting, and their recordings have the same shapes
CALLS: list[Any] = [
    Sampling(0.0),
    Sampling(0.8),
    Sampling(0.8, top_k=3),
    Sampling(0.8, top_k=4),
    Sampling(0.8, top_k=5),
    [Sampling(0.5, top_k=2), Sampling(0.8)],
    [Sampling(0.8), Sampling(0.0)],
    [Sampling(0.0, min_p=0.2), Sampling(0.8, min_p=0.4)],
    Sampling(0.8, min_p=0.3),
    Sampling(0.8, top_p=0.5),
    Sampling(0.8, presence_penalty=2.0),
    Sampling(0.8, frequency_penalty=2.0),
    Sampling(0.8, repetition_penalty=2.0),
    Sampling(0.8, logit_bias={3: 4.0}),
    Sampling(0.8, logit_bias={4: 4.0}, presence_penalty=1.0),
    Sampling(0.8, banned=((4,), (5,))),
    Sampling(0.8, min_new_tokens=3, stop_ids=(7,)),
]


def flat(tensors: Any) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    elif tensors is not None:
        for part in tensors:
            yield from flat(part)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Names of the replayed recordings, on a CPU without graphs, each compared with the function itself."""
    record_on_cpu(monkeypatch)
    numbers = cached_property(lambda round: (round.send(), round._streams(round.noise.table.shape[-1]))[1])
    numbers.__set_name__(DecodingRound, "_numbers")
    monkeypatch.setattr(DecodingRound, "_numbers", numbers)  # as many as there are, as on a GPU
    replayed, names = Recorded.__call__, []

    def both(self: Recorded, name: Any, inputs: Any, make: Callable[[], Any], reads: Any, **how: Any) -> Any:
        output = replayed(self, name, inputs, make, reads, **how)
        if output is not None and name != "keep" and name[0] != "pass":
            names.append(name)
            for one, other in zip(flat(output), flat(make()(**inputs, **reads)), strict=True):
                assert torch.allclose(one.double(), other.double(), rtol=0, atol=1e-9, equal_nan=True), name
        return output

    monkeypatch.setattr(Recorded, "__call__", both)
    return names


Make = Callable[..., Proposer]


def independent(target: Any, **settings: Any) -> Proposer:
    return Independent(near(tiny(layers=1)), **settings)


def kind(name: str, shape: Any = None) -> Make:
    return lambda target: kinds.KINDS[name].proposer(target, **({"shape": shape} if shape else {}))


class Later(Independent):
    """Drafts one token in its first round, two in the next, as a part of a hybrid whose other drafts are looked up."""

    def open(self, host: Host) -> None:
        super().open(host)
        self.rounds = 0

    def propose(self, round: Any) -> Proposal:
        self.rounds += 1
        return super().propose(PartialRound(round, [min(k, self.rounds) for k in round.k]))


class LaterAtOnce(Later, Parallel): ...


DRAFTS: dict[str, tuple[Make, str]] = {
    "independent, token": (independent, "token"),
    "independent, coupled": (independent, "coupled"),
    "parallel, block": (lambda target: Parallel(kinds.masked(target)), "block"),
    "independent, later": (lambda target: Later(near(tiny(layers=1))), "token"),
    "parallel, later": (lambda target: LaterAtOnce(kinds.masked(target)), "token"),
    "parallel, markov": (lambda target: Parallel(kinds.chained(kinds.masked(target))), "token"),
    "ngram, token": (lambda target: NGram(1), "token"),
    "medusa, trees": (kind("medusa", (-1, -1, 0)), "tree"),
    "eagle, trees": (kind("eagle", (-1, -1, 0)), "traversal"),
    "eagle, token": (kind("eagle"), "token"),
    "p_eagle, token": (kind("p_eagle"), "token"),
    "p_eagle, trees": (kind("p_eagle", (-1, -1, 0)), "tree"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_recording_gives_what_its_function_gives_now(drafts: str, compared: list[object]) -> None:
    """Calls on one engine that differ in a setting, and then in the draft length."""
    make, rule = DRAFTS[drafts]
    target = tiny()
    engine = Engine(target, make(target), verify=rule, policy=Fixed(2), rows=2)
    for n, sampling in enumerate(CALLS):
        engine.generate(PROMPTS, max_new_tokens=3, sampling=sampling, seed=n, ignore_eos=True)
    for k in (1, 3):
        engine.policy = Fixed(k)
        engine.generate(PROMPTS[::-1], max_new_tokens=6, sampling=Sampling(0.8, top_k=9), ignore_eos=True)
    assert len(compared) > 2 * len(CALLS)


@pytest.mark.thorough
def test_a_recording_is_of_the_target_that_its_engine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that serve two engines in turn read the states of the current one and run its output head."""
    monkeypatch.setattr("inference.models.replay.WARMUP", 0)

    def accepted(device: str) -> list[list[int]]:
        targets, counts = [tiny(layers=1, hidden=8, seed=seed).to(device) for seed in (0, 5)], []
        heads = kinds.KINDS["medusa"].proposer(targets[0])
        for target in targets:
            engine = Engine(target, heads, policy=Fixed(2), rows=2)
            counts.append(engine.generate(PROMPTS, max_new_tokens=9, seed=2, ignore_eos=True).stats.accepted)
        return counts

    wanted = accepted("cpu")
    with standin.device():
        assert accepted("cuda") == wanted


@pytest.mark.parametrize("name", often(["eagle", "medusa"], {"eagle"}.__contains__))
@pytest.mark.thorough
def test_recordings_of_one_tree_outlive_those_of_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of two shapes in turn: what the first one's recordings read is still there."""
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)

    def texts(device: str) -> list[list[int]]:
        target = tiny(layers=2, hidden=8).to(device)
        engines = [
            Engine(target, kind(name, shape)(target), verify="tree", policy=Fixed(2), rows=2)
            for shape in ((-1, -1, 0), (-1, 0, 0))
        ]
        return [engine.generate(PROMPTS, max_new_tokens=3, seed=2).tokens for engine in (*engines, engines[0])]

    wanted = texts("cpu")
    with standin.device() as gpu:
        assert texts("cuda") == wanted and gpu.recordings
