"""Prompts are prompts: what is continued, and learnt from, begins as a server's context begins."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from cotrain.commands import served_pair
from cotrain.data.corpora import PIECE, text_pieces
from cotrain.data.prompt_rows import PromptRows, TextStarts
from cotrain.data.sources import pack_blocks
from cotrain.data.splits import SPLITS
from cotrain.data.texts import Learnt, joined_texts
from cotrain.rollout.samplers import Ask, Own
from cotrain.rollout.training_texts import Sampled
from cotrain.teacher.target_model import split
from inference import Engine, Sampling
from tests.cotrain.data.test_inputs import given, source_of, templated
from tests.folders import few_files, network, tokenizer, write_rows

START = 1  # id of the token that a text begins with


def starting() -> PreTrainedTokenizerFast:
    """A tokenizer that begins every text with a token of its own, as most do."""
    one = copy.deepcopy(tokenizer())
    one.bos_token = "<|pad|>"
    one.backend_tokenizer.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", START)])
    return one


def rows(path: Path, column: str, texts: list[str]) -> Path:
    return write_rows(path, ({column: text} for text in texts))


@pytest.mark.parametrize("column", ["text", "prompt"])
def test_prompts_have_their_domains_where_there_are_several(tmp_path: Path, column: str) -> None:
    """Prompts that are whole rows, and beginnings of texts."""
    file, words = tmp_path / "own.jsonl", tokenizer()
    texts = [f"number {i} of many words" for i in range(6)]
    names = ["a" if i % 2 else "b" for i in range(6)]
    for domains in (names, ["a"] * 6):
        write_rows(file, ({column: text, "domain": domain} for text, domain in zip(texts, domains, strict=True)))
        source = source_of(given(path=str(file), column=column), "all", words)
        wanted = {tuple(words(text)["input_ids"][:4]): domain for text, domain in zip(texts, domains, strict=True)}
        if column == "prompt":
            wanted = {tuple(words(text)["input_ids"]): domain for text, domain in zip(texts, domains, strict=True)}
        assert source.domains(4) == (wanted if len({*domains}) > 1 else {})


TEXTS = [f"number {i} " + "of many words " * (i % 9) for i in range(80)]


@pytest.mark.parametrize("column", ["text", "prompt"])
def test_a_row_is_one_prompt_from_its_start(tmp_path: Path, column: str) -> None:
    words = starting()
    path = rows(tmp_path / "own.jsonl", column, TEXTS)
    found = [ids for part in SPLITS for ids in source_of(given(path), part, words).several(1000, 0)]
    assert sorted(found) == sorted(words(text)["input_ids"] for text in TEXTS) and {ids[0] for ids in found} == {START}


def test_a_text_that_is_longer_is_begun_and_a_prompt_is_dropped(tmp_path: Path) -> None:
    words, limit = starting(), 20
    text, prompt = (
        source_of(given(rows(tmp_path / f"{name}.jsonl", name, TEXTS)), "train", words) for name in ("text", "prompt")
    )
    assert isinstance(text, TextStarts) and isinstance(prompt, PromptRows) and not prompt.rendered
    whole = [words(one)["input_ids"] for one in text.texts["text"]]
    long = sum(len(ids) > limit for ids in whole)
    assert 0 < long < len(whole) and sorted(text.several(limit, 0)) == sorted(ids[:limit] for ids in whole)
    assert sorted(prompt.several(limit, 0)) == sorted(ids for ids in whole if len(ids) <= limit)
    said = f"of {len(whole)} prompts of the split train, {long} are longer than rollout.prompt_tokens=20; these are"
    assert said in prompt.left_out(limit, "train") and prompt.left_out(1000, "train") == ""


def test_the_context_that_is_learnt_from_is_the_one_that_is_served(tmp_path: Path) -> None:
    """The sampler continues, and the draft reads from place 0, just what the engine makes of the same text."""
    words, target = starting(), network()
    source = source_of(given(rows(tmp_path / "own.jsonl", "prompt", TEXTS[:60])), "train", words)
    served: list[list[int]] = []
    engine = Engine(target, tokenizer=words, rows=4)
    generate = engine.generate

    def spied(prompts: list, **settings: object) -> object:
        served.extend(words(one)["input_ids"] if isinstance(one, str) else one for one in prompts)
        return generate(prompts, **settings)

    engine.generate = spied  # type: ignore[method-assign]
    ask = Ask({"train": 3}, 64, 4)
    made = Sampled(target, words, tmp_path, ask, 4, 0, {"train": "own"}, by=lambda: Own(engine))
    texts = made.texts("train", Sampling(0.0), source.prompts)
    engine.generate = generate  # type: ignore[method-assign]
    asked = [words.decode(ids[1:]) for ids in served]
    assert len(asked) == 3 and set(asked) <= set(TEXTS) and served == [words(text)["input_ids"] for text in asked]
    part = Learnt(joined_texts([texts.at(1.0, whole=True)]))
    read, _ = split(target)
    out = engine.generate(asked, max_new_tokens=4, sampling=Sampling(0.0))
    for place, ids in enumerate(served):
        learnt = part[place]
        assert learnt["ids"][: len(ids)].tolist() == ids and "position_ids" not in learnt
        assert learnt["ids"][len(ids) : texts.length[place]].tolist() == out.tokens[place]
        row = learnt["ids"][None, : len(ids)]
        assert torch.equal(read(row), read(row, torch.arange(len(ids))[None]))  # places from 0 on


def test_texts_are_shown_as_a_users_where_that_is_asked(tmp_path: Path) -> None:
    words = templated()
    for column in ("text", "prompt"):
        path = rows(tmp_path / f"{column}.jsonl", column, TEXTS)
        raw, shown = (source_of(given(path, chat=chat), "train", words) for chat in (False, True))
        assert shown.rendered and not raw.rendered
        starts = {words.decode(ids) for ids in shown.several(1000, 0)}
        assert len(starts) > 60 and starts <= {f"<user>{text}<assistant>" for text in TEXTS}
        assert {words.decode(ids) for ids in raw.several(1000, 0)} <= set(TEXTS)
        with pytest.raises(ValueError, match="data.chat=true: the target's tokenizer has no chat template"):
            source_of(given(path, chat=True), "train", tokenizer())


def test_packed_texts_begin_as_a_server_begins_them() -> None:
    words = starting()
    blocks = pack_blocks(datasets.Dataset.from_dict({"text": ["abcd", "efgh"], "domain": ["a", "a"]}), words, 5)
    stream = words("abcd")["input_ids"] + words("efgh")["input_ids"]
    assert blocks.ids.flatten().tolist() == stream[: len(stream) // 5 * 5]
    assert (blocks.position_ids[blocks.ids == START] == 0).all()


def test_embedded_prompts_are_starts_of_pieces_that_begin_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    few_files(monkeypatch)
    data = given("").model_copy(update={"path": None, "bytes": {"code": 20_000, "records": 5_000}})
    source = source_of(data, "train", tokenizer())
    assert isinstance(source, TextStarts)
    found = source.prompts(4, 12, seed=3)
    assert [domain for domain, _ in found] == ["code"] * 4 + ["records"] * 4
    starts = {tuple(tokenizer()(text)["input_ids"][:12]) for text in source.starts["text"]}
    assert {tuple(ids) for _, ids in found} <= starts and found == source.prompts(4, 12, seed=3)
    text = source.texts["text"][0]
    cut = text_pieces(text)
    assert "".join(cut) == text and all(len(one) >= PIECE and one.endswith("\n") for one in cut[:-1])
    every = source.prompts(10**6, 12, seed=3)  # as many as there are
    assert [domain for domain, _ in every] == sorted(source.starts["domain"]) and {*map(str, found)} <= {
        *map(str, every)
    }


def test_bench_counts_prompts_that_are_too_long_or_learnt_by_its_own_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {
        split: [{"domain": "own", "prompt": [first + n] * n, "completion": []} for n in (2, 3, 9)]
        for split, first in (("held_out", 0), ("final", 20))
    }
    rows["train"] = [{"domain": "own", "prompt": rows[split][0]["prompt"] + [9], "completion": []} for split in rows]
    monkeypatch.setattr(
        "cotrain.data.sources.sources_of", lambda data, splits, *_: {split: PromptRows(rows[split]) for split in splits}
    )
    size, data = SimpleNamespace(prompt_tokens=8, seed=0), SimpleNamespace(path="own.jsonl", template={})
    found = served_pair.prompts(cast(Any, data), cast(Any, size), network(), cast(Any, None))
    assert sorted(map(len, found.ranking)) == sorted(map(len, found.final)) == [3]  # others begin rows to learn from
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines() == [
        "data.path: 1 of 3 held-out prompts are left out, because they begin like training prompts (their first 8 "
        "tokens are compared)",
        "data.path: of 2 prompts of the split held_out, 1 are longer than bench.prompt_tokens=8; these are left out",
        "data.path: of 3 prompts of the split final, 1 are longer than bench.prompt_tokens=8; these are left out",
    ]
