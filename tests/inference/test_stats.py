"""Counts and clocks of calls."""

from inference.output import PHASES, Counts, Stats, pooled


def stats(first: int) -> Stats:
    """All numbers different."""
    rows = [Counts(first + 1, first + 2, [4, first], [3, 1], [4, 2], [first])]
    seconds, times = ({phase: scale * (first + n) for n, phase in enumerate(PHASES)} for scale in (0.5, 1))
    return Stats(first + 1, first + 7, [4, first], [3, 1], [4, 2], [], rows, seconds, times)  # type: ignore[arg-type]


def test_pooled_runs_are_sums_of_each_figure() -> None:
    a, b, c = stats(10), stats(20), stats(40)
    c.drafted, c.accepted, c.tried = [5, 40, 2], [2, 2, 1], [5, 3, 2]
    whole = pooled([a, b, c])
    assert (whole.tokens, whole.target_calls) == (11 + 21 + 41, 17 + 27 + 47)
    assert (whole.drafted, whole.accepted, whole.tried) == ([13, 70, 2], [8, 4, 1], [13, 7, 2])
    assert whole.rows == [*a.rows, *b.rows, *c.rows]
    for n, phase in enumerate(PHASES):
        assert whole.seconds[phase] == 0.5 * (70 + 3 * n) and whole.times[phase] == 70 + 3 * n


def test_counts_by_depth_separate_prefix_from_conditional():
    row = Counts()
    for tokens, drafted, accepted in [(3, 2, 2), (2, 2, 1), (1, 2, 0), (2, 1, 1)]:
        row.add(tokens, drafted, accepted)
    assert row.prefix == [3 / 4, 1 / 3]
    assert row.conditional == [3 / 4, 1 / 2]  # the round that drafted one never tried the second
    both = pooled([Stats(rows=[row]), Stats(rows=[row])])
    assert len(both.rows) == 2 and both.tokens == 0
    both.merge(row)
    both.merge(row)
    assert both.tokens == 16 and both.conditional == row.conditional and both.drafted == [8, 6]


def test_starts_of_rounds_are_stored_by_row():
    stats = Stats(rows=[Counts(), Counts()])
    for row, tokens in [(0, 3), (1, 1), (0, 2), (1, 4), (0, 1)]:
        stats.count(row, tokens, 3, tokens - 1)
    assert [row.starts for row in stats.rows] == [[0, 3, 5], [0, 1]]
