"""Costs of rounds from a file (`cotrain plan costs=`), for a machine that is not this one."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from cotrain.errors import UserError
from inference.measure.costs import Costs

PARTS = ("target", "draft", "rest", "first")  # of Costs: what a file of one's own has


def read_costs(path: str, draft: str, rows: Sequence[int], longest: int) -> dict[int, Costs]:
    """Return the costs by number of rows in a file: the plan.json of another machine, or JSON with `PARTS` in seconds,
    as in `Costs`, by number of rows. draft: the draft folder, by which a plan of several drafts is read. longest: the
    longest draft length that is forecast.

    Raises UserError for other files, for missing rows, for fewer draft lengths and for numbers that are no seconds.
    """
    try:
        with open(path, encoding="utf-8") as file:
            given: dict[str, Any] = json.load(file)
        if "cells" in given:  # a plan
            of_drafts = given["costs"]
            given = of_drafts.get(draft) or next(iter(of_drafts.values()), {})
            if len(of_drafts) > 1 and given is not of_drafts.get(draft):
                raise UserError(f"costs={path}: it has costs of {', '.join(of_drafts)}, and none of {draft}")
        return {count: _costs(given[str(count)], count, longest) for count in rows}
    except KeyError as error:
        raise UserError(
            f"costs={path}: there is no entry {error}; costs of {', '.join(map(str, rows))} rows are "
            f"needed, each with {', '.join(PARTS)}"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"costs={path}: {error}") from error


def _costs(given: Mapping[str, Any], rows: int, longest: int) -> Costs:
    """Return the costs of a number of rows. Raises KeyError, TypeError and ValueError."""
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
