"""A round with each sampling setting alone, so that no other setting hides its absence."""

from typing import Any

import pytest
import torch

from inference import Sampling
from inference.request import Request
from inference.round import Batch, DecodingRound
from inference.sampling.noise import Uniforms, branch_states, gumbel, gumbel_states
from inference.verify.rules import RULES

V = 16
ALONE: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.4,
    "min_p": 0.4,
    "repetition_penalty": 1.7,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "logit_bias": {3: 2.5},
    "banned": ((4,), (2, 5)),
    "min_new_tokens": 9,
    "stop_ids": (6,),
    "banned_first": (3, 8),
}
TOGETHER = {"min_new_tokens": {"stop_ids": (6,)}}  # what a setting needs to take effect
ENDS_AND_CODE = {"stop", "stop_ids", "processors"}


def only(name: str) -> Sampling:
    return Sampling(**{name: ALONE[name]}, **TOGETHER.get(name, {}))


@pytest.mark.parametrize("name", sorted(set(ALONE) - ENDS_AND_CODE))
def test_drafts_by_temperature_alone_are_for_rows_with_nothing_else(name: str) -> None:
    """An operator that drafts chains reads temperature and top-p alone; it must not be used for any other setting."""
    row, cpu = Request(0, 0, [1, 2], 9, only(name), frozenset()), torch.device("cpu")
    rounds = {rule: DecodingRound([row], [2], RULES[rule], Uniforms(0, cpu), V, cpu) for rule in ("token", "coupled")}
    draws, likeliest = (rounds["token"].chain_draws(1, greedy) for greedy in (False, True))
    assert (draws is None) == (name not in ("temperature", "top_p")) and (likeliest is None) == (name != "temperature")
    assert draws is None or (len(draws.temperature), len(draws.tails)) == (1, name == "top_p")
    assert rounds["coupled"].chain_draws(1, False) is None


def test_noise_of_rows_is_of_the_seed_that_is_asked_for() -> None:
    """Also if an earlier call had the same rows and another seed."""
    rows = [Request(i, 90 + i, [1, 2], 9, Sampling(), frozenset()) for i in range(2)]
    batch, ids = Batch(rows, V, torch.device("cpu")), torch.tensor([90, 91])
    for seed in (5, 0, 6):
        assert torch.equal(batch.gumbel_states(seed), gumbel_states(seed, ids))
        assert torch.equal(batch.branch_states(seed), branch_states(seed, ids))
        round = DecodingRound(rows, [2, 2], RULES["coupled"], Uniforms(seed, ids.device), V, ids.device, batch)
        place = torch.arange(3).expand(2, 3)
        assert torch.equal(round._gumbel, gumbel(seed, ids, place, V))
        assert round.batch is batch
