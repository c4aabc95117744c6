"""A draft in parts: each of several processes holds a share of its weights, gradients and moments (FSDP2).

Weights are whole only inside a pass of the module that was sharded, layer by layer, so everything that asks for them,
heads in chunks and losses too, happens inside one: see `within`. The target stays whole on every process.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

Found = TypeVar("Found")


def sharded(draft: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """A copy of the draft in parts, one a process of the mesh: each decoder layer is gathered alone, when its turn
    comes. The draft itself goes to main memory."""
    parted: Any = copy.deepcopy(draft)
    for layer in _layers(parted):
        fully_shard(layer, mesh=mesh)
    fully_shard(parted, mesh=mesh)
    parted.within = lambda work: work()
    register_fsdp_forward_method(parted, "within")
    nn.Module.to(draft, "cpu")
    return parted


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost lists."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def within(draft: PreTrainedModel, work: Callable[[], Found]) -> Found:
    """What `work` finds where the draft's weights can be used, on all processes at once."""
    parted: Any = draft
    return parted.within(work) if isinstance(draft, FSDPModule) else work()


def rest(draft: PreTrainedModel) -> None:
    """Give back what passes without gradients left gathered."""
    if isinstance(draft, FSDPModule):
        draft.reshard()


def gathered(parted: PreTrainedModel, whole: PreTrainedModel, everywhere: bool = True) -> PreTrainedModel:
    """`whole` with the weights of all parts, on all processes or the first; asked of all at once."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=not everywhere)  # offloaded, the first alone gets them
    state = get_model_state_dict(parted, options=options)
    if state:
        whole.load_state_dict(state)
    return whole
