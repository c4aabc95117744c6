"""Engines in several threads: calls wait for each other, streams lose their slots with a clear error, nothing else."""

import copy
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers import Independent
from tests.often import often
from tests.tiny import near, tiny

PROMPTS = [[1, 2, 3], [4, 5], [6]]
REGIME: dict[str, Any] = {"max_new_tokens": 8, "sampling": Sampling(0.8), "ignore_eos": True}


@pytest.fixture(autouse=True)
def hasty():
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*tasks: Callable[[], None]) -> list[BaseException]:
    """Run tasks in threads; what they raised. None may last."""
    raised: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return raised


def paused(engine: Engine, seed: int) -> None:
    """Its rounds take random times."""
    read, chance = engine.target_pass, random.Random(seed)

    def slow(*given: Any) -> Any:
        time.sleep(chance.random() * 2e-3)
        return read(*given)

    engine.target_pass = slow  # type: ignore[method-assign]


def engines(shared: str) -> list[Engine]:
    target, draft = tiny(), near(tiny())
    if shared == "engine":
        return 2 * [Engine(target, Independent(draft), policy=Fixed(3), rows=2)]
    proposer = Independent(draft)
    targets = [target, tiny(seed=2) if shared == "proposer" else target]
    proposers = [proposer, proposer if shared == "proposer" else Independent(draft)]
    return [Engine(*both, policy=Fixed(3), rows=2) for both in zip(targets, proposers, strict=True)]


@pytest.mark.parametrize("shared", often(["engine", "target", "proposer"], {"proposer"}.__contains__))
def test_calls_of_several_threads_give_what_they_give_alone(shared: str) -> None:
    both = engines(shared)
    wanted = [[one.generate(PROMPTS, seed=seed, **REGIME).tokens for seed in range(3)] for one in both]
    for seed, one in enumerate(both if both[0] is not both[1] else both[:1]):
        paused(one, seed)
    results: list[tuple[int, int, list[list[int]]]] = []

    def calls(which: int) -> None:
        for seed in (0, 1, 2):
            results.append((which, seed, both[which].generate(PROMPTS, seed=seed, **REGIME).tokens))

    assert together(*(lambda which=which: calls(which) for which in (0, 1, 0, 1))) == []  # type: ignore[misc]
    assert len(results) == 12 and all(tokens == wanted[which][seed] for which, seed, tokens in results)


def test_a_stream_gives_its_text_or_says_that_a_later_call_took_its_slots() -> None:
    engine = engines("engine")[0]
    wanted = {seed: engine.generate(PROMPTS[:1], seed=seed, **REGIME).tokens[0] for seed in range(4)}
    paused(engine, 0)

    def stream(seed: int) -> None:
        text: list[int] = []
        try:
            for event in engine.stream(PROMPTS[0], seed=seed, **REGIME):
                text += event.ids
        except RuntimeError as error:
            assert "a later call took the slots of this stream" in str(error)
        else:
            assert text == wanted[seed]

    def call(seed: int) -> None:
        assert engine.generate(PROMPTS[:1], seed=seed, **REGIME).tokens == [wanted[seed]]

    assert (
        together(
            *[lambda seed=seed: stream(seed) for seed in range(4)],  # type: ignore[misc]
            *[lambda seed=seed: call(seed) for seed in range(4)],
        )
        == []
    )  # type: ignore[misc]


def test_a_stream_that_is_left_half_way_holds_nobody_up() -> None:
    engine = engines("engine")[0]
    left = engine.stream(PROMPTS[0], **REGIME)
    next(left)
    assert together(lambda: engine.generate(PROMPTS, **REGIME) and None) == []
    with pytest.raises(RuntimeError, match="a later call took the slots"):
        next(left)


def test_new_engines_do_not_disturb_a_call() -> None:
    """Whoever makes one runs the model, with narrow windows and other memory."""
    model = tiny()
    engine = Engine(model, rows=2)
    wanted = engine.generate(PROMPTS, seed=1, **REGIME).tokens
    paused(engine, 1)

    def make() -> None:
        for _ in range(3):
            with_other_weights = tiny(seed=5)
            Engine(with_other_weights, Independent(model), rows=1).generate(PROMPTS, **REGIME)

    def call() -> None:
        for _ in range(4):
            assert engine.generate(PROMPTS, seed=1, **REGIME).tokens == wanted

    assert together(make, call, make) == []


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_an_engine_says_that_it_is_not_copied(way: Callable[[Engine], Any]) -> None:
    with pytest.raises(
        TypeError, match=r"cannot be copied or pickled, .* copy its model and make another engine: Engine\("
    ):
        way(Engine(tiny(), Independent(near(tiny()))))


def test_a_shallow_copy_has_the_same_slots() -> None:
    engine = Engine(tiny(), rows=2)
    other = copy.copy(engine)
    assert other.slots is engine.slots and other.generate(PROMPTS, **REGIME).tokens
