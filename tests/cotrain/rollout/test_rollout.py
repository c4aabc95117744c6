"""Texts sampled from the target: prompts, interruption, and which kept sets serve."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cotrain.console import Display
from cotrain.data.prompt_rows import PromptRows
from cotrain.rollout import samplers, training_texts
from cotrain.rollout.samplers import CALL, Ask, Own, Remote, collect
from cotrain.rollout.training_texts import Sampled, name
from inference import Engine, Sampling
from inference.servers.openai_client import Completion
from tests.folders import tokenizer
from tests.tiny import tiny

VOCABULARY = 300
WARM = Sampling(temperature=0.8, top_p=0.9)


class Killed(RuntimeError):
    pass


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny(vocab=VOCABULARY, layers=1, eos=3)


@pytest.fixture
def prompts() -> PromptRows:
    """6 prompts of 4 tokens, domains in turn."""
    return PromptRows(
        [{"domain": "ab"[i % 2], "prompt": list(range(4 * i + 4, 4 * i + 8)), "completion": []} for i in range(6)]
    )


@pytest.fixture
def sampled(target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sampled:
    """Sets of this target in an empty folder, with no shipped ones."""
    monkeypatch.setattr(training_texts, "folder", lambda _: tmp_path / "data")
    ask = Ask({"train": 3, "held_out": 2}, prompt_tokens=4, new_tokens=6)
    source = {"train": "own", "held_out": "own"}
    return Sampled(target, tokenizer(), tmp_path / "own", ask, rows=2, seed=1, source=source)


@contextmanager
def killed_after(batches: int) -> Iterator[None]:
    """A process that dies of what it shows of its last batch."""
    left = [batches]

    def to(*_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Display, "to", to)
        yield


def test_an_interrupted_collection_goes_on_as_if_it_had_not_been(
    target: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [("a", [5 + i, 6, 7]) for i in range(3 * CALL - 1)]

    def run(partial: Path, rows: int = 1) -> list[dict]:
        return collect(Own(Engine(target, rows=rows)), asked, WARM, 6, 0, partial)

    whole = run(tmp_path / "whole.jsonl")
    assert [row["prompt"] for row in whole] == [prompt for _, prompt in asked]
    assert len({tuple(row["completion"]) for row in whole}) > 3
    with killed_after(2):
        run(tmp_path / "partial.jsonl")
    with (tmp_path / "partial.jsonl").open("a") as file:
        file.write('{"domain": "a", "prom')  # cut short by its death
    capsys.readouterr()
    assert run(tmp_path / "partial.jsonl", rows=3) == whole
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "11/11" in said
    assert (tmp_path / "partial.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_prompts_of_a_window_are_sampled_longest_first_with_their_own_numbers(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    asked = [("a", [5 + i] * (1 + 3 * i % 5)) for i in range(7)]
    plain = {
        tuple(prompt): Own(Engine(target, rows=1))([prompt], WARM, 6, 0, [i])[0] for i, (_, prompt) in enumerate(asked)
    }
    rows = collect(Own(Engine(target, rows=2)), asked, WARM, 6, 0, tmp_path / "p.jsonl", window=4)
    lengths = [len(row["prompt"]) for row in rows]
    assert lengths == [5, 4, 2, 1, 4, 3, 1] and sorted(row["prompt"][0] for row in rows) == list(range(5, 12))
    assert all(row["completion"] == plain[tuple(row["prompt"])] for row in rows)


def test_sampling_ends_with_its_seconds(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of two takes ten seconds; none begins that would end later, and the first always does. With much time
    left, a batch is four times as large."""
    asked, now, sizes = [("a", [5 + i]) for i in range(9)], [0.0], []
    monkeypatch.setattr(samplers, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(Own):
        def __call__(self, *arguments: Any) -> list[list[int]]:
            now[0] += 5.0 * len(arguments[0])
            sizes.append(len(arguments[0]))
            return super().__call__(*arguments)

    for seconds, count in ((None, 9), (1000.0, 9), (39.0, 6), (30.0, 6), (1.0, 2)):
        sampler = Slow(Engine(target, rows=2))
        rows = collect(sampler, asked, WARM, 2, 0, tmp_path / f"{seconds}", None, seconds)
        assert [row["prompt"] for row in rows] == [prompt for _, prompt in asked[:count]]
    assert sizes == [8, 1, 2, 7, *[2] * 7]


def test_a_budget_leaves_some_of_every_domain(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """A set that its minutes cut short holds all domains, is used by runs of the same budget and by no other; a whole
    one is used by all."""
    prompts = PromptRows([{"domain": "ab"[i >= 5], "prompt": [5 + i, 6], "completion": []} for i in range(8)])
    whole = Sampled(target, tokenizer(), tmp_path, Ask({"train": 5}, 4, 3), 2, 1, {"train": "own"})
    short = replace(whole, minutes=3.0, seconds={"train": 1e-9})
    path = short.sample("train", WARM, prompts.prompts)
    assert [row["domain"] for row in training_texts.read_rows(path)] == ["a", "b"]
    assert short._fits(path, "train", WARM)
    assert not whole._fits(path, "train", WARM) and not replace(short, minutes=4.0)._fits(path, "train", WARM)
    path = replace(short, seconds={"train": 1e9}).sample("train", WARM, prompts.prompts)
    domains = [row["domain"] for row in training_texts.read_rows(path)]
    assert sorted(domains) == ["a"] * 5 + ["b"] * 3 and domains[:4] == ["a", "b", "a", "b"]
    assert all(one._fits(path, "train", WARM) for one in (whole, short))
    before = path.with_name(f"{path.name}.parquet").read_bytes()
    whole.sample("train", WARM, cast(Any, None), keep=True)  # stored: nothing is sampled
    other = replace(whole, seed=2).sample("train", WARM, prompts.prompts, keep=True)
    kept = path.with_name(f"{path.name}-1")
    assert kept.with_name(f"{kept.name}.parquet").read_bytes() == before and whole._fits(kept, "train", WARM)
    assert other == path and replace(whole, seed=2)._fits(path, "train", WARM)
    kept.with_name(f"{kept.name}.parquet").rename(stored := path.with_name(f"{path.name}.parquet"))
    kept.with_name(f"{kept.name}.json").rename(path.with_name(f"{path.name}.json"))
    stored.write_bytes(before[: len(before) // 2])
    with pytest.raises(ValueError, match=f"{stored} cannot be read .*: delete it and {path.name}.json"):
        whole.sample("train", WARM, cast(Any, None), keep=True)
    path.with_name(f"{path.name}.json").unlink()
    assert whole.sample("train", WARM, prompts.prompts, keep=True) == path and whole._fits(path, "train", WARM)
    assert kept.with_name(f"{kept.name}.parquet").is_file()
    stored.unlink()
    assert not whole._fits(path, "train", WARM)


def test_a_budget_leaves_some_of_a_domain_of_short_prompts(target: LlamaForCausalLM, tmp_path: Path) -> None:
    rows = [{"domain": "ab"[i >= 5], "prompt": [5 + i] * (3 - 2 * (i >= 5)), "completion": []} for i in range(8)]
    whole = Sampled(target, tokenizer(), tmp_path, Ask({"train": 5}, 4, 3), 2, 1, {"train": "own"})
    short = replace(whole, minutes=3.0, seconds={"train": 1e-9})
    path = short.sample("train", WARM, PromptRows(rows).prompts)
    assert [row["domain"] for row in training_texts.read_rows(path)] == ["a", "b"]


def test_completions_keep_their_end_and_stop_there(target: LlamaForCausalLM, tmp_path: Path) -> None:
    asked = [("a", [5 + i % 200]) for i in range(60)]
    rows = collect(Own(Engine(target, rows=60)), asked, Sampling(3.0), 40, 0, tmp_path / "p.jsonl")
    ended = [row["completion"] for row in rows if 3 in row["completion"]]
    assert ended and all(text.index(3) == len(text) - 1 for text in ended)
    assert all(len(row["completion"]) == 40 for row in rows if 3 not in row["completion"])


def test_a_set_is_read_as_it_was_saved(tmp_path: Path) -> None:
    rows = [
        {"domain": "a", "prompt": [5, 6], "completion": [7, 8, 9]},
        {"domain": "b", "prompt": [4], "completion": [2]},
    ]
    path = tmp_path / "held_out_T0.5"
    training_texts.save_rows(rows, path, {"seed": 3})
    digest = hashlib.sha256((tmp_path / "held_out_T0.5.parquet").read_bytes()).hexdigest()
    assert training_texts.read_manifest(path) == {"seed": 3, "rows": 2, "tokens": 4, "sha256": digest}
    texts = training_texts.padded(training_texts.read_rows(path))
    assert texts.ids.tolist() == [[5, 6, 7, 8, 9], [4, 2, 0, 0, 0]]
    assert (texts.prompt.tolist(), texts.length.tolist(), texts.domain) == ([2, 1], [5, 2], ["a", "b"])
    assert texts.predicted.tolist() == [[False, True, True, True], [True, False, False, False]]
    with pytest.raises(ValueError, match="there is no .*train_T1.parquet"):
        training_texts.read_rows(tmp_path / "train_T1")


def test_sets_are_named_for_their_regime() -> None:
    names = [name("train", s) for s in (Sampling(1.0), Sampling(0.5), Sampling(1.0, 20, 0.95))]
    assert names == ["train_T1", "train_T0.5", "train_T1_k20_p0.95"]


def test_more_texts_than_prompts_are_said(
    sampled: Sampled, prompts: PromptRows, capsys: pytest.CaptureFixture[str]
) -> None:
    for texts in (6, 7):
        asked = replace(sampled, ask=replace(sampled.ask, texts={"train": texts}))
        asked.sample("train", WARM, prompts.prompts, keep=True)
        said = "rollout.texts=7: there are only 6 prompts, and each is continued once\n"
        assert (said in capsys.readouterr().out) == (texts == 7)


def test_what_was_begun_with_other_settings_is_not_mixed_in(sampled: Sampled, prompts: PromptRows) -> None:
    whole = training_texts.read_rows(
        replace(sampled, folder=sampled.folder.parent / "whole").sample("train", WARM, prompts.prompts)
    )
    for one in (replace(sampled, seed=2), sampled):
        with killed_after(1):
            one.sample("train", WARM, prompts.prompts)
    assert training_texts.read_rows(sampled.sample("train", WARM, prompts.prompts)).to_list() == whole.to_list()


def test_what_was_sampled_outlives_a_failed_save(
    sampled: Sampled, prompts: PromptRows, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_texts, "save_rows", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampled.sample("train", WARM, prompts.prompts)
    monkeypatch.undo()
    monkeypatch.setattr(training_texts, "folder", lambda _: sampled.folder)
    capsys.readouterr()
    sampled.sample("train", WARM, prompts.prompts)
    assert capsys.readouterr().out == ""


class Answering:
    """A client of a server that gives one answer."""

    def __init__(self, answer: Completion) -> None:
        self.answer, self.sends_ids = answer, answer.ids is not None
        self.asked: list[tuple[object, list[int]]] = []

    def complete(self, prompts: list, new_tokens: int, sampling: Sampling, seeds: list[int], at_once: int) -> list:
        self.asked += [(prompt, seeds) for prompt in prompts]
        return [self.answer for _ in prompts]


def test_a_server_samples_by_ids_or_by_text() -> None:
    words = tokenizer()
    prompt, end = words("import os")["input_ids"], words.eos_token_id

    def answered(answer: Completion, asked: list[int] = prompt, ends: tuple[int, ...] = (end, 7, 9)) -> list[int]:
        client = Answering(answer)
        (ids,) = Remote(client, words, 4, frozenset(ends))([asked], WARM, 6, 1, [3])  # type: ignore[arg-type]
        assert client.asked == [(asked if answer.ids else words.decode(asked), [2**32 + 3])]
        return ids

    assert answered(Completion("ab", [7, 8], "stop")) == [7, 8]
    ab = words("ab", add_special_tokens=False)["input_ids"]
    assert answered(Completion("ab", None, "stop")) == [*ab, end]
    assert answered(Completion("ab", None, "length")) == ab
    assert answered(Completion("ab", None, "stop", end=9)) == [*ab, 9]  # the server says it
    assert answered(Completion("ab", None, "stop"), [*prompt, 7, *prompt]) == [*ab, 7]  # it ended the turn before
    for turns in ([7, 9], [9, 7], [end, 9, 7], [7, end]):  # the last of several
        among = [one for token in turns for one in (token, *prompt)]
        assert answered(Completion("ab", None, "stop"), prompt + among) == [*ab, turns[-1]]
    assert answered(Completion("ab" + words.decode([9]), None, "stop")) == [*ab, 9]  # it is in the text
    assert answered(Completion("ab\ufffd", None, "length")) == []
    assert answered(Completion("ab" * 9, None, "stop")) == (ab * 9)[:6]
    half = words("\u00e9", add_special_tokens=False)["input_ids"][:1]
    assert words.decode(half) == "\ufffd"
    client = Answering(Completion("ab", None, "stop"))
    assert Remote(client, words, 4, frozenset())([half], WARM, 6, 1, [3]) == [[]]  # type: ignore[arg-type]
    assert client.asked == []


def test_an_answer_is_encoded_as_the_prompts_continuation() -> None:
    """A tokenizer that begins a text with a space would write one before the answer."""
    model = Tokenizer(
        BPE({"\u2581": 0, "a": 1, "b": 2, "\u2581a": 3, "\u2581b": 4}, [("\u2581", "a"), ("\u2581", "b")])
    )
    model.pre_tokenizer, model.decoder = Metaspace(), decoders.Metaspace()
    client = Answering(Completion("b b", None, "length"))
    words = PreTrainedTokenizerFast(tokenizer_object=model)
    assert Remote(client, words, 4, frozenset())([[3]], WARM, 6, 1, [3]) == [[2, 4]]  # type: ignore[arg-type]
