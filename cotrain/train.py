"""The main job: distil a draft, measure each checkpoint with the real engine, export the fastest."""

import hashlib
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import ConcatDataset, DataLoader
from transformers import PreTrainedTokenizerBase

from cotrain import bench, compare
from cotrain.callbacks import Bar, RealSpeed
from cotrain.config import TrainConfig
from cotrain.evaluate import held_out
from cotrain.job import Job, build, foreign, initial, models, objective, parts, settle
from cotrain.module import WATCHED, Distillation
from cotrain.regimes import sampling
from cotrain.rollouts import Texts
from cotrain.sets import Curriculum, Part, regime
from cotrain.shards import Shards
from cotrain.surprise import Surprise
from inference.atomic import write_atomic
from inference.environment import environment
from inference.pair import hash_target
from inference.store import Metadata, save


def distil(cfg: TrainConfig, folder: Path) -> dict[str, Any]:
    """Run or resume the job in `folder`; returns the report of the exported draft, nothing with measure=false."""
    k = cfg.policy.k
    if k is None:
        raise ValueError("policy.k: checkpoints are compared at a draft length that is given, as in policy=fixed")
    bench.refuse(cfg.bench)
    settle(cfg.trainer.threads, cfg.trainer.seed)
    target, tokenizer = models(cfg)
    job, drafts = Job(cfg, folder, target, tokenizer), objective(cfg.objective)
    network = initial(cfg, target)
    module = build(job, network)
    others = foreign(job)
    tau = partial(module.tau, k, drafts)
    speed = RealSpeed(lambda draft: bench.quick(job.plan(draft), k), tau, folder / "checkpoints", cfg.trainer.patience)
    fit(job, module, [speed] if cfg.measure else [])
    keep_figures(job, module)
    if not cfg.measure:
        return {}
    fastest = speed.fastest()
    print(f"measuring the checkpoint of the highest tau, step {fastest.step}, on other prompts")
    if fastest.step < cfg.trainer.steps:
        network.load_state_dict(type(network).from_pretrained(fastest.path, dtype=torch.float32).state_dict())
        module.judge()
    return export(job, module, speed, others)


def _digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the chat template, which decides what was learnt."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def _reading(done: int, total: int) -> None:
    print(f"\rthe target reads the texts: {done}/{total}", end="" if done < total else "\n", flush=True)


def keep_figures(job: Job, module: Distillation) -> None:
    """What `cotrain compare` reads: held-out figures of the last step, text by text."""
    loss = job.cfg.loss
    label = job.cfg.label or (f"{loss.first}_then_{loss.then}" if loss.then else loss.first)
    found = {"label": label, "seed": job.cfg.trainer.seed, "steps": job.cfg.trainer.steps,
             "texts": compare.per_text(module.scores()), "environment": environment()}  # fmt: skip
    write_atomic(job.folder / compare.FIGURES, json.dumps(found) + "\n")


def biased(job: Job, module: Distillation, others: tuple[Texts, Surprise]) -> dict[str, Any]:
    """What acceptance would seem to be on texts that the target did not sample, beside what it is."""
    texts, found = others
    alpha = module.on(held_out(job.read, texts, module.temperature, module.truncate))["all"].alpha
    own = module.judged[module.temperature]["all"].alpha
    print(f"on texts of data.path, which the target did not sample, acceptance is {alpha:.3f}; on its own {own:.3f}")
    return asdict(found) | {"alpha": alpha, "alpha_own": own}


def export(
    job: Job, module: Distillation, speed: RealSpeed, others: tuple[Texts, Surprise] | None = None
) -> dict[str, Any]:
    """Measure the module's draft afresh and write the draft folder; returns its report."""
    plan, loss = job.plan(module.draft), job.cfg.loss
    made = {
        "loss": {"first": loss.first, "then": loss.then, "switch": loss.switch, "hardest": loss.hardest},
        "temperatures": list(job.cfg.rollout.train_temperatures) or [job.cfg.regime.temperature],
        "steps": job.cfg.trainer.steps,
        "learnt": {
            "completions": job.chats,
            "template": dict(job.cfg.data.template),
            "chat_template": _digest(job.tokenizer) if job.chats else None,
        },
        "init": {"kind": job.cfg.init.kind, "layers": list(job.cfg.init.layers), "cosine": job.cfg.init.cosine},
    }
    extra: dict[str, Any] = {
        "held_out": module.acceptance(),
        "checkpoints": [{"step": kept.step, "speedup": kept.speedup, "tau": kept.tau} for kept in speed.kept],
        "exported_step": speed.fastest().step,
        "training": made,
        "given_texts": biased(job, module, others) if others else None,
    }
    report = bench.measure(plan, extra)
    metadata = Metadata(
        target={"name": job.cfg.target.path, **hash_target(job.target.config, job.tokenizer)},
        k=report["extra"]["planned_k"],
        objective=objective(job.cfg.objective),
        regime=regime(sampling(job.cfg.regime)),
        made={"environment": report["environment"], **made},
        int8=plan.int8,
    )
    save(plan.served, job.tokenizer, job.folder / "draft", metadata, report, replace=True)
    return report


def fit(job: Job, module: Distillation, extra: list[Callback]) -> None:
    """Train, with acceptance (and `extra`) before the first step, at every validation and after the last step.

    A checkpoint is kept after each validation, its figures included; the next call goes on there. Leaves the draft
    in eval mode where the target is.
    """
    cfg, last = job.cfg.trainer, job.folder / "checkpoints" / "last.ckpt"
    corpus, sampled = parts(job)
    done = torch.load(last, weights_only=True)["global_step"] if last.exists() else 0
    order = Curriculum((len(corpus), len(sampled)), cfg.corpus_steps * cfg.batch, cfg.seed, done * cfg.batch)
    every = max(cfg.steps // max(cfg.validations, 1), 1)
    trainer = lightning.Trainer(
        accelerator=job.target.device.type, devices=1, precision=cast(Any, cfg.precision),
        max_steps=cfg.steps, max_epochs=-1,
        gradient_clip_val=cfg.clip, val_check_interval=every, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        log_every_n_steps=WATCHED, enable_model_summary=False,
        logger=TensorBoardLogger(job.folder, name="", version="tensorboard"),
        callbacks=[*extra, Bar(refresh_rate=5),
                   ModelCheckpoint(last.parent, "last", every_n_epochs=1, save_on_train_epoch_end=False,
                                   enable_version_counter=False)],
    )  # fmt: skip
    asks: DataLoader[Any] = DataLoader(
        Part(torch.zeros(1, 2), torch.zeros(1, 1))
    )  # a validation is one call: the texts are the module's own
    if not done:
        trainer.validate(module, asks, verbose=False)
    if cfg.steps * cfg.batch >= len(corpus) + len(sampled):  # every text comes, most of them again
        keys, read = sampled.first + torch.arange(len(sampled)), job.read
        if isinstance(read, Shards):
            width = job.target.config.get_text_config().hidden_size
            print(read.estimate(len(sampled), sampled.ids.shape[1] * width * job.target.dtype.itemsize))
        module.teacher.fill(sampled.ids.long(), keys, progress=_reading, read=read)
    train: DataLoader[Any] = DataLoader(ConcatDataset([corpus, sampled]), batch_size=cfg.batch, sampler=order)
    trainer.fit(module, train, asks, ckpt_path=last if done else None)
    if trainer.global_step % every:  # the last validation was not at the last step
        trainer.validate(module, asks, verbose=False)
    module.to(job.target.device).eval()  # the trainer leaves it on the CPU
    if not module.judged:  # the run had stopped between its last step and its report
        module.judge()
