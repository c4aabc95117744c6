"""Training with several processes, or several batches in one step: sharded drafts (FSDP2), and the counts by which
losses are divided.

Each process has a shard of the draft's weights, gradients and moments. Weights are whole only during a pass of the
sharded module, layer by layer. So all code that reads them, including heads in chunks and losses, runs in such a pass,
see `within`. The target is whole on every process, unless target.device_map=auto shards its layers too, see
`sharded_target`.

A step may add up the gradients of several batches (accumulation) and several processes. A mean of means would give a
token more weight if its batch has few tokens. So every sum is divided by the counts over all batches and processes.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from cotrain.ranks import local_rank
from inference.models.pretrained import decoder_layers

Result = TypeVar("Result")
Batch = Mapping[str, Any]


def sharded(draft: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """Return a copy of the draft, sharded over the processes of the mesh. Each decoder layer is gathered only for its
    own pass. The given draft is moved to the CPU."""
    copied: Any = copy.deepcopy(draft)
    for layer in _layers(copied):
        fully_shard(layer, mesh=mesh)
    fully_shard(copied, mesh=mesh)
    copied.within = lambda work: work()
    register_fsdp_forward_method(copied, "within")
    nn.Module.to(draft, "cpu")
    return copied


def sharded_target(target: PreTrainedModel) -> PreTrainedModel:
    """Shard the frozen target's decoder layers over all processes of the run, in place, and return the target. Each
    layer is gathered only for its own pass, so all processes must call the target equally often. Embeddings, norm and
    head stay whole. The target must be on the CPU; each process keeps its part on its GPU, if it has one.

    The processes are those of a launcher, such as torchrun, that has set the variables of torch.distributed.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(local_rank())
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    layers = decoder_layers(target)
    ends = {*target.parameters()} - {*layers.parameters()}
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(target.base_model, mesh=mesh, ignored_params=ends)
    for part in ends:
        part.data = part.data.to(mesh.device_type)
    return target


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in the outermost module lists, which are the decoder layers."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def within(draft: PreTrainedModel, work: Callable[[], Result]) -> Result:
    """Return `work()`, called while the draft's weights are whole and can be read. All processes must call this
    function."""
    network: Any = draft
    return network.within(work) if isinstance(draft, FSDPModule) else work()


def rest(draft: PreTrainedModel) -> None:
    """Free a sharded draft's weights that are still gathered after passes without gradients."""
    if isinstance(draft, FSDPModule):
        draft.reshard()


def gathered(parted: PreTrainedModel, whole: PreTrainedModel, everywhere: bool = True) -> PreTrainedModel:
    """Load the weights of a sharded draft into `whole`, in place, and return `whole`. All processes must call this
    function. parted: the sharded draft. everywhere: True: all processes get the weights; False: only the first process
    does."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=not everywhere)  # offload: to the first process only
    state = get_model_state_dict(parted, options=options)
    if state:
        whole.load_state_dict(state)
    return whole


@dataclass(frozen=True)
class StepCounts:
    """The numbers by which losses are divided, as scalar tensors. positions: how many positions the loss counts.
    tokens: how many tokens the target sampled."""

    positions: Tensor
    tokens: Tensor


def sampled_mask(batch: Batch) -> Tensor:
    """Return (B, T-1) bool: entry t is True if the target sampled token t+1. If the batch has no entry "sampled", the
    target sampled all tokens that the loss counts (its entry "predicted")."""
    return batch.get("sampled", batch["predicted"])


def counted(batch: Batch) -> Tensor:
    """Return (2,) float32: the number of positions that the loss counts in a batch, and the number of tokens that the
    target sampled. batch: predicted (B, T-1) bool, and sampled (B, T-1) bool if not all of these were sampled."""
    return torch.stack([batch["predicted"].sum(), sampled_mask(batch).sum()]).float()


def divisors(total: Tensor, batches: int) -> StepCounts:
    """Return the numbers by which the losses of a step are divided. total (2,): the step's counts, averaged over
    processes. batches: the number of batches in the step.

    The trainer divides the loss of each batch by the number of batches, so the counts are divided by it too. A count of
    0 becomes 1.
    """
    total = torch.where(total > 0, total / batches, torch.ones_like(total))
    return StepCounts(*total.unbind())


def ends_step(batch: Batch) -> bool:
    """Return whether a batch is the last one in its step."""
    index, number = batch.get("group", (0, 1))
    return bool(index + 1 == number)


class Ahead:
    """Iterator over batches. It calls `begin` with each batch before it yields the batch before that one, so that the
    next batch is prepared while a batch is learnt."""

    def __init__(self, batches: Iterable[dict[str, Any]], begin: Callable[[dict[str, Any]], None]) -> None:
        self.batches, self.begin = batches, begin

    def __iter__(self) -> Iterator[dict[str, Any]]:
        earlier: dict[str, Any] | None = None
        for batch in self.batches:
            self.begin(batch)
            if earlier is not None:
                yield earlier
            earlier = batch
        if earlier is not None:
            yield earlier


class Grouped:
    """Iterator over batches in groups of `number`, one group per step. It adds two entries to each batch: "counts"
    (2,), the counts of its step, and "group", a pair of its index (0-based) and the number of batches in the step."""

    def __init__(self, batches: Iterable[dict[str, Any]], number: int) -> None:
        self.batches, self.number = batches, number

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.batches)
        while group := list(islice(batches, self.number)):
            counts = torch.stack([counted(batch) for batch in group]).sum(0)
            for index, batch in enumerate(group):
                yield batch | {"counts": counts, "group": (index, len(group))}
