"""Defaults that follow the target's size: what a user typed, or a recipe set, stays; a resumed run keeps its values."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config, T5Config

from cotrain.cli import main
from cotrain.commands.shapes import composed_shape
from cotrain.config.settings import TrainConfig
from cotrain.run_folder import claim
from cotrain.training import by_size
from tests.cotrain.commands.test_cli import ran as ran  # a fixture
from tests.settings import composed, pick

# the published shapes of Llama-3.2-1B, Qwen3-8B, Qwen3-32B, SmolLM2-1.7B and GPT-2 XL, and their billions of parameters
SHAPES: dict[str, tuple[PretrainedConfig, float]] = {
    "1B": (
        LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        ),
        1.236,
    ),
    "8B": (
        Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=False,
        ),
        8.191,
    ),
    "32B": (
        Qwen3Config(
            vocab_size=151936,
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=False,
        ),
        32.762,
    ),
    "1.7B of few tokens": (
        LlamaConfig(
            vocab_size=49152,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=24,
            num_attention_heads=32,
            num_key_value_heads=32,
            tie_word_embeddings=True,
        ),
        1.711,
    ),
    "GPT-2": (GPT2Config(n_embd=1600, n_layer=48, n_head=25), 1.558),
}
KEYS = ("draft.kind", "draft.vocabulary", "optimizer.lr", "rollout.texts", "trainer.batch")
DERIVED: dict[str, tuple[Any, ...]] = {
    "1B": ("eagle", 32000, 1e-4, 12000, 16),
    "8B": ("eagle", 32000, 5e-5, 12000, 16),
    "32B": ("eagle", 32000, 5e-5, 6000, 8),
    "1.7B of few tokens": ("eagle", None, 1e-4, 12000, 16),
    "GPT-2": ("independent", None, 1e-4, 12000, 16),  # its layers fit no eagle
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of configs alone."""
    place = tmp_path_factory.mktemp("targets")
    for name, (config, _) in SHAPES.items():
        config.save_pretrained(place / name)
    T5Config(d_model=1024, d_ff=16384, num_layers=24, num_heads=32, d_kv=128).save_pretrained(place / "T5")  # 2.8 B
    LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=24).save_pretrained(
        place / "small"
    )  # .37 B
    return place


def values(cfg: Any) -> tuple[Any, ...]:
    return tuple(pick(cfg, key) for key in KEYS)


@pytest.mark.parametrize("name", SHAPES)
def test_an_untouched_run_follows_the_size(
    name: str, targets: Path, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"target.path={targets / name}"]) == 0
    assert values(ran[0]) == DERIVED[name]
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{targets / name}: {SHAPES[name][1]:.1f} B parameters, so by default draft={DERIVED[name][0]} " in line
    shown = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
    assert [shown[key] for key in KEYS[2:]] == [str(value) for value in DERIVED[name][2:]]
    assert shown.get("draft.vocabulary") == (None if DERIVED[name][1] is None else "32000")
    others = ran[0].model_dump(exclude={"draft", "target"}), composed().model_dump(exclude={"draft", "target"})
    for given in others:
        del given["optimizer"]["lr"], given["rollout"]["texts"], given["trainer"]["batch"]
    assert others[0] == others[1]


