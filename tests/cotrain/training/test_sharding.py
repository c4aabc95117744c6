"""A draft in parts computes what a whole one does; here on one process, on two in test_ddp."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from cotrain.losses.spec import parse
from cotrain.teacher.target_model import halves
from cotrain.training.distributed import gathered, sharded, within
from cotrain.training.module import Distillation, Stage
from tests.cotrain.students.test_every_student import whole
from tests.cotrain.training.test_module import alone, module_of
from tests.tiny import tiny


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    distributed.destroy_process_group()


def step(module: Distillation) -> Tensor:
    """One step of plain descent; the loss before it."""
    ids = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(1))
    loss = alone(module).training_step(whole(ids), 0)
    loss.backward()
    with torch.no_grad():
        for weight in module.draft.parameters():
            weight -= 0.1 * weight.grad
            weight.grad = None
    return loss.detach()


@pytest.mark.parametrize(("name", "chunk"), [("0.1*kl+0.9*tv", 4), ("calls", 100)])
def test_a_step_of_a_sharded_draft_equals_one_of_a_whole_draft(mesh: DeviceMesh, name: str, chunk: int) -> None:
    modules = [module_of(tiny(), tiny(layers=2, seed=3), [Stage(1.0, parse(name))], steps=1) for _ in range(2)]
    plain, parted = modules
    network = parted.draft
    parted._device_mesh = mesh
    parted.configure_model()
    parted.configure_model()  # as every trainer calls it
    assert parted.whole == [network] and all(isinstance(p, DTensor) for p in parted.draft.parameters())
    assert not any(isinstance(p, DTensor) for p in network.parameters()) and "whole" not in str(
        parted.state_dict().keys()
    )
    for module in modules:
        module.chunk = chunk
    for _ in range(2):  # the second, behind a judgement, learns with what the first changed
        torch.testing.assert_close(step(parted), step(plain), rtol=0, atol=1e-9)
        for module in modules:
            module.judge()
        assert parted.acceptance() == pytest.approx(plain.acceptance(), abs=1e-9)
        assert all(isinstance(p, DTensor) for p in parted.draft.parameters())
    parted.assemble()
    assert parted.draft is network and not parted.whole
    for ours, theirs in zip(network.parameters(), plain.draft.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    parted.judge()
    assert parted.acceptance() == pytest.approx(plain.acceptance(), abs=1e-9)


def test_weights_are_whole_only_within_a_pass(mesh: DeviceMesh) -> None:
    draft = tiny(layers=2)
    parted = sharded(draft, mesh)
    read, head = halves(parted)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        wanted = draft(ids).logits
        torch.testing.assert_close(within(parted, lambda: head(read(ids))), wanted)
        assert within(draft, lambda: 3) == 3
    other = tiny(layers=2, seed=5)
    assert gathered(parted, other) is other
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), draft.parameters(), strict=True))
