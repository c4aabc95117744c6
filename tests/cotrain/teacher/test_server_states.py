"""A target that runs on a server: its states are those of a target in the process, whatever the server goes through."""

import json
import math
import os
import random
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cotrain.cli import main
from cotrain.data.texts import Texts
from cotrain.errors import UserError
from cotrain.evaluation.held_out import held_out
from cotrain.rollout.samplers import Remote
from cotrain.students.base import student_class
from cotrain.teacher import server_states, servers
from cotrain.teacher.server_states import agreement, asked_layers, final_norm, load_ends, served_elsewhere
from cotrain.teacher.servers import servers_at
from cotrain.teacher.states_cache import DiskCache, MemoryCache
from cotrain.teacher.target_model import load_target, served
from cotrain.training.distributed import Ahead
from cotrain.training.preconditions import RunOutline
from cotrain.training.preflight import estimate_need
from inference import Sampling
from inference.models.passes import LAST
from inference.models.pretrained import auto_class, head_of, layers_of, length_of
from inference.servers import hidden_states
from tests.fake_vllm import FakeVLLM, running
from tests.folders import VOCABULARY, network, target_folder, tokenizer, write_rows
from tests.inference import test_families as families
from tests.often import often
from tests.settings import composed

IDS = torch.tensor([[5, 9, 250, 17, 0, 3], [1, 2, 3, 4, 5, 6]])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])  # the first row has two texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("teacher") / "target", layers=3)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVLLM]:
    """It gives the states of layers 1 and 2, and those before the norm."""
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    monkeypatch.setattr(servers, "DOWN", 0.02)
    monkeypatch.setattr(servers, "PATIENCE", 20.0)
    with servers.open_servers(), running(FakeVLLM(network(3), tmp_path, [1, 2, 3])) as fake:
        yield fake


def elsewhere(folder: Path, *some: FakeVLLM) -> Any:
    """The target of a folder with its layers on these servers: the reader of layers 1 and 2, and the head."""
    return served_elsewhere([one.url for one in some], load_ends(str(folder)), VOCABULARY, [2, 1])


def one_token(client: hidden_states.StatesClient) -> object:
    """What a server answers to a request for a text of one token."""
    return client.complete([[1]], 1, Sampling(0), [0])


@pytest.mark.parametrize("places", [None, PLACES], ids=["rows", "packed"])
def test_states_and_logits_are_those_of_a_target_in_the_process(
    places: torch.Tensor | None, folder: Path, server: FakeVLLM
) -> None:
    read, head = elsewhere(folder, server)
    here, head_here = served(AutoModelForCausalLM.from_pretrained(folder), VOCABULARY, [1, 2])
    with torch.no_grad():
        wanted = here(IDS, places)
    found = read(IDS, places)
    assert found.keys() == wanted.keys() == {LAST, 1, 2}
    for layer, states in wanted.items():
        torch.testing.assert_close(found[layer], states, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(head(found[LAST]), head_here(wanted[LAST]), rtol=1e-3, atol=1e-3)
    texts = (
        [[5, 9, 250, 17, 0, 3], [1, 2, 3, 4, 5, 6]] if places is None else [[5, 9, 250], [17, 0, 3], [1, 2, 3, 4, 5, 6]]
    )
    assert sorted(server.asked) == sorted(texts) and not list(server.folder.iterdir())


def test_only_embeddings_norm_and_head_are_loaded(folder: Path) -> None:
    whole, ends = AutoModelForCausalLM.from_pretrained(folder), load_ends(str(folder))
    assert {name for name, _ in ends.named_parameters()} == {"model.embed_tokens.weight", "model.norm.weight"}
    assert ends.config.num_hidden_layers == 3 and ends.config.to_dict() == whole.config.to_dict()
    assert ends.generation_config.eos_token_id == whole.generation_config.eos_token_id
    with pytest.raises(UserError, match="the target's layers run on the server"):
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
        for weight in final_norm(whole).parameters():  # type: ignore[union-attr,attr-defined]
            weight.normal_()
    whole.save_pretrained(tmp_path)
    before: list[torch.Tensor] = []
    final_norm(whole).register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))  # type: ignore[attr-defined]
    ids = torch.arange(8)[None]
    ends = load_ends(str(tmp_path))
    with torch.no_grad():
        wanted = whole(ids).logits
        torch.testing.assert_close(head_of(ends)(final_norm(ends)(before[0])), wanted)
        torch.testing.assert_close(ends.get_input_embeddings()(ids), whole.get_input_embeddings()(ids))
    assert ends.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert asked_layers(ends, [LAST]) == [layers_of(whole.config)]


