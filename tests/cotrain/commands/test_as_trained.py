"""Commands that open a draft folder measure and serve what it was trained for, unless another setting is typed."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cotrain.commands.served_pair import KNOWN, as_trained
from cotrain.config.ranges import change
from cotrain.config.settings import BenchConfig, TrainConfig, checked, register
from cotrain.paths import folder
from cotrain.training.distil import served_as
from inference.drafts.draft_folder import Metadata

TRAINED = {
    "temperature": 0.6, "top_k": 7, "top_p": 0.8, "verify": "block", "prompt_tokens": 31, "quantisation": "nf4",
    "chat": True, "template": {"enable_thinking": False}, "messages": True,
}  # fmt: skip
ELSE: dict[str, Any] = {
    "temperature": 0.0, "top_k": 3, "top_p": 0.5, "verify": "match", "prompt_tokens": 17, "quantisation": "int8",
    "chat": False, "template": {"enable_thinking": True}, "messages": False,
}  # fmt: skip
# what both commands have and a folder does not decide: this machine, how much is measured, which texts
FREE = ("target.", "draft.", "bench.", "data.", "output", "overwrite", "minutes", "threads")


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    register()
    with initialize_config_dir(str(folder("conf")), version_base="1.3"):
        yield


def made(**changed: Any) -> Metadata:
    regime = {name: TRAINED[name] for name in ("temperature", "top_k", "top_p")}
    served = {name: value for name, value in TRAINED.items() if name not in regime}
    target = {"name": "there", "config": None, "tokenizer": None}
    return Metadata(target=target, k=3, regime=regime, origin={"served": served}, **changed)


def keys(schema: Any, above: str = "") -> set[str]:
    """Leaves of a configuration's types."""
    found = set()
    for field, kind in zip(fields(schema), get_type_hints(schema).values(), strict=True):
        found |= keys(kind, f"{above}{field.name}.") if is_dataclass(kind) else {f"{above}{field.name}"}
    return found


def settings(command: str, *overrides: str) -> Any:
    return checked(command, compose(command, overrides=["draft.path=there", *overrides]))


def held(command: str) -> list[str]:
    whole = settings(command)
    return [key for key in KNOWN if OmegaConf.is_missing(whole, key) or key_in(whole, key)]


def key_in(cfg: Any, key: str) -> bool:
    group, _, name = key.rpartition(".")
    inside = OmegaConf.select(cfg, group) if group else cfg
    return inside is not None and name in inside


@pytest.mark.parametrize("command", ["bench", "generate", "serve_check"])
def test_what_is_left_open_is_as_the_folder_says(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = settings(command)
    as_trained(cfg, made())
    assert {key: OmegaConf.select(cfg, key) for key in held(command)} == {
        key: TRAINED[KNOWN[key].name] for key in held(command)
    }
    assert not capsys.readouterr().err
    cfg = settings(command)
    as_trained(cfg, None)
    assert all(OmegaConf.select(cfg, key) == KNOWN[key].unsaid for key in held(command))


@pytest.mark.parametrize("command", ["bench", "generate", "serve_check"])
def test_what_is_typed_stands_and_is_said(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for key in held(command):
        name = KNOWN[key].name
        cfg = settings(command)
        OmegaConf.update(cfg, key, ELSE[name])
        as_trained(cfg, made())
        assert OmegaConf.select(cfg, key) == ELSE[name]
        assert f"{key}={ELSE[name]} ({TRAINED[name]})" in capsys.readouterr().err


def test_a_folder_says_all_that_training_and_measuring_have_in_common() -> None:
    shared = {key for key in keys(TrainConfig) & keys(BenchConfig) if not key.startswith(FREE)}
    known = {key for key in KNOWN if not key.startswith(("bench.", "data.", "prompt_tokens", "chat"))}
    assert shared == known
    cfg = compose("train", overrides=["verify=block", "bench.prompt_tokens=31", "quantisation=nf4", "data.chat=true",
                                      "+data.template.enable_thinking=false"])  # fmt: skip
    regime = {"temperature", "top_k", "top_p"}
    assert served_as(cfg, True) == {name: value for name, value in TRAINED.items() if name not in regime}
    assert {known.name for known in KNOWN.values()} == set(TRAINED)


def test_a_folder_of_an_older_version_that_learnt_from_messages_leaves_the_template_to_the_target() -> None:
    old = {"chat": False, "messages": True}
    for messages, wanted in ((True, None), (False, False)):
        cfg, metadata = settings("bench"), made()
        metadata = replace(metadata, origin={"served": old | {"messages": messages}})
        as_trained(cfg, metadata)
        assert cfg.data.chat is wanted
    assert change("data.chat", False, None) == change("data.column", "text", None) == "free"
    assert change("data.chat", True, None) == change("data.column", "prompt", None) == "other"
