"""A client of an OpenAI-compatible server. It requests completions of prompts, and reads vLLM's counters of drafts."""

import hashlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, TypeVar

from inference.measure.arms import refuse
from inference.sampling import Sampling

T = TypeVar("T")
UNTRANSLATED = ("banned", "banned_first", "processors")  # a request has no such fields
# servers, by the owner of their models: those that know vLLM's fields, and llama.cpp
LIKE_VLLM, LLAMA_CPP = ("vllm", "sglang"), "llamacpp"
# elsewhere: fields that are ignored, and penalties that llama.cpp counts over the prompt too
LIKE_VLLM_ONLY = ("stop_ids", "min_new_tokens", "presence_penalty", "frequency_penalty")
PAGE_SECONDS = 30.0  # in which a server must answer when it has no text to write
LARGEST_BIAS = 100.0  # servers clip what is above it
OF_LLAMA_CPP = {
    "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
    "repeat_last_n": -1,
    "mirostat": 0,
    "dynatemp_range": 0.0,
}
# fields that only some servers know, or whose empty values some reject, with their neutral values
NOT_EVERYWHERE = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,
    "logit_bias": {},
    "stop": [],
    "ignore_eos": False,
}
COUNTER = re.compile(r"^vllm:spec_decode_(num_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. text: the new text. ids: the new token ids, None if the server does not send them.
    finish: "stop" or "length". end: id of the token that ended the text, None if the server does not say."""

    text: str
    ids: list[int] | None
    finish: str
    end: int | None = None


@dataclass(frozen=True)
class Served:
    """The drafting counters of a server. rounds: number of rounds that drafted. drafted, accepted: numbers of drafts.
    by_depth: number of drafts accepted at each depth (0-based)."""

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
        """Return tokens per target call, counting only calls that verified drafts; nan before the first such call."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")


class Client:
    """A client of one server. url: the server's root, with or without http:// and /v1. model: name of the model on the
    server, None for the first in its list. key: the API key, None for the one in the environment variable
    OPENAI_API_KEY. timeout: seconds to wait for a completion. Raises ConnectionError, with the address and the answer,
    if the server does not answer, rejects a request, or answers in another form."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None, timeout: float = 600.0) -> None:
        self.root = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self.key, self.timeout = key or os.environ.get("OPENAI_API_KEY"), timeout
        named, self.owner = self._read("/v1/models", _first_model)
        self.model = model or named
        self.sends_ids = self.owner == "vllm"

    def complete(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: Iterable[int],
        at_once: int = 8,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Return a completion of every prompt (text or token ids), in order. max_new_tokens: the largest number of new
        tokens of each. sampling: the settings of all prompts. seeds: one per prompt. at_once: the largest number of
        requests at a time. ignore_eos: whether texts end only by length.

        Raises ValueError for sampling settings that this server applies differently or not at all, and if the server
        ends a text before max_new_tokens. Raises ConnectionError if the server does not answer, rejects a request, or
        answers in another form.
        """
        common = self._request(sampling, max_new_tokens, ignore_eos)

        def one(item: tuple[Any, int]) -> Completion:
            prompt, seed = item
            asked = common | {"prompt": prompt, "seed": self._seed(seed)}
            completion, tokens = self._read("/v1/completions", completion_in, asked)
            if completion.finish == "length" and tokens is not None and tokens < max_new_tokens:
                raise ValueError(
                    f"{self.root} ended a text after {tokens} of {max_new_tokens} tokens: raise its context "
                    "(vLLM: --max-model-len, llama.cpp: --ctx-size) or its own limit (vLLM: max_new_tokens in "
                    "generation_config.json, llama.cpp: --n-predict)"
                )
            return completion

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, zip(prompts, seeds, strict=True)))

    def prompt_logprobs(self, ids: list[int], top: int) -> list[dict[int, float]]:
        """Return, for each id of a text after the first, the log-probabilities of the `top` likeliest ids and of the id
        itself, in nats, by id: at temperature 1, before any setting. Raises ConnectionError as `complete` does, also if
        the server has no such field; vLLM has."""
        asked = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}
        return self._read("/v1/completions", lambda answer: logprobs_in(answer, len(ids)), asked)

    def resolved_settings(self, sampling: Sampling) -> dict[str, Any] | None:
        """Return the settings that the server really uses for a request with `sampling`, by name. Return None if the
        server does not report them; only llama.cpp does."""
        if self.owner != LLAMA_CPP:
            return None
        asked = self._request(sampling, 1, False)
        said = self._read("/completion", _settings, asked | {"prompt": "1", "seed": 1})
        return {name: said[name] for name in asked if name in said}

    def _seed(self, seed: int) -> int:
        """Return a seed of the size that the server supports: 63 bits for vLLM and SGLang, 31 bits (a hash) for
        others."""
        if self.owner in LIKE_VLLM:
            return seed % 2**63
        return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest()) >> 1

    def _request(self, sampling: Sampling, max_new_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """Return the fields of a request, by name. Neutral values are sent too: for a missing field, the server would
        use the model's generation config or a default of its own. Raises ValueError for sampling settings that this
        server applies differently or not at all.

        vLLM, SGLang and llama.cpp get their own fields. Any other server may reject fields that it does not know. It
        gets OpenAI's fields, the repetition penalty under both names, and the fields of `NOT_EVERYWHERE` only if they
        are not neutral.
        """
        like_vllm = self.owner in LIKE_VLLM
        refuse(sampling, *UNTRANSLATED, *(() if like_vllm else LIKE_VLLM_ONLY))
        biases = {str(token): bias for token, bias in (sampling.logit_bias or {}).items()}
        for token, bias in biases.items():
            if abs(bias) > LARGEST_BIAS:
                raise ValueError(
                    f"Sampling.logit_bias: token {token} has the bias {bias}; servers clip biases to -{LARGEST_BIAS:g} "
                    f"... {LARGEST_BIAS:g}: use values in this range"
                )
        if self.owner == "vllm" and sampling.min_p and sampling.top_p < 1:
            raise ValueError(
                f"Sampling.min_p={sampling.min_p}, top_p={sampling.top_p}: vLLM applies min_p before top_p; set "
                "min_p=0 or top_p=1"
            )
        fields: dict[str, Any] = {
            "model": self.model,
            "n": 1,
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or (-1 if like_vllm else 0),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": biases,
            "stop": list(sampling.stop),
            "ignore_eos": ignore_eos,
        }
        if like_vllm:
            fields["skip_special_tokens"] = False
            fields["stop_token_ids"] = list(sampling.stop_ids)
            fields["min_tokens"] = max_new_tokens if ignore_eos else sampling.min_new_tokens
        else:
            fields["repeat_penalty"] = sampling.repetition_penalty
        if self.owner == LLAMA_CPP:
            fields |= OF_LLAMA_CPP
        elif not like_vllm:
            fields = {name: value for name, value in fields.items() if (name, value) not in NOT_EVERYWHERE.items()}
        return fields | ({"return_token_ids": True} if self.sends_ids else {})

    def counted(self) -> Served | None:
        """Return the drafting counters since the server started, or None if the server has none. Raises ConnectionError
        if the server does not answer, or answers in another form."""
        try:
            return self._read("/metrics", counted_in)
        except ConnectionError as error:
            if isinstance(error.__cause__, urllib.error.HTTPError):  # the server answers, and has no such page
                return None
            raise

    def _read(self, path: str, read: Callable[[str], T], body: dict[str, Any] | None = None) -> T:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.root + path, data, headers)
            with urllib.request.urlopen(request, timeout=self.timeout if data else PAGE_SECONDS) as response:
                answer: str = response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")[:500]
            if error.code == 401:
                answer += "; OPENAI_API_KEY in the environment must be the server's key"
            raise ConnectionError(f"{self.root}{path} answered {error.code}: {answer}") from error
        except (OSError, HTTPException, ValueError) as error:  # ValueError: of an address that is none
            raise ConnectionError(
                f"{self.root}{path} does not answer ({error}): start the server, or correct the address"
            ) from error
        try:
            return read(answer)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ConnectionError(
                f"{self.root}{path} answered in another form than vLLM, SGLang and llama.cpp do "
                f"({type(error).__name__}: {error}): {answer[:200]!r}"
            ) from error


