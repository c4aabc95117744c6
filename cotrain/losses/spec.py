"""A configured loss: names of `cotrain.losses` and `cotrain.acceptance`, alone or weighted sums, as the module runs it.

kl                    one loss
0.1*kl + 0.9*tv       a weighted sum
calls                 a sequence loss, from the log-probabilities of the text's tokens
calls_block           the same under block verification
calls_tv              tv, each position weighted by the target calls that acceptance there saves

Sequence losses, calls_tv among them, are of the tokens that the target sampled: neither of prompts nor of given texts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cotrain import acceptance, losses

Position = Callable[..., Tensor]
# log p(x), log q(x) (B,T), k, lengths (B,) -> a sum, and what it is divided by, over all processes where there are more
Sequence = Callable[[Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor]]
POSITION = ("kl", "tv", "nla", "lk", "rkl", "jsd", "hellinger", "greedy", "match", "greedy_draft")
OF_TEXT, DRAWN = ("mix",), ("tvpp",)  # take the text's token, and one drawn from q
WEIGHTED = "calls_tv"


def length(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """`acceptance.length`, by texts."""
    found = acceptance.length(acceptance.r_from(logp, logq), k, lengths)
    return found.sum(), found.new_tensor(len(found))


def length_block(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """`acceptance.length_block`, by texts."""
    found = acceptance.length_block(acceptance.l_from(logp, logq), k, lengths)
    return found.sum(), found.new_tensor(len(found))


def calls(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """`acceptance.calls`, by tokens: their ratio is the inverse of tau."""
    return acceptance.calls(acceptance.r_from(logp, logq), k, lengths).sum(), lengths.sum()


def calls_block(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """`acceptance.calls_block`, by tokens: their ratio is the inverse of block tau."""
    return acceptance.calls_block(acceptance.l_from(logp, logq), k, lengths).sum(), lengths.sum()


# also of laws merged outside some tokens, see `top_k`
MERGED = ("kl", "tv", "nla", "lk", "rkl", "jsd", "hellinger", "greedy", "mix")
SEQUENCE: dict[str, Sequence] = {
    "length": length, "length_block": length_block, "calls": calls, "calls_block": calls_block,
}  # fmt: skip
BY_TEXT = (length, length_block)  # means over texts; the others are over tokens
NAMES = (*POSITION, *OF_TEXT, *DRAWN, *SEQUENCE, WEIGHTED)


@dataclass(frozen=True)
class LossSpec:
    """position: the sum of the losses a position, called (logp, logq) or (logp, logq, x), None without one; takes: what
    x is, "text" or "drawn", "" for none; sequence: (weight, loss); weighted: positions count as much as the calls that
    acceptance there saves; merged: whether it has a meaning for laws of which some tokens are kept."""

    position: Position | None
    takes: str = ""
    sequence: tuple[tuple[float, Sequence], ...] = ()
    weighted: bool = False
    merged: bool = False


def parse(expression: str) -> LossSpec:
    """The loss of an expression, see above. Raises ValueError naming the key for what is no sum of known names, or one
    that no single pass can compute."""
    parts = [_part(text) for text in expression.split("+")]
    names = [name for _, name in parts]
    takes = {kind for kind, of in (("text", OF_TEXT), ("drawn", DRAWN)) if set(of) & set(names)}
    if len(takes) > 1:
        raise ValueError(f"loss: {expression!r} wants the text's token and a drawn one at once")
    if WEIGHTED in names and len(names) > 1:
        raise ValueError(f"loss: {WEIGHTED} stands alone, not in {expression!r}")
    each = [(weight, name) for weight, name in parts if name not in SEQUENCE]
    sequence = tuple((weight, SEQUENCE[name]) for weight, name in parts if name in SEQUENCE)
    merged = set(names) <= set(MERGED)
    return LossSpec(_sum(each) if each else None, takes.pop() if takes else "", sequence, WEIGHTED in names, merged)


def _part(text: str) -> tuple[float, str]:
    weight, _, name = text.strip().rpartition("*")
    if name.strip() not in NAMES:
        raise ValueError(f"loss: {name.strip()!r} is none of {', '.join(NAMES)}")
    try:
        return (float(weight) if weight.strip() else 1.0), name.strip()
    except ValueError:
        raise ValueError(f"loss: {weight.strip()!r} in {text.strip()!r} is no number") from None


def _sum(parts: list[tuple[float, str]]) -> Position:
    named = [(weight, losses.tv if name == WEIGHTED else vars(losses)[name], name) for weight, name in parts]
    if len(named) == 1 and named[0][0] == 1:
        return named[0][1]

    def total(logp: Tensor, logq: Tensor, *x: Tensor) -> Tensor:
        values = [w * loss(logp, logq, *(x if name in OF_TEXT + DRAWN else ())) for w, loss, name in named]
        return sum(values[1:], values[0])

    return total
