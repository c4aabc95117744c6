"""Forms of prompts: text, ids, messages and a tokenizer's output give the same tokens; others are rejected by name."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from inference import Engine, Sampling, load
from inference.proposers import Independent
from inference.request import PromptReader, Request
from tests import folders
from tests.tiny import tiny

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXTS = ["a cab", "abba", "b"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
COLD = Sampling(0.0)
PAD = 301  # of the tokenizer below


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """It begins every text with a start token, and pads with the end token."""
    tokenizer = copy.deepcopy(folders.tokenizer())
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.pad_token = "</s>"
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.pad_token_id == PAD
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return tokenizer


@pytest.fixture(scope="module")
def engine(tokenizer: PreTrainedTokenizerFast) -> Engine:
    return Engine(tiny(len(tokenizer), seed=5), tokenizer=tokenizer)


def tokens(engine: Engine, prompts: Any) -> list[list[int]]:
    return engine.generate(prompts, max_new_tokens=6, sampling=COLD).tokens


FORMS: dict[str, Any] = {
    "texts": lambda t: TEXTS,
    "ids": lambda t: [t(text)["input_ids"] for text in TEXTS],
    "a tuple": lambda t: tuple(TEXTS),
    "tensors": lambda t: [torch.tensor(t(text)["input_ids"]) for text in TEXTS],
    "arrays": lambda t: [np.array(t(text)["input_ids"], dtype=np.int32) for text in TEXTS],
    "the tokenizer's output": lambda t: t(TEXTS),
    "padded on the right": lambda t: t(TEXTS, padding=True, return_tensors="pt", padding_side="right"),
    "padded on the left": lambda t: t(TEXTS, padding=True, return_tensors="pt", padding_side="left"),
    "padded arrays": lambda t: t(TEXTS, padding=True, return_tensors="np"),
    "a plain dict": lambda t: dict(t(TEXTS, padding=True)),
    "one output a prompt": lambda t: [t(text) for text in TEXTS],
    "one tensor output a prompt": lambda t: [t(text, return_tensors="pt") for text in TEXTS],
    "text that begins with the start token": lambda t: ["<s>" + text for text in TEXTS],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_texts_gives_the_same_tokens(
    engine: Engine, tokenizer: PreTrainedTokenizerFast, form: str
) -> None:
    wanted = tokens(engine, [tokenizer(text)["input_ids"] for text in TEXTS])
    assert len({tuple(text) for text in wanted}) == len(TEXTS)
    assert tokens(engine, FORMS[form](tokenizer)) == wanted


CHAT_FORMS: dict[str, Any] = {
    "messages": lambda t: CHATS,
    "rendered ids": lambda t: [
        t.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS
    ],
    "rendered text": lambda t: [
        t.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in CHATS
    ],
    "rendered together": lambda t: t.apply_chat_template(
        CHATS, add_generation_prompt=True, return_dict=True, padding=True, return_tensors="pt"
    ),
    "rendered one by one": lambda t: [
        t.apply_chat_template(chat, add_generation_prompt=True, return_dict=True) for chat in CHATS
    ],
}


@pytest.mark.parametrize("form", CHAT_FORMS)
def test_every_form_of_the_same_chats_gives_the_same_tokens(
    engine: Engine, tokenizer: PreTrainedTokenizerFast, form: str
) -> None:
    rendered = ["<s><user>" + text + "<assistant>" for text in TEXTS]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
    assert all(text[0] == tokenizer.bos_token_id != text[1] for text in ids)
    assert tokens(engine, CHAT_FORMS[form](tokenizer)) == tokens(engine, ids)


def test_the_answer_that_an_assistant_began_is_continued(engine: Engine, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [*CHATS[0], {"role": "assistant", "content": "ab"}]
    ids = tokenizer("<s><user>a cab;<assistant>ab", add_special_tokens=False)["input_ids"]
    assert tokens(engine, [chat]) == tokens(engine, [ids])


def test_one_output_of_one_text_is_one_prompt(engine: Engine, tokenizer: PreTrainedTokenizerFast) -> None:
    wanted = tokens(engine, TEXTS[:1])
    assert tokens(engine, tokenizer(TEXTS[0])) == tokens(engine, tokenizer(TEXTS[0], return_tensors="pt")) == wanted
    for prompt in (
        TEXTS[0],
        tokenizer(TEXTS[0]),
        tokenizer(TEXTS[0], return_tensors="pt"),
        torch.tensor(tokenizer(TEXTS[0])["input_ids"]),
    ):
        events = engine.stream(prompt, max_new_tokens=6, sampling=COLD)
        assert [token for event in events for token in event.ids] == wanted[0]


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("ab", r"prompts must be a list; put \[ \] around"),
        ([1, 2], r"prompts must be a list; put \[ \] around"),
        (torch.tensor([1, 2]), r"prompts must be a list; put \[ \] around"),
        (CHATS[0], r"prompts must be a list; put \[ \] around"),
        (torch.tensor([[1, 2], [3, PAD]]), "prompts: .*attention_mask"),
        (torch.tensor([[[1, 2]]]), "prompts must be .*not Tensor"),
        ({"input_ids": torch.tensor([[1, 2], [3, 0]])}, "prompts: .*attention_mask"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "prompts: .*differ in shape"),
        ({"text": "ab"}, r"prompts: .*input_ids.*\['text'\]"),
        (None, "prompts must be .*not NoneType"),
        ([None], "prompt 0: .*not a NoneType"),
        ([[1], [1.5]], "prompt 1: .*not a list of float"),
        ([[1], ["ab"]], "prompt 1: .*not a list of str"),
        ([[[1, 2]]], "prompt 0: .*not a list of list"),
        ([torch.tensor([[1, 2]])], "prompt 0: .*not a Tensor"),
        ([{"role": "user", "content": "a"}, "ab"], "prompt 0: .*input_ids"),
        ([[{"role": "user"}]], "prompt 0: .*role and content"),
        ([[{"role": "user", "content": None}]], "prompt 0: the content of a message is text .*, not None"),
        ([[{"role": "user", "content": [{"type": "image"}]}]], "prompt 0: the content of a message is text"),
        (["a", "b\ud800"], "prompt 1: the text is no valid Unicode"),
        (torch.tensor([[True, False]]), "prompt 0: a prompt must be text, token ids"),
        ([{"input_ids": [[1], [2]]}], "prompt 0: 2 rows"),
        ([[]], "prompt 0: the prompt is empty"),
    ],
)
def test_other_prompts_are_rejected_by_name_before_anything_runs(
    engine: Engine, prompts: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "rounds", None)
    with pytest.raises(ValueError, match=said):
        engine.generate(prompts)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_new_tokens": 1.5}, "max_new_tokens .*1.5"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"sampling": {"temperature": 0.5}}, "sampling .*dict"),
        ({"sampling": None}, "sampling .*NoneType"),
        ({"ids": ["a", "b"]}, "ids= .*'a'"),
        ({"ids": [0.5, 1]}, "ids= .*0.5"),
        ({"ids": np.array([1])}, "ids has 1 values for 2 prompts"),
        ({"ids": [2**64, 1]}, "ids"),
    ],
)
def test_wrong_settings_are_rejected_by_name(engine: Engine, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine.generate([[1], [2]], **settings)


def test_ids_and_limits_may_be_arrays(engine: Engine) -> None:
    hot = {"max_new_tokens": 5, "sampling": Sampling(1.0)}
    wanted = engine.generate([[1], [2]], ids=[7, 8], **hot).tokens
    assert engine.generate([[1], [2]], ids=np.array([7, 8]), **hot).tokens == wanted
    limited = engine.generate([[1], [2]], max_new_tokens=torch.tensor([2, 4])).tokens
    assert [len(text) for text in limited] == [2, 4]


def test_a_list_of_prompts_is_no_prompt_of_a_stream(engine: Engine) -> None:
    for prompts in (["ab"], [[1, 2]], [CHATS[0]]):
        with pytest.raises(ValueError, match="prompt must be one prompt"):
            next(engine.stream(prompts))


def test_text_leaves_out_the_end_token_and_tokens_keep_it(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny(len(tokenizer), seed=5)
    free = Engine(model, tokenizer=tokenizer).generate([[3]], max_new_tokens=6, sampling=COLD)
    assert free.text == [tokenizer.decode(free.tokens[0])]
    end = free.tokens[0][3]
    model.generation_config.eos_token_id = end
    for ignore, stop_ids in ((False, ()), (True, (end,))):
        ended = Engine(model, tokenizer=tokenizer).generate(
            [[3]], max_new_tokens=6, sampling=Sampling(0.0, stop_ids=stop_ids), ignore_eos=ignore
        )
        assert ended.finish == ["stop"] and ended.tokens[0] == free.tokens[0][: len(ended.tokens[0])]
        assert ended.tokens[0][-1] == end and ended.text == [tokenizer.decode(ended.tokens[0][:-1])]


def test_paths_and_adapters_go_where_models_go(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny(len(tokenizer), seed=5, dtype=torch.float32)
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    wanted = tokens(Engine(model, tokenizer=tokenizer), TEXTS)
    for target in (tmp_path / "target", str(tmp_path / "target")):
        assert tokens(Engine(target, device="cpu"), TEXTS) == wanted
        assert tokens(Engine(target, Independent(tmp_path / "target")), TEXTS) == wanted
        engine = load(tmp_path / "target", target, kind="independent", device="cpu")
        assert tokens(engine, TEXTS) == wanted
    adapted = peft.get_peft_model(LlamaForCausalLM(model.config), peft.LoraConfig(r=2, init_lora_weights=False))
    merged = [peft_text(adapted, [1, 2, 3])]
    assert tokens(Engine(adapted), [[1, 2, 3]]) == merged
    assert tokens(Engine(adapted, Independent(adapted)), [[1, 2, 3]]) == merged


def peft_text(model: peft.PeftModel, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        text = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
    return [int(token) for token in text[0, len(prompt) :]]


def test_a_model_is_neither_moved_nor_cast() -> None:
    for settings in ({"device": "cuda"}, {"dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))}: a model is used unchanged"):
            Engine(tiny(), **settings)


def test_settings_of_a_generation_config() -> None:
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        bad_words_ids=[[1, 2]],
        min_new_tokens=3,
        stop_strings=["x"],
        suppress_tokens=[4, 5],
        begin_suppress_tokens=[6],
    )
    assert Sampling.of(config) == Sampling(
        0.7,
        50,
        0.9,
        0.1,
        repetition_penalty=1.1,
        banned=((1, 2), (4,), (5,)),
        banned_first=(6,),
        min_new_tokens=3,
        stop=("x",),
    )
    assert Sampling.of(GenerationConfig(do_sample=True, top_k=0)) == Sampling(1.0)
    assert Sampling.of(GenerationConfig(temperature=0.7)) == Sampling(0.0)
    for name, value in {"num_beams": 4, "typical_p": 0.5, "no_repeat_ngram_size": 2, "penalty_alpha": 0.6}.items():
        with pytest.raises(ValueError, match=f"Sampling.of: {name}="):
            Sampling.of(GenerationConfig(**{name: value}))


def test_a_bias_is_not_rounded_to_the_default_dtype() -> None:
    model, bias = tiny(dtype=torch.float32), Sampling(1.0, logit_bias={5: 100.2, 7: 100.4}, frequency_penalty=0.3)
    wanted = Engine(model).generate([[1]] * 20, max_new_tokens=20, sampling=bias).tokens
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert Engine(model).generate([[1]] * 20, max_new_tokens=20, sampling=bias).tokens == wanted
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("stop", ["é", "ab", "a cab abba cab a", "\ufffd", "\ufffda", "a cab ab" * 8])
def test_a_stop_is_seen_where_the_whole_text_shows_it(tokenizer: PreTrainedTokenizerFast, stop: str) -> None:
    """Token by token, over long texts of single bytes and whole words, against decoding all of it each time."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        words = torch.randint(0, 8, (120,), generator=generator).tolist()
        text = "".join(("a", "b", " ", "cab", "é", " c", "abba", "日")[word] for word in words) + "a cab ab" * 10
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        row = Request(0, 0, [1], 10_000, Sampling(0.0, stop=(stop,)), frozenset(), tokenizer)
        wanted = next((n for n in range(1, len(new) + 1) if stop in tokenizer.decode(new[:n])), len(new))
        assert len(row.take(new)) == wanted


