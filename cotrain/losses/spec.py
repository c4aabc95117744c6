"""A configured loss: names of `registry.LOSSES`, alone or in weighted sums, as the module runs it.

kl                    one loss
0.1*kl + 0.9*tv       a weighted sum
mix                   a name for 0.1*ce+1.8*tv
calls                 a sequence loss, from the log-probabilities of the text's tokens
calls_block           the same under block verification
calls_tv              tv, each position weighted by the target calls that acceptance there saves

Sequence losses, calls_tv among them, are of the tokens that the target sampled: neither of prompts nor of given texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from cotrain.losses import divergences, sequence
from cotrain.losses.registry import LOSSES, Loss

__all__ = ["EXPRESSIONS", "MERGED", "NAMES", "LossSpec", "Term", "divergences", "parse", "sequence"]

Position = Callable[..., Tensor]
EXPRESSIONS = {"mix": "0.1*ce+1.8*tv"}  # sums that have a name: 2 tv = sum_v abs(p - q)
MERGED = [name for name, loss in LOSSES.items() if loss.merged]
NAMES = (*LOSSES, *EXPRESSIONS)


@dataclass(frozen=True)
class Term:
    """A loss of a sum, with its weight."""

    name: str
    weight: float
    loss: Loss

    def __call__(self, logp: Tensor, logq: Tensor, *x: Tensor) -> Tensor:
        """Of a position, weighted; x: the token, which the loss is given if it takes one."""
        value: Tensor = self.loss.function(logp, logq, *(x if self.loss.takes else ()))
        return self.weight * value


@dataclass(frozen=True)
class LossSpec:
    """position: the sum of the losses a position, called (logp, logq) or (logp, logq, x), None without one; takes: what
    x is, "text" or "drawn", "" for none; sequence: losses of whole texts; weighted: positions count as much as the
    calls that acceptance there saves; merged: whether it has a meaning for distributions of which some tokens are kept;
    terms: what position is a sum of."""

    position: Position | None
    takes: str = ""
    sequence: tuple[Term, ...] = ()
    weighted: bool = False
    merged: bool = False
    terms: tuple[Term, ...] = ()


def parse(expression: str) -> LossSpec:
    """The loss of an expression, see above. Raises ValueError naming the key for what is no sum of known names, or one
    that no single pass can compute."""
    terms = _terms(expression)
    takes = {term.loss.takes for term in terms} - {""}
    if len(takes) > 1:
        raise ValueError(f"loss: {expression!r} wants the text's token and a drawn one at once")
    weighted = [term.name for term in terms if term.loss.weighted]
    if weighted and len(terms) > 1:
        raise ValueError(f"loss: {weighted[0]} stands alone, not in {expression!r}")
    each = tuple(term for term in terms if not term.loss.sequence)
    whole, merged = tuple(term for term in terms if term.loss.sequence), all(term.loss.merged for term in terms)
    return LossSpec(_sum(each), takes.pop() if takes else "", whole, bool(weighted), merged, each)


def _terms(expression: str) -> list[Term]:
    """Those of a sum, named sums written out; one of a name that comes twice."""
    found: dict[str, Term] = {}
    for weight, name in map(_part, expression.split("+")):
        for term in _terms(EXPRESSIONS[name]) if name in EXPRESSIONS else [Term(name, 1.0, LOSSES[name])]:
            before = found[term.name].weight if term.name in found else 0.0
            found[term.name] = Term(term.name, before + weight * term.weight, term.loss)
    return list(found.values())


def _part(text: str) -> tuple[float, str]:
    weight, _, name = text.strip().rpartition("*")
    if name.strip() not in (known := (*LOSSES, *EXPRESSIONS)):
        raise ValueError(f"loss: {name.strip()!r} is none of {', '.join(known)}")
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
