"""Cases of the engine and of plans: inputs that failed once."""

import json
from pathlib import Path

import pytest
import torch

from cotrain.cli import main
from inference import Engine, Sampling
from inference.adaptive_policy import INPUTS, Adaptive, Estimates
from inference.request import Request
from inference.round import Batch
from inference.sampling import probs
from tests.cases import case
from tests.tiny import tiny


@case("min-p in a mixed batch")
def test_min_p_acts_after_top_p_alone_and_in_a_batch() -> None:
    """Of .52, .2, .15, .13 top-p keeps the first two, and min-p keeps both. Min-p before top-p would leave .722 and
    .278, of which top-p keeps the first alone."""
    logits = 0.9 * torch.tensor([0.52, 0.2, 0.15, 0.13], dtype=torch.float64).log().expand(2, 4)
    sampling = Sampling(0.9, top_p=0.7, min_p=0.35)
    both = torch.stack([probs(logits[i], one) for i, one in enumerate((sampling, Sampling(1.0)))])
    wanted = torch.tensor([52 / 72, 20 / 72, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(both[0], wanted, rtol=0, atol=1e-12)
    assert torch.equal(probs(logits[:1], sampling), both[:1])
    rows = [Request(i, i, [1], 9, one, frozenset()) for i, one in enumerate((sampling, Sampling(1.0)))]
    assert torch.equal(Batch(rows, 4, logits.device).regimes.probs(logits), both)


@case("counters of zero")
def test_counters_without_an_accepted_draft_name_draft_tokenizer_states_and_flags_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = {"draft": "d", "temperature": 1.0, "tau": [1.0, 1.6, 1.9], "tau_errors": [0.0, 0.01, 0.01]}
    plan = {"recommended": "d", "acceptance": {"d": {"1": {"prefix": [0.6, 0.3]}}}, "cells": [cell]}
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "log.json").write_text(json.dumps({"rounds": 500, "accepted_by_depth": [0, 0]}))
    assert main(["plan", f"log={tmp_path / 'log.json'}", f"output={tmp_path / 'plan'}"]) == 0
    said = capsys.readouterr().out
    cause = said[said.index("drift: ") :]
    named = [cause.index(word) for word in ("draft is the planned folder", "tokenizer", "states", "flags")]
    assert named == sorted(named) and "train on" not in cause


@case("policy without proposer")
def test_an_adaptive_policy_without_a_proposer_decodes_plainly() -> None:
    policy = Adaptive({1: (1.0, 1.1)}, Estimates(0.9, (0.0,) * INPUTS, (0.0,) * INPUTS))
    target, given = tiny(), {"prompts": [[1, 2], [3]], "max_new_tokens": 9, "seed": 1}
    output = Engine(target, policy=policy).generate(**given)
    assert output.tokens == Engine(target).generate(**given).tokens and not output.stats.drafted
