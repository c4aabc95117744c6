"""Look-up in a real vLLM, alone and beside a draft model: it serves the target's text, and drafts as often as here."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.data.prompts import shipped_ids
from cotrain.teacher.target_model import load_pair
from inference import Engine, Sampling
from inference.drafts.bundled_target import resolve
from inference.exactness.checks import check_text
from inference.models.dtypes import cast
from inference.noise import row_ids
from inference.policy import Fixed
from inference.proposers.gate import Gate
from inference.proposers.hybrid import Hybrid
from inference.proposers.independent import Independent
from inference.proposers.retrieval import Retrieval
from inference.servers.vllm_lookup import FOLDER
from inference.servers.vllm_server import Server, custom_class
from tests.engines.conftest import OUTPUT, ROOT, K, draft_folder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
PROMPTS, NEW = 12, 96


def kept(kind: str, place: Path) -> Path:
    """A folder of the kind."""
    if kind == "hybrid":
        shutil.copytree(draft_folder("two layers", "greedy"), place)
    else:
        place.mkdir()
        (place / "config.json").write_text("{}")
    config = json.loads((place / "config.json").read_text())
    config["lookup"] = {"shortest": 2, "gate": Gate.uncalibrated().to_json() if kind == "hybrid" else None}
    (place / "config.json").write_text(json.dumps(config))
    return place


def served(prompts: list[list[int]], speculative: dict[str, Any] | None, log: str) -> dict[str, Any]:
    with Server(os.environ["COTRAIN_VLLM"], resolve("bundled"), speculative, 4, 256, OUTPUT / log) as server:
        return server.generate(prompts, NEW, 0.0, 0)


@pytest.mark.parametrize("kind", ["retrieval", "hybrid"])
def test_look_up_serves_the_targets_text(
    kind: str, found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, tokenizer = load_pair("bundled")
    prompts = shipped_ids(tokenizer, 48)[1][:PROMPTS]
    folder = kept(kind, tmp_path / kind)
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    plain, fast = served(prompts, None, "plain look-up.log"), served(prompts, custom_class(K), f"{kind}.log")
    keys, sampling = (row_ids(prompts), 0), Sampling(temperature=0)
    rounded = cast(copy.deepcopy(target), torch.bfloat16)
    text = check_text(rounded, prompts, plain["tokens"], fast["tokens"], keys, sampling, 4096, K)
    tau = 1 + fast["accepted"] / fast["drafts"]  # of rounds that drafted
    figures = {"served": tau, "greedy_text": vars(text) | {"line": text.line()}, "seconds": fast["seconds"]}
    found[f"custom_class, {kind}"] = figures | {"ours": ours(kind, folder, target, prompts)}
    print(f"\nvllm, custom_class, {kind}: {found[f'custom_class, {kind}']}")
    assert text.unexplained == 0 and tau > 1


def ours(kind: str, folder: Path, target: Any, prompts: list[list[int]]) -> float:
    """Tokens of a round that drafted, by this engine on its own greedy texts."""
    retrieval = Retrieval(shortest=2)
    proposer = Hybrid(Independent(str(folder), greedy=True), retrieval) if kind == "hybrid" else retrieval
    engine = Engine(cast(copy.deepcopy(target), torch.bfloat16), proposer, policy=Fixed(K), rows=4)
    stats = engine.generate(prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0), ignore_eos=True).stats
    return 1 + sum(stats.accepted) / stats.drafted[0]
