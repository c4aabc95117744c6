"""Training in phases, each with the texts of a round more, and checkpoints that the next call goes on from."""

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.utils.data import ConcatDataset, DataLoader

from cotrain.board import tags
from cotrain.board.loggers import log, tensorboard
from cotrain.config.groups import Trainer as TrainerSettings
from cotrain.config.settings import TrainConfig
from cotrain.data.texts import Curriculum, Learnt, Strided, Texts
from cotrain.errors import NotFinite, UserError
from cotrain.progress_display import Display
from cotrain.ranks import rank
from cotrain.rollout.samplers import Faster, Mixed
from cotrain.students.rounding import KINDS
from cotrain.teacher.states_cache import Shards
from cotrain.teacher.top_k import size
from cotrain.training import run_budget
from cotrain.training.assembly import parts
from cotrain.training.callbacks import Averaged, MeasureSpeed, QuantisationAware
from cotrain.training.clock import NEVER, Clock
from cotrain.training.counts import Grouped
from cotrain.training.held_out_points import HeldOutPoints, part_of
from cotrain.training.interrupts import Checkpoints, Keeper, read_saved
from cotrain.training.job import Job, objective
from cotrain.training.learning_curves import Learning
from cotrain.training.module import WATCHED, Distillation
from cotrain.training.optim import precision
from cotrain.training.phases import Phase, phases_of, swapped
from cotrain.training.progress import Progress
from cotrain.training.progress import refuse as refuse_fractions
from cotrain.training.run_budget import LEAST
from cotrain.training.stand_ins import Shown, showing
from cotrain.training.training_bar import Bar

CHECKPOINT, SHARDED = "checkpoints/last.ckpt", "fsdp2"
SHOWN = 12  # tokens of a text that went wrong


class Reached(NamedTuple):
    """step: the last one that was taken. ended: by patience, a signal or time, or training was over before."""

    step: int
    ended: bool


