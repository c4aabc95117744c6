"""What passes must move and do, counted by hand."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cotrain.teacher.target_model import load_pair
from inference.measure.floor import weight_bytes
from inference.models.lm import LM
from studies import floor
from studies.floor import Load, Machine, pass_load, round_loads
from tests.folders import target_folder
from tests.tiny import tiny


def test_bytes_and_operations_of_a_pass():
    model = tiny(layers=2, hidden=16, heads=2)  # float64, one group of 8, embedding apart from the head
    lm = LM(model, 3)
    weights = sum(p.numel() for p in model.parameters()) - 32 * 16
    assert weight_bytes(lm) == (8 * weights, weights)
    loads = pass_load(lm, rows=3, n=2, context=10)
    assert loads.bytes == 8 * weights + 3 * (2 * 2 * 8 * 8) * 12 + 8 * 3 * 2 * 32
    assert loads.operations == 2 * 3 * 2 * weights


@pytest.mark.parametrize("quantisation", ["none", "int8", "nf4"])
def test_bytes_are_those_that_are_stored_however_weights_are_quantised(quantisation: str, tmp_path: Path) -> None:
    """Against what a saved checkpoint of the same model holds, which has all that a pass needs."""
    folder = str(target_folder(tmp_path / "whole"))
    model, _ = load_pair(folder, quantisation)
    lm = LM(model, 1)
    whole, _ = load_pair(folder, "none")
    held, count = weight_bytes(lm)
    assert count == sum(p.numel() for p in whole.parameters())  # its embedding is its head
    model.save_pretrained(tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    described = sum(t.nbytes for name, t in tensors.items() if "quant_state" in name or "weight_format" in name)
    stored = sum(t.nbytes for t in tensors.values()) - described  # their description in JSON
    assert held == pytest.approx(stored, rel=0.01)
    assert lm.weights.startswith(quantisation) or quantisation == "none"
    report = pass_load(lm, 1, 1, 8)
    assert report.bytes > held and report.operations == 2 * count


def test_the_slower_of_moving_and_doing_is_the_floor():
    machine = Machine(bandwidth=10.0, rate=100.0)
    assert Load(50, 10).seconds(machine) == 5 and Load(50, 1000).seconds(machine) == 10
    target, draft = (LM(tiny(layers=n), 1) for n in (2, 1))
    one, three = (pass_load(target, 1, n, 8).seconds(machine) for n in (1, 3))
    seconds = [sum(load.seconds(machine) for load in round_loads(target, draft, k, 1, 8)) for k in (0, 2)]
    assert seconds == [one, three + 2 * pass_load(draft, 1, 1, 8).seconds(machine)]


def test_a_copy_reads_and_writes_and_a_product_multiplies_and_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "_median", lambda *_: 0.5)
    monkeypatch.setattr(floor, "COPIED", 64)
    monkeypatch.setattr(floor, "SIDE", 4)
    assert floor.measure_machine(torch.device("cpu"), torch.float32) == floor.Machine(256.0, 256.0)
