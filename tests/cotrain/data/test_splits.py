"""Three splits of prompts that share no content, whatever index or file they came from; block tau ranks for block."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cotrain.data import splits
from cotrain.data.corpora import shipped_ids
from cotrain.data.splits import SPLITS, Prompts, apart, refuse_shared, shared, split_of, splits_of
from cotrain.evaluation.held_out import Scores
from cotrain.rollout.training_texts import padded, read_rows
from cotrain.training.job import Job
from cotrain.training.module import Distillation
from inference.drafts.bundled_target import NAME, resolve
from tests.cotrain.data.test_inputs import given
from tests.folders import tokenizer, write_rows


def test_content_decides_about_the_split() -> None:
    found = [split_of(f"text number {i}") for i in range(4000)]
    assert found == [split_of(f"text number {i}") for i in range(4000)]
    shares = {name: found.count(name) / 4000 for name in SPLITS}
    assert shares == pytest.approx({"train": 0.9, "held_out": 0.05, "final": 0.05}, abs=0.012)


@pytest.mark.parametrize(("count", "least"), [(3, 0), (5, 1), (12, 2), (20, 4), (60, 4)])
def test_a_small_data_set_has_rows_in_every_split(count: int, least: int) -> None:
    for first in range(0, 1000, 100):
        contents = [f"text number {first + i}" for i in range(count)]
        found = splits_of(contents)
        assert min(found.count(name) for name in SPLITS) >= least
        assert all(own == split_of(one) or split_of(one) == "train" for one, own in zip(contents, found, strict=True))
        assert splits_of(contents[::-1]) == found[::-1] and splits_of(contents * 2) == found * 2


def test_a_large_data_set_is_split_by_content_alone() -> None:
    contents = [f"text number {i}" for i in range(1000)]
    assert splits_of(contents) == [split_of(one) for one in contents]


@pytest.mark.parametrize(
    ("prompt", "other"), [([1, 2, 3], [1, 2, 3]), ([1, 2], [1, 2, 3]), ([1, 2, 3, 4], [1, 2]), ([7], [7, 0])]
)
def test_equal_prompts_and_beginnings_are_shared_content(prompt: list[int], other: list[int]) -> None:
    others = [[0], [1, 1], [1, 3, 2], [2], other, [9, 9]]
    assert shared([[1, 2, 0, 5] if other != [1, 2] else [3], prompt, [4]], others) == [prompt]
    with pytest.raises(ValueError, match="1 of 2 prompts that time the exported draft also rank checkpoints"):
        Prompts(others, [[4], prompt], "own")
    assert apart(others, [[4], prompt, [4]], [], "own").final == [[4]]


def test_final_prompts_are_none_that_were_learnt_from() -> None:
    assert apart([[1]], [[2], [3], [4]], [[3, 9]], "own").final == [[2], [4]]
    with pytest.raises(ValueError, match="data.path: no prompt is left to time the exported draft, .* give more texts"):
        apart([[1]], [[3]], [[3, 9]], "own")
    with pytest.raises(ValueError, match="also were learnt from"):
        refuse_shared([[2], [3]], [[3, 9]], "were learnt from")


def rows_of(kind: str, count: int = 120) -> list[dict]:
    if kind == "texts":
        return [{"text": f"{i} {' '.join(map(str, range(i % 7, i % 7 + 30)))}"} for i in range(count)]
    return [{"prompt": f"question {i} of {i % 7}", "response": f"answer {i}"} for i in range(count)]


@pytest.mark.parametrize("kind", ["texts", "conversations"])
def test_a_run_with_own_data_times_on_prompts_of_no_other_split(tmp_path: Path, kind: str) -> None:
    """Every row comes twice, so that no order and no index could keep them apart."""
    data = given(write_rows(tmp_path / "own.jsonl", rows_of(kind) * 2), block=16)
    ask = SimpleNamespace(prompt_tokens=40 if kind == "conversations" else 16, seed=0, folder=None)
    config = SimpleNamespace(eos_token_id=None, is_encoder_decoder=False)
    target = SimpleNamespace(generation_config=None, config=config)
    job = Job(SimpleNamespace(data=data, rollout=ask, output=str(tmp_path)), tmp_path, target, tokenizer())  # type: ignore[arg-type]
    found, learnt = job.prompts, job.source("train").several(ask.prompt_tokens, 0)
    assert found.source == "own" and found.ranking and found.final
    assert not shared(found.final, found.ranking) and not shared(found.final, learnt)


def test_shipped_prompts_share_nothing_with_shipped_texts() -> None:
    from transformers import AutoTokenizer

    ranking, final = shipped_ids(AutoTokenizer.from_pretrained(resolve(NAME)), 48)
    data = Path(splits.__file__).parents[2] / "data" / "rollouts"
    others = [
        row for kind in ("train_T1", "held_out_T1", "held_out_T0") for row in padded(read_rows(data / kind)).prompts
    ]
    found = apart(ranking, final, others, "shipped")
    assert (len(found.ranking), len(found.final)) == (len(ranking), len(final)) and len(final) > 150 > len(ranking) > 60


def scores(l: torch.Tensor) -> Scores:
    lengths = torch.tensor([6, 4])
    return Scores(l, l.exp().clamp(max=1), l, lengths, 0.5, 0.5, 0.1, 1.0)


def test_checkpoints_are_ranked_by_the_rule_that_verifies() -> None:
    found = scores(torch.tensor([math.log(2), math.log(0.5)]).double().repeat(2, 3))
    module = SimpleNamespace(judged={1.0: {"all": found}}, temperature=1.0)
    ranked = [Distillation.tau(module, 4, "sampled", rule) for rule in ("token", "block")]  # type: ignore[arg-type]
    assert ranked == [found.tau(4), found.tau(4, "block")] and ranked[0] < ranked[1]
    assert Distillation.tau(module, 4, "greedy", "block") == found.tau_greedy(4)  # type: ignore[arg-type]


def test_own_prompts_that_rank_are_not_learnt_from() -> None:
    learnt, ranking, final = [[1, 2, 3], [7]], [[1, 2, 3], [1, 2], [7, 8], [4], [4]], [[5], [4, 5]]
    found = apart(ranking, final, learnt, "own")
    assert (found.ranking, found.final) == ([[4]], [[5]])
    with pytest.raises(ValueError, match="rank checkpoints"):
        apart([[7, 1]], final, learnt, "own")


def test_rows_of_one_split_alone_are_a_data_set_too() -> None:
    """Rows of the final split, as in a draft folder: some of them rank, none is needed twice."""
    final = [text for text in map(str, range(4000)) if splits.split_of(text) == "final"][:40]
    for count in (1, 4, 5, 9, 40):
        own = splits.splits_of(final[:count])
        assert (own.count("held_out"), own.count("train")) == (min(4, count // 5), 0)
        assert splits.in_split(final[:count], splits.ALL_ROWS) == list(range(count))
        assert splits.in_split(final[:count], "final") == [row for row in range(count) if own[row] == "final"]
