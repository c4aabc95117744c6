"""Every loss by its name: what an expression as 0.1*kl+0.9*tv may name, and what each takes beside both distributions.

A loss is added by writing its function under `@loss(...)`, in `divergences` (of a position) or `sequence` (of a text);
`loss.first=NAME` then trains with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True)
class Loss:
    """function: (log p, log q) of a position, (..., V) -> (...); with x (...) when it takes a token.

    takes: "" or what x is: "text", the text's own token, or "drawn", one drawn from q. merged: whether it has a meaning
    for distributions of which some tokens alone are kept, see `teacher.top_k`. over: "positions"; "texts" or "tokens"
    of a loss of a whole text, which is what its sum is divided by. weighted: each position counts as much as the target
    calls that acceptance there saves.
    """

    function: Function
    takes: str = ""
    merged: bool = False
    over: str = "positions"
    weighted: bool = False

    @property
    def sequence(self) -> bool:
        """Whether it is of whole texts: (log p(x), log q(x), k, lengths) -> the sum of its values, differentiable."""
        return self.over != "positions"


LOSSES: dict[str, Loss] = {}


def loss(takes: str = "", merged: bool = False, over: str = "positions") -> Callable[[Function], Function]:
    """Registers a function under its own name, and leaves it as it is."""

    def registered(function: Function) -> Function:
        LOSSES[function.__name__] = Loss(function, takes, merged, over)
        return function

    return registered
