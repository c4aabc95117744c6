"""Every loss by its name, and the weighted sum of losses that a configuration gives (`loss.first`, `loss.then`).

kl                    one loss
0.1*kl + 0.9*tv       a weighted sum
mix                   a name for 0.1*ce+1.8*tv
calls                 a sequence loss, from the log-probabilities of the text's tokens
calls_block           the same under block verification
calls_tv              tv, each position weighted by the target calls that acceptance there saves

Sequence losses and calls_tv are computed on tokens that the target sampled, never on prompts or given texts. To add a
loss, write its function in `divergences` (per position) or `sequence` (per text) and add its row to LOSSES.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cotrain.losses import divergences, sequence

Position = Callable[..., Tensor]


@dataclass(frozen=True)
class LossDefinition:
    """function: (log p, log q) of a position, (..., V) -> (...), plus tokens x (...) if `takes` is set.

    takes: "" or which token x is: "text", the text's own, or "drawn", one drawn from q. merged: whether the loss is
    defined for distributions of which only the top k tokens are stored, see `TopKTeacher`. over: "positions", or
    "texts" or "tokens" for a loss of whole texts: the count by which its sum is divided. weighted: weight each position
    by the target calls that acceptance there saves.
    """

    function: Callable[..., Any]
    takes: str = ""
    merged: bool = False
    over: str = "positions"
    weighted: bool = False

    @property
    def sequence(self) -> bool:
        """Whether it scores whole texts: (log p(x), log q(x), k, lengths) -> the differentiable sum of its values."""
        return self.over != "positions"


LOSSES = {
    "kl": LossDefinition(divergences.kl, merged=True),
    "tv": LossDefinition(divergences.tv, merged=True),
    "nla": LossDefinition(divergences.nla, merged=True),
    "lk": LossDefinition(divergences.lk, merged=True),
    "rkl": LossDefinition(divergences.rkl, merged=True),
    "jsd": LossDefinition(divergences.jsd, merged=True),
    "tvpp": LossDefinition(divergences.tvpp, takes="drawn"),
    "ce": LossDefinition(divergences.ce, takes="text", merged=True),
    "hellinger": LossDefinition(divergences.hellinger, merged=True),
    "greedy": LossDefinition(divergences.greedy, merged=True),
    "match": LossDefinition(divergences.match),
    "greedy_draft": LossDefinition(divergences.greedy_draft),
    "length": LossDefinition(sequence.length, over="texts"),
    "length_block": LossDefinition(sequence.length_block, over="texts"),
    "calls": LossDefinition(sequence.calls, over="tokens"),
    "calls_block": LossDefinition(sequence.calls_block, over="tokens"),
    # weighted by `acceptance.call_weights`: the gradient of `calls` with less variance
    "calls_tv": LossDefinition(divergences.tv, weighted=True),
}
EXPRESSIONS = {"mix": "0.1*ce+1.8*tv"}  # named sums: 2 tv = sum_v abs(p - q)
MERGED = [name for name, loss in LOSSES.items() if loss.merged]
NAMES = (*LOSSES, *EXPRESSIONS)


@dataclass(frozen=True)
class Term:
    """A loss of a sum, with its weight."""

    name: str
    weight: float
    loss: LossDefinition

    def __call__(self, logp: Tensor, logq: Tensor, *x: Tensor) -> Tensor:
        """The weighted loss of a position; x: the token, passed on if the loss takes one."""
        value: Tensor = self.loss.function(logp, logq, *(x if self.loss.takes else ()))
        return self.weight * value


@dataclass(frozen=True)
class LossSpec:
    """A parsed expression.

    position: the sum of its losses per position, called (logp, logq) or (logp, logq, x), None without one; takes: which
    token x is, "text" or "drawn", "" for none; sequence: its losses of whole texts; weighted: weight each position by
    the calls that acceptance there saves; merged: whether all its losses are `LossDefinition.merged`; terms: the losses
    that `position` sums.
    """

    position: Position | None
    takes: str = ""
    sequence: tuple[Term, ...] = ()
    weighted: bool = False
    merged: bool = False
    terms: tuple[Term, ...] = ()


def parse(expression: str) -> LossSpec:
    """The loss of an expression, see above. Raises ValueError naming the key for anything but a sum of known names, and
    for a sum that one pass cannot compute."""
    terms = _terms(expression)
    takes = {term.loss.takes for term in terms} - {""}
    if len(takes) > 1:
        raise ValueError(f"loss: {expression!r} needs the text's token and a drawn one at once")
    weighted = [term.name for term in terms if term.loss.weighted]
    if weighted and len(terms) > 1:
        raise ValueError(f"loss: {weighted[0]} stands alone, not in {expression!r}")
    per_position = tuple(term for term in terms if not term.loss.sequence)
    per_text = tuple(term for term in terms if term.loss.sequence)
    merged = all(term.loss.merged for term in terms)
    token = takes.pop() if takes else ""
    return LossSpec(_sum(per_position), token, per_text, bool(weighted), merged, per_position)


def _terms(expression: str) -> list[Term]:
    """The terms of a sum, with named sums written out and equal names added up."""
    terms: dict[str, Term] = {}
    for weight, name in map(_weight_and_name, expression.split("+")):
        for term in _terms(EXPRESSIONS[name]) if name in EXPRESSIONS else [Term(name, 1.0, LOSSES[name])]:
            before = terms[term.name].weight if term.name in terms else 0.0
            terms[term.name] = Term(term.name, before + weight * term.weight, term.loss)
    return list(terms.values())


def _weight_and_name(text: str) -> tuple[float, str]:
    weight, _, name = text.strip().rpartition("*")
    if name.strip() not in (names := (*LOSSES, *EXPRESSIONS)):
        raise ValueError(f"loss: {name.strip()!r} is none of {', '.join(names)}")
    try:
        return (float(weight) if weight.strip() else 1.0), name.strip()
    except ValueError:
        raise ValueError(f"loss: {weight.strip()!r} in {text.strip()!r} is no number") from None


def _sum(terms: Sequence[Term]) -> Position | None:
    if not terms:
        return None
    if len(terms) == 1 and terms[0].weight == 1:
        return terms[0].loss.function

    def total(logp: Tensor, logq: Tensor, *x: Tensor) -> Tensor:
        first, *others = (term(logp, logq, *x) for term in terms)
        return sum(others, first)

    return total