@pytest.mark.parametrize("word", ["cab ", "\U0001f389", "\ud55c\uad6d"])
def test_a_stop_costs_the_same_late_in_a_text(tokenizer: PreTrainedTokenizerFast, word: str) -> None:
    decoded: list[int] = []

    class Counting:
        def decode(self, ids: list[int]) -> str:
            decoded.append(len(ids))
            return str(tokenizer.decode(ids))

    new = tokenizer(word * 500, add_special_tokens=False)["input_ids"]
    row = Request(0, 0, [1], 10_000, Sampling(0.0, stop=("zz",)), frozenset(), Counting())  # type: ignore[arg-type]
    row.take(new)
    assert len(new) >= 1000 and max(decoded) <= 48


def test_the_text_parts_of_a_message_are_joined(engine: Engine) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "cab"}]
    whole, joined = (tokens(engine, [[{"role": "user", "content": content}]]) for content in ("a cab", parts))
    assert whole == joined


def test_an_array_of_texts_or_of_ids_is_a_list_of_prompts(engine: Engine) -> None:
    assert tokens(engine, TEXTS) == tokens(engine, np.array(TEXTS))
    assert tokens(engine, torch.tensor([[3, 5], [7, 9]])) == tokens(engine, [[3, 5], [7, 9]])


