"""The main job: distil a draft, measure each checkpoint with the real engine, export the fastest."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import ConcatDataset, DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain import bench, compare, draft, losses, optim
from cotrain.callbacks import Bar, RealSpeed
from cotrain.config import Loss, TrainConfig
from cotrain.data import Blocks, blocks_of
from cotrain.evaluate import held_out
from cotrain.module import Distillation, Stage
from cotrain.regimes import sampling, truncation
from cotrain.rollout import Ask
from cotrain.sets import Curriculum, Part, Sampled, corpus_part, regime
from cotrain.teacher import load_pair, split
from inference.atomic import write_atomic
from inference.environment import environment
from inference.pair import hash_target
from inference.store import Metadata, save


@dataclass
class Job:
    """A run's models, its folder and its settings."""

    cfg: TrainConfig
    folder: Path
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def sampled(self) -> Sampled:
        ask = self.cfg.rollout
        texts = {"train": ask.texts, "held_out": ask.held_out_texts}
        return Sampled(self.target, self.tokenizer, self.folder / "rollouts",
                       Ask(texts, ask.prompt_tokens, ask.new_tokens), ask.rows, ask.seed,
                       self.cfg.data.path or "embedded")  # fmt: skip

    def blocks(self, part: str) -> Blocks:
        return blocks_of(self.cfg.data, part, self.tokenizer)

    def plan(self, draft: PreTrainedModel) -> bench.Plan:
        names = (self.cfg.target.path, f"{self.cfg.init.kind}, {self.cfg.loss.first}")
        return bench.Plan(
            self.target,
            self.tokenizer,
            draft,
            sampling(self.cfg.regime),
            self.cfg.verify,
            self.cfg.bench,
            names,
        )


def distil(cfg: TrainConfig, folder: Path) -> dict[str, Any]:
    """Run or resume the job in `folder`; returns the report of the exported draft, nothing with measure=false."""
    k = cfg.policy.k
    if k is None:
        raise ValueError("policy.k: checkpoints are compared at a draft length that is given, as in policy=fixed")
    bench.refuse(cfg.bench)
    settle(cfg.trainer.threads, cfg.trainer.seed)
    target, tokenizer = load_pair(
        cfg.target.path, cfg.quantisation.kind, cfg.target.dtype, cfg.target.trust_remote_code
    )
    job = Job(cfg, folder, target, tokenizer)
    network = initial(cfg, target)
    module = build(job, network)
    speed = RealSpeed(lambda draft: bench.quick(job.plan(draft), k), folder / "checkpoints")
    fit(job, module, [speed] if cfg.measure else [])
    keep_figures(job, module)
    if not cfg.measure:
        return {}
    fastest = speed.fastest()
    print(f"measuring the fastest checkpoint, step {fastest.step}, on prompts it was not chosen by")
    network.load_state_dict(type(network).from_pretrained(fastest.path, dtype=torch.float32).state_dict())
    return export(job, module, speed)


def keep_figures(job: Job, module: Distillation) -> None:
    """What `cotrain compare` reads: held-out figures of the last step, text by text."""
    loss = job.cfg.loss
    label = job.cfg.label or (f"{loss.first}_then_{loss.then}" if loss.then else loss.first)
    found = {"label": label, "seed": job.cfg.trainer.seed, "steps": job.cfg.trainer.steps,
             "texts": compare.per_text(module.scores()), "environment": environment()}  # fmt: skip
    write_atomic(job.folder / compare.FIGURES, json.dumps(found) + "\n")


def export(job: Job, module: Distillation, speed: RealSpeed) -> dict[str, Any]:
    """Measure the module's draft afresh and write the draft folder; returns its report."""
    best = module.draft
    loss = job.cfg.loss
    extra = {
        "held_out": module.acceptance(),
        "checkpoints": [{"step": kept.step, "speedup": kept.speedup} for kept in speed.kept],
        "exported_step": speed.fastest().step,
        "training": {
            "loss": {"first": loss.first, "then": loss.then, "switch": loss.switch},
            "steps": job.cfg.trainer.steps,
            "init": job.cfg.init.kind,
        },
    }
    report = bench.measure(job.plan(best), extra)
    metadata = Metadata(
        target={"name": job.cfg.target.path, **hash_target(job.target.config, job.tokenizer)},
        k=report["extra"]["planned_k"],
        objective="sampled",
        regime=regime(sampling(job.cfg.regime)),
        made={"environment": report["environment"], **extra["training"]},
    )
    save(best, job.tokenizer, job.folder / "draft", metadata, report, replace=True)
    return report