@pytest.mark.parametrize("target", ["bundled", "bundled_t5", "T5", "small", "nothing"])
def test_small_targets_and_those_with_an_encoder_keep_the_defaults(
    target: str, targets: Path, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (targets / "nothing").mkdir(exist_ok=True)  # what is wrong with it is said by the command
    path = target if target.startswith("bundled") else str(targets / target)
    assert main(["train", f"target.path={path}"]) == 0
    expected: TrainConfig = composed(f"target.path={path}")
    assert ran == [expected] and capsys.readouterr().out == ""


# what is typed for the 8B -> the values of KEYS
TYPED: dict[str, tuple[Any, ...]] = {
    "draft=independent": ("independent", None, 5e-5, 12000, 16),
    "draft=independent init=scratch": ("independent", None, 1e-3, 12000, 16),  # 128 wide
    "draft=p_eagle": ("p_eagle", 32000, 5e-5, 12000, 16),
    "draft=block": ("block", None, 5e-5, 12000, 16),
    "draft=medusa": ("medusa", None, 1e-3, 12000, 16),
    "draft.vocabulary=null": ("eagle", None, 5e-5, 12000, 16),
    "draft.vocabulary=16000": ("eagle", 16000, 5e-5, 12000, 16),
    "draft.layers=1 init=scratch": ("independent", None, 1e-3, 12000, 16),  # no setting of an eagle
    "optimizer.lr=1e-3": ("eagle", 32000, 1e-3, 12000, 16),
    "rollout.texts=600": ("eagle", 32000, 5e-5, 600, 16),
    "trainer.batch=2": ("eagle", 32000, 5e-5, 12000, 2),
    "++trainer.batch=2": ("eagle", 32000, 5e-5, 12000, 2),
    "trainer=gpu": ("eagle", 32000, 5e-5, 12000, 16),
    "trainer=ddp": ("eagle", 32000, 5e-5, 12000, 32),  # two processes
    "init=pretrained draft.path=old": ("independent", None, 5e-5, 12000, 16),
    "experiment=smollm2": ("eagle", 8192, 1.5e-3, 4000, 4),
    "experiment=losses": ("independent", None, 4e-3, 600, 4),
    "experiment=one_gpu_8b": ("eagle", 32000, 5e-5, 12000, 16),
}


@pytest.mark.parametrize("typed", TYPED)
def test_what_somebody_set_wins(typed: str, targets: Path, ran: list[Any], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    assert main(["train", f"target.path={targets / '8B'}", *typed.split()]) == 0
    assert values(ran[0])[1:] == TYPED[typed][1:] and ran[0].draft.kind == TYPED[typed][0]


def test_a_recipe_of_ones_own_wins_too(targets: Path, ran: list[Any], tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\noptimizer: {lr: 0.001}\n")
    assert main(["train", f"target.path={targets / '8B'}", "--config-dir", str(tmp_path), "experiment=mine"]) == 0
    assert values(ran[0]) == ("eagle", 32000, 1e-3, 12000, 16)


def test_a_layer_from_random_weights_has_the_shape_of_the_targets(targets: Path, ran: list[Any]) -> None:
    assert main(["train", f"target.path={targets / '8B'}", "init=scratch", "draft.kv_heads=2"]) == 0
    draft = ran[0].draft
    assert (draft.intermediate, draft.head_dim, draft.kv_heads) == (12288, 128, 2)


def test_a_resumed_run_has_the_values_that_it_was_started_with(
    targets: Path, ran: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", f"target.path={targets / '8B'}", "output=run"]
    assert main(command) == 0
    with claim("run", settings=json.loads(ran[0].model_dump_json())) as folder:
        (folder.path / "work").touch()
    monkeypatch.setattr(by_size, "BY_SIZE", (by_size.BySize(0, 0.5, 7, 3),))
    monkeypatch.setattr(by_size, "VOCABULARY", 9)
    assert main([*command, "optimizer.lr=0.25"]) == 0
    assert values(ran[1]) == ("eagle", 32000, 0.25, 12000, 16)
    assert "parameters, as in the run that is resumed draft=eagle" in capsys.readouterr().out
    assert main([*command, "overwrite=true"]) == 0 and main([*command[:-1], "output=new"]) == 0
    assert values(ran[2]) == values(ran[3]) == ("eagle", 9, 0.5, 7, 3)
    old = json.loads(composed().model_dump_json())  # of a version without such defaults
    with claim("old", settings=old) as folder:
        (folder.path / "work").touch()
    assert main([*command[:-1], "output=old"]) == 0
    assert ran[4].draft == composed().draft and values(ran[4]) == values(composed())
    assert main([*command, "draft.layers=1", "init=scratch"]) == 0  # which the stored kind does not have
    assert (ran[5].draft.kind, type(ran[5].draft)) == ("independent", type(composed().draft))


def test_the_other_commands_follow_the_same_table(
    targets: Path, ran: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"target.path={targets / '8B'}"
    assert main(["rollout", asked]) == 0 and main(["teacher", asked]) == 0
    assert ran[0].rollout.texts == 12000 and ran[1].draft.kind == "eagle"
    said = capsys.readouterr()
    assert said.out == "" and said.err.count(" B parameters, so by default ") == 2
    shapes = lambda cfg: ran.extend(composed_shape(one, cfg.target) for one in ("draft=eagle", "trainer.seed=1"))  # noqa: E731
    monkeypatch.setitem(sys.modules, "cotrain.commands.plan", SimpleNamespace(run=shapes))
    assert main(["plan", asked]) == 0
    assert [(cfg.draft.kind, cfg.draft.vocabulary) for cfg in ran[2:]] == [("eagle", 32000)] * 2
