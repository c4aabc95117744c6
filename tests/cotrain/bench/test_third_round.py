"""What a third round of planted bugs survived, and faults that were found on the way."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from cotrain.bench import matrix, measurement
from cotrain.bench.measurement import Plan, parity
from cotrain.config.settings import Bench
from cotrain.data.splits import Prompts
from cotrain.students import hybrid
from cotrain.students.early_exit import EarlyExit
from cotrain.students.parallel import Parallel
from inference import Engine, Sampling
from inference.measure.timing import Emitted
from inference.proposers.gate import Gate
from inference.request import Request
from tests import folders
from tests.folders import network
from tests.tiny import tiny

# --- engine


def test_ids_behind_a_gap_of_the_tokenizer_have_mass() -> None:
    """Tokens that were added at high ids: fewer tokens than the highest id says."""
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 12}, unk_token="a"))
    engine = Engine(tiny(vocab=16), tokenizer=PreTrainedTokenizerFast(tokenizer_object=core))
    likely = Sampling(logit_bias={12: 1e3})
    assert engine.generate([[1]], max_new_tokens=2, sampling=likely).tokens == [[12, 12]]
    with pytest.raises(ValueError, match="the vocabulary size is 13"):  # rows behind only pad
        engine.generate([[1]], sampling=Sampling(logit_bias={13: 1.0}))


def test_a_stop_string_of_many_tokens_ends_a_text() -> None:
    tokenizer = folders.tokenizer()
    stop = "漢字🙂" * 20
    ids = tokenizer(f"a {stop}", add_special_tokens=False)["input_ids"]
    row = Request(0, 0, [2], 10**6, Sampling(stop=(stop,)), frozenset(), tokenizer)
    assert len(ids) > 200 and row.take([*ids, 5, 6]) == ids and row.finish == "stop"


# --- prediction and measurement


def plan(kind: str = "independent") -> Plan:
    """Of few prompts, three that rank and three that time."""
    ranking, final = ([[5 + i, side] for i in range(3)] for side in (7, 9))
    size = Bench(2, 2, 8, 4, 28, 2, 0.0, 0.1, [2], "auto", False, False, 0, 0)
    given = Prompts(ranking, final, "own")
    draft = network(layers=1, seed=1)
    return Plan(network(), folders.tokenizer(), draft, Sampling(), "token", size, ("t", "d"), given=given, kind=kind)


def test_parity_counts_no_text_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """More texts are asked for than there are prompts: one that comes again is decoded with other noise."""
    met: list[Emitted] = []
    true = measurement.counted

    def noted(plan: Plan, texts: Emitted, *others: Any) -> Any:
        met.append(texts)
        return true(plan, texts, *others)

    monkeypatch.setattr(measurement, "counted", noted)
    monkeypatch.setattr(measurement, "BATCH", 2)
    found = parity(plan(), 2)
    made = [(*prompt, *text) for prompt, text in zip(met[0].prompts, met[0].tokens, strict=True)]
    assert found and found["tokens"] == 28 and len(made) == len(set(made)) == 7


def test_a_gate_is_counted_on_prompts_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[list[int]] = []

    def noted(model: Engine, plain: Engine, retrieval: Any, prompts: list[list[int]], **_: Any) -> Gate:
        met.extend(prompts)
        return Gate.uncalibrated()

    monkeypatch.setattr(hybrid, "calibrate", noted)
    asked = plan("hybrid")
    asked.draft.config.lookup = {"datastore": None, "shortest": 2}
    hybrid.prepare(asked)
    assert {tuple(prompt) for prompt in met} == set(map(tuple, asked.prompts.ranking))


def test_a_matrix_keeps_the_other_settings_of_the_regime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    met: list[Sampling] = []
    monkeypatch.setattr(matrix, "_cell", lambda plan, *_: met.append(plan.sampling))
    monkeypatch.setattr(matrix, "line", lambda _: "")
    cut = replace(plan(), sampling=Sampling(1.0, top_k=9, top_p=0.9))
    matrix.matrix(cut, matrix.Grid([0.5, 1.0], [1], 2, None, tmp_path), lambda _: None)
    assert met == [Sampling(0.5, top_k=9, top_p=0.9), Sampling(1.0, top_k=9, top_p=0.9)]


# --- students


def test_windows_that_slide_are_refused_before_there_are_weights() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=8)
    with torch.device("meta"):
        target = MistralForCausalLM(config)
        draft: Any = SimpleNamespace(layers=1, rank=2, depths=2, path=None)
        init: Any = SimpleNamespace(kind="target_layers", layers=[0])
        with pytest.raises(ValueError, match="draft.kind: Mistral.* sliding windows.* draft.rank=0"):
            EarlyExit.initial(draft, init, target)
        with pytest.raises(ValueError, match="draft: MistralForCausalLM sees the last 8 tokens"):
            Parallel.initial(draft, init, target)
        draft.rank = 0
        EarlyExit.initial(draft, init, target)
