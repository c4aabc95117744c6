"""Arms of a timing. An arm is one way to decode: it continues a batch of prompts by a fixed number of tokens each."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from inference.engine import Engine
from inference.models.encoder_decoder import padded_sources
from inference.output import Counts, Stats, pooled
from inference.sampling import Sampling
from inference.source import source_in_text

ENDS = ("stop", "stop_ids")
UNTRANSLATED = ("presence_penalty", "frequency_penalty", "logit_bias", "banned", "banned_first", "processors")


@dataclass(frozen=True)
class ArmResult:
    """The result of one run of an arm. tokens: for each prompt, its new ids. seconds: wall seconds, prefill included.
    decode_seconds: wall seconds without the prefill. stats: the engine's counts, None for an arm without counts.
    decode_tokens: number of tokens that were emitted in decode_seconds, None for all tokens."""

    tokens: list[list[int]]
    seconds: float
    decode_seconds: float
    stats: Stats | None = None
    decode_tokens: int | None = None

    def paid(self, decode: bool) -> tuple[int, float]:
        """Return (number of tokens, wall seconds), prefill included. decode: whether to leave the prefill out."""
        total = sum(map(len, self.tokens))
        if not decode:
            return total, self.seconds
        return (total if self.decode_tokens is None else self.decode_tokens), self.decode_seconds


@dataclass(frozen=True)
class Arm:
    """One way to decode. name: its name in reports. run(prompts, ids, seed): continues every prompt, and returns the
    result. prompts: token ids of each prompt. ids: for each prompt, the key of its row's random numbers. seed: of these
    numbers."""

    name: str
    run: Callable[[Sequence[list[int]], Sequence[int], int], ArmResult]


def engine_arm(name: str, engine: Engine, sampling: Sampling, max_new_tokens: int) -> Arm:
    """Return an arm that runs Engine.generate and ignores end tokens. max_new_tokens: the number of new tokens of each
    prompt. name: the arm's name in reports. sampling: the settings of every prompt. Raises ValueError for settings that
    may end a text early. The arm's run raises RequestError if a prompt ends in an error, since its text is then no
    sample."""
    refuse(sampling, *ENDS)

    def run(prompts: Sequence[list[int]], ids: Sequence[int], seed: int) -> ArmResult:
        start = time.perf_counter()
        out = engine.generate(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, ids=ids, ignore_eos=True
        ).whole()
        seconds = time.perf_counter() - start
        return ArmResult(out.tokens, seconds, seconds - out.stats.seconds["prefill"], out.stats)

    return Arm(name, run)


def transformers_arm(name: str, model: PreTrainedModel, sampling: Sampling, max_new_tokens: int) -> Arm:
    """Return an arm that runs transformers' own generate under the same distribution and ignores end tokens. During
    each run it replaces the model's generation_config, so that no default in it changes the distribution.

    Decode-only figures omit the first pass and its tokens, since this pass is transformers' prefill. The arm's `ids`
    are not used: torch's generator is seeded for each run. name: the arm's name in reports. max_new_tokens: the number
    of new tokens of each prompt. Raises ValueError for sampling settings that this arm cannot express.
    """
    refuse(sampling, *ENDS, *UNTRANSLATED)
    config = generation_config(sampling, max_new_tokens)

    def run(prompts: Sequence[list[int]], ids: Sequence[int], seed: int) -> ArmResult:
        with seeded(model, seed), generating_by(model, config):
            return generate(model, list(prompts))

    return Arm(name, run)


@contextmanager
def seeded(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Within the `with` block, draw torch's random numbers from `seed`, on the CPU and on the model's GPU. Afterwards
    restore the generators."""
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed)
        yield


def refuse(sampling: Sampling, *fields: str) -> None:
    """Raise ValueError for the first of these fields of `sampling` that differs from its default. fields: names of
    settings that an arm cannot express."""
    default = Sampling()
    for name in fields:
        if replace(default, **{name: vars(sampling)[name]}) != default:
            raise ValueError(
                f"Sampling.{name}={vars(sampling)[name]!r} cannot be timed: it may end a text early, or the "
                f"other decoder lacks it; leave it at {vars(default)[name]!r}"
            )


def generation_config(sampling: Sampling, max_new_tokens: int) -> GenerationConfig:
    """Return a transformers generation config with the temperature, top-k, top-p, min-p and repetition penalty of
    `sampling`, and without end tokens. It sets all of these, since transformers replaces a missing one by its own
    default (top_k = 50). Temperature 0 gives greedy decoding."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, repetition_penalty=float(sampling.repetition_penalty))
    if sampling.temperature > 0:
        config.do_sample, config.temperature = True, float(sampling.temperature)
        config.top_k, config.top_p, config.min_p = sampling.top_k, float(sampling.top_p), sampling.min_p or None
    return config


@contextmanager
def generating_by(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Within the `with` block, replace the model's generation config."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


class _Passes(BaseStreamer):
    """A streamer that records when the first pass ended, and how many tokens each pass added to a row."""

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


def generate(model: PreTrainedModel, prompts: list[list[int]], **settings: Any) -> ArmResult:
    """Return the result of transformers' generate. prompts: ids; all prompts are decoded together. settings: more
    arguments of transformers' generate. Raises ValueError if the prompts of an encoder-decoder (the ids that the
    decoder's texts begin with) differ in length."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)  # padded on the left
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": mask}
    sources = [source for p in prompts if (source := source_in_text(p)) is not None]
    if sources:
        if int(mask.min()) == 0:
            raise ValueError(
                "transformers' generate: the decoder prompts of one batch must have the same number of ids, but here "
                f"they have {min(map(len, prompts))} to {width}; give decoder prompts of equal length"
            )
        inputs = padded_sources(model, sources)[1] | {"decoder_input_ids": ids}
        settings = settings | {"decoder_start_token_id": prompts[0][0]}
    passes = _Passes()
    start = time.perf_counter()
    run: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    texts = run(**inputs, streamer=passes, **settings)[:, width:].tolist()
    end = time.perf_counter()
    rows = [Counts(len(text), len(passes.counts)) for text in texts]
    stats = pooled([Stats(row.tokens, row.target_calls, rows=[row]) for row in rows])
    left = sum(map(len, texts)) - len(prompts) * passes.counts[0]
    return ArmResult(texts, end - start, end - passes.first, stats, left)
