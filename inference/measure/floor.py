"""What a plain step cannot do without: reading the target's weights once."""

import math
import timeit
from statistics import median

import torch
from torch import Tensor

from inference.models import packing
from inference.models.forward import Lean
from inference.models.llama import projections
from inference.models.lm import LM


def read_seconds(lm: LM) -> float:
    """Return the seconds in which this machine's CPU reads as many bytes as the weights of `lm` have: the median of
    sums over a tensor of that size, in memory like theirs. Return 0 for a model on an accelerator."""
    if lm.device.type != "cpu":
        return 0
    zeros = torch.ops.inference.zeros if packing.has_kernels() else torch.zeros
    return median(timeit.repeat(zeros(int(weight_bytes(lm)[0]) // 4).sum, number=1, repeat=3))


def weight_bytes(lm: LM) -> tuple[float, float]:
    """Return (bytes, count) of the weights that a pass reads. These are all weights except an embedding that is not
    also the head. bytes: as stored, with scales and tables of quantised weights. count: the number of weights that
    these represent."""
    embedding = lm.model.get_input_embeddings().weight
    skipped = set() if embedding is lm.model.get_output_embeddings().weight else {embedding.data_ptr()}
    if isinstance(lm.run, Lean):  # some of its weights are rounded or packed
        weights, linears = lm.run.weights, projections(lm.run.weights)
        others = [linear.bias for linear in linears] + [part for layer in weights.layers for part in layer]
        vectors = [weights.norm, *(part for part in others if isinstance(part, Tensor))]
        count = sum(t.numel() for t in [*vectors, *(linear.weight for linear in linears)])
        return float(sum(t.nbytes for t in vectors) + sum(linear.read_bytes for linear in linears)), float(count)
    parameters = {p.data_ptr(): p for p in lm.model.parameters() if p.data_ptr() not in skipped}
    scales = sum(t.nbytes for at, t in _states(lm.model, set(parameters)).items() if at not in skipped)
    return float(sum(p.nbytes for p in parameters.values()) + scales), float(sum(map(_count, parameters.values())))


def _count(parameter: Tensor) -> int:
    """Return the number of weights in a parameter. bitsandbytes packs two 4-bit weights into a byte."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(state.shape) if state is not None else parameter.numel()


def _states(model: torch.nn.Module, known: set[int]) -> dict[int, Tensor]:
    """Return, by address, the tensors that bitsandbytes stores besides its parameters: scales and code tables, nested
    ones too."""
    tensors: dict[int, Tensor] = {}
    states = [getattr(module, "state", None) for module in model.modules()]
    waiting = [vars(p) for p in model.parameters()]
    waiting += [vars(state) for state in states if type(state).__name__ == "MatmulLtState"]
    while waiting:
        for value in waiting.pop().values():
            if isinstance(value, Tensor) and value.data_ptr() not in known:
                tensors[value.data_ptr()] = value
            elif type(value).__name__ == "QuantState":
                waiting.append(vars(value))
    return tensors
