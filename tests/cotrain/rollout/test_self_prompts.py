"""Prompts that the target samples itself: where each family of templates begins and ends, filters, splits, resuming."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

from cotrain.config.groups import Data
from cotrain.data.conversations import Template
from cotrain.data.sources import source_of
from cotrain.data.splits import SPLITS
from cotrain.errors import UserError
from cotrain.paths import folder
from cotrain.rollout import self_prompts
from cotrain.rollout.samplers import CALL
from cotrain.rollout.self_prompts import (
    FILTERS,
    GIVEN,
    MOST,
    Opening,
    SelfPrompts,
    counts_line,
    filtered,
    needed,
    opening,
    openings,
    unended,
)
from inference import Sampling
from inference.drafts.weight_files import read_json
from tests.folders import tokenizer

START = "<|endoftext|>"  # of the tests' tokenizer: starts and ends a text


class Family(NamedTuple):
    """A chat template; its special tokens; the text before a user's content; the token, or the text, that ends it."""

    template: str
    special: tuple[str, ...]
    before: str
    end: str | None
    close: str = ""


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN = CHATML.removesuffix("{% endif %}") + "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
VICUNA = "{% for m in messages %}USER: {{ m.content }} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
IM = ("<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(CHATML, IM, "<|im_start|>user\n", "<|im_end|>"),
    "chatml with a system prompt": Family(
        SYSTEM + CHATML, IM, "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n", "<|im_end|>"
    ),
    "llama 3": Family(
        LLAMA,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        f"{START}<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "qwen 3": Family(QWEN, IM, "<|im_start|>user\n", "<|im_end|>"),
    "gemma": Family(GEMMA, ("<start_of_turn>", "<end_of_turn>"), f"{START}<start_of_turn>user\n", "<end_of_turn>"),
    "mistral": Family(MISTRAL, ("[INST]", "[/INST]"), f"{START}[INST]", "[/INST]"),
    "vicuna": Family(VICUNA, (), "USER:", None, "ASSISTANT:"),
}


def template_of(family: Family | None) -> Template:
    words: PreTrainedTokenizerFast = copy.deepcopy(tokenizer())
    words.bos_token = START
    if family:
        words.add_special_tokens({"additional_special_tokens": list(family.special)})
        words.chat_template = family.template
    return Template(words, {}, {words.eos_token_id})


ROWS = [json.loads(row)["messages"] for row in (folder("data") / GIVEN).read_text().splitlines()]
BEFORE = [tuple(row[:-1]) for row in ROWS if row[:-1]]
CHAT = template_of(FAMILIES["chatml"])
OPENED = opening(CHAT)
END = CHAT.tokenizer.convert_tokens_to_ids("<|im_end|>")


def written(text: str, end: bool = True) -> list[int]:
    """What a target samples: a user's message, and the token that ends it."""
    return [*CHAT.ids(text), *([END] if end else [])]


def messages(count: int) -> list[list[int]]:
    """Different messages that pass all filters."""
    return [written(f"Please tell me a story about number {i}") for i in range(count)]


class Scripted:
    """A sampler of completions, by key; by default messages. stops: it is interrupted after so many batches."""

    rows = 8

    def __init__(self, completions: Sequence[list[int]] = (), stops: int | None = None) -> None:
        self.completions, self.stops = completions or messages(300), stops
        self.keys: list[int] = []
        self.prompts: list[list[int]] = []
        self.sampling, self.seeds = Sampling(), set[int]()

    def __call__(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: int, seed: int, keys: list[int]
    ) -> list[list[int]]:
        if self.stops is not None and len(self.keys) >= self.stops * self.rows:
            raise KeyboardInterrupt
        self.keys += keys
        self.prompts, self.sampling = prompts, sampling
        self.seeds.add(seed)
        return [self.completions[key % len(self.completions)][:new_tokens] for key in keys]

    def file(self, prompts: SelfPrompts) -> Path:
        return prompts.file(lambda: self)


def asked(folder: Path, wanted: dict[str, int] | None = None, seed: int = 1, **changed: Any) -> SelfPrompts:
    return SelfPrompts(CHAT, folder, {"weights": "a"}, wanted or needed(20, 2, 2), seed, **changed)


def contents(rows: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


class TestOpening:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_a_template_is_cut_where_the_user_begins(self, name: str) -> None:
        family = FAMILIES[name]
        template = template_of(family)
        opened, words = opening(template), template.tokenizer
        assert words.decode(opened.ids) == family.before and opened.chat
        assert opened.ids == template.ids(family.before)
        ends = {words.eos_token_id} | ({words.convert_tokens_to_ids(family.end)} if family.end else set())
        assert (opened.ends, opened.close) == (ends, family.close)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_what_follows_the_opening_is_read_back_as_the_user_wrote_it(self, name: str) -> None:
        template = template_of(FAMILIES[name])
        opened, text = opening(template), "Write a poem about the sea"
        message = [{"role": "user", "content": text}]
        rendered = template.ids(template.text(message, None, prompt=True))
        assert rendered[: len(opened.ids)] == opened.ids
        rows, _ = filtered([(opened, rendered[len(opened.ids) :])], template)
        assert [row["messages"] for row in rows] == [message]

    @pytest.mark.parametrize("name", FAMILIES)
    def test_every_second_prompt_has_first_words_or_messages_before(self, name: str) -> None:
        """What the target then writes is read back as a conversation that the template renders to the same ids."""
        template = template_of(FAMILIES[name])
        turns, plain = openings(template), opening(template)
        assert all(one["role"] != "assistant" for row in ROWS for one in row)  # else a prompt stands before its answer
        assert turns[::2] == [plain] * len(turns[1::2]) and len(turns[1::2]) == len(ROWS)
        written = []
        for turn in turns[1::2]:
            content = f"{turn.begin}{' ' * turn.begin.endswith(tuple('abcdefghijklmnopqrstuvwxyz:'))}sea and land"
            said = [*turn.before, {"role": "user", "content": content}]
            rendered = template.ids(template.text(said, None, prompt=True))
            assert rendered[: len(turn.ids)] == turn.ids
            written.append((turn, rendered[len(turn.ids) :], said))
        rows = [filtered([(turn, ids)], template)[0] for turn, ids, _ in written]
        assert [row[0]["messages"] for row in rows] == [said for *_, said in written]

    def test_messages_that_a_template_does_not_render_are_left_out(self) -> None:
        refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
        last = CHATML.replace("for m in messages", "for m in messages[-1:]")
        for template, count in ((refusing, sum(one[0]["role"] != "system" for one in BEFORE)), (last, 0)):
            turns = openings(template_of(FAMILIES["chatml"]._replace(template=template)))
            assert [turn.before for turn in turns if turn.before] == BEFORE[len(BEFORE) - count :]

    def test_a_target_without_a_template_begins_a_text_with_its_start_token(self) -> None:
        template = template_of(None)
        opened = opening(template)
        assert not opened.chat and len(opened.ids) == 1 and opened.ends == {template.tokenizer.eos_token_id}
        rows, dropped = filtered([(opened, template.ids("a text without an end, of which"))], template)
        assert openings(template) == [opened]
        assert [row["text"] for row in rows] == ["a text without an end, of which"] and not any(dropped.values())

    def test_a_template_that_changes_the_content_is_refused(self) -> None:
        family = FAMILIES["chatml"]._replace(template=CHATML.replace("m.content", "m.content | upper"))
        with pytest.raises(
            ValueError, match="data=self: .* changes the user's content, so prompts cannot be sampled: set data.path="
        ):
            opening(template_of(family))

    def test_a_template_that_wants_more_messages_is_refused(self) -> None:
        family = FAMILIES["chatml"]._replace(template="{{ raise_exception('no system message') }}")
        match = "data=self: .* template fails: no system message: correct the template, or set data.path= to messages"
        with pytest.raises(ValueError, match=match):
            opening(template_of(family))

    @pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>"), ("llama 3", "<|eot_id|>"), ("vicuna", None)])
    def test_a_special_token_after_an_answer_should_end_texts(self, name: str, end: str | None) -> None:
        words = template_of(FAMILIES[name]).tokenizer
        assert unended(Template(words, {}, {0})) == end
        assert (
            unended(
                Template(
                    words, {}, {0, words.convert_tokens_to_ids("<|im_end|>"), words.convert_tokens_to_ids("<|eot_id|>")}
                )
            )
            is None
        )
        assert unended(template_of(None)) is None


class TestFilters:
    @pytest.mark.parametrize(
        ("reason", "ids"),
        [
            ("unfinished", written("Tell me a story about number", end=False)),
            ("empty", written(" \n ")),
            ("short", written("a")),
            ("markup", [*CHAT.ids("Tell me a story "), *CHAT.ids("<|im_start|>"), *CHAT.ids("of it"), END]),
            ("repetitive", written("xyz" * 30)),
        ],
    )
    def test_a_prompt_is_dropped_and_counted(self, reason: str, ids: list[int]) -> None:
        good = messages(1)[0]
        rows, dropped = filtered([(OPENED, one) for one in (good, ids, good)], CHAT)
        assert contents(rows) == ["Please tell me a story about number 0"]
        assert {name for name, count in dropped.items() if count} == {reason, "duplicate"}
        assert sum(dropped.values()) == 2 and tuple(dropped) == FILTERS

    @pytest.mark.parametrize(("reason", "said"), [("empty", ""), ("short", " a")])
    def test_first_words_alone_are_no_prompt(self, reason: str, said: str) -> None:
        rows, dropped = filtered([(opening(CHAT, "Write a class in Java that"), written(said))], CHAT)
        assert not rows and dropped[reason] == sum(dropped.values()) == 1

    @pytest.mark.parametrize(
        ("texts", "kept"),
        [
            (("Tell me a story", "tell  me\na Story", "Tell me the story"), [0, 2]),
            (("Why?!", "why?!", "Who?"), [0, 2]),
            # 7 words have four sequences of four words; a word after them makes five, in the middle seven of which
            # three are shared
            (("one two three four five six seven", "one two three four five six seven eight"), [0]),
            (("one two three four five six seven", "one two three other four five six seven"), [0, 1]),
            (("one two three four five six seven eight nine ten eleven", "one two three four five six"), [0, 1]),
            (("one two three four five six", "two three four five six seven", "one two three four five six"), [0, 1]),
        ],
    )
    def test_prompts_that_share_most_words_in_sequence_are_duplicates(
        self, texts: tuple[str, ...], kept: list[int]
    ) -> None:
        rows, dropped = filtered([(OPENED, written(text)) for text in texts], CHAT)
        assert contents(rows) == [texts[i] for i in kept]
        assert dropped["duplicate"] == len(texts) - len(kept) == sum(dropped.values())

    def test_the_first_end_ends_a_prompt(self) -> None:
        rows, _ = filtered([(OPENED, [*written("Tell me a story"), *written("and another one")])], CHAT)
        assert contents(rows) == ["Tell me a story"]

    def test_a_text_ends_a_prompt_where_no_token_does(self) -> None:
        opened = Opening([0], frozenset(), "ASSISTANT:", True)
        ids = CHAT.ids("Tell me a story ASSISTANT: Once upon")
        rows, dropped = filtered([(opened, one) for one in (ids, CHAT.ids("Tell me a story and more"))], CHAT)
        assert contents(rows) == ["Tell me a story"] and dropped["unfinished"] == 1


class TestFile:
    def test_the_target_continues_the_opening_until_the_turn_ends(self, tmp_path: Path) -> None:
        sampler = Scripted(messages(40))
        sampler.file(asked(tmp_path, seed=7))
        known = [one.ids for one in openings(CHAT)]
        assert all(prompt in known for prompt in sampler.prompts) and OPENED.ids in sampler.prompts
        assert set(sampler.sampling.stop_ids) == OPENED.ends and sampler.sampling.temperature == 1
        assert sampler.seeds == {7} and sampler.keys == list(range(len(sampler.keys)))

    def test_every_split_has_as_many_as_are_wanted_as_a_run_reads_them(self, tmp_path: Path) -> None:
        wanted = needed(30, 6, 4)
        path = Scripted(messages(900)).file(asked(tmp_path, wanted))
        counts = read_json(tmp_path / "self_prompts.json")["counts"]
        sources = [source_of(data_of(path), split, CHAT) for split in SPLITS]
        sizes = [len(source.prompts(10**6, 9999, 0)) for source in sources]
        assert sizes == [counts["splits"][split] for split in SPLITS] and sum(sizes) == counts["kept"]
        assert all(size >= wanted[split] for size, split in zip(sizes, SPLITS, strict=True))
        texts = [{tuple(ids) for _, ids in source.prompts(10**6, 9999, 0)} for source in sources]
        assert not (texts[0] & texts[1] or texts[0] & texts[2] or texts[1] & texts[2])

    def test_more_are_asked_for_while_filters_drop_many(self, tmp_path: Path) -> None:
        good = messages(2000)
        half = [written("no end", end=False) if i // 2 % 2 else good[i] for i in range(2000)]
        Scripted(half).file(asked(tmp_path))
        counts = read_json(tmp_path / "self_prompts.json")["counts"]
        assert counts["splits"]["train"] >= 20 and abs(2 * counts["dropped"]["unfinished"] - counts["asked"]) <= 2

    def test_what_was_asked_kept_and_dropped_is_printed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Scripted([*messages(300), written("a")]).file(asked(tmp_path))
        counts = read_json(tmp_path / "self_prompts.json")["counts"]
        assert counts_line(counts) in capsys.readouterr().out
        assert counts["asked"] == counts["kept"] + sum(counts["dropped"].values())
        some = {"asked": 5, "kept": 3, "dropped": {"short": 2, "empty": 0}, "splits": {"train": 2, "held_out": 1}}
        assert counts_line(some) == (
            "data=self: 5 prompts sampled from the target, 3 kept (train 2, held_out 1); dropped: 2 short"
        )

    def test_a_target_that_writes_no_prompts_is_refused_after_a_while(self, tmp_path: Path) -> None:
        sampler = Scripted([written("a", end=False)])
        with pytest.raises(
            UserError, match=r"0 kept .* dropped: \d+ unfinished; none for the split train, held_out, final"
        ):
            sampler.file(asked(tmp_path))
        first = max(20 / 0.9, 2 / 0.05)
        assert len(sampler.keys) <= MOST * (first + 1) + sampler.rows

    def test_the_same_seed_gives_the_same_file_and_is_not_sampled_again(self, tmp_path: Path) -> None:
        again = Scripted()
        path = Scripted().file(asked(tmp_path / "a"))
        assert again.file(asked(tmp_path / "a")) == path and not again.keys
        (tmp_path / "a" / "self_prompts.json").unlink()
        again.file(asked(tmp_path / "a"))  # a file without its counts
        assert again.keys
        other = Scripted().file(asked(tmp_path / "b"))
        assert other.read_bytes() == path.read_bytes()

    @pytest.mark.parametrize(
        "changed", [{"seed": 2}, {"identity": {"weights": "b"}}, {"wanted": needed(200, 2, 2)}, {"tokens": 60}]
    )
    def test_another_seed_target_or_a_larger_number_is_sampled_anew(
        self, changed: dict[str, Any], tmp_path: Path
    ) -> None:
        whole = {"identity": {"weights": "a"}, "wanted": needed(20, 2, 2), "seed": 1}
        Scripted().file(SelfPrompts(CHAT, tmp_path, **whole))
        sampler = Scripted()
        sampler.file(SelfPrompts(CHAT, tmp_path, **whole | changed))
        assert sampler.keys

    def test_a_run_that_needs_fewer_of_them_reads_the_same_file(self, tmp_path: Path) -> None:
        """As a run with measure=true after one with measure=false, if there are enough to measure on."""
        path = Scripted().file(asked(tmp_path, needed(40, 2, 0)))
        splits = read_json(tmp_path / "self_prompts.json")["counts"]["splits"]
        sampler, before = Scripted(), path.read_bytes()
        sampler.file(asked(tmp_path, needed(20, 1, splits["final"])))
        assert not sampler.keys and path.read_bytes() == before
        sampler.file(asked(tmp_path, needed(20, 1, splits["final"] + 1)))
        assert sampler.keys

    def test_an_interrupted_sampling_goes_on(self, tmp_path: Path) -> None:
        whole = Scripted().file(asked(tmp_path / "whole"))
        with pytest.raises(KeyboardInterrupt):
            Scripted(stops=2).file(asked(tmp_path / "parts"))
        rest = Scripted()
        path = rest.file(asked(tmp_path / "parts"))
        assert rest.keys[0] == CALL * Scripted.rows and path.read_bytes() == whole.read_bytes()
        assert {one.name for one in (tmp_path / "parts").iterdir()} == {"self_prompts.json", "self_prompts.jsonl"}

    def test_the_first_process_samples_for_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = Scripted().file(asked(tmp_path))
        monkeypatch.setattr(self_prompts, "rank", lambda: 1)
        sampler = Scripted()
        assert sampler.file(asked(tmp_path)) == path and not sampler.keys


def data_of(path: Path) -> Data:
    return Data(path=str(path), from_target=True, bytes={}, held_out_bytes={}, embedded_shares={}, chat=False)
