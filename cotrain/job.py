"""What a training run is made of, from its settings: models, texts, losses and the module that wires them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

import datasets
import lightning
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain import bench, draft, optim
from cotrain.config import BenchConfig, Loss, RolloutConfig, ServeCheckConfig, TrainConfig
from cotrain.data import Blocks, blocks_of
from cotrain.evaluate import DEPTHS, held_out
from cotrain.module import Distillation, Stage
from cotrain.regimes import sampling, truncation
from cotrain.rollout import Ask, Own, Remote, Sampler
from cotrain.sets import Part, Sampled, corpus_part, joined, sampled_part
from cotrain.shards import Read, Shards
from cotrain.teacher import identity, load_pair, split
from cotrain.terms import parse
from inference import load
from inference.client import Client
from inference.store import OBJECTIVES


@dataclass
class Job:
    """A run's models, its folder and its settings."""

    cfg: TrainConfig
    folder: Path
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def read(self) -> Read:
        """What reads texts: the target, or its hidden states on disk where trainer.cache= names a folder."""
        live, _ = split(self.target)
        cache = self.cfg.trainer.cache
        return Shards(live, Path(cache), identity(self.target, self.tokenizer)) if cache else live

    def sampled(self) -> Sampled:
        place = Path(self.cfg.rollout.folder or self.folder / "rollouts")
        return sampled(self.cfg, self.target, self.tokenizer, place)

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
            objective(self.cfg.objective),
        )


def sampled(
    cfg: TrainConfig | RolloutConfig,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    draft_path: str | None = None,
) -> Sampled:
    """Texts of the target as the settings ask for them, kept in `folder`; a draft makes sampling them faster.

    Raises ValueError for a draft beside a server, which samples as it does.
    """
    ask, source = cfg.rollout, cfg.data.path or "embedded"
    texts = {"train": ask.texts, "held_out": ask.held_out_texts}
    wanted = Ask(texts, ask.prompt_tokens, ask.new_tokens)
    if ask.url and draft_path:
        raise ValueError("rollout.url: the server samples, draft.path= would not be used")
    by: Callable[[], Sampler] | None = None
    if ask.url:
        by = partial(_remote, ask.url, tokenizer, ask.rows)
    elif draft_path:
        by = partial(_sped_up, draft_path, target, tokenizer, ask.rows)
    return Sampled(target, tokenizer, folder, wanted, ask.rows, ask.seed, source, by, ask.url)


def _remote(url: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> Sampler:
    return Remote(Client(url), tokenizer, rows)


def _sped_up(path: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int) -> Sampler:
    return Own(load(path, target, tokenizer=tokenizer, rows=rows))


def models(
    cfg: TrainConfig | RolloutConfig | BenchConfig | ServeCheckConfig,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target as it will be served, and its tokenizer. Raises as `teacher.load_pair`."""
    return load_pair(cfg.target.path, cfg.quantisation.kind, cfg.target.dtype, cfg.target.trust_remote_code)


def objective(name: str) -> str:
    """What cotrain.json calls sampled_draft and greedy_draft: sampled, greedy. Raises ValueError for other names."""
    found = name.removesuffix("_draft")
    if found not in OBJECTIVES:
        raise ValueError(f"objective: {name!r} is none of {', '.join(f'{one}_draft' for one in OBJECTIVES)}")
    return found


def settle(threads: int, seed: int) -> None:
    """Threads (0: torch's choice) and seeds of a run; no progress bars of `datasets` between its own lines."""
    datasets.disable_progress_bars()
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
    """The loss, or two in turn, see `terms.parse`."""
    first = Stage(loss.switch if loss.then else 1.0, parse(loss.first))
    return [first, Stage(1.0, parse(loss.then))] if loss.then else [first]


def build(job: Job, network: PreTrainedModel) -> Distillation:
    """Wire the module: losses, optimiser, held-out texts of each temperature."""
    cfg, sampled = job.cfg, job.sampled()
    taught = stages(cfg.loss)  # a wrong name is refused before texts are sampled
    prompts = cache(partial(job.blocks, "held_out"))
    cut = truncation(cfg.regime)
    judged = {
        t: held_out(job.read, sampled.texts("held_out", sampling(cfg.regime, t), prompts), t, cut)
        # checkpoints are ranked in the regime
        for t in sorted({*cfg.rollout.temperatures, *cfg.rollout.train_temperatures, cfg.regime.temperature})
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
        cosine=cfg.init.cosine,
        remember=cfg.trainer.remember_mb * 2**20,
        k=cfg.policy.k or DEPTHS,
        hardest=cfg.loss.hardest,
        seed=cfg.trainer.seed,
    )


def parts(job: Job) -> tuple[Part, Part]:
    """Corpus blocks and rollouts, each at its own temperature, the regime's or several; says so when the first steps
    learn from foreign text."""
    cfg, blocks = job.cfg, cache(partial(job.blocks, "train"))
    if cfg.trainer.corpus_steps and not cfg.data.on_target:
        said = f"the first {cfg.trainer.corpus_steps} steps learn from text that the target did not sample"
        print(f"note: {said}; data.on_target=true if it did", file=sys.stderr)
    corpus = corpus_part(blocks() if cfg.trainer.corpus_steps else None, cfg.regime.temperature)
    sampled = [
        sampled_part(job.sampled().texts("train", sampling(cfg.regime, t), blocks), cfg.data.shares, t)
        for t in cfg.rollout.train_temperatures or [cfg.regime.temperature]
    ]
    return corpus, joined(sampled, len(corpus))
