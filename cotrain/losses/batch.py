"""The loss of a batch, summed over all guesses that a student makes for it, and the weight of each depth.

If a student's distribution does not depend on the depth, it makes one guess (depth ANY), and its acceptance r has shape
(B, L). Otherwise it makes one guess per depth, and r has shape (B, L, K).

B texts, T tokens, L tokens of the longest completion, K depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from cotrain import acceptance
from cotrain.losses.chunked import Statistics, TargetDistributions, Truncate, chunked, token_logs
from cotrain.losses.guess import ANY, Guess, draftable, numbers, sent
from cotrain.losses.sequence import columns, from_columns, mask_impossible, to_columns
from cotrain.losses.spec import LossSpec, Term

DECAY = 0.8  # the weight of depth j is DECAY ** j if the exact one is unknown (Medusa, Cai et al. 2024, 2401.10774)


@dataclass(frozen=True)
class LossBatch:
    """The part of a batch that is the same for every guess.

    target: the target's distributions. ids (B, T): token ids.
    temperature (B,), on the CPU: of each text.
    sampled (B, T-1) bool, on the CPU: entry t is True if the target sampled token t+1.
    truncate: a function that sets the logits cut by the regime's top-k / top-p to -inf, (n, V) -> (n, V); None without
    a cut.
    chunk: the number of positions whose distributions are in memory at once.
    """

    target: TargetDistributions
    ids: Tensor
    temperature: Tensor
    sampled: Tensor
    truncate: Truncate | None
    chunk: int

    @property
    def following(self) -> Tensor:
        """Return (B, T): entry t is the id of token t+1. The entry of the last position is never used."""
        return self.ids.roll(-1, 1)

    @property
    def lengths(self) -> Tensor:
        """Return the number of tokens in each completion (B,)."""
        return sent(self.sampled.sum(1), self.ids.device)

    def logs(self, guesses: Sequence[Guess]) -> tuple[Tensor, Tensor]:
        """Return log p(x) and log q(x) of the sampled tokens x, (B, L) each. Column i is token i of each completion. At
        tokens with p(x) = 0 both are set to 0.

        If the student makes one guess per depth, the shape is (B, L, K), and the last axis is the depth (0-based) at
        which the token is drafted. guesses: all guesses of the student.
        """
        mask, at = pad(self.sampled, (0, 1)), sent(columns(self.sampled), self.ids.device)
        pairs = []
        for guess in guesses:
            here = draftable(mask, guess.depth)
            logs = token_logs(
                self.target, guess, self.following, here, self.temperature, chunk=self.chunk, truncate=self.truncate
            )
            pairs.append(_fill_dropped(*logs, guess, here))
        pairs = [mask_impossible(to_columns(logp, at), to_columns(logq, at)) for logp, logq in pairs]
        if guesses[0].depth == ANY:
            return pairs[0]
        logp, logq = (torch.stack(side, -1) for side in zip(*pairs, strict=True))
        return logp, logq

    def of_texts(self, term: Term, logs: tuple[Tensor, Tensor], k: int) -> Tensor:
        """Return a loss of whole texts, summed over the texts and multiplied by the term's weight; a scalar.

        term: the loss. logs: log p and log q of the sampled tokens, (B, L) or (B, L, K) each, from `LossBatch.logs`. k:
        draft length; at most K counts.
        """
        value: Tensor = term.function(*logs, _draft_length(logs[0], k), self.lengths)
        # texts of one token depend on no draft, and a step needs a gradient all the same
        return term.weight * value + 0 * logs[1].masked_fill(logs[1] == -torch.inf, 0.0).sum()

    def saved(self, logs: tuple[Tensor, Tensor], k: int) -> Tensor:
        """Return how many target calls one more unit of acceptance saves at each sampled token, (B, L) or (B, L, K),
        without gradient. logs: log p and log q of the sampled tokens in the same shape, from `LossBatch.logs`. k: draft
        length; at most K counts."""
        r = acceptance.r_from(*(side.detach() for side in logs))
        return acceptance.call_weights(r, _draft_length(r, k), self.lengths)

    def weight(self, saved: Tensor, depth: int) -> Tensor:
        """Return (B, T): entry t is the weight in `saved` of token t+1 if the target sampled it, otherwise 0. saved (B,
        L) or (B, L, K): from `LossBatch.saved`. depth: which of the K depths (0-based), or ANY for (B, L)."""
        return pad(from_columns(saved if depth == ANY else saved[..., depth], self.sampled), (0, 1))

    def of_positions(self, spec: LossSpec, guess: Guess, weight: Tensor, measured: bool) -> tuple[Tensor, Statistics]:
        """Return a loss summed over the positions of a guess, a scalar, and the guess's acceptance statistics.

        spec: has the loss per position. weight (B, T): the weight of each position; entry t belongs to the prediction
        of token t+1. measured: False sets the statistics to NaN, except the number of positions.
        """
        assert spec.position is not None
        weight = weight if guess.share == 1 else weight / guess.share
        return chunked(
            spec.position,
            self.target,
            guess,
            weight,
            self.temperature,
            chunk=self.chunk,
            truncate=self.truncate,
            measured=measured,
            terms=spec.terms if len(spec.terms) > 1 else (),
        )


def shares(guesses: Sequence[Guess], decay: float | None, saved: Tensor | None) -> Tensor:
    """Return the weight of each of the K guesses in the mean over depths, (K,). The weights sum to 1.

    decay: the weight of depth j (0-based) is proportional to decay ** j; None: proportional to saved[j].
    saved (K,): how many target calls one more unit of acceptance saves at each depth, summed over all sampled tokens.
    If it is None, or all 0 because the target sampled no token, DECAY ** j is used instead.
    """
    device = guesses[0].states.device
    if decay is None and saved is not None:
        exact = saved.clamp(min=0).to(device)
        plain = torch.where(exact.sum() > 0, exact, shares(guesses, DECAY, None))
    else:
        plain = (DECAY if decay is None else decay) ** torch.arange(len(guesses), device=device)
    return plain / plain.sum()


def _fill_dropped(logp: Tensor, logq: Tensor, guess: Guess, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p(x) and log q(x) with values at all positions where `mask` is True, although the guess was made only
    at a random share of them. logp, logq (B, T): log-probabilities of the tokens x. mask (B, T) bool.

    Positions without a guess get the mean acceptance of the others. The gradient of the guess is divided by the share,
    so that it stands for all positions.
    """
    if guess.share == 1:
        return logp, logq
    computed = torch.zeros(mask.shape, dtype=torch.bool).flatten().index_fill(0, guess.at, True).view(mask.shape)
    at = sent(numbers(computed & mask), logp.device)
    r, possible = (side.flatten()[at] for side in (acceptance.r_from(logp.detach(), logq.detach()), logq > -torch.inf))
    mean = (r * possible).sum() / possible.sum()
    mean = mean.nan_to_num().clamp(min=torch.finfo(r.dtype).tiny)  # NaN if empty
    if logq.requires_grad:
        logq = logq.clone()
        logq.register_hook(lambda slope: slope / guess.share)
    return logp, torch.where(sent(computed, logq.device), logq, mean.log())


def _draft_length(logs: Tensor, k: int) -> int:
    """Return the smaller of k and the number of the student's depths. logs: (B, L) for a student with one guess, where
    the result is k; (B, L, K) for K depths."""
    return k if logs.ndim == 2 else min(k, logs.shape[2])
