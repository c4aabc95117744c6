"""Several processes and several batches in one step: a sharded draft (FSDP2), and the counts that losses are divided
by.

Each process holds a share of a sharded draft's weights, gradients and moments. Weights are whole only inside a pass of
the sharded module, layer by layer, so everything that reads them, heads in chunks and losses too, runs in such a pass:
see `within`. The target stays whole on every process.

A step may add up the gradients of several batches (accumulation) and of several processes. Means of means would weigh
a token of a batch with few tokens more, so every sum is divided by the counts of all batches and processes together.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

Result = TypeVar("Result")
Batch = Mapping[str, Any]


def sharded(draft: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """A copy of the draft, sharded over the processes of the mesh; each decoder layer is gathered alone, for its pass.
    The draft itself moves to main memory."""
    copied: Any = copy.deepcopy(draft)
    for layer in _layers(copied):
        fully_shard(layer, mesh=mesh)
    fully_shard(copied, mesh=mesh)
    copied.within = lambda work: work()
    register_fsdp_forward_method(copied, "within")
    nn.Module.to(draft, "cpu")
    return copied


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost lists."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def within(draft: PreTrainedModel, work: Callable[[], Result]) -> Result:
    """The result of `work`, called while the draft's weights can be read; all processes must call it."""
    network: Any = draft
    return network.within(work) if isinstance(draft, FSDPModule) else work()


def rest(draft: PreTrainedModel) -> None:
    """Free the weights that passes without gradients left gathered."""
    if isinstance(draft, FSDPModule):
        draft.reshard()


def gathered(parted: PreTrainedModel, whole: PreTrainedModel, everywhere: bool = True) -> PreTrainedModel:
    """`whole` with the weights of a sharded draft, on all processes or on the first; all processes must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=not everywhere)  # offloaded, only the first gets them
    state = get_model_state_dict(parted, options=options)
    if state:
        whole.load_state_dict(state)
    return whole


@dataclass(frozen=True)
class StepCounts:
    """Scalars to divide by: positions that are learnt from, tokens that the target sampled, texts that hold some."""

    positions: Tensor
    tokens: Tensor
    texts: Tensor


def sampled(batch: Batch) -> Tensor:
    """(B, T-1) bool: whether the target sampled the next token; of a batch that does not say, every predicted one."""
    mask: Tensor = batch.get("sampled", batch["predicted"])
    return mask


def counted(batch: Batch) -> Tensor:
    """Positions, tokens and texts of a batch -> (3,) float32."""
    lengths = sampled(batch).sum(1)
    return torch.stack([batch["predicted"].sum(), lengths.sum(), (lengths > 0).sum()]).float()


def divisors(total: Tensor, batches: int) -> StepCounts:
    """total (3,): a process's share of the counts of a step. The trainer divides each batch's loss by the number of
    batches, which is undone here. A count of 0 becomes 1."""
    total = torch.where(total > 0, total / batches, torch.ones_like(total))
    return StepCounts(*total.unbind())


class Grouped:
    """Endless batches with the counts of their step, `counts` (3,), and their index in it, `group` (index, number)."""

    def __init__(self, batches: Iterable[dict[str, Any]], number: int) -> None:
        self.batches, self.number = batches, number

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.batches)
        while group := list(islice(batches, self.number)):
            counts = torch.stack([counted(batch) for batch in group]).sum(0)
            for index, batch in enumerate(group):
                yield batch | {"counts": counts, "group": (index, len(group))}
