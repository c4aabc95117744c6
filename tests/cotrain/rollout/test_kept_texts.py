"""Kept texts and states: each part of what made them is changed, and they are not used; unchanged, they are."""

import copy
import json
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cotrain.cli import main
from cotrain.config.groups import Data
from cotrain.data.fingerprints import fingerprint, identity, settings
from cotrain.data.sources import prompt_origin
from cotrain.rollout import training_texts
from cotrain.rollout.samplers import Ask
from cotrain.rollout.training_texts import Sampled
from cotrain.teacher.target_model import load_pair
from cotrain.training import run
from cotrain.training.job import sampled_texts
from cotrain.training.preconditions import fill_prompt_tokens, timed
from inference import Sampling
from tests.cotrain.commands.test_train import job, place  # noqa: F401 - a fixture
from tests.cotrain.data.test_inputs import given
from tests.folders import network, own_texts, target_folder, tokenizer, write_rows
from tests.settings import composed

TEXTS = [f"number {i}" for i in range(80)]


class Continues:
    """A sampler that repeats the prompt's last id, and counts its prompts."""

    rows, asked = 8, 0

    def __call__(self, prompts: list, sampling: Sampling, new_tokens: int, seed: int, keys: list) -> list[list[int]]:
        self.asked += len(prompts)
        return [[prompt[-1]] * new_tokens for prompt in prompts]


def changed(data: Any, **values: Any) -> Any:
    return data.model_copy(update=values)


@pytest.fixture
def data(tmp_path: Path) -> Data:
    rows = [{"text": text, "other": text[::-1]} for text in TEXTS]
    (tmp_path / "data").mkdir()
    for name, part in (("a.jsonl", rows[:40]), ("b.jsonl", rows[40:])):
        write_rows(tmp_path / "data" / name, part)
    return given(tmp_path / "data")


def kept(target: LlamaForCausalLM, words: PreTrainedTokenizerFast, data: Data, texts: Path) -> Sampled:
    source = {kind: prompt_origin(data, kind) for kind in ("train", "held_out")}
    return Sampled(target, words, texts, Ask({"train": 3}, 4, 5), 2, 1, source, by=Continues)


def anew(one: Sampled) -> tuple[bool, str]:
    """Whether texts are sampled though some are kept, and what is said of it."""
    asked: list[int] = []

    def prompts(*ask: int) -> list[tuple[str, list[int]]]:
        asked.append(1)
        rows = [{"domain": "a", "prompt": [i, 5], "completion": []} for i in range(9)]
        return training_texts.PromptRows(rows).prompts(*ask)

    with redirect_stdout(StringIO()) as said:
        one.texts("train", Sampling(1.0), prompts)
    return bool(asked), said.getvalue().partition("\n")[0]


def test_unchanged_they_are_used(data: Data, tmp_path: Path) -> None:
    def made() -> Sampled:
        return kept(network(), tokenizer(), copy.deepcopy(data), tmp_path / "texts")

    assert anew(made())[0] and anew(made()) == (False, "")
    moved = changed(data, path=str(Path(str(data.path)).rename(tmp_path / "elsewhere")), block=64)
    assert anew(kept(network(), tokenizer(), moved, tmp_path / "texts")) == (False, "")


def rewritten(data: Data) -> Data:
    """Of the same size and, to the eye, the same time."""
    path = Path(str(data.path)) / "b.jsonl"
    path.write_text(path.read_text().replace("number 77", "number 78"))
    return data


def grown(data: Data) -> Data:
    (Path(str(data.path)) / "c.jsonl").write_text('{"text": "one more", "other": "one more"}\n')
    return data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: changed(d, column="other"), "source.column was 'text', now 'other'"),
        (lambda d: changed(d, split="test"), "source.split was 'train', now 'test'"),
        (lambda d: changed(d, template={"enable_thinking": False}), "source.template"),
        (lambda d: changed(d, chat=True), "source.chat was None, now True"),
        (lambda d: changed(d, streaming=True), "source.take was None, now 1000"),
        (rewritten, "source.contents differs"),
        (grown, "source.contents differs"),
        (lambda d: changed(d, path=None), "source.path was None, now 'embedded'"),
    ],
)
def test_of_other_data_they_are_not(data: Data, tmp_path: Path, change: Callable[[Data], Data], words: str) -> None:
    anew(kept(network(), tokenizer(), data, tmp_path / "texts"))
    found, said = anew(kept(network(), tokenizer(), change(data), tmp_path / "texts"))
    assert found and words in said and "the stored ones do not fit" in said


