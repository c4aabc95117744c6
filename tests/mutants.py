"""Known ways to break the code, each with the test that must notice.

A row of `tests/planted/*.py` is (name, file, old, new, tests, pitfall): it replaces the text `old`, which must occur
exactly once in `file`, by `new`; one of `tests` must then fail. `pitfall` says what the bug is, with the number of its
row where it is a known pitfall of speculative decoding. `python -m tests.run_mutants` plants them.
"""

from dataclasses import dataclass

from tests.planted import (
    baselines,
    commands,
    core,
    engine,
    folders,
    measurement,
    packaging,
    prediction,
    training,
    truth_commands,
)

PARTS = (core, engine, prediction, measurement, folders, commands, training, baselines, packaging, truth_commands)


@dataclass(frozen=True)
class Mutant:
    """One planted bug: a name, the change of one file, the node ids that must fail, what it stands for."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    pitfall: int | str


MUTANTS = [Mutant(*row) for part in PARTS for row in part.ROWS_OF_BUGS]
