"""The training of a draft. A later call resumes from the last checkpoint."""

import json
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.utils.data import ConcatDataset, DataLoader

from cotrain.board.curves import tensorboard
from cotrain.config.groups import OF_PATH
from cotrain.config.groups import Trainer as TrainerSettings
from cotrain.console import Display
from cotrain.data.texts import Curriculum, Learnt, Strided, Texts
from cotrain.errors import NotFinite, UserError
from cotrain.evaluation.comparison import at_start, own_acceptance, per_text
from cotrain.ranks import rank
from cotrain.teacher.states_cache import DiskCache
from cotrain.training.assembly import parts
from cotrain.training.callbacks import (
    HeldOutPoints,
    Learning,
    MeasureSpeed,
    QuantisationAware,
    ReturnedMemory,
    StandingWeights,
    part_of,
    showing,
)
from cotrain.training.deadline import LEAST, time_limited
from cotrain.training.distributed import Ahead, Grouped
from cotrain.training.interrupts import Checkpoints, Keeper, read_saved
from cotrain.training.job import Job, objective
from cotrain.training.module import WATCHED, Distillation
from cotrain.training.optim import precision
from cotrain.training.progress import NEVER, Bar, Clock, Progress
from inference.drafts.atomic import write_atomic

CHECKPOINT, SHARDED = "checkpoints/last.ckpt", "fsdp2"
START = "start.json"  # the held-out figures of the draft that a training with draft.path= began with
SHOWN = 12  # number of tokens that an error shows of a text
VALIDATION = [0]  # one batch: a validation evaluates the module's own texts, see `Distillation.judge`


def fit(job: Job, module: Distillation, speed: MeasureSpeed | None) -> int:
    """Train the module's draft, in place, and return the number of steps after which the training ended.

    Acceptance is computed, and `speed` measures (None: nothing is measured), before the first step, at every validation
    and after the last step. Each validation saves a checkpoint with its figures, from which a later call resumes. The
    draft is left in eval mode on the target's device. Raises Interrupted if a signal ends the run, and UserError for a
    loss that is not finite or a damaged checkpoint.
    """
    step = _train(job, module, speed)
    if not module.judged:  # an earlier call did all steps, but wrote no report
        with as_served(job, module):
            module.judge()
            if speed and not speed.checkpoints and not rank():  # it trained with measure=false
                speed.save(module.draft, step)
                speed.add(step, speed.measure(module.draft)["speedup"])
    return step