def fit(job: Job, module: Distillation, extra: list[Callback]) -> int:
    """Train, with acceptance (and `extra`) before the first step, at every validation and after the last step; returns
    the steps that were taken.

    A checkpoint is kept after each validation, its figures included; the next call goes on there. Leaves the draft
    in eval mode where the target is.
    """
    every = max(job.cfg.trainer.steps // max(job.cfg.trainer.validations, 1), 1)
    reached = Reached(0, False)
    for phase in phases_of(job.cfg, every):
        reached = _trained(job, module, extra, phase, every)
        if reached.ended:
            break
    if not module.judged:  # the run had stopped between its last step and its report
        _judge(job, module, extra, reached.step)
    return reached.step


def _judge(job: Job, module: Distillation, extra: list[Callback], step: int) -> None:
    """As at a validation. Of a training that nothing measured (measure=false) the weights of its last step are kept to
    be measured now."""
    with as_served(job, module):
        module.judge()
        for speed in extra:
            if isinstance(speed, MeasureSpeed) and not speed.kept and not rank():
                speed.save(module.draft, step)
                speed.keep(step, speed.measure(module.draft)["speedup"])


def as_served(job: Job, module: Distillation) -> AbstractContextManager[None]:
    """With rounded weights in the module where the draft is served with such."""
    return showing(_rounded(job), module)


def _rounded(job: Job) -> list[QuantisationAware]:
    kind = job.cfg.draft.quantisation
    return [QuantisationAware(kind)] if kind != "none" else []


def _take(kept: dict[str, Any], job: Job, module: Distillation) -> None:
    """Give the module what a checkpoint of a finished training holds: its weights, or their average where that is what
    was judged and is exported."""
    module.load_state_dict(kept["state_dict"])
    module.to(job.target.device).eval()
    if job.cfg.trainer.ema:
        average = Averaged(job.cfg.trainer.ema)
        average.load_state_dict(kept["callbacks"][average.state_key])
        average.show(module)


def _trained(job: Job, module: Distillation, extra: list[Callback], phase: Phase, every: int) -> Reached:
    """Sample the phase's texts and train to its end."""
    cfg, last = job.cfg.trainer, job.folder / CHECKPOINT
    kept: dict[str, Any] = {"global_step": 0}
    if last.exists():
        kept = read_saved(last)
    done = kept["global_step"]
    if _ended(kept, extra, module, job.cfg):
        _take(kept, job, module)
        return Reached(done, True)
    if done >= phase.last < cfg.steps:
        return Reached(done, False)
    averaged = [Averaged(cfg.ema)] if cfg.ema else []
    progress = module.progress
    assert progress is not None
    clock = Clock(progress, cfg.validations)
    rounded = _rounded(job)
    points = _points(job, module, clock, [*averaged, *rounded])
    callbacks = [*extra, *averaged, *rounded, clock, Learning(progress), points]
    trainer = _trainer(job, callbacks, phase, every, progress, done)
    sampler: Faster | Mixed | None = None  # of the phase's texts: the target alone
    if phase.round and done == phase.first:  # else its texts were sampled before
        module.load_state_dict(kept["state_dict"])  # this process may be a new one
        sampler = swapped(job, module.to(job.target.device).draft)
    del kept  # the trainer reads its own
    corpus, sampled = parts(job, phase.round + 1, sampler)
    if sampler:
        log(trainer, {f"{tags.ROLLOUT}/{name}": speed for name, speed in sampler.speeds.items()}, phase.first)
    # one call: the texts are the module's
    asks: DataLoader[Any] = DataLoader([torch.zeros(1)])  # type: ignore[arg-type]
    began = time.monotonic()
    if not done:
        trainer.validate(module, asks, verbose=False)
    validation = time.monotonic() - began
    _remember(job, module, corpus, sampled)
    if not done:
        _budgeted(job, clock, trainer, validation)
    texts = _loader(cfg, phase, done, corpus, sampled, trainer)
    _stepped(job, trainer, module, (texts, asks), last if done else None)
    if not rank():
        print(points.line())
    for average in averaged:
        average.show(module)
    if not run_budget.timed(job.cfg) and trainer.global_step % every:  # the last validation was not at the last step
        trainer.validate(module, asks, verbose=False)
    module.assemble()
    module.to(job.target.device).eval()  # the trainer leaves it on the CPU
    return Reached(trainer.global_step, bool(trainer.should_stop))


def _stepped(
    job: Job, trainer: lightning.Trainer, module: Distillation, loaders: tuple[Any, DataLoader[Any]], last: Path | None
) -> None:
    """All steps of a phase, from a checkpoint on. loaders: of texts, and of validations. Raises Interrupted."""
    try:
        trainer.fit(module, *loaders, ckpt_path=last)
    except NotFinite as error:
        raise UserError(_named(error, job)) from error
    job.signals.check(f"interrupted at step {trainer.global_step}, kept; the same command resumes")


def _budgeted(job: Job, clock: Clock, trainer: lightning.Trainer, validation: float) -> None:
    """Give the training its minutes and validations, the same in every process. validation: seconds of that before the
    first step."""
    if not job.cfg.minutes:
        return
    progress, left = clock.progress, run_budget.left_of(job.cfg, time.monotonic() - job.start, validation)
    left, clock.validations = trainer.strategy.broadcast((left, run_budget.validations(job.cfg, validation)))
    progress.leave(left)
    if clock.validations < job.cfg.trainer.validations and not rank():
        print(f"one validation takes {validation:.0f} s: {clock.validations} of trainer.validations="
              f"{job.cfg.trainer.validations} fit minutes={job.cfg.minutes:g}")  # fmt: skip
    if not rank():
        more = (
            ": what comes before and behind it takes longer than that leaves" if left <= LEAST * job.cfg.minutes else ""
        )
        print(
            f"training has {progress.minutes:.1f} of minutes={job.cfg.minutes:g}, or its steps if they are fewer{more}"
        )


def _points(job: Job, module: Distillation, clock: Clock, shown: list[Shown]) -> HeldOutPoints:
    cfg = job.cfg
    assert cfg.policy.k is not None
    tokens = cfg.trainer.steps * cfg.trainer.accumulate * cfg.trainer.batch * cfg.rollout.new_tokens
    part = part_of(module.held_out[module.temperature], tokens)
    return HeldOutPoints(part, clock, shown, cfg.policy.k, objective(cfg.objective), cfg.verify)


def _named(error: NotFinite, job: Job) -> str:
    """What is known of a step that went wrong, and what can be changed."""
    begin = [repr(job.tokenizer.decode(ids[:SHOWN])) for ids in error.ids]
    return (f"{error} ({', '.join(begin)}): lower optimizer.lr, or another loss; output={job.folder} keeps the last "
            "good checkpoint")  # fmt: skip


def _ended(kept: dict[str, Any], callbacks: list[Callback], module: Distillation, cfg: TrainConfig) -> bool:
    """Whether a callback had ended the training that a checkpoint is of, or its time had run out."""
    states, ended = kept.get("callbacks", {}), False
    progress = module.progress
    if progress and run_budget.timed(cfg) and Clock.__name__ in states:
        progress.resume(states[Clock.__name__])
        ended = progress.at(kept["global_step"]) >= 1
    for callback in callbacks:
        if isinstance(callback, MeasureSpeed) and callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
            return ended or callback.stale
    return ended


def refuse(cfg: TrainConfig) -> None:
    """Raise ValueError, naming the keys, for counts of processes, fractions, betas and minutes out of range, a batch
    that processes cannot share, an unknown quantisation, and two at once of averaged, rounded and sharded weights."""
    trainer, kind = cfg.trainer, cfg.draft.quantisation
    world = trainer.devices * trainer.nodes
    if trainer.devices < 1 or trainer.nodes < 1:
        raise ValueError(f"trainer.devices, trainer.nodes: at least 1, not {trainer.devices} and {trainer.nodes}")
    refuse_fractions(cfg.optimizer.warmup, cfg.optimizer.decay, trainer.steps)
    if len(cfg.optimizer.betas) != 2:
        raise ValueError(f"optimizer.betas: two numbers, of both moments, not {list(cfg.optimizer.betas)}")
    run_budget.refuse(cfg)
    if trainer.batch % world:
        raise ValueError(f"trainer.batch: {trainer.batch} texts are not as many for each of {world} devices")
    if kind not in KINDS:
        raise ValueError(f"draft.quantisation: {kind!r} is none of {', '.join(KINDS)}")
    beside = {
        "draft.quantisation": kind != "none",
        "trainer.ema": trainer.ema > 0,
        "trainer.strategy": trainer.strategy == SHARDED,
    }
    found = [key for key, used in beside.items() if used]
    if len(found) > 1:
        raise ValueError(f"{', '.join(found)}: one of them: rounded weights, an average, or (fsdp2) parts of them")


def strategy_of(cfg: TrainerSettings) -> str | Strategy:
    """Lightning's, by its name; "fsdp2": the draft in parts, checkpoints in one file."""
    if cfg.strategy != SHARDED:
        return cfg.strategy
    parts = cfg.devices * cfg.nodes
    return ModelParallelStrategy(data_parallel_size=parts, tensor_parallel_size=1, save_distributed_checkpoint=False)


def _trainer(
    job: Job, extra: list[Callback], phase: Phase, every: int, progress: Progress, done: int
) -> lightning.Trainer:
    cfg, last = job.cfg.trainer, job.folder / CHECKPOINT
    again = done + 1 if done else None  # what was written behind the checkpoint is made anew
    return lightning.Trainer(
        accelerator=job.target.device.type, devices=cfg.devices, num_nodes=cfg.nodes, strategy=strategy_of(cfg),
        inference_mode=cfg.strategy != SHARDED,  # weights gathered in it could not be learnt later
        precision=cast(Any, precision(cfg.precision, job.target.device.type)),
        accumulate_grad_batches=cfg.accumulate, use_distributed_sampler=False,
        max_steps=phase.last, max_epochs=-1,
        gradient_clip_val=cfg.clip, check_val_every_n_epoch=None,
        val_check_interval=NEVER if run_budget.timed(job.cfg) else every * cfg.accumulate,
        num_sanity_val_steps=0, log_every_n_steps=WATCHED, enable_model_summary=False,
        logger=[tensorboard(job.folder, again), *job.loggers], plugins=[Checkpoints()],
        callbacks=[*extra, Bar(progress), Keeper(last, cfg.checkpoint_minutes, job.signals),
                   ModelCheckpoint(last.parent, "last", every_n_epochs=1, save_on_train_epoch_end=False,
                                   enable_version_counter=False)],
    )  # fmt: skip


def _loader(
    cfg: TrainerSettings, phase: Phase, done: int, corpus: Texts, sampled: Texts, trainer: lightning.Trainer
) -> DataLoader[Any] | Grouped:
    """This process's texts of a phase, from step `done` on."""
    world, texts = trainer.world_size, cfg.batch * cfg.accumulate  # of a step
    before = max(cfg.corpus_steps - phase.first, 0) * texts
    order = Curriculum((len(corpus), len(sampled)), before, cfg.seed + phase.round, (done - phase.first) * texts)
    mine = Strided(order, trainer.global_rank, world)
    sets = [Learnt(corpus), Learnt(sampled, first=len(corpus))]
    batches: DataLoader[Any] = DataLoader(ConcatDataset(sets), cfg.batch // world, sampler=mine)
    return Grouped(batches, cfg.accumulate) if cfg.accumulate > 1 else batches


def _remember(job: Job, module: Distillation, corpus: Texts, sampled: Texts) -> None:
    """Read the texts before training where every one comes, most of them again."""
    trainer = job.cfg.trainer
    if trainer.steps * trainer.batch * trainer.accumulate < len(corpus) + len(sampled):
        return
    keys, read = len(corpus) + torch.arange(len(sampled)), module.teacher.read
    if isinstance(read, Shards):
        states = job.target.config.get_text_config().hidden_size * job.target.dtype.itemsize  # of a layer
        distributions = size(trainer.top) * torch.float32.itemsize if trainer.top else states
        each = distributions + len(job.reads) * states
        print(read.estimate(len(sampled), sampled.ids.shape[1] * each))
    with Display("the target reads the texts", len(sampled), "texts", hidden=bool(rank())) as display:
        module.teacher.fill(sampled.ids.long(), keys, progress=lambda done, _: display.to(done))
