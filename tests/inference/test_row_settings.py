"""Rows of one engine with settings of their own."""

from inference import Engine, Sampling
from tests.tiny import tiny


def test_rows_of_one_noise_keep_their_own_settings() -> None:
    """The second text enters the slot of the first one, under the same id."""
    engine, both = Engine(tiny(), rows=1), [Sampling(0.3), Sampling(1.7, repetition_penalty=1.5)]
    together = engine.generate([[3, 5], [3, 5]], max_new_tokens=12, sampling=both, ids=[7, 7], ignore_eos=True).tokens
    alone = [engine.generate([[3, 5]], max_new_tokens=12, sampling=one, ids=[7], ignore_eos=True).tokens[0]
             for one in both]  # fmt: skip
    assert together == alone and alone[0] != alone[1]
