"""Arms of a timing. An arm is one way to continue a batch of prompts by a fixed number of tokens each."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from inference.engine import Engine
from inference.models.encoder_decoder import padded_sources
from inference.output import Counts, Stats, pooled
from inference.sampling import Sampling
from inference.source import source_of

ENDS = ("stop", "stop_ids")
UNTRANSLATED = ("presence_penalty", "frequency_penalty", "logit_bias", "banned", "banned_first", "processors")


@dataclass(frozen=True)
class ArmResult:
    """The result of one run of an arm. tokens: new ids of each prompt. seconds: wall seconds, prefill included.
    decode_seconds: wall seconds without the prefill. stats: the engine's counts, None for an arm without counts.
    decode_tokens: number of tokens that were emitted in decode_seconds, None for all."""

    tokens: list[list[int]]
    seconds: float
    decode_seconds: float
    stats: Stats | None = None
    decode_tokens: int | None = None

    def paid(self, decode: bool) -> tuple[int, float]:
        """Return (tokens, seconds), with the prefill or, if `decode`, without it."""
        total = sum(map(len, self.tokens))
        if not decode:
            return total, self.seconds
        return (total if self.decode_tokens is None else self.decode_tokens), self.decode_seconds


@dataclass(frozen=True)
class Arm:
    """One way to decode. run(prompts, ids, seed) continues every prompt; `ids` are the keys of the rows' noise."""

    name: str
    run: Callable[[Sequence[list[int]], Sequence[int], int], ArmResult]


def engine_arm(name: str, engine: Engine, sampling: Sampling, max_new_tokens: int) -> Arm:
    """Return an arm that runs Engine.generate and ignores end tokens. Raises ValueError for settings that may end a
    text early. The arm's calls raise RuntimeError if a prompt ends in an error, since its text is no sample."""
    refuse(sampling, *ENDS)

    def run(prompts: Sequence[list[int]], ids: Sequence[int], seed: int) -> ArmResult:
        start = time.perf_counter()
        out = engine.generate(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, ids=ids, ignore_eos=True
        ).whole()
        seconds = time.perf_counter() - start
        return ArmResult(out.tokens, seconds, seconds - out.stats.seconds["prefill"], out.stats)

    return Arm(name, run)


def transformers_arm(
    name: str,
    model: PreTrainedModel,
    sampling: Sampling,
    max_new_tokens: int,
    assistant: PreTrainedModel | None = None,
    k: int | None = None,
    rows: int | None = None,
    compile: bool = False,
    **settings: Any,
) -> Arm:
    """Return an arm that runs transformers' own generate under the same distribution and ignores end tokens. Each call
    replaces the generation_config of both models, so that none of its defaults changes the distribution.

    assistant: a draft for assisted generation, one prompt at a time. k: constant draft length, None for that of the
    assistant's generation_config. rows: number of prompts decoded together, None for all; there is no queue. compile:
    use transformers' static cache and compilation, on any device. settings: more arguments of generate, such as
    prompt_lookup_num_tokens.

    Decode-only figures omit the first pass and its tokens, since that pass is transformers' prefill. The arm's `ids`
    are not used: torch's generator is seeded for each call. Raises ValueError for sampling settings that this arm
    cannot express.
    """
    refuse(sampling, *ENDS, *UNTRANSLATED)
    config = _generation(sampling, max_new_tokens)
    if compile:
        config.cache_implementation, config.compile_config = "static", CompileConfig(mode="default")
        config.compile_config._compile_all_devices = True  # else it compiles only on accelerators
    single = assistant is not None or "prompt_lookup_num_tokens" in settings
    if assistant is not None:
        settings["assistant_model"] = assistant
    devices = [model.device] if model.device.type == "cuda" else []

    def run(prompts: Sequence[list[int]], ids: Sequence[int], seed: int) -> ArmResult:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(_using(model, config))
            if assistant is not None:
                stack.enter_context(_using(assistant, _drafting(assistant, k)))
            torch.manual_seed(seed)
            size = 1 if single else rows or len(prompts)
            groups = [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]
            return _joined([_generate(model, group, settings) for group in groups])

    return Arm(name, run)


def refuse(sampling: Sampling, *fields: str) -> None:
    """Raise ValueError for the first of the fields that differs from its default."""
    default = Sampling()
    for name in fields:
        if replace(default, **{name: vars(sampling)[name]}) != default:
            raise ValueError(
                f"Sampling.{name}: this arm needs a fixed number of tokens and settings that it can express, "
                f"not {vars(sampling)[name]!r}"
            )


def _generation(sampling: Sampling, max_new_tokens: int) -> GenerationConfig:
    """Return a generation config without end tokens that sets every setting. transformers would replace None by its own
    defaults (top_k = 50)."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, repetition_penalty=float(sampling.repetition_penalty))
    if sampling.temperature > 0:
        config.do_sample, config.temperature = True, float(sampling.temperature)
        config.top_k, config.top_p, config.min_p = (
            sampling.top_k,
            float(sampling.top_p),
            sampling.min_p or None,
        )
    return config


def _drafting(assistant: PreTrainedModel, k: int | None) -> GenerationConfig:
    """Return the assistant's settings, without end tokens, since it would stop drafting at them."""
    if k is None:
        config = copy.deepcopy(assistant.generation_config)
        config.eos_token_id = None
        return config
    return GenerationConfig(
        num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )


@contextmanager
def _using(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


class _Passes(BaseStreamer):
    """A streamer that records the time of the first pass, and the number of tokens that each pass gives a row."""

    def __init__(self) -> None:
        self.first = 0.0
        self.counts: list[int] = []
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.first = self.first or time.perf_counter()
        self.counts.append(value.shape[-1] if value.dim() > 1 else 1)

    def end(self) -> None: ...


def _generate(model: PreTrainedModel, prompts: list[list[int]], settings: dict[str, Any]) -> ArmResult:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)  # padded on the left
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": mask}
    sources = [source for p in prompts if (source := source_of(p)) is not None]
    if sources:
        if int(mask.min()) == 0:
            raise ValueError("transformers' generate needs decoder texts that begin with equally many ids")
        inputs = padded_sources(model, sources)[1] | {"decoder_input_ids": ids}
        settings = settings | {"decoder_start_token_id": prompts[0][0]}
    passes = _Passes()
    start = time.perf_counter()
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    texts = generate(**inputs, streamer=passes, **settings)[:, width:].tolist()
    end = time.perf_counter()
    rows = [Counts(len(text), len(passes.counts)) for text in texts]
    stats = pooled([Stats(row.tokens, row.target_calls, rows=[row]) for row in rows])
    left = sum(map(len, texts)) - len(prompts) * passes.counts[0]
    return ArmResult(texts, end - start, end - passes.first, stats, left)


def _joined(parts: list[ArmResult]) -> ArmResult:
    """Return the results of several calls as one."""
    return ArmResult(
        [text for part in parts for text in part.tokens],
        sum(part.seconds for part in parts),
        sum(part.decode_seconds for part in parts),
        pooled([part.stats for part in parts if part.stats]),
        sum(part.paid(decode=True)[0] for part in parts),
    )
