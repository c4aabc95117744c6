"""The bundled target's pretraining at tiny size by its command: phases, folder and card."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cotrain.data.corpora import Document
from studies.pretrain.__main__ import main, manifest
from studies.pretrain.blocks import Blocks
from studies.pretrain.pretraining import LanguageModel
from tests.folders import few_files, network

BYTES = "{code: 30000, prose: 20000, records: 20000}"
SIZES = f"""data.block=33|data.bytes={BYTES}|data.held_out_bytes={BYTES}|tokenizer_bytes={BYTES}
pretraining.steps=4|pretraining.batch=2|pretraining.warmup=1|pretraining.decay=2|pretraining.validate_every=2
pretraining.compile=false|pretraining.threads=1|shape.vocabulary=300|shape.width=64|shape.layers=1
shape.intermediate=64|shape.kv_heads=1|shape.context=64""".replace("\n", "|").split("|")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        few_files(patch)
        yield tmp_path_factory.mktemp("pretrain")


def pretrain(place: Path, output: str, *settings: str) -> None:
    main([f"output={place / output}", *SIZES, *settings])


@pytest.fixture(scope="module")
def target(place: Path) -> Path:
    """What two phases make: the first ends after its first step, for want of time."""
    pretrain(place, "phases", "pretraining.minutes=0", f"export={place / 'target'}")
    assert not (place / "target").exists()
    assert torch.load(place / "phases" / "last.ckpt", weights_only=True)["global_step"] == 1
    pretrain(place, "phases", f"export={place / 'target'}")
    return place / "target"


def test_two_legs_are_one(target: Path, place: Path) -> None:
    pretrain(place, "whole", f"export={place / 'one'}")
    one, two = (load_file(folder / "model.safetensors") for folder in (place / "one", target))
    assert one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def test_the_target_folder_loads_and_has_its_card(target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert (model.dtype, model.config.eos_token_id, tokenizer.eos_token_id) == (torch.bfloat16, 0, 0)
    assert tokenizer.decode(tokenizer.encode("def né(x):")) == "def né(x):"
    card = json.loads((target / "card.json").read_text())
    assert (card["steps"], card["tokens_seen"], [phase["step"] for phase in card["phases"]]) == (4, 4 * 2 * 32, [1, 4])
    assert card["parameters"] == model.num_parameters()
    assert set(card["bits_per_byte"]) == set(card["five_gram"]) == {"code", "prose", "records"}
    assert all(0.5 < bits < 9 for bits in card["bits_per_byte"].values()) and 0 < card["bigram_alpha"] < 1
    readme = (target / "README.md").read_text()
    assert f"| code | {card['bits_per_byte']['code']:.3f} |" in readme
    assert f"`{card['corpora']['records']['hash']}`" in readme and "2 phase(s)" in readme


def test_a_manifest_counts_bytes_and_knows_the_order() -> None:
    one, two = Document("a", "né"), Document("b", "x")
    assert (manifest([one, two])["files"], manifest([one, two])["bytes"]) == (2, 4)
    assert manifest([one, two])["hash"] != manifest([two, one])["hash"]


def test_bits_per_byte_weigh_each_token_by_its_bytes() -> None:
    sizes = torch.arange(300) % 4 + 1
    module = LanguageModel(network(), None, None, sizes, ["a", "b"])
    ids = torch.randint(2, 300, (3, 9), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    blocks = Blocks(ids, torch.tensor([1, 0, 1]), ["a", "b"])
    module.on_validation_epoch_start()
    with torch.no_grad():
        for row in range(3):
            batch = {name: value[None] for name, value in blocks[row].items()}
            module.validation_step(batch, row)
        logs = module.network(ids.long()).logits.log_softmax(-1)[:, :-1]
    bits = -logs.gather(2, ids[:, 1:, None].long()).squeeze(2) / torch.log(torch.tensor(2.0))
    mine = ids[:, 1:].long()
    wanted = {name: (bits[rows].sum() / sizes[mine[rows]].sum()).item() for name, rows in (("a", [1]), ("b", [0, 2]))}
    assert module.bits_per_byte() == pytest.approx(wanted, rel=1e-5)
