"""One exact inner round: a small draft's guesses, verified with the distributions of a model between it and the target.

A rows, n drafted at most, V vocabulary. Every token that comes out follows the middle model's distribution, given the
text
before it: that distribution is what the outer round must be told, not the small draft's.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from inference.batched.batch import Numbers
from inference.proposers.base import Proposal, Round
from inference.sampling import draw
from inference.settled import sound
from inference.verify.rules import RULES, Rule

DRAWS, COINS, LAST = range(3)  # of `Round.inner`


def inner_rule(name: str) -> Rule:
    """A rule that verifies inner rounds: of chains, exact, with uniforms. Raises ValueError for any other."""
    fit = [rule.name for rule in RULES.values() if rule.exact and not rule.shared and not rule.trees]
    if name not in fit:
        raise ValueError(f"rule: {name!r} verifies no inner round; {', '.join(fit)} do")
    return RULES[name]


class InnerRound:
    """A round as the small draft sees it, and its verdict; implements what `base.Round` asks of chains.

    turn: the outer round, which drafts `asked` tokens a row. texts: of each row, with what was drafted so far, `done`
    tokens; k: how many the small draft is to guess. width: numbers of a stream that an inner round may use, so that
    rounds that begin at other tokens use others; uniforms: gives those of all inner rounds. numbers: what else goes to
    the device, in the small draft's first copy.
    """

    def __init__(
        self, round: Round, asked: list[int], texts: Sequence[list[int]], done: list[int], k: list[int], width: int,
        uniforms: Callable[[], Tensor], numbers: Mapping[str, Numbers],
    ) -> None:  # fmt: skip
        self.round, self.asked, self.texts, self.k, self.width = round, asked, texts, k, width
        self.uniforms = uniforms
        self.numbers = {"done": done, "guessed": k, **numbers}
        self.sent: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.round, name)

    def send(self, k: list[int] | None = None, **numbers: Numbers) -> dict[str, Tensor]:
        """As of `base.Round`; what the small draft says of its own lengths is no concern of the outer round."""
        numbers |= {} if self.sent else self.numbers
        self.sent = self.round.send(self.asked, **numbers)
        return self.sent

    @property
    def done(self) -> Tensor:
        """Tokens drafted so far (A,)."""
        return self.send()["done"]

    @cached_property
    def streams(self) -> Tensor:
        """Uniforms (3, A, width) of this inner round."""
        place = self.done.unsqueeze(1) * self.width + torch.arange(self.width, device=self.done.device)
        return self.uniforms().gather(2, place.expand(3, -1, -1))

    def simple(self, depths: int) -> tuple[Tensor, Tensor]:
        return self.streams[DRAWS, :, :depths], self.round.simple(1)[1]

    def probs(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        """Of rows that read no history: nothing is guessed for others."""
        return self.round.plain(logits)

    def draw(self, probs: Tensor, depth: int) -> Tensor:
        return self._shared(probs, depth) if self.round.shared else draw(probs, self.streams[DRAWS, :, depth])

    def _shared(self, probs: Tensor, depth: int) -> Tensor:
        """By the noise of the target's own tokens; rows that are done may stand past the last one."""
        return self.round.draw_shared(probs, (self.done + depth).clamp(max=max(self.asked)))

    def inputs(self, trees: bool = False) -> None:
        """None: no recording reads where each row stands."""

    def length(self, k: list[int]) -> Tensor:
        """How many were guessed (A,) on the device."""
        return self.send()["guessed"] if k == self.k else torch.tensor(k, device=self.done.device)

    def verified(self, rule: Rule, p: Tensor, drafts: Proposal) -> tuple[Tensor, Tensor]:
        """accepted (A,) of the guesses x (A, n) with their distributions q (A, n, V), and the token (A,) after them, by
        the distributions p (A, n+1, V) of the middle model after the text and after each guess."""
        x, q = drafts.x.to(p.device), None if drafts.q is None else drafts.q.to(p.device)
        length = sound(p, q, self.length(drafts.k))
        if self.round.shared:
            return self._coupled(p, x, length)
        verdict = rule.verify(p, q, x, self.streams[COINS], length)
        return verdict.accepted, draw(verdict.probs, self.streams[LAST, :, 0])

    def _coupled(self, p: Tensor, x: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens are those that the middle model draws by the shared noise, see `chain.coupled`."""
        y = torch.stack([self._shared(p[:, i], i) for i in range(p.shape[1])], 1)
        same = (y[:, :-1] == x) & (torch.arange(x.shape[1], device=x.device) < length.unsqueeze(1))
        accepted = same.to(torch.int64).cumprod(1).sum(1)
        return accepted, y.gather(1, accepted.unsqueeze(1)).squeeze(1)
