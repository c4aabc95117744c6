"""The estimate of `check=true`, made before any weight is loaded: what a run needs and how long it takes.

Two quick measurements of this machine, of matrix products and of copies, give the durations. A pass over many tokens is
limited by products, and a pass over one token per row by reading the weights; each takes the longer of the two times.
Caches, launches and Python are ignored, so a duration is right to a factor of about two.
"""

import math
import re
import shutil
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cotrain.config.settings import TrainConfig, from_target, judged, learnt
from cotrain.data.prompt_rows import PromptRows
from cotrain.data.sources import source_of
from cotrain.errors import UserError
from cotrain.losses.chunked import chunk_positions
from cotrain.rollout.self_prompts import LONGEST, opening
from cotrain.students.base import student_class
from cotrain.students.quantised import bits_of
from cotrain.training.deadline import SAMPLING, Deadline
from cotrain.training.job import template_of
from cotrain.training.preconditions import RunOutline, domains, ids_of, other_sampling, served_layers, shown, size_of
from inference.measure.environment import device
from inference.models import packing
from inference.models.cache import cache_bytes
from inference.models.pretrained import half, quantisation_of

WEIGHT_BYTES = {"int8": 1.0, "int8_rows": 1.0, "fp8": 1.0, "nf4": 0.5, "fp4": 0.5, "awq": 0.5, "gptq": 0.5}
TRAINED_BYTES = 16  # float32 weights, gradients and two moments of AdamW
ROUNDED_BYTES = 10  # more for a weight in 4 bits that learns: the rounded one, and what its gradient needs
GIB = 2**30
SIZE = 1024  # rows and columns of the matrices that are timed
MEMINFO = Path("/proc/meminfo")
REACHED = 1 / 3  # speed of whole models, as a share of the speed of one large product
ARMS = 4.0  # how often the timed prompts are decoded: speculatively, plainly, by transformers, some greedily
COUNTED = 32  # rows of the passes that are not timed: those for the taus of the plan and for the parity check


@dataclass(frozen=True)
class Need:
    """The needs of a run. target, draft: numbers of parameters. memory, disk: bytes."""

    target: int
    draft: int
    memory: float
    disk: float


@dataclass(frozen=True)
class Durations:
    """The seconds of each phase of a run. texts: how many texts are sampled."""

    sampling: float
    training: float
    measuring: float
    texts: int

    @property
    def total(self) -> float:
        return self.sampling + self.training + self.measuring


@dataclass(frozen=True)
class MachineSpeed:
    """The speed of this machine. flops: operations per second in a matrix product. bandwidth: bytes read per second."""

    flops: float
    bandwidth: float

    def work(self, parameters: float, tokens: float) -> float:
        """Return the seconds of passes with many tokens each, limited by matrix products. parameters: active ones of
        the model. tokens: in all passes together."""
        return 2.0 * parameters * tokens / (self.flops * REACHED)

    def step(self, parameters: float, rows: int, bytes_each: float) -> float:
        """Return the seconds of one pass over one token per row. parameters: active ones of the model. rows: the batch
        size. bytes_each: bytes per parameter."""
        return max(self.work(parameters, rows), parameters * bytes_each / self.bandwidth)


