"""Hidden states of a text that a vLLM has prefilled: the request, and the file that its connector writes.

vLLM (0.18 and later) with `method: extract_hidden_states` answers a request with the path of a safetensors file:
token_ids (n,) and hidden_states (n, layers, D). A thread of the server writes the file after the answer, and holds a
lock on PATH.lock until the file is whole. The server's layer i is the residual stream after i decoder layers; the layer
after the last is the state before the final norm.
"""

import fcntl
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from inference.servers.openai_client import Client, typed

T = TypeVar("T")
CONNECTOR = "ExampleHiddenStatesConnector"
# the folder that vLLM imports the connector for a CPU from
ON_VLLM = Path(__file__).with_name("on_vllm")
ON_CPU = {"kv_connector": "HiddenStatesOnCPU", "kv_connector_module_path": "states_on_cpu"}
LAYERS = "layers_"
LOCKED = 60.0  # seconds in which a server must have written a file
OLD = 1800.0


class WrongStates(ValueError):
    """A file has other states than those that were asked for."""


class NoStates(ValueError):
    """A server does not give the states that a run needs, whatever it is asked."""


def folder_name(layers: Sequence[int]) -> str:
    """Return the name of the folder for files with the states of these layers, in this order. A file does not say which
    layers it has, so its folder does."""
    return LAYERS + "_".join(map(str, layers))


def vllm_arguments(layers: Sequence[int], folder: Path, cpu: bool) -> list[str]:
    """Return the arguments of `vllm serve` with which a server writes the states of `layers` below `folder`. cpu:
    whether it runs on a CPU. Prefix caching and chunked prefill are off, since files would then lack states."""
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
    where = {"shared_storage_path": str(folder / folder_name(layers))}
    connector = (ON_CPU if cpu else {"kv_connector": CONNECTOR}) | {"kv_role": "kv_producer"}
    return [
        "--no-enable-prefix-caching",
        "--no-enable-chunked-prefill",
        f"--speculative-config={json.dumps(method)}",
        f"--kv-transfer-config={json.dumps(connector | {'kv_connector_extra_config': where})}",
    ]


class StatesClient(Client):
    """A client of a server that writes hidden states. url: the server's root. layers: the layers whose states its files
    must have, in order. arguments: `model`, `key` and `timeout`, as in `Client`. Raises ConnectionError if the server
    does not answer, rejects a request, or answers in another form.

    Such a server writes a file for every request. The file is deleted once it is read, or at once if the request was
    not for states. Files of requests that were given up stay, until the first states that a later client reads from the
    folder (`sweep`).
    """

    def __init__(self, url: str, layers: Sequence[int], **arguments: Any) -> None:
        self.layers, self.swept = tuple(layers), False
        super().__init__(url, **arguments)

    def _read(self, path: str, read: Callable[[str], T], body: dict[str, Any] | None = None) -> T:
        left = list[Path]()

        def noting(answer: str) -> T:
            if body and (file := _file(answer)):
                left.append(file)
            return read(answer)

        try:
            return super()._read(path, noting, body)
        finally:
            for file in left if read is not _file else []:
                discard(file)

    def states(self, ids: list[int]) -> Tensor:
        """Return the states (n, layers, D) of a text of n ids; entry (i, l) is after id i, at layer number l of the
        client's `layers`. Raises ConnectionError if the server does not answer or its file is lost or damaged,
        WrongStates if the file is of another text or has other shapes or states that are not finite, and NoStates if
        the server writes no files, those of other layers, or in a folder that is not visible here."""
        asked = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        path = self._read("/v1/completions", _file, asked)
        if path is None:
            raise NoStates(f"{self.root} gives no hidden states: start it with the line that `cotrain teacher` prints")
        if path.parent.name != folder_name(self.layers):
            discard(path)
            raise NoStates(
                f"{self.root} writes states to {path.parent}, but this run reads those of {folder_name(self.layers)}: "
                "start the server with the line that `cotrain teacher` prints for the same draft"
            )
        if not path.parent.is_dir():
            raise NoStates(
                f"{self.root} writes states to {path.parent}, which is not visible here: server and training must "
                "share this folder under the same path"
            )
        if not self.swept:
            self.swept = True
            sweep(path.parent)
        return read_states(path, ids, len(self.layers))

    def own_logprobs(self, ids: list[int]) -> Tensor:
        """Return the log-probabilities (n - 1,) that the server gives to the ids of a text after the first, in nats:
        entry i is of id i + 1. Raises ConnectionError as `Client` does."""
        steps = self.prompt_logprobs(ids, 0)
        try:
            return torch.tensor([step[token] for step, token in zip(steps, ids[1:], strict=True)])
        except KeyError as error:
            raise ConnectionError(f"{self.root} gives no log-probability of token {error}") from error


def read_states(path: Path, ids: list[int], layers: int) -> Tensor:
    """Return the states (n, layers, D) in a file of `StatesClient.states`, after it is whole, and delete the file.
    Raises ConnectionError if the file is missing or damaged, or not whole after LOCKED seconds; WrongStates if it has
    other ids, another number of layers, or states that are not finite."""
    try:
        _await_whole(path)
        stored = load_file(path)
        of_ids, states = stored["token_ids"].tolist(), stored["hidden_states"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ConnectionError(f"{path} was lost or is damaged: {error}") from error
    finally:
        discard(path)
    if of_ids != ids:
        raise WrongStates(f"{path} has the states of another text")
    if states.dim() != 3 or states.shape[:2] != (len(ids), layers):
        raise WrongStates(f"{path} has states of shape {tuple(states.shape)}, not ({len(ids)}, {layers}, D)")
    if not bool(states.isfinite().all()):
        raise WrongStates(f"{path} has states that are NaN or infinite")
    return states


def _await_whole(path: Path) -> None:
    """Wait until the server has written a file. Raises OSError without its lock, or after LOCKED seconds."""
    end = time.monotonic() + LOCKED
    with open(f"{path}.lock") as lock:
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.005)


def discard(path: Path) -> None:
    """Delete a file of states and its lock once the server has written it. A path that such a server would not write is
    left alone: it must end in .safetensors, lie in a folder of `folder_name`, and have a lock. Raises NoStates if the
    file belongs to another user."""
    lock = Path(f"{path}.lock")
    if path.suffix != ".safetensors" or not path.parent.name.startswith(LAYERS) or not lock.is_file():
        return
    with suppress(OSError):
        _await_whole(path)
    try:
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    except PermissionError as error:
        raise NoStates(
            f"{path} cannot be deleted: run server and training as one user, or make {path.parent} writable for both"
        ) from error


def sweep(folder: Path) -> None:
    """Delete the files of states in a folder that are older than OLD seconds: nobody reads them any more."""
    for path in folder.glob("*.safetensors"):
        with suppress(OSError, NoStates):
            if time.time() - path.stat().st_mtime > OLD:
                discard(path)


def _file(answer: str) -> Path | None:
    """Return the path in the answer to a request, None if it has none."""
    sent = json.loads(answer).get("kv_transfer_params") or {}
    path = sent.get("hidden_states_path")
    return None if path is None else Path(typed(path, str))
