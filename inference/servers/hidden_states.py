"""Hidden states of a text that a vLLM has prefilled: the request, and the file that its connector writes.

vLLM (0.18 and later) with `method: extract_hidden_states` answers a request with the path of a safetensors file:
token_ids (n,) and hidden_states (n, layers, D). A thread of the server writes the file after the answer, and holds a
lock on PATH.lock until the file is whole. The server's layer i is the residual stream after i decoder layers; the layer
after the last is the state before the final norm.
"""

import fcntl
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from inference.servers.openai_client import Client, Completion, completion_in, typed

CONNECTOR = "ExampleHiddenStatesConnector"
ON_CPU = {"kv_connector": "HiddenStatesOnCPU", "kv_connector_module_path": "inference.servers.vllm_states"}


def folder_name(layers: Sequence[int]) -> str:
    """Return the name of the folder for files with the states of these layers, in this order. A file does not say which
    layers it has, so its folder does."""
    return "layers_" + "_".join(map(str, layers))


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
    does not answer, rejects a request, or answers in another form."""

    def __init__(self, url: str, layers: Sequence[int] = (), **arguments: Any) -> None:
        super().__init__(url, **arguments)
        self.layers = tuple(layers)

    def states(self, ids: list[int]) -> Tensor:
        """Return the states (n, layers, D) of a text of n ids; entry (i, l) is after id i, at layer number l of the
        client's `layers`. Raises ConnectionError if the server does not answer or its file is lost or damaged. Raises
        ValueError if the file has other layers, another text, or states that are not finite."""
        asked = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        path = Path(self._read("/v1/completions", _path, asked))
        if path.parent.name != folder_name(self.layers):
            raise ValueError(
                f"{self.root} writes states to {path.parent}, but this run reads those of {folder_name(self.layers)}: "
                "start the server with the line that `cotrain teacher` prints for the same draft"
            )
        if not path.parent.is_dir():
            raise ValueError(
                f"{self.root} writes states to {path.parent}, which is not visible here: server and training must "
                "share this folder under the same path"
            )
        return read_states(path, ids, len(self.layers))

    def completion(self, answer: str) -> tuple[Completion, int | None]:
        """Return the completion in an answer, and the number of its tokens, None if the server does not say it. The
        server writes states of sampled texts too; their file is deleted."""
        with suppress(ValueError):
            discard(Path(_path(answer)))
        return completion_in(answer)

    def prompt_logprobs(self, ids: list[int]) -> Tensor:
        """Return the log-probabilities (n - 1,), in nats, that the server gives to the ids of a text after the first:
        entry i is for ids[i + 1]. Raises ConnectionError if the server does not answer, rejects the request, or answers
        in another form."""
        asked = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        return torch.tensor(self._read("/v1/completions", lambda answer: _logprobs(answer, ids), asked))


def read_states(path: Path, ids: list[int], layers: int) -> Tensor:
    """Return the states (n, layers, D) in a file, after it is whole, and delete the file. ids: the n ids of the text.
    layers: the number of layers. Raises ConnectionError if the file is missing or damaged, and ValueError if it has
    other ids, another number of layers, or states that are not finite."""
    try:
        with open(f"{path}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConnectionError(f"{path} was lost or is damaged ({error}): see whether its disk is full") from error
    finally:
        discard(path)
    if stored["token_ids"].tolist() != ids:
        raise ValueError(
            f"{path} has the states of another text: start the server again with the line that `cotrain teacher` prints"
        )
    states = stored["hidden_states"]
    if states.dim() != 3 or states.shape[:2] != (len(ids), layers):
        raise ValueError(
            f"{path} has states of shape {tuple(states.shape)}, not ({len(ids)}, {layers}, D): start the "
            "server with the line that `cotrain teacher` prints"
        )
    if not bool(states.isfinite().all()):
        raise ValueError(
            f"{path} has states that are NaN or infinite: start the server with a wider dtype, such as --dtype bfloat16"
        )
    return states


def discard(path: Path) -> None:
    """Delete a file of states and its lock, if they are there, once the server has written it. path: of the states; the
    lock is PATH.lock."""
    with suppress(OSError), open(f"{path}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    path.unlink(missing_ok=True)
    Path(f"{path}.lock").unlink(missing_ok=True)


def _path(answer: str) -> str:
    """Return the path in the answer to a request. Raises ValueError if there is none, since the server then writes no
    states."""
    sent = json.loads(answer).get("kv_transfer_params") or {}
    if "hidden_states_path" not in sent:
        raise ValueError("no hidden_states_path: start the server with the line that `cotrain teacher` prints")
    return str(typed(sent["hidden_states_path"], str))


def _logprobs(answer: str, ids: list[int]) -> list[float]:
    """Return the log-probability of each id after the first in the answer to a request."""
    steps = json.loads(answer)["choices"][0]["prompt_logprobs"][1:]
    return [float(step[str(token)]["logprob"]) for step, token in zip(steps, ids[1:], strict=True)]
