"""A server that answers as a vLLM that hands out hidden states, in a thread of the test."""

import fcntl
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper

from inference.models.pretrained import layers_of, tapped


class FakeVLLM:
    """What the server does. layers: whose states it writes below `folder`. faults: one for each of the next requests of
    states, see `answer`; None: it answers as it should. asked: the texts of requests so far. requests: their bodies."""

    def __init__(self, model: PreTrainedModel, folder: Path, layers: Sequence[int]) -> None:
        self.model, self.layers = model, list(layers)
        self.folder = folder / ("layers_" + "_".join(map(str, layers)))
        self.faults: list[str | None] = []
        self.asked: list[list[int]] = []
        self.requests: list[dict[str, Any]] = []
        self.says: int | None = None  # the id that it continues all texts with; None: the likeliest
        self.dtype = torch.float32  # of the states in its files
        self.numbers, self.lock, self.url = count(), threading.Lock(), ""
        # of a draft, two drafts a round; a server without one shows none. It has served others before.
        self.rounds, self.accepted, self.by_depth = 7, 3, [3, 0]
        self.drafts = False
        self.sampled = 0  # requests of texts
        self.pause = 0.0  # seconds for each new token
        self.heat = 1.0  # a fault: what it multiplies temperatures by
        self.folder.mkdir(parents=True)

    @torch.no_grad()
    def answer(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body. Text is drawn with the request's temperature, top_k, top_p and seed."""
        ids = request["prompt"]
        with self.lock:
            fault = self.faults.pop(0) if self.faults and request["max_tokens"] == 1 else None
            self.asked.append(ids)
            self.requests.append(request)
            self.sampled += request["max_tokens"] > 1
            new = self._continued(ids, request)
            rounds, accepted = len(new) // 2, len(new) - len(new) // 2
            self.rounds, self.accepted = self.rounds + rounds, self.accepted + accepted
            self.by_depth = [self.by_depth[0] + min(rounds, accepted), self.by_depth[1] + max(accepted - rounds, 0)]
            last = layers_of(self.model.config)
            normed: list[torch.Tensor] = []
            hook = self.model.base_model.norm.register_forward_pre_hook(lambda _, inputs: normed.append(inputs[0][0]))
            with tapped(self.model, [layer for layer in self.layers if layer < last]) as states:
                logits = self.model(torch.tensor([ids])).logits[0]
            hook.remove()
        if fault == "hangs":
            time.sleep(1)
        if fault == "closes":
            return 0, {}
        if fault == "unwell":
            return 503, {"error": "the engine has died"}
        if fault and fault.isdigit():
            return int(fault), {"error": "the prompt is too long"}
        path = self.folder / f"{next(self.numbers)}.safetensors"
        held = torch.stack([normed[0] if layer == last else states[layer][0] for layer in self.layers], 1)
        written = {
            "token_ids": torch.tensor(ids[::-1] if fault == "other text" else ids),
            "hidden_states": held.to(self.dtype),
        }
        if fault == "cut":
            written["hidden_states"] = held[:-1]
        if fault == "NaN":
            written["hidden_states"][0, 0, 0] = float("nan")
        lock = open(f"{path}.lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait = {"late": 0.05, "locked": 1.0}.get(fault or "", 0.0)
        threading.Timer(wait, self._write, (path, lock, written, fault)).start()
        logprobs = logits.log_softmax(-1)
        top = logprobs.topk(request.get("prompt_logprobs") or 0).indices.tolist()
        steps: list[Any] = [None]
        for i, b in enumerate(ids[1:]):
            steps.append({str(token): {"logprob": float(logprobs[i, token])} for token in {b, *top[i]}})
        choice = {"text": "", "token_ids": new, "finish_reason": "length", "prompt_logprobs": steps}
        return 200, {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}

    def _continued(self, ids: list[int], request: dict[str, Any]) -> list[int]:
        new, generator = list[int](), torch.Generator().manual_seed(request.get("seed", 0))
        for _ in range(request["max_tokens"]):
            after = self.model(torch.tensor([ids + new])).logits[0, -1]
            if self.says is not None:
                new.append(self.says)
            elif temperature := request.get("temperature", 0) * self.heat:
                scores: Any = (after / temperature).unsqueeze(0)
                if request.get("top_k", 0) > 0:
                    scores = TopKLogitsWarper(request["top_k"])(None, scores)  # type: ignore[arg-type]
                if request.get("top_p", 1.0) < 1:
                    scores = TopPLogitsWarper(request["top_p"])(None, scores)  # type: ignore[arg-type]
                new.append(int(scores[0].softmax(-1).multinomial(1, generator=generator)))
            else:
                new.append(int(after.argmax()))
            time.sleep(self.pause)
        return new

    def _write(self, path: Path, lock: Any, written: dict[str, torch.Tensor], fault: str | None) -> None:
        if fault != "lost":
            save_file({name: value.contiguous() for name, value in written.items()}, path)
        if fault == "half":
            path.write_bytes(path.read_bytes()[:-8])
        lock.close()


@contextmanager
def running(fake: FakeVLLM) -> Iterator[FakeVLLM]:
    """Let the server run within the block, at `fake.url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, {"data": [{"id": "target", "owned_by": "vllm"}]})
                return
            counted = {
                "num_drafts_total": fake.rounds,
                "num_draft_tokens_total": 2 * fake.rounds,
                "num_accepted_tokens_total": fake.accepted,
            }
            counted |= {f'num_accepted_tokens_per_pos_total{{position="{i}"}}': n for i, n in enumerate(fake.by_depth)}
            lines = (f"vllm:spec_decode_{name} {value}\n" for name, value in counted.items() if fake.drafts)
            self._write(200, "".join(lines).encode())

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*fake.answer(request))

        def _send(self, status: int, body: dict[str, Any]) -> None:
            self._write(status, json.dumps(body).encode())

        def _write(self, status: int, data: bytes) -> None:
            if not status:  # the connection is closed without an answer
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
