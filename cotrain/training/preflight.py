"""`check=true`: what a run would need and how long it would take, told before any weight is loaded whole."""

import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from cotrain.config.settings import TrainConfig
from cotrain.errors import UserError
from cotrain.losses.chunked import positions
from cotrain.training.durations import Durations, durations
from cotrain.training.job import source
from cotrain.training.preconditions import Known, ids_of
from cotrain.training.sizes import size_of
from inference.measure.environment import device
from inference.models.dtypes import half
from inference.models.memory import cache_bytes

WEIGHT_BYTES = {"int8": 1.0, "nf4": 0.5}
TRAINED_BYTES = 16  # float32 weights, gradients and two moments of AdamW
GIB = 2**30
MEMINFO = Path("/proc/meminfo")
SHOWN = 300  # characters of a prompt, from either end


@dataclass(frozen=True)
class Need:
    """Parameters, and bytes of memory and disk, that a run takes."""

    target: int
    draft: int
    memory: float
    disk: float


def check(cfg: TrainConfig, known: Known) -> list[str]:
    """Lines to print of a run whose preconditions hold. Raises UserError, naming the key, for what will not fit."""
    need, rows = estimate(cfg, known), known.target.config.get_text_config().vocab_size
    memory, disk = _memory(), shutil.disk_usage(_parent(Path(cfg.output))).free
    lines = [
        f"target        {need.target / 1e6:.1f} M parameters, {cfg.quantisation.kind} quantisation",
        f"draft         {need.draft / 1e6:.2f} M parameters, init {cfg.init.kind}",
        f"vocabulary    tokenizer {ids_of(known.tokenizer)}, model {rows} (padded rows get no mass)",
        f"memory        {need.memory / GIB:.2f} GiB of {memory / GIB:.1f} available",
        f"disk          {need.disk / GIB:.2f} GiB of {disk / GIB:.1f} free at {cfg.output}",
        f"steps         {cfg.trainer.steps} of {cfg.trainer.batch * cfg.trainer.accumulate} x {cfg.data.block} tokens",
        *_durations(durations(cfg, known)),
    ]
    if need.memory > memory:
        raise UserError("\n".join(lines) + "\nnot enough memory: lower trainer.batch, data.block or rollout.rows, or "
                                           "quantisation=nf4")  # fmt: skip
    if need.disk > disk:
        raise UserError("\n".join(lines) + f"\nnot enough disk at output={cfg.output}: name another folder")
    return [*lines, _prompt(cfg, known)]


def _durations(found: Durations) -> list[str]:
    """Minutes in all and by phase."""
    return [
        f"duration      about {_minutes(found.total)}, from a quick measure of this machine:",
        f"  sampling    {_minutes(found.sampling)}: {found.texts} texts, those kept from earlier runs included",
        *([f"  training    {_minutes(found.training)}"] if found.training else []),
        f"  measuring   {_minutes(found.measuring)}, with validations",
    ]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{max(math.ceil(seconds), 1)} seconds"


def _prompt(cfg: TrainConfig, known: Known) -> str:
    """The first prompt that texts are sampled from, special tokens included, as the target sees it."""
    split = "train" if known.sources else "held_out"
    texts = known.sources.get(split) or source(cfg, split, known.target, known.tokenizer)
    ((_, ids), *_) = texts.prompts(1, cfg.rollout.prompt_tokens, cfg.rollout.seed)
    text = str(known.tokenizer.decode(ids))
    shown = text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} ... {text[-SHOWN:]}"
    return f"prompt        of {len(ids)} tokens, as the target sees it: {shown!r}"


def estimate(cfg: TrainConfig, known: Known) -> Need:
    """Of models without storage. Sampling and training follow one another: memory is of the larger of the two."""
    config = known.target.config.get_text_config()
    big, small = size_of(known.target).parameters, size_of(known.draft).parameters
    tokens = cfg.trainer.batch * cfg.data.block // (cfg.trainer.devices * cfg.trainer.nodes)
    activations = tokens * config.hidden_size * config.num_hidden_layers * 4.0
    distributions = (
        min(tokens, positions(config.vocab_size)) * config.vocab_size * 4 * 8.0
    )  # of a chunk, there and back
    learnt = small * (TRAINED_BYTES + 4.0 * bool(cfg.trainer.ema))
    held = big * WEIGHT_BYTES.get(cfg.quantisation.kind, half(device()).itemsize)
    sampling = small * 4.0 + decoding(cfg, known.target.config, known.draft.config)
    disk = small * 4.0 * (cfg.trainer.validations + 4)
    return Need(big, small, held + max(learnt + activations + distributions, sampling), disk)


def decoding(cfg: TrainConfig, target: PretrainedConfig, draft: PretrainedConfig) -> float:
    """Bytes of keys and values, waiting prompts' too, while texts are sampled or a checkpoint is timed, whichever are
    more."""
    held = torch.float32 if device() == "cpu" else half(device())  # see `inference.models.llama_weights.shape_of`
    shapes = [(ask.rows, ask.prompt_tokens + ask.new_tokens) for ask in (cfg.rollout, cfg.bench)]
    return max(float(sum(cache_bytes(config, *shape, held) for config in (target, draft))) for shape in shapes)


def _memory() -> float:
    """Bytes that a run can take: of the GPU when there is one, else of main memory."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    if MEMINFO.exists():  # what counts as free there leaves out caches, which give way
        found = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text())
        if found:
            return float(found[1]) * 1024
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _parent(path: Path) -> Path:
    """The nearest folder that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