def _first_model(answer: str) -> tuple[str, Any]:
    """Return the name and the owner of the first model in a server's list. The owner may be None."""
    listed = json.loads(answer)["data"][0]
    return typed(listed["id"], str), listed.get("owned_by")


def completion_in(answer: str) -> tuple[Completion, int | None]:
    """Return a completion, and its number of tokens (None if the server does not send it). answer: the server's, as
    JSON text."""
    read = json.loads(answer)
    choice = read["choices"][0]
    ids, finish, usage = choice.get("token_ids"), choice.get("finish_reason"), read.get("usage")
    end = choice.get("stop_reason", choice.get("matched_stop"))  # of vLLM, of SGLang: an id or a stop string
    tokens = usage.get("completion_tokens") if usage is not None and ids is None else None
    tokens = tokens if ids is None else len([typed(one, int) for one in typed(ids, list)])
    completion = Completion(
        typed(choice["text"], str),
        ids,
        "length" if finish is None else typed(finish, str),
        end if isinstance(end, int) else None,
    )
    return completion, None if tokens is None else typed(tokens, int)


def logprobs_in(answer: str, ids: int) -> list[dict[int, float]]:
    """Return the log-probabilities in the answer to a request with prompt_logprobs, by id, for each of a text's ids
    after the first. answer: the server's, as JSON text. ids: number of the text's ids."""
    steps = typed(json.loads(answer)["choices"][0]["prompt_logprobs"], list)[1:]
    if len(steps) != ids - 1:
        raise ValueError(f"log-probabilities of {len(steps)} ids instead of {ids - 1}")
    return [{int(token): float(one["logprob"]) for token, one in typed(step, dict).items()} for step in steps]


def _settings(answer: str) -> dict[str, Any]:
    """Return the sampling settings in an answer of llama.cpp; {} if the answer has none."""
    said = json.loads(answer).get("generation_settings")
    return {} if said is None else typed(said, dict)


def typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} instead of {value!r:.40}")
    return value


def counted_in(page: str) -> Served | None:
    """Return the drafting counters in a Prometheus page of vLLM, or None if the page has none. Raises KeyError for a
    page with only some of the counters, and ValueError or OverflowError for a value that is no number."""
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
    return Served(
        counts["num_drafts"],
        counts["num_draft_tokens"],
        counts["num_accepted_tokens"],
        tuple(depths[depth] for depth in sorted(depths)),
    )


def stable_counters(client: Client, quiet: float = 2.0, limit: float = 30.0) -> Served | None:
    """Return a server's drafting counters once they have not changed for `quiet` seconds, or after `limit` seconds. A
    server updates them some time after it answers. Return None if the server has none. Raises ConnectionError if the
    server does not answer."""
    counters, since, end = client.counted(), time.monotonic(), time.monotonic() + limit
    while counters and time.monotonic() - since < quiet and time.monotonic() < end:
        time.sleep(0.2)
        now = client.counted()
        if now != counters:
            counters, since = now, time.monotonic()
    return counters
