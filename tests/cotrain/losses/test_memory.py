"""The benchmark of heads, at a size that the suite can afford."""

from studies.heads import run


def test_both_sides_agree_and_chunks_take_less_memory() -> None:
    found = run(24_000, 2_048, repeats=1)
    assert max(found["apart"]) < 0.01
    assert found["memory"] < 0.7