def check_resources(cfg: TrainConfig, known: RunOutline) -> list[str]:
    """Return lines for the user about a run that `require` accepts. Raises UserError, which names the keys, if there is
    too little memory or disk."""
    need, rows = estimate_need(cfg, known), known.target.config.get_text_config().vocab_size
    output = Path(cfg.output).absolute()
    memory, disk = _memory(cfg), shutil.disk_usage(next(filter(Path.exists, (output, *output.parents)))).free
    padded = " (padded rows get no mass)" * (rows > ids_of(known.tokenizer))
    quantisation = _quantisation(cfg, known).replace("none", "not quantised")
    batch = cfg.trainer.batch * cfg.trainer.accumulate
    lines = [
        f"target        {need.target / 1e6:.1f} M parameters, {quantisation}",
        f"draft         {need.draft / 1e6:.2f} M parameters, "
        + (f"init {cfg.init.kind}" if cfg.draft.trained else "nothing is trained"),
        f"vocabulary    tokenizer {ids_of(known.tokenizer)}, model {rows}{padded}",
        f"memory        {need.memory / GIB:.2f} GiB of {memory / GIB:.1f} available",
        f"disk          {need.disk / GIB:.2f} GiB of {disk / GIB:.1f} free at {cfg.output}",
        *([f"steps         {_steps(cfg)} of {batch} x at most {_longest(cfg, known)} tokens"] * cfg.draft.trained),
        *(f"sampling      the draft learns for {line}" for line in other_sampling(cfg.regime, known.target)),
        *(_from_servers(cfg, known) if cfg.teacher.urls else _lines(durations(cfg, known), cfg.minutes)),
    ]
    if need.memory > memory:
        raise UserError(
            "\n".join(lines) + "\nnot enough memory: lower trainer.batch, rollout.new_tokens or "
            f"rollout.rows, or set {'more trainer.devices' if cfg.shards_target else 'quantisation=nf4'}"
        )
    if need.disk > disk:
        raise UserError("\n".join(lines) + f"\nnot enough disk at output={cfg.output}: name another folder")
    return [*lines, *_prompts(cfg, known)]


def _from_servers(cfg: TrainConfig, known: RunOutline) -> list[str]:
    """Return lines about the states that servers send: bytes of a token and of all texts. Times are not estimated,
    since the servers' speed is not known."""
    config, texts = known.target.config.get_text_config(), cfg.rollout.texts + cfg.rollout.held_out_texts
    each = (
        len(served_layers(cfg.draft.kind, known.draft, known.target, known.tokenizer))
        * config.hidden_size
        * half(device()).itemsize
    )
    total = each * texts * _texts(cfg, known)[0]
    return [
        f"teacher       states of {each / 2**10:.0f} KiB a token in 16 bits, at most {total / GIB:.2f} GiB for {texts} "
        "texts of a domain",
        "duration      not estimated: it is that of the servers, which sample and read",
    ]


def _lines(estimated: Durations, minutes: float | None) -> list[str]:
    longer = minutes and estimated.total > 60 * minutes
    return [
        f"duration      about {_minutes(estimated.total)}, from a quick measurement of this machine:",
        f"  sampling    {_minutes(estimated.sampling)}: {estimated.texts} texts, including those of earlier runs",
        *([f"  training    {_minutes(estimated.training)}"] if estimated.training else []),
        f"  measuring   {_minutes(estimated.measuring)}, including validations",
        *([f"longer than minutes={minutes:g}: lower bench.minutes= or rollout.held_out_texts="] if longer else []),
    ]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{max(math.ceil(seconds), 1)} seconds"


def _prompts(cfg: TrainConfig, known: RunOutline) -> list[str]:
    """Return lines with the first prompts of the embedded corpora or, for data=self, with the text that the target
    continues. Return [] for the user's prompts, which are already printed."""
    if from_target(cfg.data):
        ids = opening(template_of(cfg, known.target, known.tokenizer)).ids
        return [
            f"prompts       sampled from the target itself, which begins after {str(known.tokenizer.decode(ids))!r}"
        ]
    if known.sources:
        return []  # `preconditions.require` has printed them
    template, encoder = template_of(cfg, known.target, known.tokenizer), known.target.config.is_encoder_decoder
    return shown(cfg, source_of(cfg.data, "held_out", template, encoder), known.tokenizer)


# --- memory and disk


