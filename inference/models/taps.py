"""States of the layers of a model that runs transformers' own forward: hooks that are there while they are asked for.

transformers' `output_hidden_states` is not used: it leaves hooks on the model for good, and gives no residual stream
behind the last decoder layer.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.models.passes import LAST


@contextmanager
def tapped(model: PreTrainedModel, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """While it lasts, a pass of the model, or of its body, leaves the states (A, n, D) of `layers` in what it gives.

    Raises ValueError where the model's layers are not known, see `decoder_layers`.
    """
    found: dict[int, Tensor] = {}

    def kept(layer: int) -> Callable[[Tensor], None]:
        return lambda states: found.update({layer: states})

    handles = [_hooked(model, layer, kept(layer)) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def left_behind(model: PreTrainedModel, depth: int, run: Callable[[], Any]) -> Tensor:
    """States (A, n, D) behind the first `depth` decoder layers; run: a pass of the model, which is left there, so that
    no layer behind is run. Exact whatever the family: the layers before are run as they are."""

    def leave(states: Tensor) -> None:
        raise _Left(states)

    handle = _hooked(model, depth, leave)
    try:
        run()
    except _Left as left:
        return left.states
    finally:
        handle.remove()
    raise ValueError(f"{type(model).__name__}: its forward does not run the {depth} layers that its config names")


class _Left(Exception):
    """A pass that is left, with the states that it had there."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


def _hooked(model: PreTrainedModel, layer: int, use: Callable[[Tensor], None]) -> Any:
    """A hook that gives `use` the states of a layer."""
    if layer == LAST:
        body = model.get_decoder()  # what both the model and its `base_model` run
        if body is model:
            return model.get_output_embeddings().register_forward_pre_hook(lambda _, args: use(args[0]))
        return body.register_forward_hook(lambda _, __, out: use(out[0]))
    blocks = decoder_layers(model)
    if layer == len(blocks):
        return blocks[-1].register_forward_hook(lambda _, __, out: use(out[0] if isinstance(out, tuple) else out))

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        use(args[0] if args else kwargs["hidden_states"])

    return blocks[layer].register_forward_pre_hook(before, with_kwargs=True)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers in their order: the first list in its body of as many modules as its config names.

    Raises ValueError where there is none.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    found = next(lists, None)
    if found is None:
        raise ValueError(f"{type(model).__name__}: no list of {count} decoder layers, whose states could be read")
    return found