def settle(threads: int, seed: int) -> None:
    """Threads (0: torch's choice) and seeds of a run."""
    if threads:
        torch.set_num_threads(threads)
    lightning.seed_everything(seed, verbose=False)


def initial(cfg: TrainConfig, target: PreTrainedModel) -> PreTrainedModel:
    """The draft before training. Raises ValueError naming the key that is wrong."""
    shape = cfg.draft
    if cfg.init.kind == "scratch":
        return draft.scratch(target, shape.width, shape.layers, shape.intermediate, shape.head_dim, shape.kv_heads)
    if cfg.init.kind == "target_layers":
        return draft.from_layers(target, cfg.init.layers)
    if cfg.init.kind == "pretrained" and shape.path:
        return draft.pretrained(shape.path, target)
    raise ValueError(f"init.kind: {cfg.init.kind!r} is none of scratch, target_layers, pretrained (with draft.path=)")


def stages(loss: Loss) -> list[Stage]:
    """The loss, or two in turn, by name."""
    first = Stage(loss.switch if loss.then else 1.0, _loss(loss.first))
    return [first, Stage(1.0, _loss(loss.then))] if loss.then else [first]


def _loss(name: str) -> Callable[..., torch.Tensor]:
    known = ("kl", "tv", "nla", "lk", "rkl", "jsd", "hellinger", "greedy", "match", "greedy_draft")
    if name not in known:
        raise ValueError(f"loss: {name!r} is none of {', '.join(known)}")
    return vars(losses)[name]


def build(job: Job, network: PreTrainedModel) -> Distillation:
    """Wire the module: losses, optimiser, held-out texts of each temperature."""
    cfg, sampled, (read_target, _) = job.cfg, job.sampled(), split(job.target)
    taught = stages(cfg.loss)  # a wrong name is refused before texts are sampled
    prompts = cache(partial(job.blocks, "held_out"))
    cut = truncation(cfg.regime)
    judged = {
        t: held_out(read_target, sampled.texts("held_out", sampling(cfg.regime, t), prompts), t, cut)
        for t in cfg.rollout.temperatures
    }
    rate = cfg.optimizer
    return Distillation(
        network,
        job.target,
        taught,
        partial(optim.adamw, lr=rate.lr, weight_decay=rate.weight_decay, betas=rate.betas),
        partial(optim.trapezoid, steps=cfg.trainer.steps, warmup=rate.warmup, decay=rate.decay),
        judged,
        cfg.regime.temperature,
        cut,
    )


def parts(job: Job) -> tuple[Part, Part]:
    """Corpus blocks and rollouts of the run's temperature."""
    corpus = job.blocks("train")
    texts = job.sampled().texts("train", sampling(job.cfg.regime), lambda: corpus)
    return corpus_part(corpus), Part(texts.ids, texts.predicted)


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
        accelerator=job.target.device.type, devices=1, precision=cfg.precision, max_steps=cfg.steps, max_epochs=-1,
        gradient_clip_val=cfg.clip, val_check_interval=every, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        log_every_n_steps=5, enable_model_summary=False,
        logger=TensorBoardLogger(job.folder, name="", version="tensorboard"),
        callbacks=[*extra, Bar(refresh_rate=5),
                   ModelCheckpoint(last.parent, "last", every_n_epochs=1, save_on_train_epoch_end=False,
                                   enable_version_counter=False)],
    )  # fmt: skip
    asks = DataLoader([0])  # a validation is one call: the texts are the module's own
    if not done:
        trainer.validate(module, asks, verbose=False)
    train = DataLoader(ConcatDataset([corpus, sampled]), batch_size=cfg.batch, sampler=order)
    trainer.fit(module, train, asks, ckpt_path=last if done else None)
    if trainer.global_step % every:  # the last validation was not at the last step
        trainer.validate(module, asks, verbose=False)
    module.to(job.target.device).eval()  # the trainer leaves it on the CPU
