"""A path that is not there is named with the working directory; the hub is asked only for what may be a repository."""

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
from huggingface_hub import constants
from transformers import BartConfig, BertConfig, ElectraConfig, RobertaConfig, ViTConfig, XLMConfig

from cotrain.cli import main
from cotrain.config.settings import SCHEMAS
from cotrain.run_folder import claim
from inference.drafts import bundled_target
from inference.drafts.bundled_target import reach_hub, refuse_missing
from inference.models.pretrained import auto_class
from tests.cotrain.commands.test_output_inputs import texts_of

PATHS = [
    (command, key)
    for command, schema in SCHEMAS.items()
    for key in sorted(texts_of(schema))
    if key in ("target.path", "draft.path", "target.adapter", "data.path")
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model; no connection is made."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    return tmp_path


@pytest.mark.parametrize(("command", "key"), PATHS)
def test_every_setting_of_a_model_or_data_names_what_is_not_there(
    command: str, key: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, f"{key}=models/mien", "output=out" if command != "generate" else "prompt=x"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"cotrain {command}: {key}: models/mien is no f")
    assert f"in the working directory {here}; the nearest is models/mine" in said and said.count("\n") == 1
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("report run=[a,b]", "run=[a,b] does not exist: several runs are typed one by one, as in run=a run=b"),
        ("report run=a,b", "run=a,b does not exist: several runs are typed one by one, as in run=a run=b"),
        ("compare folder=none", "folder=none does not exist: "),
        ("compare folder=run", "folder=run: the run run is not finished: repeat its command"),
        ("generate draft.path=run prompt=x", "draft.path=run: the run run is not finished: repeat its command"),
        ("bench draft.path=run/draft", "draft.path=run/draft: the run run is not finished: repeat its command"),
        ("export check=true", "check=true: name the exported folder instead, for example check="),
        (
            "train target.path=adapter",
            "it has no config.json; an adapter is named by target.adapter=, and its model by ",
        ),
        ("train data.path=model", "data.path: model is the folder of a model, not of texts"),
        ("generate target.path=draft prompt=x", "target.path=draft is a draft folder: set draft.path=draft"),
    ],
)
def test_what_is_no_folder_of_this_kind_is_named(
    typed: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("draft/cotrain.json", "adapter/adapter_config.json", "model/config.json", "model/model.safetensors"):
        (here / file).parent.mkdir(exist_ok=True)
        (here / file).write_text("{}")
    with claim(here / "run", settings={}):
        pass
    assert main(typed.split()) == 1 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "models/other",
            "in the working directory HERE; to load a repository of the hub by this name, work in another",
        ),
        ("modles/mine", "the nearest is models/mine"),
        ("model", "the nearest is models"),
        ("./mine", "is no folder in the working directory HERE: give target.path an existing path"),
        ("models/mine/checkpoint", "is no folder in the working directory HERE: give"),
        ("~/mine", "the shell did not expand ~; write the path in full"),
        ("/no where/x", "/no where/x is no folder: give target.path"),
    ],
)
def test_paths_and_misspelt_ones_are_never_asked_of_the_hub(path: str, said: str, here: Path) -> None:
    with pytest.raises(ValueError, match=f"^target.path: {path} is no folder") as refused:
        refuse_missing("target.path", path)
    assert said.replace("HERE", str(here)) in str(refused.value)


@pytest.mark.parametrize("path", ["bundled", "models/mine", "gpt2", "Qwen/Qwen3-0.6B", "org/mine"])
def test_what_is_there_and_repositories_are_let_through(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled_target, "reach_hub", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    refuse_missing("target.path", path)


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json", None])
def test_offline_a_model_of_the_hub_is_in_the_cache_or_refused_at_once(
    file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(bundled_target, "try_to_load_from_cache", lambda name, one: "/cache" if one == file else None)
    refuse_missing("data.path", "org/rows", "file or folder")  # a data set has a cache of its own
    if file:
        refuse_missing("target.path", "org/mine")
    else:
        with pytest.raises(ValueError, match="^draft.path: org/mine is no folder, and the hub cannot be reached, nor"):
            refuse_missing("draft.path", "org/mine")


def test_a_repository_that_was_fetched_is_used_whatever_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    cached: Callable[[str, str], str] = lambda name, file: f"/cache/{name}/{file}"  # noqa: E731
    monkeypatch.setattr(bundled_target, "try_to_load_from_cache", cached)
    refuse_missing("target.path", "models/mien")
    with pytest.raises(ValueError, match="is no folder"):
        refuse_missing("target.path", "./models/mien")


@pytest.mark.parametrize(
    ("error", "offline"),
    [
        (URLError(socket.gaierror("no such host")), True),
        (TimeoutError(), True),
        (HTTPError("https://hub", 503, "busy", Message(), None), False),
    ],
)
def test_a_hub_that_does_not_answer_is_asked_once(
    error: OSError, offline: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def answer(request: object, timeout: float) -> None:
        asked.append(timeout)
        raise error

    monkeypatch.setattr(bundled_target, "urlopen", answer)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    reach_hub.cache_clear()
    for _ in range(2):
        with pytest.raises(ValueError, match="the hub cannot be reached") if offline else nullcontext():
            refuse_missing("target.path", "org/mine")
    assert asked == [bundled_target.SECONDS]
    assert (constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]) == (offline, "1" if offline else "")
    reach_hub.cache_clear()
    if offline:
        assert main(["train", "target.path=org/mine", "check=true"]) == 1
        said = capsys.readouterr().err
        assert "target.path: org/mine is no folder, and the hub cannot be reached" in said and said.count("\n") == 1
        assert main(["bench", "draft.path=org/mine"]) == 1  # before the command is imported
        assert "draft.path: org/mine is no folder, and the hub cannot be reached" in capsys.readouterr().err


def test_a_model_of_images_is_named_in_short() -> None:
    with pytest.raises(ValueError, match="is a model of type vit, which writes no text: name a causal") as refused:
        auto_class(ViTConfig())
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("config", [BertConfig, RobertaConfig, ElectraConfig])
def test_an_encoder_is_refused_unless_it_decodes(config: Any) -> None:
    with pytest.raises(ValueError, match="is a masked language model .* is_decoder false .*: name a causal"):
        auto_class(config())
    for causal in (config(is_decoder=True), XLMConfig(), BartConfig()):
        assert auto_class(causal)
