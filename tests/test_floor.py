"""What passes must move and do, counted by hand."""

import torch

from inference.measure.floor import Load, Machine, measure_machine, pass_load, round_loads, weight_bytes
from inference.models.lm import LM
from tests.test_lean import WIDE, build
from tests.tiny import tiny


def test_bytes_and_operations_of_a_pass():
    model = tiny(layers=2, hidden=16, heads=2)  # float64, one group of 8, embedding apart from the head
    lm = LM(model, 3)
    weights = sum(p.numel() for p in model.parameters()) - 32 * 16
    assert weight_bytes(lm) == (8 * weights, weights)
    found = pass_load(lm, rows=3, n=2, context=10)
    assert found.bytes == 8 * weights + 3 * (2 * 2 * 8 * 8) * 12 + 8 * 3 * 2 * 32
    assert found.operations == 2 * 3 * 2 * weights


def test_eight_bit_weights_are_a_byte_each_and_a_shared_embedding_counts_once():
    model = build("Llama", WIDE | {"tie_word_embeddings": True}, torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    assert weight_bytes(LM(model, 1)) == (2 * count, count) and weight_bytes(LM(model, 1, int8=True)) == (count, count)


def test_the_slower_of_moving_and_doing_is_the_floor():
    machine = Machine(bandwidth=10.0, rate=100.0)
    assert Load(50, 10).seconds(machine) == 5 and Load(50, 1000).seconds(machine) == 10
    target, draft = (LM(tiny(layers=n), 1) for n in (2, 1))
    one, three = (pass_load(target, 1, n, 8).seconds(machine) for n in (1, 3))
    seconds = [sum(load.seconds(machine) for load in round_loads(target, draft, k, 1, 8)) for k in (0, 2)]
    assert seconds == [one, three + 2 * pass_load(draft, 1, 1, 8).seconds(machine)]


def test_a_machine_is_measured():
    machine = measure_machine(torch.device("cpu"), torch.float32, repeats=1)
    assert 1e8 < machine.bandwidth < 1e13 and 1e8 < machine.rate < 1e16
