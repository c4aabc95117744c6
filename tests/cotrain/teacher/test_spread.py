"""A target whose layers are on several devices, in other memory, or sharded over processes, gives the states of one
that is whole."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cotrain.cli import main
from cotrain.data.fingerprints import fingerprint
from cotrain.errors import UserError
from cotrain.students.independent import IndependentStudent, plain_tensors
from cotrain.teacher.target_model import load_target, served
from cotrain.training import assembly
from cotrain.training.job import Job, sampled_texts
from cotrain.training.preconditions import require
from inference import Engine, Sampling
from inference.models.passes import LAST
from inference.models.pretrained import head_weight
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.quantised import quantised_copy
from tests import standin
from tests.folders import network, target_and_texts, tokenizer
from tests.settings import composed, typed

LAYERS = (1,)
pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be recorded as CUDA graphs:UserWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a target with two layers, and the user's texts."""
    return target_and_texts(tmp_path_factory.mktemp("spread"), 60)


def read(model: PreTrainedModel) -> dict[Any, Tensor]:
    """States of some texts by layer and logits, on the CPU; all were on the model's device."""
    reader, head = served(model, None, LAYERS)
    states = reader(torch.arange(12).view(2, 6))
    found = dict(states) | {"logits": head(states[LAST])}
    assert {part.device for part in found.values()} == {model.device}
    return {name: part.cpu() for name, part in found.items()}


def written(model: PreTrainedModel) -> list[list[int]]:
    engine = Engine(model, tokenizer=tokenizer(), rows=2)
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    return engine.generate(prompts, max_new_tokens=6, sampling=Sampling(1.0), seed=3, ignore_eos=True).tokens


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """The norm of all differences."""
    return sum((ours[name] - theirs[name]).double().square().sum() for name in ours).sqrt()


def test_layers_on_two_devices_give_the_same_states_and_texts(folder: Path) -> None:
    whole = load_target(str(folder / "target"), dtype="float32")
    expected, texts, values = read(whole), written(whole), fingerprint(whole)
    with standin.device():
        model = load_target(str(folder / "target"), dtype="float32", device_map="auto")
        assert {part.device.index for part in model.parameters()} == {0, 1}
        found = read(model)
        assert written(model) == texts and fingerprint(model) == values
    for name, part in expected.items():
        torch.testing.assert_close(found[name], part, msg=str(name))


@pytest.mark.thorough
def test_commands_train_and_measure_with_layers_on_two_devices(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    paths = [f"target.path={folder / 'target'}", f"data.path={folder / 'own.jsonl'}", "target.device_map=auto"]
    sizes = """data.block=64 rollout.texts=2 rollout.held_out_texts=2 rollout.prompt_tokens=8 rollout.new_tokens=4
    rollout.rows=2 rollout.temperatures=[1.0] trainer.batch=2 trainer.validations=1 trainer.steps=1 draft=medusa
    draft.depths=2 measure=false""".split()
    bench = """bench.prompts=1 bench.quick_prompts=1 bench.prompt_tokens=8 bench.new_tokens=4 bench.parity_tokens=8
    bench.minutes=0 bench.depths=[1]""".split()
    with standin.device():
        assert main(["train", *paths, *sizes, f"output={folder / 'run [1]'}"]) == 0, capsys.readouterr().err
        draft = f"draft.path={folder / 'run [1]' / 'draft'}"
        assert main(["bench", *paths, *bench, draft, f"output={folder / 'bench'}"]) == 0, capsys.readouterr().err
    assert "exactness: passed" in capsys.readouterr().out


def test_layers_on_a_disk_give_the_same_states_texts_and_drafts(folder: Path, tmp_path: Path) -> None:
    path = str(folder / "target")
    whole = load_target(path, dtype="float32")
    ends = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places = ends | {f"model.layers.{i}": "disk" if i else "cpu" for i in range(2)}
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, device_map=places, offload_folder=tmp_path
    ).eval()
    assert sum(part.is_meta for part in model.parameters()) > 5
    expected, found = read(whole), read(model)
    assert all(torch.equal(found[name], part) for name, part in expected.items())
    assert written(model) == written(whole) and fingerprint(model) == fingerprint(whole)
    theirs = plain_tensors(model)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in plain_tensors(whole).items())


SHARDED = """
import sys, torch
from torch.distributed.fsdp import FSDPModule
from cotrain.data.fingerprints import fingerprint
from cotrain.students.independent import IndependentStudent, plain_tensors
from cotrain.teacher.target_model import load_target
from cotrain.training.distributed import sharded_target
from inference.models.pretrained import decoder_layers
from tests.cotrain.teacher.test_spread import read

whole = load_target(sys.argv[1], dtype="float32")
expected, tensors = read(whole), plain_tensors(whole)
model = sharded_target(load_target(sys.argv[1], dtype="float32", device_map="cpu"))
assert all(isinstance(layer, FSDPModule) for layer in decoder_layers(model))  # gathered one at a time
for _ in range(2):
    found = read(model)
    assert all(torch.equal(found[name], part) for name, part in expected.items())
assert fingerprint(model) == fingerprint(whole)
assert all(torch.equal(tensors[name], part) for name, part in plain_tensors(model).items())
read(model)  # which leaves each layer's part alone
count = lambda parts: sum(part.to_local().numel() if hasattr(part, "to_local") else part.numel() for part in parts)
shares = [count(m.parameters()) for m in (decoder_layers(model), decoder_layers(whole))]
assert shares[0] * 2 == shares[1] and model.get_output_embeddings().weight.shape[0] == whole.config.vocab_size
"""


