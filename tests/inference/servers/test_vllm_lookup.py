"""The class that vLLM loads drafts as this engine's own proposers do, whatever order vLLM keeps its rows in."""

import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers.hybrid import Hybrid
from inference.proposers.independent import Independent
from inference.proposers.retrieval import Retrieval
from inference.servers.vllm_lookup import FOLDER, Lookup
from tests.kinds import KINDS
from tests.often import often
from tests.tiny import near, tiny
from tests.watched import Watched

K, CONTEXT = 3, 64


def config() -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        model_config=SimpleNamespace(max_model_len=CONTEXT),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
    )


@pytest.mark.parametrize("kind", often(["retrieval", "hybrid"], {"hybrid"}.__contains__))
def test_drafts_are_those_of_this_engine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(seed=3, positions=CONTEXT)
    retrieval, proposer = Retrieval(shortest=1), None
    if kind == "hybrid":
        draft = near(target)
        gate = KINDS["hybrid"].proposer(target).gate
        proposer = Hybrid(Independent(copy.deepcopy(draft), greedy=True), retrieval, gate)
        draft.config.lookup = {"shortest": 1, "gate": proposer.gate.to_json()}
        draft.save_pretrained(tmp_path)
    else:
        (tmp_path / "config.json").write_text('{"lookup": {"shortest": 1}}')
    watched = Watched(proposer or retrieval)
    engine = Engine(target, watched, rows=1, policy=Fixed(K))
    engine.generate([[1, 2, 1, 3], [5], [4, 4, 6]], max_new_tokens=40, sampling=Sampling(0.9))
    result = {
        tuple(text): x[:k]
        for one in watched.rounds
        for text, x, k in zip(one.texts, one.x.tolist(), one.k, strict=True)
    }
    monkeypatch.setenv(FOLDER, str(tmp_path))
    served = Lookup(config())
    assert (served.gate is None) == (kind == "retrieval")
    texts = [text for text in result if len(text) + K < CONTEXT]
    for low in range(len(texts) - 3):
        part = [texts[low + (one * (low + 1)) % 3] for one in range(3)]  # rows change places
        ids = np.zeros((3, CONTEXT), dtype=np.int32)
        for row, text in enumerate(part):
            ids[row, : len(text)] = text
        lengths = np.array([len(text) for text in part])
        drafts = served.propose([[1], [], [1]], lengths, ids, slot_mappings=None)
        assert drafts[1] == []
        for row in (0, 2):
            limit = result[part[row]]
            assert drafts[row][: len(limit)] == limit and len(drafts[row]) >= len(limit)
    assert len(texts) > 20
