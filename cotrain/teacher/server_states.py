"""A target that serving engines run: its states come from the servers, and this process has its embeddings, final norm
and head alone.

`load_ends` loads these parts. `ServerReader` is a `Reader`, see `target_model`, so nothing else of a training knows
that the target is elsewhere.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, PreTrainedModel

from cotrain.errors import UserError
from cotrain.losses.guess import sent
from cotrain.ranks import local_rank
from cotrain.teacher.servers import Servers, servers_at
from cotrain.teacher.target_model import Head, Reader, Record, halves, in_own_precision, require_whole
from inference.models.passes import LAST
from inference.models.pretrained import auto_class, layers_of, widened

COMPARED = 8  # texts that are compared with the servers' own log-probabilities
FAR = 0.02  # mean difference of probabilities of a server that has another target, or another dtype than its files


def load_ends(path: str, dtype: str = "auto", trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the target `path` with its embeddings, final norm and head, and without decoder layers. Its config names
    all layers; a call of its body raises UserError.

    path: a folder or hub id. dtype: "auto" means the checkpoint's dtype, or float32 if the CPU would emulate it. Raises
    ValueError for an encoder-decoder, since servers do not give its encoder's states, and as `require_whole` does.
    """
    whole = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if whole.is_encoder_decoder:
        raise ValueError(
            f"teacher.url: {path} is an encoder-decoder, whose states servers do not give: leave out teacher.url="
        )
    short = deepcopy(whole)
    text = short.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    model_class: Any = auto_class(short)
    with unreported():
        model, info = model_class.from_pretrained(
            path,
            config=short,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            device_map=f"cuda:{local_rank()}" if torch.cuda.is_available() else "cpu",
            output_loading_info=True,
        )
    require_whole(model, path, info)
    if dtype == "auto":
        widened(model)
    # GPT-2 and others have the number of layers under another name in to_dict()
    text, own = model.config.get_text_config(), whole.get_text_config()
    text.num_hidden_layers = own.num_hidden_layers
    if getattr(own, "layer_types", None) is not None:
        text.layer_types = own.layer_types
    model.base_model.forward = _absent
    return model.eval().requires_grad_(False)


@contextmanager
def unreported() -> Iterator[None]:
    """Keep transformers, until the block ends, from listing the weights of the decoder layers, which are not loaded
    here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _absent(*_: Any, **__: Any) -> Any:
    raise UserError(
        "teacher.url: the target's layers run on the server, but this part of the run needs them in this process: "
        "leave out teacher.url="
    )


def final_norm(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return the norm before the head of a model that `load_ends` loaded: the one normalisation among the direct parts
    of its body. Raises ValueError if there is none, or more than one."""
    norms = [part for name, part in model.base_model.named_children() if "norm" in name or name == "ln_f"]
    if len(norms) != 1 or not isinstance(norms[0], nn.Module):
        raise ValueError(
            f"teacher.url: {type(model).__name__} has {len(norms)} norms in its body, so the one before its head is "
            "not known: leave out teacher.url="
        )
    return norms[0]


class ServerReader:
    """Reads the target's states from servers, as a `Reader` of `target_model`. Each text is one request, without its
    padding, whose states are 0.

    servers: their files have the states of `layers` in ascending order, then the states before the final norm.
    target: a model that `load_ends` loaded.
    layers: the layers to return besides LAST: 0 the embeddings, i the state after i decoder layers.
    """

    def __init__(self, servers: Servers, target: PreTrainedModel, layers: Sequence[int]) -> None:
        self.servers, self.target, self.layers = servers, target, sorted({*layers} - {LAST})
        self.norm = final_norm(target)

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor,
        position_ids: Tensor | None = None,
        source: Tensor | None = None,
        length: Tensor | None = None,
    ) -> Record:
        """Return the states (B, T, D) of texts ids (B, T), keyed by layer: the layers of `layers`, and LAST.
        position_ids (B, T): a text begins at each 0; None: each row is one text. source: not used. length (B,): the
        number of tokens of each row; None: T. Raises the errors of `Servers`."""
        width = ids.shape[1]
        sizes = [width] * len(ids) if length is None else length.tolist()
        places = [None] * len(ids) if position_ids is None else position_ids.tolist()
        rows = [_texts(row[:size], at) for row, at, size in zip(ids.tolist(), places, sizes, strict=True)]
        parts = iter(self.servers.map(lambda client, text: client.states(text), [text for row in rows for text in row]))
        states = [torch.cat([next(parts) for _ in row]) for row in rows]
        read = torch.stack([pad(part, (0, 0, 0, 0, 0, width - len(part))) for part in states]).to(self.target.dtype)
        read = sent(read, self.target.device)
        record = {layer: read[:, :, place] for place, layer in enumerate(self.layers)}
        with torch.autocast(read.device.type, enabled=False):  # mixed precision is for the draft only
            last: Tensor = self.norm(read[:, :, -1])
        return {LAST: last} | record


