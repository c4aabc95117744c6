"""Early exit: the target's first layers draft, on the target's own keys and values.

A draft's own weights are a norm and changes of the first layers: low-rank ones, or weights in 4 bits, of which a CPU
reads .28 of the bytes of those in 16. If all layers draft, the last ones are the target's, by a CPU's kernels in 8
bits: there errors of rounding cost the most (`docs/measurements/smollm2.md`). The changes apply only when it drafts.
The draft model is built from the target's modules and tensors; changed weights are copies, so the target stays as it
is.

r the rank, D width of the states.
"""

import copy
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from inference.drafts.compatibility import same_sizes
from inference.models.checksum import Stamp, checksum
from inference.models.llama import SCALES
from inference.models.lm import LM, takes_int8
from inference.models.packing import GROUP, best_scales, in_groups
from inference.models.pretrained import decoder_layers
from inference.proposers.base import LoadArguments
from inference.proposers.independent import OnTargetsCache
from inference.proposers.trees import TreeShape

SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
UNCHANGED = 15  # if all layers draft in 4 bits, one in so many, rounded, stays the target's: the last ones


class ExitConfig(PretrainedConfig):
    """The config of an early exit. num_hidden_layers: number of the target's decoder layers that draft. rank: rank of
    the change of each projection, 0 for no change. bits: 4 if the projections have weights of their own in 4 bits, else
    None. unchanged: number of the last layers whose projections are the target's. depths: number of drafts per round in
    training. projections: for each projection in a layer, by name, its size [out, in]."""

    model_type = "cotrain_early_exit"

    def __init__(
        self,
        num_hidden_layers: int = 1,
        rank: int = 0,
        bits: int | None = None,
        unchanged: int = 0,
        depths: int = 1,
        projections: dict[str, list[int]] | None = None,
        hidden_size: int = 1,
        **others: Any,
    ) -> None:
        self.num_hidden_layers, self.rank, self.bits, self.depths = num_hidden_layers, rank, bits, depths
        self.unchanged, self.projections, self.hidden_size = unchanged, projections or {}, hidden_size
        super().__init__(**others)

    @property
    def changed(self) -> int:
        """Return the number of the first layers whose projections differ from the target's."""
        return self.num_hidden_layers - self.unchanged if self.rank or self.bits else 0


class Change(nn.Module):
    """A low-rank change of a weight (out, in): up (out, r) times down (r, in) is added to the weight (LoRA: Hu et al.
    2021, 2106.09685). It is 0 before training. out, inside: the sizes of the weight. rank: r."""

    def __init__(self, out: int, inside: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inside) * inside**-0.5)
        self.up = nn.Parameter(torch.zeros(out, rank))


