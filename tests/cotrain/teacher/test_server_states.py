"""A target that runs on a server: its states are those of a target in the process, whatever the server goes through."""

import json
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from cotrain.cli import main
from cotrain.errors import UserError
from cotrain.students.base import student_class
from cotrain.teacher import server_states
from cotrain.teacher.server_states import agreement, asked_layers, final_norm, load_ends, served_elsewhere
from cotrain.teacher.target_model import served
from cotrain.training.preconditions import RunOutline
from cotrain.training.preflight import estimate_need
from inference.models.passes import LAST
from inference.models.pretrained import auto_class, head_of
from tests.fake_vllm import FakeVLLM, running
from tests.folders import VOCABULARY, network, target_folder, tokenizer
from tests.inference import test_families as families
from tests.settings import composed

IDS = torch.tensor([[5, 9, 250, 17, 0, 3], [1, 2, 3, 4, 5, 6]])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])  # the first row has two texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("teacher") / "target", layers=3)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVLLM]:
    """It gives the states of layer 1, and those before the norm."""
    monkeypatch.setattr(server_states, "PAUSE", 0.01)
    with running(FakeVLLM(network(3), tmp_path, [1, 3])) as fake:
        yield fake


@pytest.mark.parametrize("places", [None, PLACES], ids=["rows", "packed"])
def test_states_and_logits_are_those_of_a_target_in_the_process(
    places: torch.Tensor | None, folder: Path, server: FakeVLLM
) -> None:
    read, head = served_elsewhere([server.url], load_ends(str(folder)), VOCABULARY, [1])
    here, head_here = served(AutoModelForCausalLM.from_pretrained(folder), VOCABULARY, [1])
    with torch.no_grad():
        wanted = here(IDS, places)
    found = read(IDS, places)
    assert found.keys() == wanted.keys() == {LAST, 1}
    for layer, states in wanted.items():
        torch.testing.assert_close(found[layer], states, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(head(found[LAST]), head_here(wanted[LAST]), rtol=1e-3, atol=1e-3)
    assert len(server.asked) == (2 if places is None else 3) and not list(server.folder.iterdir())


def test_only_embeddings_norm_and_head_are_loaded(folder: Path) -> None:
    whole, ends = AutoModelForCausalLM.from_pretrained(folder), load_ends(str(folder))
    assert {name for name, _ in ends.named_parameters()} == {"model.embed_tokens.weight", "model.norm.weight"}
    assert ends.config.num_hidden_layers == 3 and ends.config.to_dict() == whole.config.to_dict()
    assert ends.generation_config.eos_token_id == whole.generation_config.eos_token_id
    with pytest.raises(UserError, match="the target's layers are on the server"):
        ends(IDS)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (name, settings)
        for name, settings, *_ in families.SUPPORTED
        if name in {"Llama", "Qwen3", "Gemma3Text", "Gemma2"}
    ],
)
def test_the_norm_and_head_of_families(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Gemma scales its embeddings and adds one to the norm's weight, and its layers have types."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    whole: Any = auto_class(config).from_config(config).eval()
    with torch.no_grad():
        whole.base_model.norm.weight.normal_()
    whole.save_pretrained(tmp_path)
    before: list[torch.Tensor] = []
    whole.base_model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    ids = torch.arange(8)[None]
    ends = load_ends(str(tmp_path))
    with torch.no_grad():
        wanted = whole(ids).logits
        torch.testing.assert_close(head_of(ends)(final_norm(ends)(before[0])), wanted)
        torch.testing.assert_close(ends.get_input_embeddings()(ids), whole.get_input_embeddings()(ids))
    assert ends.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()


FAULTS = ["unwell", "other text", "cut", "NaN", "lost", "half", "late"]


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_the_states_are_the_same(fault: str, folder: Path, server: FakeVLLM) -> None:
    read, _ = served_elsewhere([server.url], load_ends(str(folder)), VOCABULARY, [1])
    wanted = read(IDS)
    server.faults = [fault, fault]
    found = read(IDS)
    assert all(torch.equal(found[layer], wanted[layer]) for layer in wanted) and not server.faults
    assert len(server.asked) == (4 if fault == "late" else 6)


def test_one_of_two_servers_goes_on_alone(folder: Path, server: FakeVLLM, tmp_path: Path) -> None:
    with running(FakeVLLM(network(3), tmp_path / "other", [1, 3])) as other:
        read, _ = served_elsewhere([server.url, other.url], load_ends(str(folder)), VOCABULARY, [1])
        both = read(IDS.repeat(4, 1))
        assert len(server.asked) == len(other.asked) == 4
    left = read(IDS.repeat(4, 1))
    assert all(torch.equal(left[layer], both[layer]) for layer in both)


def test_what_does_not_pass_is_said(folder: Path, server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read, _ = served_elsewhere([server.url], load_ends(str(folder)), VOCABULARY, [1])
    server.faults = ["rejected"]
    with pytest.raises(UserError, match=r"teacher.url: .* answered 400: .*the prompt is too long"):
        read(IDS[:1])
    assert len(server.asked) == 1
    server.faults = ["other text"] * 3
    with pytest.raises(UserError, match="the states of another text"):
        read(IDS[:1])
    others, _ = served_elsewhere([server.url], load_ends(str(folder)), VOCABULARY, [2])
    with pytest.raises(UserError, match="layers_1_3, but this run reads those of layers_2_3: start the server"):
        others(IDS[:1])
    monkeypatch.setattr(server_states, "PATIENCE", 0.05)
    server.faults = ["unwell"] * 1000
    with pytest.raises(UserError, match="answered 503.*start the same command again to resume"):
        read(IDS[:1])


def test_the_servers_own_probabilities_are_compared(folder: Path, server: FakeVLLM) -> None:
    ends = load_ends(str(folder))
    read, head = served_elsewhere([server.url], ends, VOCABULARY, [1])
    assert "of 10 tokens" in (line := agreement(read, head, IDS.tolist())) and "e-0" in line
    with torch.no_grad():
        final_norm(ends).weight.mul_(2)  # type: ignore[union-attr,operator]
    assert float(agreement(read, head, IDS.tolist()).rpartition(" ")[2]) > 1e-4


SMALL = {
    "eagle": "draft.intermediate=64",
    "medusa": "",
    "independent": "draft.width=32 draft.head_dim=32 draft.intermediate=64",
}


@pytest.mark.parametrize("kind", SMALL)
def test_a_training_from_a_server_ends_like_one_in_the_process(kind: str, folder: Path, tmp_path: Path) -> None:
    """From the same texts; a server sees them one by one, so sums have another order."""
    rng = random.Random(0)
    rows = [
        {"prompt": f"say {n}", "completion": " " + " ".join(rng.choice(["red", "blue", "sea"]) for _ in range(6))}
        for n in range(120)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = f"""train target.path={folder} data.path={tmp_path / "own.jsonl"} data.on_target=true draft={kind}
    {SMALL[kind]} init=scratch measure=false trainer.steps=4
    trainer.corpus_steps=0 trainer.batch=2 trainer.validations=1
    rollout.texts=8 rollout.held_out_texts=3 rollout.new_tokens=12 rollout.temperatures=[1.0]""".split()
    target = network(3)
    reads = student_class(kind)(made(kind), target, VOCABULARY).reads
    with running(FakeVLLM(target, tmp_path, asked_layers(target, reads))) as fake:
        assert main([*given, f"teacher.url={fake.url}", f"output={tmp_path / 'served'}"]) == 0
    assert main([*given, f"output={tmp_path / 'here'}"]) == 0
    one, two = (load_file(tmp_path / run / "draft" / "model.safetensors") for run in ("served", "here"))
    assert one.keys() == two.keys() and len(fake.asked) >= 10
    for name, value in one.items():
        torch.testing.assert_close(value.float(), two[name].float(), rtol=0.02, atol=2e-3)


def made(kind: str) -> Any:
    cfg = composed(f"draft={kind}", *SMALL[kind].split(), "init=scratch")
    return student_class(kind).initial(cfg.draft, cfg.init, network(3))


NEEDS = {
    "draft=early_exit": "draft=early_exit",
    "quantisation=int8": "quantisation=int8",
    "init=target_layers": "init=target_layers",
    "measure=true": "measure=true",
}


@pytest.mark.parametrize("setting", NEEDS)
def test_what_needs_the_layers_here_is_refused_by_name(
    setting: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"draft": "eagle", "init": "scratch", "measure": "false"} | dict([setting.split("=")])
    words = [f"{key}={value}" for key, value in given.items()]
    output = f"output={tmp_path / 'run'}"
    assert main(["train", f"target.path={folder}", "teacher.url=http://127.0.0.1:9", *words, output]) == 1
    assert f"{NEEDS[setting]}: it needs the target's layers in this process" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["draft=eagle", "init=scratch", "measure=false", f"output={tmp_path / 'run'}"]
    assert main(["train", f"target.path={folder}", "teacher.url=http://127.0.0.1:9", *given]) == 1
    assert "teacher.url=http://127.0.0.1:9: no OpenAI-compatible server answers there" in capsys.readouterr().err


def test_the_command_names_the_layers_that_the_draft_reads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And folder, parallelism, and what `cotrain train` needs; on a CPU, vLLM's connector is replaced."""
    given = ["teacher", f"target.path={folder}", f"output={tmp_path / 'states'}"]
    for settings, layers, connector in (
        (["draft=eagle", "gpus=4"], [1, 3], "ExampleHiddenStatesConnector"),
        (["draft=medusa", "gpus=0"], [3], "HiddenStatesOnCPU"),
    ):
        assert main([*given, *settings]) == 0
        command, then = capsys.readouterr().out.splitlines()
        words = dict(word.partition("=")[::2] for word in shlex.split(command))
        config = json.loads(words["--speculative-config"])["draft_model_config"]["hf_config"]
        assert config["eagle_aux_hidden_state_layer_ids"] == layers
        transfer = json.loads(words["--kv-transfer-config"])
        assert transfer["kv_connector"] == connector
        place = Path(transfer["kv_connector_extra_config"]["shared_storage_path"])
        assert place == tmp_path / "states" / ("layers_" + "_".join(map(str, layers)))
        assert ("--tensor-parallel-size" in words) == (connector != "HiddenStatesOnCPU") and "teacher.url=" in then


@pytest.mark.parametrize(
    ("settings", "said"),
    [("draft=early_exit", "draft=early_exit: it needs the target"), (f"python={sys.executable}", "it has no vLLM")],
)
def test_what_cannot_serve_is_refused(
    settings: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["teacher", f"target.path={folder}", settings]) == 1
    assert said in capsys.readouterr().err


def test_a_check_counts_what_is_here_and_what_comes_from_servers(
    folder: Path, tmp_path: Path, server: FakeVLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target that does not fit into memory does not stop the run, and is not timed."""
    given = f"""train target.path={folder} draft=medusa init=scratch measure=false check=true teacher.url={server.url}
    rollout.texts=8 rollout.new_tokens=16 output={tmp_path / "run"}""".split()
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "states of 0 KiB a token" in said and "duration      not estimated" in said  # 64 numbers of 16 bits


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_the_memory_of_a_run_leaves_out_the_layers(kind: str, folder: Path) -> None:
    cfg = composed(f"draft={kind}", "init=scratch", "draft.intermediate=64" if kind == "eagle" else "draft.depths=2")
    target = network(40)
    known = RunOutline(target, tokenizer(), made(kind))
    whole = estimate_need(cfg, known).memory
    cfg.teacher.url = "http://a"
    layers = sum(weight.numel() for weight in target.model.layers.parameters())
    assert whole - estimate_need(cfg, known).memory > 4 * layers