def launched(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.thorough
def test_each_of_two_processes_has_half_of_the_layers(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sharded.py").write_text(SHARDED)
    done = launched(str(tmp_path / "sharded.py"), str(folder / "target"))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "given",
    ["draft=medusa draft.depths=2 trainer.strategy=ddp", "draft=independent init.layers=[0] trainer.strategy=fsdp2"],
)
def test_two_processes_with_a_sharded_target_train_what_one_would(folder: Path, tmp_path: Path, given: str) -> None:
    texts = f"rollout.folder={tmp_path / 'texts'}"
    common = f"""target.path={folder / "target"} data.path={folder / "own.jsonl"} target.device_map=auto measure=false
    rollout.texts=8 rollout.held_out_texts=2 rollout.prompt_tokens=8 rollout.new_tokens=24 rollout.temperatures=[1.0]
    data.block=64 trainer.steps=4 trainer.batch=2 trainer.validations=1 trainer.precision=32-true loss=kl""".split()
    assert main(["train", *common, *given.split(), texts, f"output={tmp_path / 'one'}"]) == 0
    start, two = ([*common, *given.split(), texts, f"output={tmp_path / name}"] for name in ("start", "two"))
    assert main(["train", *start, "optimizer.lr=1e-12"]) == 0
    done = launched("-m", "cotrain", "train", *two, "trainer.devices=2")
    assert done.returncode == 0, done.stderr[-3000:]
    began, ours, theirs = (load_file(tmp_path / run / "draft" / "model.safetensors") for run in ("start", "one", "two"))
    moved, apart = distance(ours, began), distance(ours, theirs)
    assert apart < 0.02 * moved and moved > 1e-2


def test_a_tree_of_drafts_on_two_devices_gives_the_texts_of_one(tmp_path: Path) -> None:
    """With a head of its own on the last device."""
    config = LlamaConfig(**network().config.to_dict() | {"tie_word_embeddings": False})
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    draft = network(1)

    def told(model: PreTrainedModel) -> list[list[int]]:
        trees = Independent(draft.to(model.device), shape=(-1, -1, 0, 0))  # type: ignore[arg-type]
        engine = Engine(model, trees, verify="tree", rows=1, policy=Fixed(2), graphs=False)
        prompts = [[5, 6, 7, 8, 9]]
        return engine.generate(prompts, max_new_tokens=8, sampling=Sampling(1.0), seed=3, ignore_eos=True).tokens

    whole = load_target(str(tmp_path), dtype="float32")
    texts, expected = told(whole), read(whole)
    with standin.device():
        model = load_target(str(tmp_path), dtype="float32", device_map="auto")
        assert model.lm_head.weight.device.index == 1  # type: ignore[attr-defined]
        found = read(model)
        assert told(model) == texts
    torch.testing.assert_close(found["logits"], expected["logits"])


def test_a_head_on_a_disk_fills_an_eagle_as_one_in_memory(tmp_path: Path) -> None:
    config = LlamaConfig(**network().config.to_dict() | {"tie_word_embeddings": False})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers"), "cpu")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=places | {"lm_head": "disk"}, offload_folder=tmp_path / "disk"
    )
    whole = load_target(str(tmp_path / "target"))
    assert model.lm_head.weight.is_meta and torch.equal(head_weight(model), whole.lm_head.weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="some layers are not on a device"):
        quantised_copy(model, "int8")


def test_one_process_on_each_of_two_machines_shares_the_target() -> None:
    cfg = typed(composed("trainer.nodes=2", "target.device_map=auto"))
    assert cfg.shards_target and not typed(composed("trainer.nodes=2")).shards_target


def test_processes_that_share_a_target_do_not_sample(tmp_path: Path) -> None:
    cfg = typed(composed("trainer.devices=2", "target.device_map=auto", "rollout.temperatures=[0.5]"))
    texts = sampled_texts(cfg, network(), tokenizer(), tmp_path)
    with pytest.raises(
        UserError, match="with kind=train regime.temperature=1 and kind=held_out regime.temperature=0.5 "
    ):
        texts.sample("train", Sampling(1.0), lambda *_: [("own", [5, 6])])


def test_states_are_read_in_step() -> None:
    """No process may find states in its cache that another must read: the layers are gathered for all at once."""
    cfg = typed(composed("trainer.devices=2", "trainer.remember_mb=5"))
    for device_map, room in ((None, 5 * 2**20), ("auto", 0)):
        cfg.target.device_map = device_map
        job = Job(cfg, Path("place"), network(), tokenizer())
        assert assembly.trained_by(job, IndependentStudent(network(1)), {}).teacher.room == room


WRONG = {
    "draft=early_exit": "draft=early_exit: with target.device_map=auto the target is spread over devices: use one of",
    "mode=joint": "mode=joint: .* set mode=distil",
    "trainer.devices=2 measure=false": "trainer.devices: .* sharded .* start it with torchrun --nproc-per-node=2 ",
    "trainer.devices=2": "measure=true: .* sharded over the processes, which call it in step: set measure=false",
    "trainer.devices=2 draft=quantised": "draft=quantised: .* use one of independent, conditioned, parallel, eagle, ",
    "trainer.devices=2 data=self": "data=self: .* sample prompts first, cotrain rollout data=self",
    "trainer.devices=2 measure=false trainer.cache=states": "trainer.cache: .* leave it out",
    "trainer.devices=2 quantisation=int8": "quantisation: .* set quantisation=none",
    "teacher.url=http://127.0.0.1:9": "teacher.url: .* leave out one of the two",
}


@pytest.mark.parametrize("given", WRONG)
def test_what_needs_the_target_in_one_place_is_refused(given: str) -> None:
    with pytest.raises(UserError, match=f"^{WRONG[given]}"):
        require(typed(composed(*given.split(), "target.device_map=auto")))
