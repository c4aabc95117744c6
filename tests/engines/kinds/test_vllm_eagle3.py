"""Feature drafts served by a real vLLM, whole vocabulary and pruned: accepted as often as here and as predicted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotrain.bench import server_parity as checked
from cotrain.bench.measurement import Plan
from cotrain.cli import main
from cotrain.export.eagle3 import export
from cotrain.teacher.target_model import load_pair
from inference import Sampling
from inference.drafts.bundled_target import resolve
from inference.drafts.draft_folder import read
from inference.proposers.eagle_network import EagleNetwork
from inference.servers.openai_client import Client
from inference.servers.vllm_server import draft_model
from tests.engines.conftest import OUTPUT, QUICK, K
from tests.engines.servers import serving
from tests.engines.test_vllm import SIZE, TEMPERATURES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
VOCABULARIES = {"whole": [], "pruned": ["draft.vocabulary=1024"]}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_feature_draft_is_accepted_as_here(name: str, found: dict[str, Any], tmp_path: Path) -> None:
    run = OUTPUT / f"eagle, {name}"
    if not (run / "draft" / "cotrain.json").is_file():
        settings = [*QUICK, "draft=eagle", f"draft.depths={K}", *VOCABULARIES[name]]
        assert main(["train", f"output={run}", "overwrite=true", *settings]) == 0
    target, tokenizer = load_pair("bundled")
    folder = export(run / "draft", tmp_path / "served", target=target)
    made = read(folder).metadata
    assert made is not None
    draft: Any = EagleNetwork.from_pretrained(folder, dtype="auto")
    plan = Plan(target, tokenizer, draft.eval(), Sampling(), "token", SIZE, ("bundled", "eagle"), kind="eagle")
    config = draft_model(str(folder), K, "sampled", "eagle3")
    figures = found[f"eagle, {name}"] = {}
    with serving(resolve("bundled"), config, OUTPUT / f"eagle, {name}.log") as url:
        for temperature in TEMPERATURES:
            regime = replace(plan, sampling=Sampling(temperature=temperature))
            parity = checked.parity(regime, checked.over_http(Client(url), regime), K, at_once=8)
            figures[f"temperature {temperature:g}"] = parity.report()
            print(f"\nvllm, eagle3, {name}, temperature {temperature:g}: {parity.line()}")
            assert parity.passed, parity.line()