def _texts(ids: list[int], places: list[int] | None) -> list[list[int]]:
    """Return the texts in a row. places: the position of each id in its text; None: the row is one text."""
    starts = [i for i, place in enumerate(places[: len(ids)]) if place == 0] if places else [0]
    return [ids[a:b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]


def asked_layers(target: PreTrainedModel, layers: Sequence[int]) -> list[int]:
    """Return the numbers of the layers whose states a server must write for a student that reads `layers`: these
    without LAST in ascending order, then the number of decoder layers, which stands for the state before the final
    norm. Raises ValueError for a layer that the target does not have."""
    last, inner = layers_of(target.config), sorted({*layers} - {LAST})
    if wrong := [layer for layer in inner if not 0 <= layer < last]:
        raise ValueError(f"teacher.url: a server has no states of layers {wrong}: its layers are 0 to {last - 1}")
    return [*inner, last]


def served_elsewhere(
    urls: Sequence[str], target: PreTrainedModel, vocabulary: int, layers: Sequence[int]
) -> tuple[ServerReader, Head]:
    """Return the target as two functions: ids (B, T) -> states (B, T, D) by layer, read from the servers, and last
    states (..., D) -> logits (..., vocabulary), computed here.

    urls: the servers. target: a model that `load_ends` loaded. vocabulary: the number of ids that can have mass.
    layers: the layers to read besides LAST. Raises ValueError for a layer that the target does not have.
    """
    reader = ServerReader(servers_at(urls, asked_layers(target, layers)), target, layers)
    return reader, in_own_precision(target, halves(target, vocabulary)[1])


@torch.no_grad()
def agreement(reader: Reader, head: Head, texts: Sequence[list[int]]) -> str:
    """Return a line for the user about the log-probabilities of some texts' tokens: those from each server's states and
    the head here, compared with those that the same server computes itself. This finds another head, norm or dtype, not
    other layers. texts: token ids of each, at least one of two tokens. reader: a `ServerReader`."""
    assert isinstance(reader, ServerReader)
    gaps, masses = list[Tensor](), list[Tensor]()
    texts = [ids for ids in texts if len(ids) > 1]
    for client in reader.servers.clients:
        alone = ServerReader(Servers([client], 1), reader.target, reader.layers)
        owns = alone.servers.map(lambda client, ids: client.own_logprobs(ids).double(), texts)
        for ids, own in zip(texts, owns, strict=True):
            states = alone(torch.tensor([ids]))[LAST]
            here = head(states[0, :-1]).double().log_softmax(-1)
            here = here.gather(1, torch.tensor(ids[1:], device=here.device)[:, None])[:, 0].cpu()
            gaps.append((here - own).abs())
            masses.append((here.exp() - own.exp()).abs())
    gap, mass = torch.cat(gaps), torch.cat(masses)
    line = (
        f"teacher: log-probabilities of {len(gap)} tokens by the servers' states differ from their own by "
        f"{float(gap.mean()):.1e} in the mean and {float(gap.max()):.1e} at most, probabilities by "
        f"{float(mass.mean()):.1e}"
    )
    return f"warning: {line}: do all servers have the target of target.path=?" if mass.mean() > FAR else line
