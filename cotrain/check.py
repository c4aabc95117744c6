"""`check=true`: what a run would need, told before any weight is loaded whole."""

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.assembly import initial
from cotrain.config import TrainConfig
from cotrain.errors import UserError
from cotrain.rows import positions
from cotrain.teacher import load_config
from inference.environment import device
from inference.memory import cache_bytes
from inference.precision import half

WEIGHT_BYTES = {"int8": 1.0, "nf4": 0.5}
TRAINED_BYTES = 16  # float32 weights, gradients and two moments of AdamW
GIB = 2**30
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Need:
    """Parameters, bytes of memory and disk, and seconds that a run is expected to take."""

    target: int
    draft: int
    memory: float
    disk: float
    seconds: float


def check(cfg: TrainConfig) -> list[str]:
    """Lines to print. Raises UserError, naming the key to change, for what will not work or fit."""
    if cfg.init.kind == "pretrained" and cfg.draft.path is None:
        raise UserError("init=pretrained: name the draft with draft.path=")
    config, tokenizer = load_config(cfg.target.path, cfg.target.trust_remote_code)
    vocabulary = _vocabulary(cfg.target.path, config, tokenizer)
    need = estimate(cfg, config)
    memory, disk = _memory(), shutil.disk_usage(_parent(Path(cfg.output))).free
    lines = [
        f"target        {need.target / 1e6:.1f} M parameters, {cfg.quantisation.kind} quantisation",
        f"draft         {need.draft / 1e6:.2f} M parameters, init {cfg.init.kind}",
        f"vocabulary    tokenizer {vocabulary}, model {config.get_text_config().vocab_size} (padded rows get no mass)",
        f"memory        {need.memory / GIB:.2f} GiB of {memory / GIB:.1f} available",
        f"disk          {need.disk / GIB:.2f} GiB of {disk / GIB:.1f} free at {cfg.output}",
        f"steps         {cfg.trainer.steps} of {cfg.trainer.batch * cfg.trainer.accumulate} x {cfg.data.block} tokens",
        f"duration      about {need.seconds / 60:.0f} minutes of training, from a quick measure of this machine",
    ]
    if need.memory > memory:
        raise UserError(
            "\n".join(lines) + "\nnot enough memory: lower trainer.batch or data.block, or quantisation=nf4"
        )
    if need.disk > disk:
        raise UserError("\n".join(lines) + f"\nnot enough disk at output={cfg.output}: name another folder")
    return lines


def _vocabulary(place: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Ids of the tokenizer, which must all have a row in the model."""
    size, rows = 1 + max(tokenizer.get_vocab().values(), default=-1), config.get_text_config().vocab_size
    if not 0 < size <= rows:
        raise UserError(f"target.path: {place} has a tokenizer of {size} ids and a model of {rows}")
    return size


def estimate(cfg: TrainConfig, config: PretrainedConfig) -> Need:
    """Sizes from models without storage, time from a quick matrix product on this machine."""
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
        draft = initial(cfg, target) if cfg.init.kind != "pretrained" else target
    big, small = _count(target), _count(draft)
    text = config.get_text_config()
    whole = cfg.trainer.batch * cfg.data.block  # of all devices
    tokens = whole // (cfg.trainer.devices * cfg.trainer.nodes)
    activations = tokens * text.hidden_size * text.num_hidden_layers * 4.0
    laws = min(tokens, positions(text.vocab_size)) * text.vocab_size * 4 * 8.0  # of a chunk, there and back
    learnt = small * (TRAINED_BYTES + 4.0 * bool(cfg.trainer.ema))
    memory = big * WEIGHT_BYTES.get(cfg.quantisation.kind, half(device()).itemsize) + learnt + activations + laws
    memory += decoding(cfg, config, draft.config)
    disk = small * 4.0 * (cfg.trainer.validations + 4)
    work = cfg.trainer.steps * cfg.trainer.accumulate * tokens * (2.0 * big + 6.0 * small)
    return Need(big, small, memory, disk, work / _flops())


def decoding(cfg: TrainConfig, target: PretrainedConfig, draft: PretrainedConfig) -> float:
    """Bytes of keys and values, waiting prompts' too, while texts are sampled or a checkpoint is timed, whichever are
    more."""
    held = torch.float32 if device() == "cpu" else half(device())  # see `inference.lean.shape_of`
    shapes = [(ask.rows, ask.prompt_tokens + ask.new_tokens) for ask in (cfg.rollout, cfg.bench)]
    return max(float(sum(cache_bytes(config, *shape, held) for config in (target, draft))) for shape in shapes)


def _count(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _flops(size: int = 1024, repeats: int = 3) -> float:
    """Operations per second of a matrix product, a third of it, as whole models reach."""
    a = torch.randn(size, size, device=device(), dtype=half(device()))
    float((a @ a)[0, 0])
    start = time.perf_counter()
    for _ in range(repeats):
        float((a @ a)[0, 0])
    return 2.0 * size**3 * repeats / (time.perf_counter() - start) / 3


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
