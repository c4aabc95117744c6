"""Costs of rounds from a file (`cotrain plan costs=`), for a machine that is not this one."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from cotrain.errors import UserError, first_line
from cotrain.planning.forecast import at_acceptance, break_even
from inference.measure.costs import Costs
from inference.report.table import aligned

PARTS = ("target", "draft", "rest", "first")  # of Costs: what a file of one's own has
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def speedups_of(path: str, rows: Sequence[int], longest: int) -> list[dict[str, Any]]:
    """Return one entry of plan.json for each draft in a file of costs and each number of rows. It has the costs, the
    break-even acceptance, and for each of `ACCEPTANCES` (the same at every depth) the speed-up over plain decoding with
    the best draft length, at most `longest`.

    path: the file. rows: the numbers of rows. Raises UserError for a file that has no such costs, for missing rows, for
    too few draft lengths, and for numbers that are no seconds.
    """
    with _readable(path, rows):
        content = _content(path)
        drafts = {
            draft: _by_rows(given, rows, longest) for draft, given in content.get("costs", {path: content}).items()
        }
    speedups = []
    for draft, by_rows in drafts.items():
        for count, costs in by_rows.items():
            seconds = costs.rounds[: longest + 1]
            best = {f"{acceptance:g}": at_acceptance(seconds, acceptance) for acceptance in ACCEPTANCES}
            even = break_even(seconds)
            speedups.append(
                {"draft": draft, "rows": count, "speedups": best, "break_even": even, "costs": asdict(costs)}
            )
    return speedups


def speedup_table(speedups: Sequence[Mapping[str, Any]]) -> str:
    """Return the speed-ups as a table for the user, with draft lengths in brackets. speedups: from `speedups_of`."""
    rows = [["draft", "rows", *(f"acceptance {acceptance:g}" for acceptance in ACCEPTANCES), "break-even"]]
    for one in speedups:
        cells = (f"{speedup:.2f}x ({k})" for speedup, k in one["speedups"].values())
        even = "-" if one["break_even"] is None else f"{one['break_even']:.2f}"
        rows.append([one["draft"], str(one["rows"]), *cells, even])
    return aligned(rows, left=1)


def read_costs(path: str, draft: str, rows: Sequence[int], longest: int) -> dict[int, Costs]:
    """Return the costs of rounds in a file, keyed by number of rows.

    path: the plan.json of another machine, or a JSON object with an object for each number of rows, which has the
    entries `PARTS` in seconds. draft: the draft folder, to choose among a plan's drafts. rows: the numbers of rows to
    return. longest: the longest draft length to forecast.

    Raises UserError for any other file, for missing rows, for too few draft lengths, and for numbers that are no
    seconds.
    """
    with _readable(path, rows):
        given = _content(path)
        if "costs" in given:  # a plan
            of_drafts = given["costs"]
            given = of_drafts.get(draft) or next(iter(of_drafts.values()), {})
            if len(of_drafts) > 1 and given is not of_drafts.get(draft):
                raise UserError(
                    f"costs={path}: it has costs of {', '.join(of_drafts)}, and none of {draft}: set draft.path= to "
                    "one of them"
                )
        return _by_rows(given, rows, longest)


@contextmanager
def _readable(path: str, rows: Sequence[int]) -> Iterator[None]:
    """Turn errors that are raised in the block while the file `path` is read into a UserError. rows: the numbers of
    rows that it must have, for the message."""
    try:
        yield
    except KeyError as error:
        raise UserError(
            f"costs={path}: it has no entry {error}: the file needs costs for {', '.join(map(str, rows))} rows "
            f"(batches=), each with {', '.join(PARTS)}"
        ) from error
    except (TypeError, AttributeError) as error:
        raise UserError(
            f"costs={path}: it must be a plan.json, or a JSON object with an object for each number of rows, which has "
            f"{', '.join(PARTS)}"
        ) from error
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"costs={path}: {first_line(error)}") from error


def _content(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _by_rows(given: Mapping[str, Any], rows: Sequence[int], longest: int) -> dict[int, Costs]:
    return {count: _costs(given[str(count)], count, longest) for count in rows}


def _costs(given: Mapping[str, Any], rows: int, longest: int) -> Costs:
    """Return the costs of rounds with `rows` rows. given: the file's object for this number of rows. longest: the
    longest draft length that it must cover. Raises KeyError, TypeError or ValueError if an entry is missing or wrong.
    """
    target, rest = (tuple(map(float, given[part])) for part in ("target", "rest"))
    draft, first = float(given["draft"]), float(given["first"])
    if not longest < len(target) == len(rest):
        raise ValueError(
            f"{rows} rows: target and rest must have {longest + 1} numbers or more, for draft lengths 0 "
            f".. {longest}; they have {len(target)} and {len(rest)}"
        )
    whole = Costs(target, draft, rest, rows, int(given.get("context", 0)), first=first)
    if not all(math.isfinite(one) for one in (*target, *rest, draft, first)):
        raise ValueError(f"{rows} rows: {', '.join(PARTS)} must be finite numbers of seconds")
    if min(*target, *rest, draft, *map(whole.drafting, range(len(target)))) < 0:
        raise ValueError(
            f"{rows} rows: {', '.join(PARTS)} must be seconds of at least 0, and so must all drafts of a round together"
        )
    if not min(whole.rounds) > 0:
        raise ValueError(f"{rows} rows: rounds must take some seconds, not {whole.rounds}")
    return whole