def estimate_need(cfg: TrainConfig, known: RunOutline) -> Need:
    """Return the needs of a run: parameters, memory and disk. Sampling and training do not overlap, so the larger of
    the two counts. To certify, a joint training has three targets in memory: the trained one, and the original and the
    moved one, loaded again."""
    config = known.target.config.get_text_config()
    big, small = size_of(known.target).parameters, size_of(known.draft).parameters
    tokens = cfg.trainer.batch * _longest(cfg, known) // cfg.trainer.processes
    activations = tokens * config.hidden_size * config.num_hidden_layers * 4.0
    distributions = (
        min(tokens, chunk_positions(config.vocab_size, device())) * config.vocab_size * 4 * 8.0
    )  # those of a chunk, forward and backward
    trained = TRAINED_BYTES * float(small)
    weights = big * WEIGHT_BYTES.get(_quantisation(cfg, known), half(device()).itemsize)
    sampling = small * 4.0 + decoding(cfg, known.target.config, known.draft.config)
    if cfg.draft.bits and cfg.draft.trained:  # and a served copy
        trained += ROUNDED_BYTES * small
        sampling += small * half(device()).itemsize
    if cfg.teacher.urls:  # the layers, and what samples, are elsewhere
        weights, sampling = float(_ends_size(known.target)) * half(device()).itemsize, 0.0
    elif cfg.shards_target:  # a part of the layers, and one layer at a time
        ends, each = float(_ends_size(known.target)), weights / big
        weights = each * (ends + (big - ends) * (1 / cfg.trainer.processes + 1 / config.num_hidden_layers))
    if student_class(cfg.draft.kind).rounds_target:  # the draft is a rounded copy; only CPUs read it in 8 bits
        narrow = bits_of(cfg.draft) == "int8" and device() == "cpu"
        sampling += big * (1.0 if narrow else half(device()).itemsize)
    needs = [trained + activations + distributions, sampling, 2 * weights * (cfg.mode == "joint")]
    return Need(big, small, weights + max(needs), small * 4.0 * (cfg.trainer.validations + 4))


def _ends_size(target: PreTrainedModel) -> int:
    """Return the number of weights of a target's embeddings and head, which may share them."""
    ends: list[Any] = [target.get_input_embeddings(), target.get_output_embeddings()]
    return sum(weight.numel() for weight in {id(part.weight): part.weight for part in ends}.values())


def _quantisation(cfg: TrainConfig, known: RunOutline) -> str:
    """Return the quantisation of the target's weights: the setting, or else the checkpoint's own, such as awq or
    fp8."""
    return cfg.quantisation.kind if cfg.quantisation.kind != "none" else quantisation_of(known.target.config)


def _texts(cfg: TrainConfig, known: RunOutline) -> tuple[int, int]:
    """Return two lengths in tokens: the longest text that the target samples, and the longest text of the user: a
    prompt with its completion, or a packed block."""
    sampled = (cfg.rollout.prompt_tokens or LONGEST) + cfg.rollout.new_tokens  # 0: prompts are sampled too
    return sampled, sampled if isinstance(known.sources.get("train"), PromptRows) else cfg.data.block


def _longest(cfg: TrainConfig, known: RunOutline) -> int:
    """Return the most tokens of a text in a training step."""
    sampled, given = _texts(cfg, known)
    corpus = cfg.trainer.corpus_steps
    return max(sampled * (corpus < cfg.trainer.steps), given * (corpus > 0))


def decoding(cfg: TrainConfig, target: PretrainedConfig, draft: PretrainedConfig) -> float:
    """Return the bytes of keys and values of target and draft, including those of waiting prompts, while texts are
    sampled or while a checkpoint is timed, whichever is larger."""
    dtype = torch.float32 if device() == "cpu" else half(device())  # see `inference.models.llama.shape_of`
    shapes = [(ask.rows, ask.prompt_tokens + ask.new_tokens) for ask in (cfg.rollout, cfg.bench)]
    return max(float(sum(cache_bytes(config, *shape, dtype) for config in (target, draft))) for shape in shapes)


def _memory(cfg: TrainConfig) -> float:
    """Return the free bytes for a process's models: of its GPU, of all GPUs and main memory if the target is spread
    over these, or of main memory if there is no GPU."""
    if torch.cuda.is_available() and (cfg.target.device_map is None or cfg.shards_target):
        return float(torch.cuda.mem_get_info()[0])
    return _main_memory() + sum(float(torch.cuda.mem_get_info(i)[0]) for i in range(torch.cuda.device_count()))


def _main_memory() -> float:
    """Return the free bytes of main memory, at most the limit of a container."""
    free = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text()) if MEMINFO.exists() else None
    return float(min(int(free[1]) * 1024 if free else math.inf, packing.memory()))


def _steps(cfg: TrainConfig) -> str:
    """Return the number of steps as text; for a joint training, the number in each stage."""
    if cfg.mode != "joint":
        return str(cfg.trainer.steps)
    return f"{cfg.joint.warm_steps} + {cfg.joint.steps} with the target + {cfg.trainer.steps}"


