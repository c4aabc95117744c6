"""Blind heads: what acceptance losses gain for a head that guesses 1 to 4 tokens further than it has seen.

    python -m studies.blind outputs/results/blind.json

A head n ahead reads the target's hidden state before token t and guesses the distribution of token t + n, of which it
has not seen the last n tokens (Cai et al. 2024, 2401.10774: Medusa's heads): a bottleneck of 128 beside the identity,
then the target's own output layer. Trained on the shipped texts with forward KL, or with total variation in the second
half, at equal steps, texts and rate; acceptance at temperature 1 on held-out texts, its gain with an interval over
texts.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cotrain.data.texts import Texts
from cotrain.evaluation.held_out import HeldOut, held_out
from cotrain.losses import divergences
from cotrain.losses.chunked import chunked, compared
from cotrain.paths import folder
from cotrain.rollout.training_texts import padded, read_rows
from cotrain.students.base import Guess
from cotrain.teacher.target_distributions import FromStates
from cotrain.teacher.target_model import load_target, served
from inference.drafts.bundled_target import resolve
from inference.measure.environment import environment

AHEAD, WIDTH, STEPS, BATCH, RATE, RESAMPLES = (1, 2, 3, 4), 128, 600, 4, 2e-3, 2000


class Blind(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, WIDTH), nn.Linear(WIDTH, width)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.up(nn.functional.silu(self.down(states)))


def inside(set_: Texts, at: Tensor, ahead: int) -> Tensor:
    """Which positions (B, T - 1 - ahead) predict a sampled token, `ahead` later."""
    return set_.predicted[at][:, ahead:]


def trained(set_: Texts, states: Tensor, head: Any, ahead: int, then: Any) -> Blind:
    """kl, and `then` from half of the steps on."""
    torch.manual_seed(ahead)
    network = Blind(states.shape[-1])
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / STEPS)))
    for step in range(STEPS):
        at = torch.randint(len(set_), (BATCH,))
        seen, wanted = states[at, : states.shape[1] - ahead].float(), states[at, ahead:]
        loss = divergences.kl if step < STEPS / 2 else then
        distributions, guess = FromStates(wanted, head), Guess.everywhere(network(seen), head)
        total, found = chunked(loss, distributions, guess, inside(set_, at, ahead), measured=False)
        (total / max(found.positions, 1)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return network


@torch.no_grad()
def alphas(held: HeldOut, head: Any, network: Blind, ahead: int) -> np.ndarray:
    """Summed acceptance and number of positions of each text (N, 2)."""
    found = []
    for at in torch.arange(len(held.texts)):
        states, mask = held.hidden[at][None], inside(held.texts, at[None], ahead)
        ours = network(states[:, : states.shape[1] - ahead].float())
        x = held.texts.ids[at][None, 1 + ahead :]
        alpha = compared(FromStates(states[:, ahead:], head), Guess.everywhere(ours, head), x, mask).alpha
        found.append([float(alpha.sum()), len(alpha)])
    return np.array(found)


def gain(kl: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Of pooled acceptance, paired by text, with a 95 % interval."""
    rng = np.random.default_rng(0)
    draws = [rng.integers(len(kl), size=len(kl)) for _ in range(RESAMPLES)]
    low, high = np.quantile([other[i, 0].sum() / kl[i, 0].sum() - 1 for i in draws], [0.025, 0.975])
    (ours, count), (theirs, _) = other.sum(0).tolist(), kl.sum(0).tolist()
    return {
        "alpha_kl": theirs / count,
        "alpha": ours / count,
        "gain": ours / theirs - 1,
        "low": float(low),
        "high": float(high),
    }


def main(report: str) -> None:
    target = load_target(resolve("bundled"))
    readings, head = served(target)
    place = folder("data") / "rollouts"
    learnt, judged = (padded(read_rows(place / f"{kind}_T1")) for kind in ("train", "held_out"))
    states, held = (held_out(readings, one, 1.0) for one in (learnt, judged))
    rows = []
    for ahead in AHEAD:
        kl, tv = (trained(learnt, states.hidden, head, ahead, then) for then in (divergences.kl, divergences.tv))
        rows.append({"ahead": ahead} | gain(*(alphas(held, head, network, ahead) for network in (kl, tv))))
        print(rows[-1], flush=True)
    made = {"environment": environment(), "steps": STEPS, "batch": BATCH, "rate": RATE, "width": WIDTH, "heads": rows}
    Path(report).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
