"""A target that serving engines run: its states come from the servers, and this process has its embeddings, final norm
and head alone.

`load_ends` loads these parts. `ServerReader` is a `Reader`, see `target_model`, so nothing else of a training knows
that the target is elsewhere.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from itertools import count
from typing import Any
from urllib.error import HTTPError

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from cotrain.errors import UserError
from cotrain.losses.guess import sent
from cotrain.ranks import local_rank
from cotrain.teacher.target_model import Head, Reader, Record
from inference.models.passes import LAST
from inference.models.pretrained import auto_class, head_of, layers_of, widened
from inference.servers.hidden_states import StatesClient

PATIENCE = 600.0  # seconds in which some server must answer
PAUSE = 1.0  # seconds before a server that failed is asked again
REJECTED = (400, 401, 403, 404, 413, 422)  # answers that asking again does not change
TRIES = 3  # of a text whose states came back wrong
COMPARED = 8  # texts that are compared with the server's own log-probabilities


def load_ends(path: str, dtype: str = "auto", trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the target `path` with its embeddings, final norm and head, and without decoder layers. Its config names
    all layers; a call of its body raises UserError.

    path: a folder or hub id. dtype: "auto" means the checkpoint's dtype, or float32 if the CPU would emulate it. Raises
    ValueError for an encoder-decoder, since servers do not give its encoder's states.
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
        model = model_class.from_pretrained(
            path,
            config=short,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            device_map=f"cuda:{local_rank()}" if torch.cuda.is_available() else "cpu",
        )
    if dtype == "auto":
        widened(model)
    for name, value in whole.get_text_config().to_dict().items():
        if name in ("num_hidden_layers", "layer_types"):
            setattr(model.config.get_text_config(), name, value)
    model.base_model.forward = _absent
    frozen: PreTrainedModel = model.eval().requires_grad_(False)
    return frozen


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
    """Reads the target's states from servers, as a `Reader` of `target_model`.

    Each text is one request; the requests of a batch go to the servers in turn. If a server fails, the text is asked
    for again after a pause, from the next server; the same if its states are wrong. Raises UserError if no server
    answers for PATIENCE seconds, if one rejects a request, or if states stay wrong; the same command then resumes the
    run.

    clients: one per server. Their files have the states of `layers` in ascending order, then the states before the
    final norm.
    target: a model that `load_ends` loaded.
    layers: the layers to return besides LAST: 0 the embeddings, i the state after i decoder layers.
    at_once: requests that run at a time, per server.
    """

    def __init__(
        self, clients: Sequence[StatesClient], target: PreTrainedModel, layers: Sequence[int], at_once: int = 8
    ) -> None:
        self.clients, self.target, self.layers = clients, target, sorted({*layers} - {LAST})
        self.norm = final_norm(target)
        self.turns, self.pool = count(), ThreadPoolExecutor(at_once * len(clients))
        self.seconds, self.tokens = 0.0, 0  # spent waiting, and read

    @torch.no_grad()
    def __call__(self, ids: Tensor, position_ids: Tensor | None = None, source: Tensor | None = None) -> Record:
        """Return the states (B, T, D) of texts ids (B, T), keyed by layer: the layers of `layers`, and LAST.
        position_ids (B, T): a text begins at each 0; None: each row is one text. source: not used."""
        began = time.perf_counter()
        rows, starts = ids.tolist(), (torch.zeros_like(ids) if position_ids is None else position_ids).tolist()
        texts = [
            text for row, places in zip(rows, starts, strict=True) for text in _texts(row, places, position_ids is None)
        ]
        read = torch.cat(list(self.pool.map(self._states, texts)))  # (B T, layers, D)
        read = read.view(*ids.shape, *read.shape[1:]).to(self.target.dtype)
        read = sent(read, self.target.device)
        record = {layer: read[:, :, place] for place, layer in enumerate(self.layers)}
        last: Tensor = self.norm(read[:, :, -1])
        self.seconds += time.perf_counter() - began
        self.tokens += ids.numel()
        return {LAST: last} | record

    def _states(self, ids: list[int]) -> Tensor:
        """Return the states (n, layers, D) of one text of n tokens. Raises UserError if no server gives them."""
        end, wrong = time.monotonic() + PATIENCE, 0
        while True:
            client = self.clients[next(self.turns) % len(self.clients)]
            try:
                return client.states(ids)
            except ConnectionError as error:
                rejected = isinstance(error.__cause__, HTTPError) and error.__cause__.code in REJECTED
                if rejected or time.monotonic() > end:
                    raise UserError(f"teacher.url: {error}; start the same command again to resume") from error
            except ValueError as error:
                wrong += 1
                if wrong == TRIES:
                    raise UserError(f"teacher.url: {error}") from error
            time.sleep(PAUSE)


def _texts(ids: list[int], places: list[int], whole: bool) -> list[list[int]]:
    """Return the texts in a row. places: the position of each id in its text. whole: the row is one text."""
    starts = [0] if whole else [i for i, place in enumerate(places) if place == 0]
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
    asked = asked_layers(target, layers)
    head = head_of(target)

    def logits(states: Tensor) -> Tensor:
        with torch.autocast(target.device.type, enabled=False):
            return head(states)[..., :vocabulary]

    return ServerReader([StatesClient(url, asked) for url in urls], target, layers), logits


@torch.no_grad()
def agreement(reader: Reader, head: Head, texts: Sequence[list[int]]) -> str:
    """Return a line for the user about the log-probabilities of some texts' tokens: those from the servers' states and
    the head here, compared with those that the first server computes itself. texts: token ids of each. reader: a
    `ServerReader`."""
    assert isinstance(reader, ServerReader)
    client, gaps, masses = reader.clients[0], list[Tensor](), list[Tensor]()
    for ids in texts:
        own = client.prompt_logprobs(ids).double()
        states = reader(torch.tensor([ids]))[LAST]
        here = head(states[0, :-1]).double().log_softmax(-1)
        here = here.gather(1, torch.tensor(ids[1:], device=here.device)[:, None])[:, 0].cpu()
        gaps.append((here - own).abs())
        masses.append((here.exp() - own.exp()).abs())
    gap, mass = torch.cat(gaps), torch.cat(masses)
    return (
        f"teacher: log-probabilities of {len(gap)} tokens by the server's states differ from its own by "
        f"{float(gap.mean()):.1e} in the mean and {float(gap.max()):.1e} at most, probabilities by "
        f"{float(mass.mean()):.1e}"
    )