# --- durations


def durations(cfg: TrainConfig, known: RunOutline) -> Durations:
    """Return the seconds of each phase of a run, if no texts of an earlier run can be used again."""
    machine = machine_speed()
    big, small = size_of(known.target).active, size_of(known.draft).active
    ask, size, each = cfg.rollout, cfg.bench, float(half(device()).itemsize)
    held = _count(cfg, known, "held_out")
    texts = _count(cfg, known, "train") + held
    plain = machine.step(big, ask.rows, each)
    sampling = texts / ask.rows * ask.new_tokens * plain + machine.work(big, texts * ask.prompt_tokens)
    if cfg.minutes:
        sampling = min(sampling, 60 * cfg.minutes * sum(SAMPLING.values()))
    training = _training(cfg, known, machine, big, small)
    judging = machine.work(big + small, held * (ask.prompt_tokens + ask.new_tokens)) * (cfg.trainer.validations + 1)
    one = machine.step(big, size.rows, each) / size.rows  # seconds of a token in plain decoding
    quick = size.quick_prompts * (cfg.trainer.validations + 1) * 2.0
    many = machine.step(big, COUNTED, each) / COUNTED * (COUNTED * size.new_tokens + size.parity_tokens)
    full = 60 * size.minutes or size.new_tokens * one * ARMS * size.prompts + many
    measuring = judging + (size.new_tokens * one * quick + full) * cfg.measure
    if not cfg.draft.trained:
        training = 0.0
    validation = judging / (cfg.trainer.validations + 1)
    if cfg.minutes:
        training = min(training, 60 * Deadline(cfg.minutes).training(cfg, sampling + validation, validation))
    return Durations(sampling, min(training, 60 * (cfg.trainer.minutes or math.inf)), measuring, texts)


def _training(cfg: TrainConfig, known: RunOutline, machine: MachineSpeed, big: int, small: int) -> float:
    """Return the seconds of all training steps. machine: this machine's speed. big, small: active parameters of target
    and draft. In a step that also trains the target (mode=joint), the target reads the texts twice: without its
    adapter, and with it and gradients."""
    texts = cfg.trainer.accumulate * cfg.trainer.batch / cfg.trainer.processes
    sampled, given = _texts(cfg, known)
    alone = 0.0
    for steps in (cfg.trainer.steps, *([cfg.joint.warm_steps] if cfg.mode == "joint" else [])):
        corpus = min(cfg.trainer.corpus_steps, steps)
        alone += machine.work(big + 3.0 * small, texts * (corpus * given + (steps - corpus) * sampled))
    if cfg.mode != "joint":
        return alone
    return alone + machine.work(4.0 * big + 3.0 * small, texts * cfg.joint.steps * sampled)


def _count(cfg: TrainConfig, known: RunOutline, split: str) -> int:
    """Return how many texts of a split are sampled, over its domains and temperatures."""
    ask = cfg.rollout
    most, sets = (ask.texts, len(learnt(cfg))) if split == "train" else (ask.held_out_texts, len(judged(cfg)))
    if split in known.sources:
        return len(known.sources[split].prompts(most, ask.prompt_tokens, ask.seed)) * sets
    return most * len(domains(cfg, known.target, known.sources, split)) * sets


def machine_speed() -> MachineSpeed:
    """Return the speed of this machine, timed on a product of two `SIZE` x `SIZE` matrices in the target's dtype and on
    a copy of 64 MiB. The shortest of three times counts."""
    on = device()
    a, block = torch.randn(SIZE, SIZE, device=on, dtype=half(on)), torch.ones(2**24, device=on)
    flops = _seconds(lambda: float((a @ a)[0, 0]))
    return MachineSpeed(2.0 * SIZE**3 / flops, 2.0 * block.nbytes / _seconds(lambda: float(block.clone()[0])))


def _seconds(work: Callable[[], float]) -> float:
    """Return the shortest of three times of `work` in seconds, after a warm-up."""
    return min(timeit.repeat(work, number=1, repeat=4)[1:])