def rotated(target: LlamaForCausalLM) -> None:
    target.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}


def set_on(*names: str, to: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name in names[:-1]:
            model = getattr(model, name)
        setattr(model, names[-1], to)

    return change


def started(words: PreTrainedTokenizerFast) -> None:
    words.backend_tokenizer.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 1)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rotated, "target.config.rope_parameters.rope_theta was 10000.0, now 500000.0"),
        (set_on("config", "rms_norm_eps", to=1e-5), "target.config.rms_norm_eps was 1e-06, now 1e-05"),
        (set_on("config", "own_key", to=3), "target.config.own_key was None, now 3"),
        (set_on("generation_config", "eos_token_id", to=[0, 7]), "target.ends was [0], now [0, 7]"),
        (set_on("chat_template", to="{{ messages }}"), "target.tokenizer.chat_template differs"),
        (lambda words: words.add_tokens(["<tool>"]), "target.tokenizer.vocabulary differs"),
        (set_on("bos_token", to="<|pad|>"), "target.tokenizer.vocabulary differs"),
        (started, "target.tokenizer.ids differs"),
    ],
)
def test_of_another_config_or_tokenizer_they_are_not(
    data: Data, tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    target, tokens = network(), copy.deepcopy(tokenizer())
    anew(kept(target, tokens, data, tmp_path / "texts"))
    change(tokens if "tokenizer" in words else target)
    found, said = anew(kept(target, tokens, data, tmp_path / "texts"))
    assert found and words in said


def test_one_value_of_any_tensor_is_seen() -> None:
    """Wherever it is: most values are not among those that are hashed one by one."""
    model = network()
    first, generator = fingerprint(model), torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        at = int(torch.randint(weight.numel(), (), generator=generator))
        with torch.no_grad():
            value = weight.view(-1)[at].clone()
            weight.view(-1)[at] += 1e-3
            assert fingerprint(model) != first, name
            weight.view(-1)[at] = value
    assert fingerprint(model) == first


def test_values_that_change_places_are_seen() -> None:
    model = network()
    first = fingerprint(model)
    with torch.no_grad():
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.copy_(weight.flip(0))
    assert fingerprint(model) != first


def test_bfloat16_widened_is_the_same_target() -> None:
    model = network().to(torch.bfloat16)
    assert fingerprint(model) == fingerprint(copy.deepcopy(model).float()) != fingerprint(network())


def test_an_adapter_beside_the_weights_is_part_of_the_target() -> None:
    peft = pytest.importorskip("peft")

    def adapted(alpha: int) -> LlamaForCausalLM:
        torch.manual_seed(3)
        model = network()
        model.add_adapter(peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"]))
        return model

    one, two, bare = (identity(model, tokenizer()) for model in (adapted(2), adapted(8), network()))
    assert one["weights"] == two["weights"] != bare["weights"] and one["adapter"] != two["adapter"]
    assert identity(adapted(2), tokenizer()) == one


def test_names_and_dtype_are_no_part_of_a_config() -> None:
    one, two = network().config, network().to(torch.bfloat16).config
    two.dtype, two._name_or_path, two.use_cache = torch.bfloat16, "elsewhere", False
    assert settings(one) == settings(two) == json.loads(json.dumps(settings(one)))


def test_texts_of_a_server_are_not_this_engines(data: Data, tmp_path: Path) -> None:
    ours = kept(network(), tokenizer(), data, tmp_path / "texts")
    anew(replace(ours, server="http://127.0.0.1:9"))
    found, said = anew(ours)
    assert found and "server was 'http://127.0.0.1:9', now None" in said


def test_the_shipped_texts_are_what_the_defaults_ask_for(tmp_path: Path) -> None:
    cfg, shipped = composed(), (("train", 1.0), ("held_out", 0.0), ("held_out", 0.5), ("held_out", 1.0))
    target, words = load_pair("bundled")
    fill_prompt_tokens(cfg, target, timed(cfg.bench), {})
    found = sampled_texts(cfg, target, words, tmp_path)
    for kind, t in shipped:
        texts = found.texts(kind, Sampling(t), lambda *_: 1 / 0)  # type: ignore[arg-type, return-value]
        assert len(texts) == 3 * (cfg.rollout.texts if kind == "train" else cfg.rollout.held_out_texts)
    cfg.data.bytes = dict(cfg.data.bytes) | {"prose": 0}
    cfg.data.held_out_bytes = dict(cfg.data.held_out_bytes) | {"prose": 0}
    other = replace(found, source=sampled_texts(cfg, target, words, tmp_path).source)
    for kind, t in shipped:
        with pytest.raises(ZeroDivisionError):
            other.texts(kind, Sampling(t), lambda *_: 1 / 0)  # type: ignore[arg-type, return-value]


def test_over_a_full_cache_the_target_reads_no_text(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Neither before training nor in its steps, though nothing is remembered in memory; but for the few ids by which
    the halves of the target are tried."""
    passes: list[tuple[int, ...]] = []
    models = run.models

    def counted(cfg: Any) -> Any:
        target, words = models(cfg)
        target.model.register_forward_pre_hook(
            lambda module, args, kwargs: passes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        return target, words

    monkeypatch.setattr(run, "models", counted)
    settings = [
        *"""measure=false rollout.temperatures=[1.0] trainer.steps=4 trainer.validations=1 trainer.corpus_steps=0
        trainer.remember_mb=0 loss=kl""".split(),
        f"rollout.folder={place / 'kept texts'}",
        f"trainer.cache={place / 'kept states'}",
    ]
    assert job(place, "fills the cache", *settings) == 0
    assert sum(shape[1] > 8 for shape in passes) > 3
    passes.clear()
    assert job(place, "reads the cache", *settings) == 0
    assert [shape for shape in passes if shape[1] > 8] == []


def test_a_changed_byte_of_stored_texts_is_refused_by_name(tmp_path: Path) -> None:
    """Parquet has no checksum of its own: other tokens would be learnt."""
    rows = [{"domain": "a", "prompt": [i, i + 1], "completion": [i] * 5} for i in range(40)]
    file = tmp_path / "train_T1.parquet"
    training_texts.save_rows(rows, tmp_path / "train_T1", {"kind": "train"})
    content = file.read_bytes()
    assert list(training_texts.read_rows(tmp_path / "train_T1")) == rows
    for at in range(0, len(content), len(content) // 12):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        os.utime(file, (at, at))  # a digest is kept for a file of this size and time
        with pytest.raises(ValueError, match=f"{file} cannot be read .*delete it and train_T1.json, and the same"):
            training_texts.read_rows(tmp_path / "train_T1")
    file.write_bytes(content)
    earlier = {"kind": "train", "rows": 40, "tokens": 200}
    (tmp_path / "train_T1.json").write_text(json.dumps(earlier))
    assert len(training_texts.read_rows(tmp_path / "train_T1")) == 40


def killed(*_: Any) -> None:
    raise OSError("killed")


def test_the_json_of_earlier_texts_does_not_vouch_for_those_that_replace_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"domain": "a", "prompt": [1], "completion": [2]}]
    training_texts.save_rows(rows, tmp_path / "train_T1", {})

    monkeypatch.setattr(training_texts, "write_json", killed)
    with pytest.raises(OSError, match="killed"):
        training_texts.save_rows(rows * 2, tmp_path / "train_T1", {})
    assert [file.name for file in tmp_path.iterdir()] == ["train_T1.parquet"]


def test_texts_without_their_json_are_the_same_texts_after_a_kill_between_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left beside them; other texts under this name are kept."""
    target, data = target_folder(tmp_path / "target"), own_texts(tmp_path / "own.jsonl")
    few = ["rollout.texts=4", "rollout.prompt_tokens=6", "rollout.new_tokens=8", f"output={tmp_path / 'out'}"]
    command = ["rollout", f"target.path={target}", f"data.path={data}", *few]

    with monkeypatch.context() as patched:
        patched.setattr(training_texts, "write_json", killed)
        assert main(command) == 1
    assert main(command) == 0
    assert sorted(file.name for file in (tmp_path / "out").glob("*.parquet")) == ["train_T1.parquet"]
    rows = training_texts.read_rows(tmp_path / "out" / "train_T1").to_list()
    (tmp_path / "out" / "train_T1.json").unlink()
    assert training_texts._halfway(rows, tmp_path / "out" / "train_T1")
    assert not training_texts._halfway(rows[1:], tmp_path / "out" / "train_T1")
