"""The figures of a verdict as a report keeps them, see `verdict`; None for a check that does not apply."""

from typing import Any

from inference.report.schema import Many, Maybe

_TEXT = {
    **dict.fromkeys(("prompts", "equal", "ties", "unexplained", "compared", "tokens"), int),
    "noise": Maybe(float),
    "gap": Maybe(float),
    "limit": Maybe(float),
    "passed": bool,
}
_CALLS = {
    **dict.fromkeys(("tokens", "measured", "near", "rare"), int),
    **dict.fromkeys(("predicted", "sigma", "rare_expected", "z_rare", "relative", "tau"), float),
    "z": Maybe(float),
    "prefix": Maybe([Maybe(float)]),
    "conditional": Maybe([Maybe(float)]),
    "passed": bool,
}
_DEPTH = {
    **dict.fromkeys(("rounds", "accepted"), int),
    **dict.fromkeys(("alpha", "sigma", "measured"), float),
    "passed": bool,
}
_LOGITS = {
    **dict.fromkeys(("tokens", "first", "last"), int),
    **dict.fromkeys(("one", "many", "worst", "own", "limit", "worst_limit"), Maybe(float)),
    "passed": bool,
}
_SURPRISE = {
    **dict.fromkeys(("tokens", "impossible"), int),
    **dict.fromkeys(("surprise", "entropy", "z", "place_z"), Maybe(float)),
    "passed": bool,
}
FIGURES: dict[str, Any] = {
    "passed": bool,
    "text": _TEXT,
    "calls": Maybe(_CALLS),
    "depth": Maybe(_DEPTH),
    "logits": Maybe(_LOGITS),
    "surprise": Maybe(_SURPRISE),
    "missing": Many(str),
}
