"""A client of an OpenAI-compatible server. It requests completions of prompts and reads vLLM's counters of drafts."""

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from inference.measure.arms import refuse
from inference.sampling import Sampling

UNTRANSLATED = ("banned", "processors")  # a request has no such fields
COUNTER = re.compile(r"^vllm:spec_decode_(num_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. text: the new text. ids: ids of its tokens, None from a server that does not send them.
    finish: "stop" or "length"."""

    text: str
    ids: list[int] | None
    finish: str


@dataclass(frozen=True)
class Served:
    """The counters of a server. rounds: rounds that drafted. drafted, accepted: numbers of tokens. by_depth: tokens
    accepted at each depth."""

    rounds: int
    drafted: int
    accepted: int
    by_depth: tuple[int, ...] = ()

    def __sub__(self, earlier: "Served") -> "Served":
        depths = earlier.by_depth or (0,) * len(self.by_depth)
        return Served(
            self.rounds - earlier.rounds,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in zip(self.by_depth, depths, strict=True)),
        )

    @property
    def tau(self) -> float:
        """Return tokens per target call, over calls that verified drafts; nan before the first."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")


class Client:
    """A client of one server. url: the server's root, with or without /v1. model: its name on the server, None for the
    first in the list. key: the API key, by default the environment's OPENAI_API_KEY. Raises ConnectionError, with the
    address and the answer, if the server does not answer or rejects a request."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None, timeout: float = 600.0) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        self.key, self.timeout = key or os.environ.get("OPENAI_API_KEY"), timeout
        listed = json.loads(self._read("/v1/models"))["data"][0]
        self.model = model or str(listed["id"])
        self.sends_ids = listed.get("owned_by") == "vllm"  # other servers may reject an unknown field

    def complete(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: Iterable[int],
        at_once: int = 8,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Continue every prompt (strings or ids) with one seed per prompt. At most `at_once` requests run at a time.

        ignore_eos: texts end by length only; only vLLM has this field. Raises ValueError for sampling settings that no
        request can express.
        """
        refuse(sampling, *UNTRANSLATED)
        common = _request(sampling) | {"model": self.model, "max_tokens": max_new_tokens}
        if self.sends_ids:
            common["return_token_ids"] = True
        if ignore_eos:
            common |= {"ignore_eos": True, "min_tokens": max_new_tokens}

        def one(item: tuple[Any, int]) -> Completion:
            prompt, seed = item
            answer = self._read("/v1/completions", common | {"prompt": prompt, "seed": seed % 2**63})
            choice = json.loads(answer)["choices"][0]
            return Completion(choice["text"], choice.get("token_ids"), choice.get("finish_reason") or "length")

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, zip(prompts, seeds, strict=True)))

    def counted(self) -> Served | None:
        """Return the drafting counters since the server started, or None if its page shows none."""
        return counted_in(self._read("/metrics"))

    def _read(self, path: str, body: dict[str, Any] | None = None) -> str:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer: str = response.read().decode()
                return answer
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")[:500]
            raise ConnectionError(f"{self.root}{path} answered {error.code}: {answer}") from error
        except (urllib.error.URLError, TimeoutError) as error:
            raise ConnectionError(f"{self.root}{path}: {error}") from error


def counted_in(page: str) -> Served | None:
    """Return the drafting counters of a Prometheus page of vLLM, or None if it shows none."""
    counts: dict[str, int] = {}
    depths: dict[int, int] = {}
    for name, labels, value in COUNTER.findall(page):
        at = POSITION.search(labels)
        if name == "num_accepted_tokens_per_pos" and at:
            depths[int(at[1])] = depths.get(int(at[1]), 0) + int(float(value))
        elif not at:
            counts[name] = counts.get(name, 0) + int(float(value))  # summed over engines of one server
    if "num_drafts" not in counts:
        return None
    return Served(counts["num_drafts"], counts["num_draft_tokens"], counts["num_accepted_tokens"],
                  tuple(depths[depth] for depth in sorted(depths)))  # fmt: skip


def stable_counters(client: Client, quiet: float = 2.0, limit: float = 30.0) -> Served | None:
    """Return the counters once they stop changing. A server updates its page some time after it answers."""
    counters, since, end = client.counted(), time.monotonic(), time.monotonic() + limit
    while counters and time.monotonic() - since < quiet and time.monotonic() < end:
        time.sleep(0.2)
        now = client.counted()
        if now != counters:
            counters, since = now, time.monotonic()
    return counters


def _request(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a request. Fields that OpenAI's API lacks are sent only if their values are not the
    defaults."""
    default = Sampling()
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    for name in ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(sampling, name) != getattr(default, name):
            fields[name] = getattr(sampling, name)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    for name, field in (("stop", "stop"), ("stop_ids", "stop_token_ids"), ("min_new_tokens", "min_tokens")):
        if getattr(sampling, name):
            fields[field] = getattr(sampling, name)
    return fields
