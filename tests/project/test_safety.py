"""What downloaded files and models may not do: run code, leave their folder, reach the network.

That the page escapes all texts of models and data is in `tests/cotrain/page/test_page.py`; what commands write outside
their output is recorded for each case of `studies/fuzz.py`.
"""

import ast
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers.utils.hub
from peft import LoraConfig
from safetensors.torch import save_file

from cotrain.cli import main
from cotrain.config.groups import Target
from cotrain.data.conversations import Template
from cotrain.teacher.target_model import adapted, load_pair
from inference import Engine
from inference.drafts.weight_files import weight_files
from inference.models.pretrained import load_model
from studies.trust import Watch
from tests.draft_folders import draft_folder
from tests.folders import network, target_folder, tokenizer

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {"eval", "exec", "compile", "pickle.load", "pickle.loads", "joblib.load", "os.system", "yaml.load"}
# calls that read weights, and the argument that each must have
SAFE = {"torch.load": ("weights_only", "True"), "np.load": ("allow_pickle", "False")}
WATCH: list[Watch] = []


def calls() -> Iterator[tuple[str, ast.Call]]:
    """(file, call) of all code that a user installs."""
    for package in ("cotrain", "inference"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield str(file.relative_to(ROOT)), node


def test_no_code_of_a_file_is_run_and_no_pickle_is_read_as_objects() -> None:
    seen = set()
    for file, call in calls():
        name, given = ast.unparse(call.func), {one.arg: ast.unparse(one.value) for one in call.keywords}
        assert name not in FORBIDDEN, file
        if name in SAFE:
            argument, value = SAFE[name]
            assert given.get(argument) == value, (file, name)
            seen.add(name)
        assert given.get("trust_remote_code") != "True", file
    assert seen == set(SAFE)
    assert Target().trust_remote_code is False


class Payload:
    """What a pickle runs when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def pickled(file: Path, proof: Path) -> None:
    torch.save({"a": torch.zeros(1), "b": Payload(proof)}, file)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return target_folder(tmp_path / "target")


def test_pickled_weights_of_a_target_a_draft_and_an_adapter_are_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proof, draft = tmp_path / "proof", draft_folder(tmp_path / "draft", target, "independent")
    for folder in (target, draft):
        (folder / "model.safetensors").unlink()
        pickled(folder / "pytest.bin", proof)
        pickled(folder / "pytorch_model.bin", proof)
        with pytest.raises(ValueError, match="is pickled, and weights are read from safetensors only"):
            weight_files(folder)
    for settings in (f"target.path={target}", f"draft.path={draft}"):
        assert main(["generate", settings, "prompt=a"]) == 1
    with pytest.raises((OSError, ValueError)):
        load_model(str(target))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]).save_pretrained(adapter)
    pickled(adapter / "adapter_model.bin", proof)
    with pytest.raises(ValueError, match=r"has no adapter_model.safetensors: .* pickled files are not read"):
        adapted(network(), str(adapter))
    assert not proof.exists()
    pickle.loads(pickle.dumps(Payload(proof)))  # the payload works
    assert proof.exists()


def test_code_in_a_folder_runs_only_if_asked(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((target / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (target / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": names}))
    (target / "own.py").write_text(f"from pathlib import Path\nPath({str(target / 'ran')!r}).touch()\n")
    assert main(["generate", f"target.path={target}", "prompt=a"]) == 1
    assert "trust_remote_code" in capsys.readouterr().err
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_pair(str(target))
    assert not (target / "ran").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/OUTSIDE", "sub/../../outside.safetensors", "sub/inside"])
def test_an_index_names_files_of_its_folder_alone(name: str, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (target / "sub").mkdir()
    place = target / name if name == "sub/inside" else target.parent / "outside.safetensors"
    outside = (target / "model.safetensors").rename(place)
    name = str(outside) if name == "/OUTSIDE" else name
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    for command in (["generate", "prompt=a"], ["rollout", f"output={target.parent / 'out'}"]):
        assert main([*command, f"target.path={target}"]) == 1
        assert "weight_map must name files of this folder" in capsys.readouterr().err


TEMPLATES = {
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{% for i in range(10 ** 9) %}{% endfor %}": "Range too big",
    "{% include '/etc/passwd' %}": "no loader",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates_are_sandboxed(template: str) -> None:
    """Those that render data, and those that render the engine's prompts."""
    words = tokenizer()
    given = words.chat_template
    messages = [{"role": "user", "content": "a"}]
    try:
        words.chat_template = template
        with pytest.raises(ValueError, match=f"chat template fails: .*{TEMPLATES[template]}"):
            Template(words, {}, ()).text(messages, None, True)
        engine = Engine(network(), tokenizer=words)
        with pytest.raises(ValueError, match=f"chat template fails .*{TEMPLATES[template]}"):
            engine.generate([messages], max_new_tokens=1)
    finally:
        words.chat_template = given


def test_nothing_is_asked_of_the_network_unless_a_hub_id_is_named(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the hub is not set to be offline."""
    if not WATCH:
        WATCH.append(Watch())
    for module in (huggingface_hub.constants, transformers.utils.hub):
        for name in ("HF_HUB_OFFLINE", "_is_offline_mode"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    draft = draft_folder(tmp_path / "draft", target, "eagle")
    with WATCH[0].recording([tmp_path]) as seen:
        for words in (
            ["generate", f"draft.path={draft}", "prompt=a", "max_new_tokens=2"],
            ["generate", f"target.path={target}", "prompt=a", "max_new_tokens=2"],
            ["export", f"check={draft}"],
        ):
            assert main(words) == 0
    assert not [one for one in seen if one.startswith("socket")]


def test_a_watch_sees_addresses_programs_and_writes_outside(tmp_path: Path) -> None:
    if not WATCH:
        WATCH.append(Watch())
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    with WATCH[0].recording([allowed]) as seen:
        save_file({"a": torch.zeros(1)}, allowed / "one")
        (allowed / "two").write_text("x")
        (tmp_path / "three").write_text("x")
        (tmp_path / "three").rename(allowed / "four")
        (allowed / ".." / "five").mkdir()
    assert [one.replace(str(tmp_path), "") for one in seen] == ["open /three", "os.rename /three", "os.mkdir /five"]
    (tmp_path / "six").write_text("x")
    assert len(seen) == 3
