"""Draft folders that failed."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cotrain.students.base import KINDS
from inference import Engine, Sampling, load
from inference.models import packing
from inference.models.pretrained import cast, load_model
from inference.policy import Fixed
from tests.cases import case
from tests.draft_folders import draft_folder, new_student, written
from tests.folders import network, tokenizer

STEP = 8  # bytes: a header's length is a multiple of them


@case("unaligned mask")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_drafts_as_before_writing_at_every_offset_of_its_header(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights that the kind's kernels read: in 8 bits, or packed in float16 by FBGEMM."""
    aligned_kernels(monkeypatch)
    rounds = kind not in ("medusa", "hydra")
    dtype = torch.bfloat16 if rounds else torch.float32
    model, folder = halved(network(), dtype), tmp_path / "target"
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    small = {"path": str(draft_folder(tmp_path / "small", folder, "independent"))} if kind == "two_levels" else {}
    student = new_student(kind, model, **small)
    disturb(student.network)
    halved(student.network, dtype)
    path = written(tmp_path / kind, folder, student, rounds)
    wanted = drafted(Engine(model, student.proposer(int8=rounds), policy=Fixed(2)))
    for offset in range(0, packing.ALIGNED, STEP):
        for file in tmp_path.glob("*/model.safetensors"):
            begin(file, offset)
        assert drafted(load(path, load_model(str(folder), dtype))) == wanted, offset


def aligned_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test fails where another processor would end the process."""

    def checked(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
            assert all(one.is_contiguous() and not one.data_ptr() % packing.ALIGNED for one in tensors)
            return kernel(*inputs)

        return run

    monkeypatch.setattr(torch, "_weight_int8pack_mm", checked(torch._weight_int8pack_mm))
    products = SimpleNamespace(default=checked(torch.ops.quantized.linear_dynamic_fp16.default))
    monkeypatch.setattr(torch.ops.quantized, "linear_dynamic_fp16", products)


def halved(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model itself, with weights that bfloat16 represents."""
    return cast(cast(model, torch.bfloat16), dtype)


def disturb(network: PreTrainedModel) -> None:
    """Make an untrained draft right at times only."""
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.1 * torch.randn_like(weight)


def drafted(engine: Engine) -> tuple[Any, ...]:
    """Return what is drafted and emitted after two prompts, by draws that depend on all distributions."""
    out = engine.generate([[5, 6, 7, 8], [9, 10]], max_new_tokens=8, sampling=Sampling(), ignore_eos=True)
    return out.tokens, out.stats.drafted, out.stats.accepted


def begin(file: Path, offset: int) -> None:
    """Pad the header of a file so that its tensors begin `offset` bytes after a multiple of `ALIGNED`."""
    data = file.read_bytes()
    size = int.from_bytes(data[:STEP], "little")
    head = data[STEP : STEP + size].rstrip(b" ")
    head = head.ljust(len(head) + (offset - STEP - len(head)) % packing.ALIGNED)
    file.write_bytes(len(head).to_bytes(STEP, "little") + head + data[STEP + size :])
