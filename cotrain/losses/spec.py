"""Parses the loss expressions in loss.first= and loss.then=: one loss, or a weighted sum of losses.

    kl                    one loss
    0.1*kl + 0.9*tv       a weighted sum
    calls                 a sequence loss, from the log-probabilities of the text's tokens
    calls_block           the same under block verification
    calls_tv              tv, each position weighted by the target calls that acceptance there saves

Sequence losses and calls_tv use only tokens that the target sampled. They ignore prompts and texts from other sources.
The module `names` describes how to add a loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cotrain.losses import divergences, sequence
from cotrain.losses.names import LOSSES, REMOVED_LOSSES, LossDefinition

Position = Callable[..., Tensor]


@dataclass(frozen=True)
class Term:
    """One loss in a weighted sum. name: the loss's name in the expression. weight: its factor in the sum."""

    name: str
    weight: float
    loss: LossDefinition
    function: Callable[..., Any]

    def __call__(self, logp: Tensor, logq: Tensor) -> Tensor:
        """Return the loss per position times its weight, (...), from log p and log q (..., V). Only for a loss per
        position."""
        value: Tensor = self.function(logp, logq)
        return self.weight * value


@dataclass(frozen=True)
class LossSpec:
    """A parsed loss expression.

    position: a function from log p and log q (..., V) to (...), the weighted sum of the losses per position; None if
    there are none. sequence: the losses of whole texts.
    weighted: whether each position is weighted by the target calls that acceptance there saves.
    argmax: whether one of the losses reads the target's most probable token.
    terms: the losses in `position`.
    """

    position: Position | None
    sequence: tuple[Term, ...] = ()
    weighted: bool = False
    argmax: bool = False
    terms: tuple[Term, ...] = ()


def parse(expression: str, key: str = "loss.first") -> LossSpec:
    """Parse a loss expression; the module's docstring shows the syntax. key: the setting with the expression, for the
    message. Raises ValueError, which names the key, if the expression is no sum of known losses, or if a weighted loss
    is part of a sum."""
    terms = _terms(expression, key)
    weighted = [term.name for term in terms if term.loss.weighted]
    if weighted and len(terms) > 1:
        raise ValueError(f"{key}: {weighted[0]} cannot be part of a sum, as in {expression!r}: set {key}={weighted[0]}")
    per_position = tuple(term for term in terms if not term.loss.sequence)
    per_text = tuple(term for term in terms if term.loss.sequence)
    return LossSpec(_sum(per_position), per_text, bool(weighted), any(term.loss.argmax for term in terms), per_position)


def _terms(expression: str, key: str) -> list[Term]:
    """Return the terms of a sum. The weights of terms with the same name are added."""
    weights: dict[str, float] = {}
    for weight, name in (_weight_and_name(part, key) for part in expression.split("+")):
        weights[name] = weights.get(name, 0.0) + weight
    return [Term(name, weight, LOSSES[name], _function(name)) for name, weight in weights.items()]


def _function(name: str) -> Callable[..., Any]:
    """Return the function of a loss, from the module `sequence` or `divergences`."""
    return getattr(sequence if LOSSES[name].sequence else divergences, LOSSES[name].function or name)


def _weight_and_name(text: str, key: str) -> tuple[float, str]:
    weight, _, name = (part.strip() for part in text.strip().rpartition("*"))
    if name not in LOSSES:
        if name in REMOVED_LOSSES:
            raise ValueError(f"{key}: {name} was removed: use {REMOVED_LOSSES[name]}")
        raise ValueError(f"{key}: {name!r} is not one of {', '.join(LOSSES)}")
    try:
        return (float(weight) if weight else 1.0), name
    except ValueError:
        raise ValueError(
            f"{key}: the weight {weight!r} in {text.strip()!r} is not a number: write it as in 0.5*kl"
        ) from None


def _sum(terms: Sequence[Term]) -> Position | None:
    if not terms:
        return None
    if len(terms) == 1 and terms[0].weight == 1:
        return terms[0].function

    def total(logp: Tensor, logq: Tensor) -> Tensor:
        first, *others = (term(logp, logq) for term in terms)
        return sum(others, first)

    return total