@pytest.mark.parametrize("fault", ["unwell", "closes", "other text", "cut", "NaN", "lost", "half", "late"])
def test_after_a_fault_the_states_are_the_same(fault: str, folder: Path, server: FakeVLLM) -> None:
    read, _ = elsewhere(folder, server)
    wanted = read(IDS)
    server.faults = [fault, fault]
    found = read(IDS)
    assert all(torch.equal(found[layer], wanted[layer]) for layer in wanted) and not server.faults
    assert len(server.asked) == (4 if fault == "late" else 6)


def test_one_of_two_servers_goes_on_alone(folder: Path, server: FakeVLLM, tmp_path: Path) -> None:
    with running(FakeVLLM(network(3), tmp_path / "other", [1, 2, 3])) as other:
        read, _ = elsewhere(folder, server, other)
        both = read(IDS.repeat(4, 1))
        assert len(server.asked) == len(other.asked) == 4
    left = read(IDS.repeat(4, 1))
    assert all(torch.equal(left[layer], both[layer]) for layer in both)


def test_servers_that_fail_rest_longer_and_longer_until_they_answer(server: FakeVLLM) -> None:
    some = servers_at([server.url] * 3, (), 4)
    assert some.rows == 12
    rested = []
    server.faults = ["503", "503", "503", None, "503"]

    def asked(client: hidden_states.StatesClient) -> object:
        some.well_at[1:] = [math.inf] * 2  # only the first is asked
        if client is not some.clients[0]:
            raise AssertionError("a server that rests longer was asked")
        rested.append(some.well_at[0] - time.monotonic())
        return one_token(client)

    some.call(asked)
    some.call(asked)
    first, second, third, after_an_answer = (rested[i + 1] for i in (0, 1, 2, 4))
    assert some.failures == [0, 0, 0] and len(rested) == 6
    assert first < second < third and after_an_answer < second