def test_a_message_that_calls_tools_needs_no_content(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "a", "arguments": {}}}]}
    reader = PromptReader(None, frozenset(), tokenizer, frozenset())  # type: ignore[arg-type]
    text = tokenizer.apply_chat_template([*CHATS[0], call, *CHATS[1]], tokenize=False, add_generation_prompt=True)
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert reader._rendered("prompt 0", [*CHATS[0], call, *CHATS[1]]) == wanted


def test_ids_after_a_gap_of_the_tokenizer_have_mass() -> None:
    """Tokens that were added at high ids: the tokenizer has fewer tokens than its highest id."""
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 12}, unk_token="a"))
    engine = Engine(tiny(vocab=16), tokenizer=PreTrainedTokenizerFast(tokenizer_object=core))
    likely = Sampling(logit_bias={12: 1e3})
    assert engine.generate([[1]], max_new_tokens=2, sampling=likely).tokens == [[12, 12]]
    with pytest.raises(ValueError, match="ids go from 0 to 12"):  # rows after the highest id are padding
        engine.generate([[1]], sampling=Sampling(logit_bias={13: 1.0}))


def test_a_stop_string_of_many_tokens_ends_a_text() -> None:
    tokenizer = folders.tokenizer()
    stop = "漢字🙂" * 20
    ids = tokenizer(f"a {stop}", add_special_tokens=False)["input_ids"]
    row = Request(0, 0, [2], 10**6, Sampling(stop=(stop,)), frozenset(), tokenizer)
    assert len(ids) > 200 and row.take([*ids, 5, 6]) == ids and row.finish == "stop"
