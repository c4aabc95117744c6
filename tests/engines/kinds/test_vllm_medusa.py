"""Medusa heads served by a real vLLM, which drafts their likeliest tokens: accepted as often as here, and the target's
text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotrain.bench import server_parity as checked
from cotrain.bench.measurement import Plan
from cotrain.cli import main
from cotrain.export.medusa_layout import export, speculative
from cotrain.teacher.target_model import load_pair
from inference import Sampling
from inference.drafts.bundled_target import resolve
from inference.drafts.draft_folder import load_draft
from inference.proposers.medusa_network import MedusaNetwork
from inference.servers.openai_client import Client
from tests.engines.conftest import OUTPUT, QUICK, K
from tests.engines.servers import serving
from tests.engines.test_vllm import SIZE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_heads_are_accepted_as_here(found: dict[str, Any], tmp_path: Path) -> None:
    run = OUTPUT / "medusa"
    if not (run / "draft" / "cotrain.json").is_file():
        asked = ["train", "draft=medusa", f"output={run}", "overwrite=true", *QUICK, "objective=greedy_draft",
                 "loss.then=greedy_draft"]  # fmt: skip
        assert main(asked) == 0
    folder = export(run / "draft", tmp_path / "served", K)
    target, tokenizer = load_pair("bundled")
    draft = load_draft(run / "draft", network=MedusaNetwork)[0]
    plan = Plan(target, tokenizer, draft, Sampling(), "token", SIZE, ("bundled", "medusa"), "greedy", kind="medusa")
    with serving(resolve("bundled"), speculative(str(folder), K), OUTPUT / "medusa.log") as url:
        for temperature in (1.0, 0.0):
            regime = replace(plan, sampling=Sampling(temperature=temperature))
            parity = checked.parity(regime, checked.over_http(Client(url), regime), K, at_once=8)
            found.setdefault("medusa", {})[f"temperature {temperature:g}"] = parity.report()
            print(f"\nvllm, medusa, temperature {temperature:g}: {parity.line()}")
            assert parity.passed, parity.line()