def test_a_server_that_rests_does_not_hold_up_another(server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PAUSE", 30.0)
    some = servers_at([server.url] * 2, (), 4)
    server.faults = ["503"]
    clock = time.monotonic()
    some.call(one_token)
    assert time.monotonic() - clock < 15


def test_a_long_text_may_take_longer_than_states(server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "TIMEOUT", 0.5)
    monkeypatch.setattr(servers, "PATIENCE", 0.0)
    server.pause = 0.2
    (text,) = servers_at([server.url], (), 4).complete([[1]], 6, Sampling(0), [0])
    assert text.ids and len(text.ids) == 6


def test_files_that_nobody_reads_are_deleted_when_they_are_old(folder: Path, server: FakeVLLM) -> None:
    left = [server.folder / f"{name}.safetensors" for name in ("old", "young", "unlocked")]
    for file in left:
        file.write_bytes(b"")
        os.utime(file, (0, 0) if file.stem != "young" else None)
    for file in left[:2]:
        Path(f"{file}.lock").write_bytes(b"")
    read, _ = elsewhere(folder, server)
    read(IDS)
    assert {file.stem for file in server.folder.glob("*.safetensors")} == {"young", "unlocked"}


def test_every_server_must_give_the_states_of_one_target(folder: Path, server: FakeVLLM, tmp_path: Path) -> None:
    require = partial(servers.require_states, layers=[1, 2, 3])
    require([server.url], width=64)
    with pytest.raises(UserError, match=f"{server.url} has states of width 64, target.path= of 32"):
        require([server.url], width=32)
    changed = network(3)
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.mul_(3)
    with running(FakeVLLM(changed, tmp_path / "other", [1, 2, 3])) as other:
        with pytest.raises(UserError, match=f"{other.url} and {server.url} give other states of one text"):
            require([server.url, other.url], width=64)
    with running(FakeVLLM(network(3), tmp_path / "third", [2, 3])) as other:
        with pytest.raises(UserError, match="layers_2_3, but this run reads those of layers_1_2_3"):
            require([server.url, other.url], width=64)


def test_parts_of_the_target_that_are_missing_or_damaged_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    for name, value in (("model.norm.weight", None), ("model.embed_tokens.weight", torch.nan)):
        changed = {key: one for key, one in weights.items() if key != name or value is not None}
        if value is not None:
            changed[name] = torch.full_like(weights[name], value)
        save_file(changed, tmp_path / "target" / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=name):
            load_ends(str(tmp_path / "target"))


@pytest.mark.parametrize("code", servers.REJECTED)
def test_a_request_that_is_rejected_is_not_repeated(code: int, server: FakeVLLM) -> None:
    server.faults = [str(code)] * 2
    with pytest.raises(UserError, match=f"answered {code}.*the prompt is too long"):
        servers_at([server.url], (), 4).call(one_token)
    assert len(server.asked) == 1


def test_each_prompt_keeps_its_seed(server: FakeVLLM) -> None:
    prompts, seeds = [[5, n] for n in range(6)], [11 * n for n in range(6)]
    servers_at([server.url] * 2, (), 4).complete(prompts, 2, Sampling(0.5), seeds)
    assert {(*one["prompt"], one["seed"]) for one in server.requests} == {
        (*prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)
    }


def test_what_does_not_pass_is_said(folder: Path, server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read, _ = elsewhere(folder, server)
    server.faults = ["400"]
    with pytest.raises(UserError, match=r"teacher.url: .* answered 400: .*the prompt is too long"):
        read(IDS[:1])
    assert len(server.asked) == 1
    server.faults = ["other text"] * 3
    with pytest.raises(UserError, match="the states of another text"):
        read(IDS[:1])
    others, _ = served_elsewhere([server.url], load_ends(str(folder)), VOCABULARY, [2])
    with pytest.raises(UserError, match="layers_1_2_3, but this run reads those of layers_2_3: start the server"):
        others(IDS[:1])
    assert not list(server.folder.iterdir())
    monkeypatch.setattr(servers, "PATIENCE", 0.05)
    server.faults = ["unwell"] * 1000
    with pytest.raises(UserError, match="answered 503.*start the same command again to resume"):
        read(IDS[:1])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("ended", ["for too long", "by the end of the run"])
def test_requests_to_a_server_that_closes_connections_end(
    ended: str, folder: Path, server: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, _ = elsewhere(folder, server)
    server.faults = ["closes"] * 10**5
    if ended == "for too long":
        monkeypatch.setattr(servers, "PATIENCE", 0.1)
        with pytest.raises(
            UserError, match=r"^teacher.url: .*/v1/completions does not answer .*the same command again"
        ):
            read(IDS)
        return
    with pytest.raises(UserError, match="^teacher.url: the run has ended"), ThreadPoolExecutor(1) as thread:
        with servers.open_servers():
            read, _ = elsewhere(folder, server)
            reading = thread.submit(read, IDS)
            while len(server.asked) < 6:
                time.sleep(0.01)
        with servers.open_servers():  # of a next run in this process
            reading.result()
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    server.faults = ["closes"]
    read, _ = elsewhere(folder, server)
    assert read(IDS)[LAST].shape[:2] == IDS.shape  # after a run, requests are repeated too


def test_the_servers_own_probabilities_are_compared(
    folder: Path, server: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = load_ends(str(folder))
    read, head = served_elsewhere([server.url], ends, VOCABULARY, [1, 2])
    assert "of 10 tokens" in (line := agreement(read, head, IDS.tolist())) and "e-0" in line
    with torch.no_grad():
        final_norm(ends).weight.mul_(2)  # type: ignore[union-attr,operator]
    assert float(agreement(read, head, IDS.tolist()).rpartition(" ")[2]) > 1e-4
    monkeypatch.setattr(server_states, "FAR", 1e-5)
    assert agreement(read, head, [[3], *IDS.tolist()]).startswith("warning: teacher: ")


def test_each_servers_own_probabilities_are_compared(folder: Path, server: FakeVLLM, tmp_path: Path) -> None:
    other = network(3)
    with torch.no_grad():
        other.model.norm.weight.mul_(3)
    with running(FakeVLLM(other, tmp_path / "other", [1, 2, 3])) as second:
        for both in ((server, second), (second, server)):
            read, head = elsewhere(folder, *both)
            line = agreement(read, head, IDS.tolist())
            assert "of 20 tokens" in line and float(line.rpartition(" ")[2]) > 1e-4


SMALL = {
    "eagle": "draft.intermediate=64",
    "medusa": "",
    "independent": "draft.width=32 draft.head_dim=32 draft.intermediate=64",
}


@pytest.mark.parametrize("kind", often(SMALL, "eagle".__eq__))
def test_a_training_from_a_server_ends_like_one_in_the_process(kind: str, folder: Path, tmp_path: Path) -> None:
    """From the same texts; a server sees them one by one, so sums have another order."""
    rng = random.Random(0)
    rows = [
        {"prompt": f"say {n}", "completion": " " + " ".join(rng.choice(["red", "blue", "sea"]) for _ in range(6))}
        for n in range(120)
    ]
    write_rows(tmp_path / "own.jsonl", rows)
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


@pytest.mark.parametrize("setting", ["draft=early_exit", "quantisation=int8", "init=target_layers", "measure=true"])
def test_what_needs_the_layers_here_is_refused_by_name(
    setting: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"draft": "eagle", "init": "scratch", "measure": "false"} | dict([setting.split("=")])
    words = [f"{key}={value}" for key, value in given.items()]
    output = f"output={tmp_path / 'run'}"
    assert main(["train", f"target.path={folder}", "teacher.url=http://127.0.0.1:9", *words, output]) == 1
    assert f"{setting}: it needs the target's layers in this process" in capsys.readouterr().err


ZEROS, SIZES = torch.tensor([[5, 9, 0, 0, 0], [7, 8, 9, 1, 2], [5, 9, 0, 0, 0]]), torch.tensor([5, 5, 2])


@pytest.mark.parametrize("way", ["read", "memory", "filled", "begun", "disk", "held out"])
def test_padding_is_not_sent_and_zeros_at_the_end_of_a_text_are(
    way: str, folder: Path, server: FakeVLLM, tmp_path: Path
) -> None:
    """Rows of equal ids may be two texts."""
    read, _ = elsewhere(folder, server)
    here, _ = served(AutoModelForCausalLM.from_pretrained(folder), VOCABULARY, [1, 2])
    with torch.no_grad():
        wanted = here(ZEROS)
    memory, keys = MemoryCache(read, 2**20), torch.arange(3)
    if way == "filled":
        memory.fill(ZEROS, keys, batch=2, length=SIZES)
    if way == "begun":
        memory.begin({"ids": ZEROS, "key": keys, "length": SIZES})
    if way == "held out":
        found = held_out(read, Texts(ZEROS, torch.ones(3, dtype=torch.int64), SIZES, ["a"] * 3), 1.0, batch=2).states
    elif way in ("read", "disk"):
        reader = read if way == "read" else DiskCache(read, tmp_path / "cache", {}, (LAST, 1, 2))
        found = reader(ZEROS, None, None, SIZES)
        found = reader(ZEROS, None, None, SIZES) if way == "disk" else found
    else:
        found = memory(ZEROS, keys, None, None, SIZES)
    assert sorted(server.asked) == [[5, 9], [5, 9, 0, 0, 0], [7, 8, 9, 1, 2]]
    for layer, states in wanted.items():
        for row, size in enumerate(SIZES.tolist()):
            torch.testing.assert_close(found[layer][row, :size], states[row, :size], rtol=1e-4, atol=1e-4)
    assert not found[1][2, 2:].any() and found[LAST].shape == (3, 5, 64)


def test_a_training_sends_texts_with_all_their_zeros(folder: Path, tmp_path: Path) -> None:
    """And without padding. The states of none are remembered. A text that is learnt twice in turn is read ahead once,
    so the second time a step reads it."""
    (tmp_path / "own.jsonl").write_text("".join(f'{{"prompt": "{n} say{" x" * (n % 9)}"}}\n' for n in range(120)))
    generation = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": 1}
    target = Path(shutil.copytree(folder, tmp_path / "target"))
    (target / "generation_config.json").write_text(json.dumps(generation))  # 0 ends no text
    with running(FakeVLLM(network(3), tmp_path, [3])) as fake:
        fake.says = 0
        given = f"""train target.path={target} teacher.url={fake.url} draft=medusa init=scratch measure=false
        trainer.steps=12 trainer.corpus_steps=0 trainer.batch=1 trainer.validations=1 trainer.remember_mb=0
        rollout.texts=2 rollout.held_out_texts=2 rollout.new_tokens=6 rollout.temperatures=[1.0]
        data.path={tmp_path / "own.jsonl"} output={tmp_path / "run"}"""
        assert main(given.split()) == 0
    sampled = [body["prompt"] for body in fake.requests if body["max_tokens"] == 6]
    read = [body["prompt"] for body in fake.requests if body["max_tokens"] == 1 and body["prompt"] != [*range(1, 9)]]
    assert {*map(tuple, read)} == {(*prompt, *[0] * 6) for prompt in sampled}
    assert len(read) > 10 and len({*map(len, sampled)}) == len(sampled)


def test_states_have_the_dtype_of_the_run(folder: Path, server: FakeVLLM) -> None:
    """A server on a GPU writes bfloat16; the norm and the head of a run on a CPU may be in float32."""
    server.dtype = torch.bfloat16
    read, head = served_elsewhere([server.url], load_ends(str(folder), "float32"), VOCABULARY, [1, 2])
    halved = read(IDS)
    server.dtype = torch.float32
    whole = read(IDS)
    assert {states.dtype for states in halved.values()} == {torch.float32} == {head(halved[LAST]).dtype}
    assert all(torch.equal(halved[layer], whole[layer].bfloat16().float()) for layer in (1, 2))
    assert not torch.equal(halved[LAST], halved[LAST].bfloat16().float())  # the norm computes in float32


def test_logits_are_of_ids_that_can_have_mass(folder: Path, server: FakeVLLM) -> None:
    _, head = served_elsewhere([server.url], load_ends(str(folder)), 200, [1, 2])
    assert head(torch.zeros(3, 64)).shape == (3, 200)


def test_the_parts_here_have_the_dtype_of_a_whole_target(folder: Path, tmp_path: Path) -> None:
    """In half precision, which a CPU may emulate."""
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_ends(str(tmp_path)).dtype == load_target(str(tmp_path)).dtype


def test_a_server_that_hangs_leaves_the_others_their_time(
    folder: Path, server: FakeVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "TIMEOUT", 0.9)
    monkeypatch.setattr(servers, "DOWN", 20.0)
    with running(FakeVLLM(network(3), tmp_path / "other", [1, 2, 3])) as other:
        other.faults = ["hangs"] * 20
        read, _ = elsewhere(folder, other, server)
        read(IDS.repeat(8, 1))
    assert len(server.asked) == 16 and len(other.asked) <= 8


def test_a_lock_that_is_never_released_is_given_up(
    folder: Path, server: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "LOCKED", 0.05)
    server.faults = ["locked"]
    read, _ = elsewhere(folder, server)
    assert read(IDS[:1])[LAST].any() and len(server.asked) == 2


def test_texts_are_sampled_by_all_servers_and_leave_no_files(folder: Path, server: FakeVLLM, tmp_path: Path) -> None:
    prompts = [[5, n] for n in range(9)]
    with running(FakeVLLM(network(3), tmp_path / "other", [1, 2, 3])) as other:
        both = servers_at([server.url, other.url], (), 4)
        assert both.rows == 8
        found = Remote(both, tokenizer(), both.rows, frozenset({0}))(prompts, Sampling(0), 3, 1, list(range(9)))
        assert len(server.asked) and len(other.asked) and len(server.asked) + len(other.asked) == 9
        one = Remote(servers_at([server.url], (), 4), tokenizer(), 4, frozenset({0}))
        assert found == one(prompts, Sampling(0), 3, 1, list(range(9))) and len({*map(tuple, found)}) > 3
        assert not list(server.folder.iterdir()) and not list(other.folder.iterdir())
    assert found == Remote(both, tokenizer(), 4, frozenset({0}))(prompts, Sampling(0), 3, 1, list(range(9)))


@pytest.mark.parametrize("name", ["thesis.txt", "layers_1/thesis.txt", "layers_1/no_lock.safetensors", "a.safetensors"])
def test_a_server_cannot_delete_what_it_did_not_write(name: str, tmp_path: Path) -> None:
    (tmp_path / "layers_1").mkdir()
    (tmp_path / name).write_text("mine")
    if "no_lock" not in name:
        (tmp_path / f"{name}.lock").write_text("")
    hidden_states.discard(tmp_path / name)
    assert (tmp_path / name).read_text() == "mine"


def test_texts_are_kept_when_the_servers_address_changes(folder: Path, tmp_path: Path) -> None:
    """And states of a target with other layers are not those in a cache."""
    target = network(3)
    (tmp_path / "own.jsonl").write_text("".join(f'{{"prompt": "say {n}"}}\n' for n in range(120)))
    given = f"""train target.path={folder} draft=medusa init=scratch measure=false trainer.corpus_steps=0
    trainer.batch=2 trainer.validations=1 rollout.texts=3 rollout.held_out_texts=2 rollout.new_tokens=6
    data.path={tmp_path / "own.jsonl"} rollout.temperatures=[1.0] output={tmp_path / "run"}
    trainer.cache={tmp_path / "cache"}""".split()
    kept, sampled = set[bytes](), list[int]()
    for number, steps in ((0, 1), (1, 2)):
        with running(FakeVLLM(target, tmp_path / str(number), [3])) as fake:
            assert main([*given, f"teacher.url={fake.url}", f"trainer.steps={steps}"]) == 0
            sampled.append(fake.sampled)
            kept.add((tmp_path / "run" / "rollouts" / "train_T1.parquet").read_bytes())
    assert len(kept) == 1 and sampled[0] > 0 == sampled[1]
    other = shutil.copytree(folder, tmp_path / "target")
    network(3, seed=1).save_pretrained(tmp_path / "layers")
    weights = load_file(other / "model.safetensors")
    changed = load_file(tmp_path / "layers" / "model.safetensors")
    weights |= {name: value for name, value in changed.items() if ".layers." in name}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    again = [f"target.path={other}" if word.startswith("target.path") else word for word in given]
    again = [f"output={tmp_path / 'two'}" if word.startswith("output") else word for word in again]
    with running(FakeVLLM(target, tmp_path / "third", [3])) as fake:
        assert main([*again, f"teacher.url={fake.url}", "trainer.steps=1"]) == 1  # trainer.cache is of another target


def test_the_last_batch_is_learnt_too() -> None:
    begun: list[dict[str, Any]] = []
    batches = [{"n": n} for n in range(3)]
    seen = [(batch["n"], len(begun)) for batch in Ahead(batches, begun.append)]
    assert seen == [(0, 2), (1, 3), (2, 3)] and begun == batches  # each is begun while the one before it is learnt


def test_a_server_that_does_not_answer_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["draft=medusa", "init=scratch", "measure=false", f"output={tmp_path / 'run'}"]
    assert main(["train", f"target.path={folder}", "teacher.url=http://127.0.0.1:9", *given]) == 1
    assert "teacher.url: http://127.0.0.1:9/v1/models does not answer" in capsys.readouterr().err


def test_the_command_names_the_layers_that_the_draft_reads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And folder, parallelism, and what `cotrain train` needs; on a CPU, vLLM's connector is replaced."""
    given = ["teacher", f"target.path={folder}", f"output={tmp_path / 'states'}"]
    for settings, layers, connector in (
        ("draft=eagle draft.intermediate=64 gpus=4", [1, 3], "ExampleHiddenStatesConnector"),
        ("draft=medusa draft.depths=3 gpus=0", [3], "HiddenStatesOnCPU"),
    ):
        assert main([*given, *settings.split()]) == 0
        command, then = capsys.readouterr().out.splitlines()
        words = dict(word.partition("=")[::2] for word in shlex.split(command))
        config = json.loads(words["--speculative-config"])["draft_model_config"]["hf_config"]
        assert config["eagle_aux_hidden_state_layer_ids"] == layers
        transfer = json.loads(words["--kv-transfer-config"])
        assert transfer["kv_connector"] == connector
        place = Path(transfer["kv_connector_extra_config"]["shared_storage_path"])
        assert place == tmp_path / "states" / ("layers_" + "_".join(map(str, layers)))
        on_cpu = connector == "HiddenStatesOnCPU"
        assert ("--tensor-parallel-size" in words) == (not on_cpu) and "teacher.url=" in then
        assert words["--dtype"] == ("float32" if on_cpu else "auto")
        longest = length_of(network(3).config)  # a request for states asks for one token more
        assert f"--max-model-len {longest + 1}" in command
        assert "draft.depths=3" in then if on_cpu else "draft.intermediate=64" in then


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
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target that does not fit into memory does not stop the run, and is not timed."""
    given = f"""train target.path={folder} draft=medusa init=scratch measure=false check=true rollout.texts=8
    rollout.new_tokens=16 output={tmp_path / "run"}""".split()
    with running(FakeVLLM(network(3), tmp_path, [3])) as fake:
        assert main([*given, f"teacher.url={fake.url}"]) == 0
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
