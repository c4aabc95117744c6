"""How long the phases of a training run take, from two quick measures of this machine: products and copies.

A pass over many tokens is bound by products, one that emits a token a row by reading the weights; each costs at least
the larger of the two. Caches, launches and Python are left out, so a figure is right to a factor of two or so.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cotrain.config.regimes import judged, learnt
from cotrain.config.settings import TrainConfig
from cotrain.students.base import UNTRAINED
from cotrain.training.preconditions import Known, domains
from cotrain.training.run_budget import SAMPLING, left_of
from cotrain.training.sizes import size_of
from inference.measure.environment import device
from inference.models.dtypes import half

REACHED = 1 / 3  # of the speed of one large product, by whole models
ARMS = 4.0  # times the timed prompts are decoded: speculatively, plainly, by transformers, some greedily
COUNTED = 32  # rows where only counts matter, of the taus of the plan and the parity check


@dataclass(frozen=True)
class Durations:
    """Seconds of each phase, and how many texts are sampled."""

    sampling: float
    training: float
    measuring: float
    texts: int

    @property
    def total(self) -> float:
        return self.sampling + self.training + self.measuring


@dataclass(frozen=True)
class Machine:
    """Operations a second of a matrix product, and bytes a second that are read."""

    flops: float
    bandwidth: float

    def work(self, parameters: float, tokens: float) -> float:
        """Seconds of passes over so many tokens in all, many at once."""
        return 2.0 * parameters * tokens / (self.flops * REACHED)

    def step(self, parameters: float, rows: int, bytes_each: float) -> float:
        """Seconds of a pass that gives each row a token."""
        return max(self.work(parameters, rows), parameters * bytes_each / self.bandwidth)


def durations(cfg: TrainConfig, known: Known) -> Durations:
    """Of a run that finds no texts kept by an earlier one."""
    machine = measured()
    big, small = size_of(known.target).active, size_of(known.draft).active
    ask, size, each = cfg.rollout, cfg.bench, float(half(device()).itemsize)
    texts = _texts(cfg, known)
    plain = machine.step(big, ask.rows, each)
    sampling = texts / ask.rows * ask.new_tokens * plain + machine.work(big, texts * ask.prompt_tokens)
    if cfg.minutes:
        sampling = min(sampling, 60 * cfg.minutes * sum(SAMPLING.values()))
    tokens = cfg.trainer.steps * cfg.trainer.accumulate * cfg.trainer.batch * cfg.data.block
    training = machine.work(big + 3.0 * small, tokens / (cfg.trainer.devices * cfg.trainer.nodes))
    held = texts - _count(cfg, known, "train")
    judged = machine.work(big + small, held * (ask.prompt_tokens + ask.new_tokens)) * (cfg.trainer.validations + 1)
    one = machine.step(big, size.rows, each) / size.rows  # of a token, decoded plainly
    quick = size.quick_prompts * (cfg.trainer.validations + 1) * 2.0
    many = machine.step(big, COUNTED, each) / COUNTED * (COUNTED * size.new_tokens + size.parity_tokens)
    measuring = judged + (size.new_tokens * one * (quick + ARMS * size.prompts) + many) * cfg.measure
    if cfg.draft.kind in UNTRAINED:
        training = 0.0
    allowed = _in_time(cfg, training, sampling, judged / (cfg.trainer.validations + 1))
    return Durations(sampling, allowed, measuring, texts)


def _in_time(cfg: TrainConfig, training: float, sampling: float, validation: float) -> float:
    """Seconds of training that its budget, or the run's, allows."""
    if cfg.minutes:
        training = min(training, 60 * left_of(cfg, sampling + validation, validation))
    return min(training, 60 * cfg.trainer.minutes) if cfg.trainer.minutes else training


def _texts(cfg: TrainConfig, known: Known) -> int:
    return _count(cfg, known, "train") + _count(cfg, known, "held_out")


def _count(cfg: TrainConfig, known: Known, split: str) -> int:
    """Texts of a split that are sampled, over its domains and temperatures."""
    ask = cfg.rollout
    most, sets = (ask.texts, len(learnt(cfg))) if split == "train" else (ask.held_out_texts, len(judged(cfg)))
    if split in known.sources:
        return len(known.sources[split].prompts(most, ask.prompt_tokens, ask.seed)) * sets
    return most * len(domains(cfg, known.sources, split)) * sets


def measured(size: int = 1024, repeats: int = 3) -> Machine:
    """A square product in the dtype of the target, and a copy of 64 MiB."""
    place = device()
    a, block = torch.randn(size, size, device=place, dtype=half(place)), torch.ones(2**24, device=place)
    flops = _seconds(lambda: float((a @ a)[0, 0]), repeats)
    copied = _seconds(lambda: float(block.clone()[0]), repeats)
    return Machine(2.0 * size**3 / flops, 2.0 * block.nbytes / copied)


def _seconds(work: Callable[[], float], repeats: int) -> float:
    """The least of some times, behind one that warms up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])
