"""A loss over all that a student guesses of a batch: sums over guesses, by depth, and what each depth weighs.

B texts, T tokens, L tokens of the longest completion, K depths. A student whose distribution at a place is the same at
every depth (ANY) makes one guess, and acceptance r is (B, L); others make one a depth, and r is (B, L, K).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from cotrain import acceptance
from cotrain.losses.chunked import Statistics, chunked, token_logs
from cotrain.losses.completions import columns, placed, possible, taken
from cotrain.losses.guess import ANY, Guess
from cotrain.losses.served_distributions import Distributions, Truncate
from cotrain.losses.spec import LossSpec, Term

DECAY = 0.8  # of a depth's weight, where the exact one is not known (Medusa, Cai et al. 2024, 2401.10774)


@dataclass(frozen=True)
class Asked:
    """What every guess of a batch is asked: the target's distributions, ids (B, T), temperature (B,), which of the
    tokens that come next the target sampled, (B, T-1) bool, how distributions are cut, and how many exist at once."""

    target: Distributions
    ids: Tensor
    temperature: Tensor
    sampled: Tensor
    truncate: Truncate | None
    chunk: int

    @property
    def following(self) -> Tensor:
        """(B, T): the token that each place speaks of; the last place's is never asked for."""
        return self.ids.roll(-1, 1)

    @property
    def lengths(self) -> Tensor:
        """(B,): tokens of each completion."""
        return self.sampled.sum(1)

    def logs(self, guesses: Sequence[Guess]) -> tuple[Tensor, Tensor]:
        """log p(x) and log q(x) of the sampled tokens, each completion from column 0 on -> (B, L), or (B, L, K): of a
        token when it is drafted at depth j. 0 both where p(x) = 0, see `possible`."""
        mask, at = pad(self.sampled, (0, 1)), columns(self.sampled)
        options = {"chunk": self.chunk, "truncate": self.truncate}
        each = [token_logs(self.target, guess, self.following, mask, self.temperature, **options) for guess in guesses]  # type: ignore[arg-type]
        each = [_completed(*logs, guess) for logs, guess in zip(each, guesses, strict=True)]
        found = [possible(*(taken(one, at) for one in logs)) for logs in each]
        if guesses[0].depth == ANY:
            return found[0]
        logp, logq = (torch.stack(one, -1) for one in zip(*found, strict=True))
        return logp, logq

    def of_texts(self, term: Term, logs: tuple[Tensor, Tensor], k: int) -> Tensor:
        """The weighted sum of a sequence loss over the texts; logs as above."""
        value: Tensor = term.loss.function(*logs, _drafted(logs[0], k), self.lengths)
        return term.weight * value

    def saved(self, logs: tuple[Tensor, Tensor], k: int) -> Tensor:
        """Target calls that a unit of acceptance saves, at each sampled token (and depth), without gradient; shaped as
        logs."""
        r = acceptance.r_from(*(one.detach() for one in logs))
        return acceptance.call_weights(r, _drafted(r, k), self.lengths)

    def weight(self, saved: Tensor, depth: int) -> Tensor:
        """`saved` at its places (B, T), of a depth; 0 elsewhere."""
        return pad(placed(saved if depth == ANY else saved[..., depth], self.sampled), (0, 1))

    def of_places(
        self, spec: LossSpec, guess: Guess, weight: Tensor, measured: bool, hardest: float, u: Tensor | None
    ) -> tuple[Tensor, Statistics]:
        """The sum of a loss over places, weight (B, T) each, see `chunked`; u (B, T): uniforms to draw tokens by."""
        assert spec.position is not None
        weight = weight if guess.share == 1 else weight / guess.share
        return chunked(
            spec.position, self.target, guess, weight, self.temperature, chunk=self.chunk, truncate=self.truncate,
            measured=measured, hardest=hardest, terms=spec.terms if len(spec.terms) > 1 else (),
            x=self.following if spec.takes == "text" else None, u=u if spec.takes == "drawn" else None,
        )  # fmt: skip


def shares(guesses: Sequence[Guess], decay: float | None, saved: Tensor | None) -> Tensor:
    """What each guess weighs in the mean over depths -> (K,), summing to 1.

    decay: depth j weighs decay ** j. None: as many target calls as a unit of acceptance there saves, of all sampled
    tokens together, see `acceptance.call_weights`: saved (K,); DECAY ** j where that is None or 0, since nothing was
    sampled from the target, or kept distributions do not know its tokens.
    """
    device = guesses[0].states.device
    if decay is None and saved is not None:
        exact = saved.clamp(min=0).to(device)
        if bool(exact.sum() > 0):
            return exact / exact.sum()
    plain = (DECAY if decay is None else decay) ** torch.arange(len(guesses), device=device)
    return plain / plain.sum()


def _completed(logp: Tensor, logq: Tensor, guess: Guess) -> tuple[Tensor, Tensor]:
    """log p(x) and log q(x), (B, T), of a guess that was made at a share of its places: the others are accepted as
    these are on average, and what is learnt here counts for them."""
    if guess.share == 1:
        return logp, logq
    made = torch.zeros_like(logp, dtype=torch.bool).flatten().index_fill(0, guess.at, True).view(logp.shape)
    r = acceptance.r_from(logp.detach(), logq.detach())
    mean = r[made & (logq > -torch.inf)].mean().nan_to_num().clamp(min=torch.finfo(r.dtype).tiny)  # of none: 0
    if logq.requires_grad:
        logq = logq.clone()
        logq.register_hook(lambda slope: slope / guess.share)
    return logp, torch.where(made, logq, mean.log())


def _drafted(logs: Tensor, k: int) -> int:
    """A student drafts no further than the depths it has."""
    return k if logs.ndim == 2 else min(k, logs.shape[2])