def _train(job: Job, module: Distillation, speed: MeasureSpeed | None) -> int:
    """Sample the texts and train until the last step. Return the step at which the training ended. Raises Interrupted
    if a signal ends the run, and UserError for a loss that is not finite."""
    cfg, last, progress = job.cfg.trainer, job.folder / CHECKPOINT, module.progress
    assert progress is not None
    saved: dict[str, Any] = read_saved(last) if last.exists() else {"global_step": 0}
    done = saved["global_step"]
    if _ended(saved, job, module, progress, speed):
        return done
    if 0 < done < cfg.steps and not rank():
        print(f"the training goes on from step {done} of {cfg.steps}, which is saved in {last}")
    clock, rounded = Clock(progress, cfg.validations), _rounded(job)
    points = _points(job, module, clock, rounded)
    callbacks = [*rounded, clock, Learning(progress), ReturnedMemory(), StandingWeights(), points]
    every = max(cfg.steps // max(cfg.validations, 1), 1)  # steps between validations
    trainer = _trainer(job, [speed, *callbacks] if speed else callbacks, every, progress, done)
    del saved  # frees memory: the trainer reads the file again
    corpus, sampled = parts(job)
    began = time.monotonic()
    if not done:
        _judge_start(job, module, trainer)
    measuring = time.monotonic() - began - module.seconds - module.trial
    _remember(job, module, corpus, sampled)
    if not done:
        _set_budget(job, clock, trainer, module.seconds, measuring)
    texts = _loader(cfg, done, corpus, sampled, trainer)
    if job.cfg.teacher.urls:
        texts = Ahead(texts, module.teacher.begin)
    try:
        trainer.fit(module, texts, VALIDATION, ckpt_path=last if done else None)
    except NotFinite as error:
        named = ", ".join(repr(job.tokenizer.decode(ids[:SHOWN])) for ids in error.ids)
        raise UserError(
            f"{error} ({named}): lower optimizer.lr, or choose another loss; output={job.folder} has the "
            "last good checkpoint"
        ) from error
    job.signals.check(f"interrupted at step {trainer.global_step}, which is saved; the same command resumes")
    if not rank():
        print(points.line(), *module.teacher.lines(), sep="\n")
    if not time_limited(job.cfg) and trainer.global_step % every:  # no validation at the last step
        trainer.validate(module, VALIDATION, verbose=False)
    module.assemble()
    module.to(job.target.device).eval()  # the trainer leaves it on the CPU
    return trainer.global_step


def _judge_start(job: Job, module: Distillation, trainer: lightning.Trainer) -> None:
    """Score the draft before its first step. The figures of one that begins with a draft folder are kept in START, and
    a line says how far its acceptance is from that in its record."""
    trainer.validate(module, VALIDATION, verbose=False)
    if job.cfg.init.kind in OF_PATH and not rank():
        start = per_text(module.scores(), module.held_out)
        write_atomic(job.folder / START, json.dumps(start))
        print(*at_start(start, own_acceptance(Path(str(job.cfg.draft.path)))), sep="\n")


def _ended(
    saved: dict[str, Any],
    job: Job,
    module: Distillation,
    progress: Progress,
    speed: MeasureSpeed | None,
) -> bool:
    """Return whether patience or a time limit had already ended the training when `saved`, its checkpoint, was written.
    The state of `progress` and `speed` is restored from it. If the training had ended, the module's weights are too."""
    states, ended = saved.get("callbacks", {}), False
    if time_limited(job.cfg) and Clock.__name__ in states:
        progress.resume(states[Clock.__name__])
        ended = progress.at(saved["global_step"]) >= 1
    if speed and speed.state_key in states:
        speed.load_state_dict(states[speed.state_key])
        ended = ended or speed.stale
    if ended:
        module.load_state_dict(saved["state_dict"])
        module.to(job.target.device).eval()
    return ended


def _points(job: Job, module: Distillation, clock: Clock, rounded: list[QuantisationAware]) -> HeldOutPoints:
    cfg = job.cfg
    assert cfg.policy.k is not None
    tokens = cfg.trainer.steps * cfg.trainer.accumulate * cfg.trainer.batch * cfg.rollout.new_tokens
    part = part_of(module.held_out[module.temperature], tokens)
    return HeldOutPoints(part, clock, rounded, cfg.policy.k, objective(cfg.objective), cfg.verify)


def _trainer(job: Job, extra: list[Callback], every: int, progress: Progress, done: int) -> lightning.Trainer:
    cfg, last = job.cfg.trainer, job.folder / CHECKPOINT
    again = done + 1 if done else None  # steps after the checkpoint are logged again
    return lightning.Trainer(
        accelerator=job.target.device.type,
        devices=cfg.devices,
        num_nodes=cfg.nodes,
        strategy=strategy_of(cfg),
        inference_mode=cfg.strategy != SHARDED,  # weights gathered in inference mode could not be trained later
        precision=cast(Any, precision(cfg.precision, job.target.device.type)),
        accumulate_grad_batches=cfg.accumulate,
        use_distributed_sampler=False,
        max_steps=cfg.steps,
        max_epochs=-1,
        gradient_clip_val=cfg.clip,
        check_val_every_n_epoch=None,
        val_check_interval=NEVER if time_limited(job.cfg) else every * cfg.accumulate,
        num_sanity_val_steps=0,
        log_every_n_steps=WATCHED,
        enable_model_summary=False,
        logger=[tensorboard(job.folder, again), *job.loggers],
        plugins=[Checkpoints()],
        callbacks=[
            *extra,
            Bar(progress),
            Keeper(last, cfg.checkpoint_minutes, job.signals),
            ModelCheckpoint(
                last.parent, "last", every_n_epochs=1, save_on_train_epoch_end=False, enable_version_counter=False
            ),
        ],
    )


def strategy_of(cfg: TrainerSettings) -> str | Strategy:
    """Return Lightning's strategy for the setting trainer.strategy=: its name or, for "fsdp2", an object that shards
    the draft and saves each checkpoint as one file."""
    if cfg.strategy != SHARDED:
        return cfg.strategy
    return ModelParallelStrategy(
        data_parallel_size=cfg.processes, tensor_parallel_size=1, save_distributed_checkpoint=False
    )


def _remember(job: Job, module: Distillation, corpus: Texts, sampled: Texts) -> None:
    """Cache the target's states: those of the passes that sampled the texts, if they were kept, and those that the
    target reads now, before training. It reads nothing if training reads fewer texts than there are."""
    trainer, order = job.cfg.trainer, sampled.length.argsort(descending=True, stable=True)  # so that little is padding
    ids, keys, length = sampled.ids[order].long(), len(corpus) + order, sampled.length[order]
    if job.sampled_states:
        module.teacher.add(job.sampled_states.records, ids, keys, length)
        job.sampled_states = None
    if trainer.steps * trainer.batch * trainer.accumulate < len(corpus) + len(sampled):
        return
    read = module.teacher.read
    if isinstance(read, DiskCache):
        states = job.target.config.get_text_config().hidden_size * job.target.dtype.itemsize  # bytes of a layer
        print(read.estimate(len(sampled), sampled.ids.shape[1] * (1 + len(job.reads)) * states))
    with Display("the target reads the texts", len(sampled), "texts", hidden=bool(rank())) as display:
        module.teacher.fill(
            ids,
            keys,
            progress=lambda done, _: display.to(done),
            source=None if sampled.source is None else sampled.source[order],
            length=length,
        )


def _set_budget(job: Job, clock: Clock, trainer: lightning.Trainer, *validation: float) -> None:
    """Set the minutes and the number of validations of the training, the same in every process, and print them.
    validation: two numbers, the seconds of the first validation to evaluate the held-out texts and to measure the
    checkpoint."""
    cfg, deadline = job.cfg, job.deadline
    if not cfg.minutes:
        return
    left = deadline.training(cfg, time.monotonic() - deadline.start, *validation)
    deadline.left, clock.validations = trainer.strategy.broadcast((left, deadline.validations(cfg, *validation)))
    if rank():
        return
    if clock.validations < cfg.trainer.validations:
        print(
            f"one validation takes {sum(validation):.0f} s, so {clock.validations} of trainer.validations="
            f"{cfg.trainer.validations} fit minutes={cfg.minutes:g}"
        )
    more = "; the whole run will exceed minutes=" if deadline.left <= LEAST * cfg.minutes else ""
    minutes = clock.progress.minutes
    print(f"of minutes={cfg.minutes:g}, training gets {minutes:.1f} minutes, unless its last step is earlier{more}")


def _loader(
    cfg: TrainerSettings, done: int, corpus: Texts, sampled: Texts, trainer: lightning.Trainer
) -> Iterable[dict[str, Any]]:
    """Return this process's batches, without those of the first `done` steps. corpus, sampled: the training texts, the
    user's for the first trainer.corpus_steps steps and the target's."""
    world, texts = trainer.world_size, cfg.batch * cfg.accumulate  # texts of a step
    order = Curriculum((len(corpus), len(sampled)), cfg.corpus_steps * texts, cfg.seed, done * texts)
    mine = Strided(order, trainer.global_rank, world)
    sets = [Learnt(corpus), Learnt(sampled, first=len(corpus))]
    pinned = trainer.strategy.root_device.type == "cuda"  # copies of other memory are waited for
    batches: DataLoader[Any] = DataLoader(ConcatDataset(sets), cfg.batch // world, sampler=mine, pin_memory=pinned)
    return Grouped(batches, cfg.accumulate) if cfg.accumulate > 1 else batches


def as_served(job: Job, module: Distillation) -> AbstractContextManager[None]:
    """Give the module's draft quantised weights until the block ends if draft.quantisation= says that it is served so;
    otherwise its weights stay."""
    return showing(_rounded(job), module)


def _rounded(job: Job) -> list[QuantisationAware]:
    kind = job.cfg.draft.quantisation
    return [QuantisationAware(kind)] if kind != "none" else []
