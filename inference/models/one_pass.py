"""All drafts of a round from one pass: its distributions at the anchor and at the masks behind it, and the draws from
these, as a function of tensors, compiled or replayed.

A rows, n ids a row, k drafts, V vocabulary.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from inference.models import llama
from inference.models.compiled import Compiled
from inference.models.cuda_graphs import Captured
from inference.models.passes import LAST
from inference.models.step import Step
from inference.sampling import certain, draw, one_hot, probs_at, wide

if TYPE_CHECKING:
    from inference.models.lm import LM
    from inference.proposers.base import Round

Drafts = tuple[Tensor, Tensor]  # ids (A, k), and the distributions (A, k, V) that they were drawn from


class Masked(NamedTuple):
    """ids (A, n): what a slot lacks of its text, and masks; begins (A,): the position of the first; anchors (A,): which
    of them is the text's last token."""

    ids: Tensor
    begins: Tensor
    anchors: Tensor


class OnePass(Step):
    """The drafts of a round without history: temperature alone. greedy: the likeliest tokens, their distributions
    one-hot."""

    def __init__(self, weights: llama.Weights, shape: llama.Shape, k: int, greedy: bool = False) -> None:
        super().__init__(weights, shape, (LAST,), head=False)
        self.k, self.greedy = k, greedy

    def forward(  # type: ignore[override]
        self, ids: Tensor, begins: Tensor, anchors: Tensor, u: Tensor, temperature: Tensor, *stored: Any
    ) -> Drafts:
        """u (A, k) uniforms, temperature (A,) above 0; stored: angles, slots, keys and values as for a pass."""
        logits = self.logits(Masked(ids, begins, anchors), *stored)
        if self.greedy:
            likeliest = logits.argmax(-1)
            return likeliest, one_hot(likeliest, logits)
        distributions = probs_at(logits, temperature)
        return draw(distributions, u), distributions

    def logits(self, masked: Masked, *stored: Any) -> Tensor:
        """(A, k, V) at the anchor and the k - 1 masks behind it, float32 at least."""
        positions = masked.begins.unsqueeze(1) + torch.arange(masked.ids.shape[1], device=masked.ids.device)
        (states,) = super().forward(masked.ids, positions, *stored)
        return wide(self._tensors(self.weights).head(behind(states, masked.anchors, self.k)))


def behind(values: Tensor, anchors: Tensor, k: int) -> Tensor:
    """Values (A, n, ...) at the anchor (A,) and the k - 1 places after it -> (A, k, ...)."""
    places = anchors.unsqueeze(1) + torch.arange(k, device=anchors.device)
    return values[torch.arange(len(anchors), device=anchors.device).unsqueeze(1), places]


def at_once(lm: "LM", round: "Round", masked: Masked, begins: list[int], k: int, greedy: bool) -> Drafts | None:
    """The drafts of a round whose numbers were sent, in one call; begins: `masked.begins` on the host. None where
    passes are neither compiled nor replayed, for longer rows than these take, and, where they are compiled, for
    distributions that take more than a temperature."""
    if isinstance(lm.run, Captured) and lm.vocabulary <= lm.size:
        return _replayed(lm, lm.run, round, masked, begins, k, greedy)
    if isinstance(lm.run, Compiled) and lm.vocabulary == lm.size:
        return _compiled(lm, lm.run, round, masked, begins, k, greedy)
    return None


def _compiled(
    lm: "LM", run: Compiled, round: "Round", masked: Masked, begins: list[int], k: int, greedy: bool
) -> Drafts | None:
    temperatures = round.temperatures
    greedy = greedy or (temperatures is not None and not any(temperatures))
    window = lm._aimed(masked.ids, begins, 0, masked.begins)
    if temperatures is None or not (greedy or all(temperatures)) or not run._ready(masked.ids, window):
        return None
    u, temperature = (part.to(lm.device) for part in round.simple(k))
    even = u.reshape(-1).view(u.shape)  # one stride for every number of uniforms that were made
    slots = torch.arange(window.limit, device=lm.device)
    run._refresh(window.limit)
    inputs = (*masked, even, temperature, *run.angles, slots, *run._stores())
    several = [(masked.ids, 1), *((part, 0) for part in (*run.angles, slots))]
    name, kind = ("one pass", k, greedy), (masked.ids.shape[1] > 1,)
    found: Drafts | None = run._tried(
        lambda: run._called(name, lambda weights, shape: OnePass(weights, shape, k, greedy), kind, inputs, several)
    )
    return found


def _replayed(
    lm: "LM", run: Captured, round: "Round", masked: Masked, begins: list[int], k: int, greedy: bool
) -> Drafts | None:
    """By the round's own distributions and draws, whatever its settings."""
    window = lm._aimed(masked.ids, begins, 0, masked.begins)
    inputs = round.inputs() if run._ready(masked.ids, window) else None
    if inputs is None or inputs["start"].device != lm.device:
        return None
    slots = run._slots(window)
    inputs |= {f"masked_{name}": part for name, part in masked._asdict().items()}
    name = ("one pass", k, greedy, slots, round.key)
    found: Drafts | None = run.replays(name, inputs, round.steady, lambda: _choosing(lm, run, round, k, greedy, slots))
    return found


def _choosing(lm: "LM", run: Captured, round: "Round", k: int, greedy: bool, slots: int) -> Any:
    step, stored = OnePass(run.weights, run.shape, k), run._stored(slots)

    def made(given: Mapping[str, Tensor]) -> Drafts:
        masked = Masked(*(given[f"masked_{name}"] for name in Masked._fields))
        return drawn(round.on(given), lm._fitted(step.logits(masked, *stored)), greedy)

    return made


def drawn(round: "Round", logits: Tensor, greedy: bool) -> Drafts:
    """Drafts by the round's distributions and draws, from logits (A, k, V) that no draft changes; settings that read
    history may make a distribution depend on the drafts before it. greedy: the likeliest tokens."""
    drafts: list[Tensor] = []
    distributions: list[Tensor] = []
    for depth, one in enumerate(logits.unbind(1)):
        probs = round.probs(one, drafts)
        distributions.append(certain(probs) if greedy else probs)
        drafts.append(round.draw(distributions[-1], depth))
    return torch.stack(drafts, 1), torch.stack(distributions, 1)
