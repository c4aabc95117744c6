"""Look-up in a real vLLM, alone and beside a draft model: it drafts what this engine does, and the text is the
target's. vLLM counts rounds that drafted alone, so tau is of those here: 1 + accepted / rounds."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.bench.server_parity import TOLERANCE
from cotrain.planning.plan import Plan
from inference import Sampling
from inference.models.pretrained import cast
from tests.engines.conftest import OUTPUT, ROOT
from tests.engines.drafts import K, load
from tests.engines.kinds.exported import exported, server
from tests.engines.test_vllm import same_text

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("kind", ["retrieval", "hybrid"])
def test_look_up_drafts_as_here(
    kind: str, plain: dict[str, Any], found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, metadata = load(kind)
    assert metadata.kind == kind
    plan = replace(plain["plan"], draft=network, kind=kind, objective="greedy", sampling=Sampling(temperature=0))
    prompts = plan.final(0, plan.bench.prompts)
    command = exported(kind, tmp_path / "served")
    for key, value in {**command.environment, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(key, value)
    with server(command.target, command.speculative, OUTPUT / f"{kind}.log") as vllm:
        served = vllm.generate(prompts, plan.bench.new_tokens, 0.0, 0)
    text = same_text(plan, plain["texts"], served["tokens"])
    tau, here = 1 + served["accepted"] / served["drafts"], ours(plan, prompts, served["tokens"])
    figures = {"served": tau, "ours": here, "rounds": served["drafts"], "seconds": served["seconds"]}
    found[f"custom_class, {kind}"] = figures | {"greedy_text": vars(text) | {"line": text.line()}}
    print(f"\nvllm, custom_class, {kind}: tau {tau:.3f} served, {here:.3f} here; {text.line()}")
    assert text.unexplained == 0 and tau > 1.1 and abs(tau / here - 1) <= TOLERANCE


def ours(plan: Plan, prompts: list[list[int]], served: list[list[int]]) -> float:
    """tau of this engine, from where the server's rounds began: behind the first token, which its prefill makes."""
    engine = replace(plan, target=cast(copy.deepcopy(plan.target), torch.bfloat16)).engine(K, 8, plan.proposer())
    begun = [[*prompt, text[0]] for prompt, text in zip(prompts, served, strict=True)]
    stats = engine.generate(
        begun, max_new_tokens=plan.bench.new_tokens - 1, sampling=plan.sampling, ignore_eos=True
    ).stats
    return 1 + sum(stats.accepted) / stats.drafted[0]