class FourBits(nn.Module):
    """A weight (out, in) in 4 bits: whole numbers from -8 to 7 times a scale, which groups of `GROUP` inputs share, or
    all inputs if they are fewer.

    numbers (out, in): before they are rounded, so that steps of training can be smaller than 1 (straight-through
    estimator: Bengio et al. 2013, 1308.3432). gain, scales (out, groups): a scale is scales * (1 + gain), and the gain
    learns. out, inside: the sizes of the weight. Raises ValueError for other numbers of inputs.
    """

    scales: Tensor

    def __init__(self, out: int, inside: int) -> None:
        super().__init__()
        group = min(GROUP, inside)
        if inside % group:
            raise ValueError(f"weights in 4 bits need a multiple of {GROUP} inputs, but a projection has {inside}")
        self.numbers = nn.Parameter(torch.zeros(out, inside))
        self.gain = nn.Parameter(torch.zeros(out, inside // group))
        self.register_buffer("scales", torch.ones(out, inside // group))

    def scale(self) -> Tensor:
        """Return the scales (out, groups), rounded to bfloat16, in float32 or more."""
        scale = _wide(self.scales) * (1 + self.gain)
        return scale + (scale.to(torch.bfloat16).to(scale.dtype) - scale).detach()

    def rounded(self) -> Tensor:
        """Return the weight (out, in), in float32 or more."""
        numbers = _wide(self.numbers)
        whole = numbers + (numbers.round() - numbers).detach()
        return (in_groups(whole.clamp(-8, 7)) * self.scale().unsqueeze(2)).flatten(1)

    @torch.no_grad()
    def begin(self, weight: Tensor, scales: Tensor) -> None:
        """Begin with a weight (out, in), to be rounded with these scales (out, groups)."""
        self.scales.copy_(scales)
        self.gain.zero_()
        # a number beyond the last would get no gradient
        self.numbers.copy_((in_groups(weight) / scales.unsqueeze(2)).clamp(-8, 7).flatten(1))

    @torch.no_grad()
    def fold(self) -> None:
        """Make the numbers whole and the gains 0, with the same weight, which half precision then represents."""
        self.begin(self.rounded(), self.scale())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ExitNetwork(PreTrainedModel):
    """The weights of an early exit. norm (D,): the weight of the exit's norm. layers: for each layer, the `Change` or
    `FourBits` weight of each changed projection, by name."""

    config_class = ExitConfig
    base_model_prefix = "exit"

    def __init__(self, config: ExitConfig) -> None:
        super().__init__(config)
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.layers = nn.ModuleList(_changes(config, layer) for layer in range(config.num_hidden_layers))
        self.generation_config = GenerationConfig(**{name: getattr(config, name, None) for name in IDS})
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, since `__init__` has initialised the weights."""

    def in_four_bits(self, layer: int, name: str) -> FourBits:
        """Return the weight in 4 bits of a projection. layer: of the decoder, from 0. name: in the layer."""
        return cast(FourBits, self.layers[layer].get_submodule(_key(name)))

    def fits(self, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError if the target's sizes differ from the network's, or if the target has fewer layers than the
        network uses. where: the start of the message."""
        same_sizes(self.config, target, where)
        blocks, layers = decoder_layers(target), self.config.num_hidden_layers
        if layers > len(blocks):
            raise ValueError(
                f"{where}: it exits after {layers} layers, but the target has only {len(blocks)}: give the target "
                "that it was made for"
            )
        theirs = layer_projections(blocks[0])  # an adapter gives its projections other names
        for name, size in self.config.projections.items():
            if theirs.get(name, size) != size:
                raise ValueError(
                    f"{where}: its {name} has the size {size}, but the target's has {theirs[name]}: give the target "
                    "that it was made for"
                )

    def get_input_embeddings(self) -> Any:
        """Return None, since the target's embeddings are used."""

    def get_output_embeddings(self) -> Any:
        """Return None, since the target's head is used."""


def _changes(config: ExitConfig, layer: int) -> nn.ModuleDict:
    sizes = config.projections.items() if layer < config.changed else ()
    if config.bits:
        return nn.ModuleDict({_key(name): FourBits(*size) for name, size in sizes})
    return nn.ModuleDict({_key(name): Change(out, inside, config.rank) for name, (out, inside) in sizes})


def _key(name: str) -> str:
    return name.replace(".", "/")


class Changed(nn.Module):
    """A projection with its low-rank change. first: the first column (0-based) of a pass that the change applies to;
    earlier columns use only the target's weight. plain: the target's projection. change: added to it."""

    def __init__(self, plain: nn.Module, change: Change, first: int = 0) -> None:
        super().__init__()
        self.plain, self.change, self.first = plain, change, first

    def forward(self, x: Tensor) -> Tensor:
        plain: Tensor = self.plain(x)
        down, up = (part.to(x.dtype) for part in (self.change.down, self.change.up))
        late = x[:, self.first :]
        added = nn.functional.linear(nn.functional.linear(late, down), up).to(plain.dtype)
        return plain + nn.functional.pad(added, (0, 0, self.first, 0))


class InGroups(nn.Module):
    """A projection with another weight, in 4 bits. first: the first column (0-based) of a pass that it applies to;
    earlier columns use only the target's weight. plain: the target's projection. frozen: whether no weight learns on
    which earlier columns depend."""

    def __init__(self, plain: Any, change: FourBits, first: int, frozen: bool) -> None:
        super().__init__()
        self.plain, self.change, self.first, self.frozen = plain, change, first, frozen

    def forward(self, x: Tensor) -> Tensor:
        late = nn.functional.linear(x[:, self.first :], self.change.rounded().to(x.dtype), self.plain.bias)
        early = x[:, : self.first]
        return torch.cat((self.plain(early.detach() if self.frozen else early), late), 1)

    def served(self, like: Tensor) -> nn.Linear:
        """Return a layer with the rounded weight, in the dtype of `like` and on its device, and with the scales of its
        groups."""
        weight = self.change.rounded()
        layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        layer.weight, layer.bias = _frozen(weight, like), self.plain.bias
        layer.register_buffer(SCALES, self.change.scale().to(like.device, torch.bfloat16), persistent=False)
        return layer


def untrained_exit(
    target: PreTrainedModel, layers: int, rank: int, depths: int, bits: int | None = None
) -> ExitNetwork:
    """Return an untrained exit after the first `layers` decoder layers. Its norm is a copy of the target's; the logits
    come from the target's head. rank: rank of the change of each projection, 0 for no change. bits: 4 for projections
    that are the target's in 4 bits (of all layers, the last ones stay the target's), None for the target's own. depths:
    number of drafts per round in training. Raises ValueError for an encoder-decoder, unless layers is from 1 to the
    target's number of layers, and for projections that 4 bits do not represent."""
    settings, blocks = target.config.get_text_config(), decoder_layers(target)
    refuse_encoder(target)
    if not 0 < layers <= len(blocks):
        raise ValueError(
            f"the exit would be after {layers} layers, but the target has {len(blocks)}: give 1 to {len(blocks)}"
        )
    known: dict[str, Any] = {name: getattr(settings, name, None) for name in (*SIZES, *IDS)}
    sizes = layer_projections(blocks[0])
    unchanged = round(layers / UNCHANGED) if bits and layers == len(blocks) else 0
    config = ExitConfig(
        num_hidden_layers=layers, rank=rank, bits=bits, unchanged=unchanged, depths=depths, projections=sizes, **known
    )
    plain = (block.get_submodule(name) for block in blocks[:layers] for name in sizes)
    if bits and not (sizes and all(type(one) is nn.Linear and one.weight.is_floating_point() for one in plain)):
        raise ValueError(
            f"{type(target).__name__} has projections that are not plain linear layers (it is quantised, has adapters, "
            "or is of another family), and weights in 4 bits begin as those of such layers: leave out draft.bits="
        )
    network = ExitNetwork(config)
    with torch.no_grad():
        network.norm.copy_(final_norm(target).weight)
        for at, block in enumerate(blocks[: config.changed if bits else 0]):
            for name in sizes:
                weight = cast(nn.Linear, block.get_submodule(name)).weight.float()
                network.in_four_bits(at, name).begin(weight, best_scales(in_groups(weight)))
    return network


def refuse_encoder(target: PreTrainedModel) -> None:
    """Raise ValueError for an encoder-decoder, whose layers read more than the states and the text."""
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder, but an early exit needs a causal LM: use another kind of "
            "draft"
        )


def layer_projections(block: nn.Module) -> dict[str, list[int]]:
    """Return the size [out, in] of each projection of a decoder layer, by name."""
    return {name: [m.out_features, m.in_features] for name, m in block.named_modules() if isinstance(m, nn.Linear)}


def final_norm(model: PreTrainedModel) -> Any:
    """Return the norm after the decoder layers: the last module of the decoder that is not a list of layers and has a
    weight (D,). Raises ValueError if there is none."""
    width, body = model.config.get_text_config().hidden_size, model.get_decoder()
    for module in reversed([m for m in body.children() if not isinstance(m, nn.ModuleList)]):
        if tuple(getattr(module, "weight", torch.empty(0)).shape) == (width,):
            return module
    raise ValueError(
        f"{type(model).__name__} has no norm of {width} numbers after its decoder layers, so it cannot exit early: use "
        "another kind of draft"
    )


def first_layers(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a model with the target's embeddings, first `layers` decoder layers, norm and head. Its modules are new;
    its tensors are the target's own."""
    shared = [*target.parameters(), *target.buffers()]
    model: PreTrainedModel = copy.deepcopy(target, {id(tensor): tensor for tensor in shared})
    del decoder_layers(model)[layers:]
    config = model.config.get_text_config()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return model


def learning(network: ExitNetwork, target: PreTrainedModel, first: int = 0) -> PreTrainedModel:
    """Return a model to train: the target's first layers, with the network's norm and changes as parameters. The
    target's own tensors are shared. first: the first column (0-based) of a pass that the changes apply to; earlier
    columns use the unchanged layers."""
    model = first_layers(target, network.config.num_hidden_layers)
    frozen = not any(weight.requires_grad for weight in target.parameters())
    final_norm(model).weight = network.norm
    for at, block in enumerate(decoder_layers(model)[: network.config.changed]):
        for name in network.config.projections:
            plain, change = block.get_submodule(name), network.layers[at].get_submodule(_key(name))
            if isinstance(change, FourBits):
                block.set_submodule(name, InGroups(plain, change, first, frozen))
            else:
                block.set_submodule(name, Changed(plain, cast(Change, change), first))
    return model


_SERVING: WeakKeyDictionary[ExitNetwork, tuple[Any, bytes, Stamp, PreTrainedModel]] = WeakKeyDictionary()


def serving(network: ExitNetwork, target: PreTrainedModel) -> PreTrainedModel:
    """Return a model to serve: the target's first layers, with the network's changes added to copies of the weights in
    the target's dtype.

    The result is cached, and built again when the network or the target has changed. Projections that are not plain
    `Linear` (quantised ones) get the change as a module.
    """
    weights, cached = checksum(network), _SERVING.get(network)
    if cached is None or cached[0]() is not target or cached[1] != weights or not cached[2].holds(target):
        stamp = Stamp(target, addresses=False, values=network.config.rank > 0)
        cached = _SERVING[network] = ref(target), weights, stamp, _merged(network, target)
    return cached[3]


@torch.no_grad()
def _merged(network: ExitNetwork, target: PreTrainedModel) -> PreTrainedModel:
    model = learning(network, target)
    for block in decoder_layers(model):
        for name, module in list(block.named_modules()):
            if isinstance(module, Changed) and type(module.plain) is nn.Linear:
                block.set_submodule(name, _added(module.plain, module.change))
            if isinstance(module, InGroups):
                block.set_submodule(name, module.served(final_norm(target).weight))
    norm = final_norm(model)
    norm.weight = _frozen(norm.weight, final_norm(target).weight)
    return model.eval()


def _added(plain: nn.Linear, change: Change) -> nn.Linear:
    wide = torch.promote_types(plain.weight.dtype, torch.float32)
    down, up = (part.to(plain.weight.device, wide) for part in (change.down, change.up))
    plain.weight = _frozen(plain.weight.to(wide) + up @ down, plain.weight)  # the module is a copy
    return plain


def _frozen(value: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().to(like.device, like.dtype, copy=True), requires_grad=False)


class EarlyExit(OnTargetsCache):
    """A proposer that drafts with the first layers of the engine's target, changed as `network` says (LayerSkip:
    Elhoushi et al. 2024, 2404.16710; Draft & Verify: Zhang et al. 2023, 2309.08168).

    With weights in 4 bits, it serves those that the network had when the proposer was opened for this target. With
    changes, a draft's distribution depends on its depth: the keys and values of earlier drafts come from the changed
    layers, the text's from the target. network: the exit's weights. target: the engine's model. greedy: whether to
    draft the likeliest tokens, with one-hot distributions. shape: the tree to draft, as the parent of each node (-1 for
    the text); None for chains. Raises ValueError for an encoder-decoder."""

    network_class: Any = ExitNetwork

    def __init__(
        self,
        network: ExitNetwork,
        target: PreTrainedModel,
        greedy: bool = False,
        *,
        shape: TreeShape = None,
    ) -> None:
        refuse_encoder(target)
        super().__init__(target, greedy, shape=shape)
        self.network, self.target, self.rounds = network, target, network.config.bits is not None
        self.renew()

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "EarlyExit":
        """Return a proposer for a draft folder. Raises FileNotFoundError if the folder does not exist, and ValueError
        if its files or weights are damaged or if the network does not fit the target."""
        return cls(cls.load_network(folder, arguments), arguments.target, arguments.greedy, shape=arguments.shape)

    @classmethod
    def fits(cls, network: Any, target: PreTrainedModel, where: str) -> None:
        network.fits(target, where)

    def language_model(self, rows: int, vocabulary: int) -> LM | None:
        return None if self.network.config.changed else super().language_model(rows, vocabulary)

    @property
    def weights(self) -> str | None:
        return "int4" if self.int8 else super().weights

    def renew(self, lean: bool = True) -> None:
        self.model = serving(self.network, self.target)
        self.int8 = self.rounds and lean and takes_int8(self.model)
