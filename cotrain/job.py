"""What a training run is made of, from its settings: models, texts, losses and the module that wires them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import datasets
import lightning
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain import bench, draft, optim
from cotrain.chats import Chats
from cotrain.config import BenchConfig, Loss, RolloutConfig, ServeCheckConfig, TrainConfig
from cotrain.data import source_of
from cotrain.evaluate import DEPTHS, Head, HeldOut, held_out
from cotrain.module import Distillation, Stage
from cotrain.regimes import sampling, truncation
from cotrain.rollout import Ask, Faster, Own, Remote, Sampler
from cotrain.rollouts import Texts
from cotrain.sets import WHOLE, Part, Sampled, Share, Source, blocks_texts, corpus_part, joined, logged, sampled_part
from cotrain.shards import Read, Shards
from cotrain.surprise import Surprise, surprise
from cotrain.teacher import adapted, identity, load_pair, split
from cotrain.terms import parse
from inference import load
from inference.client import Client
from inference.engine import ends_of
from inference.store import OBJECTIVES

CHECKED = 32  # texts that are asked whether they are the target's own


@dataclass
class Job:
    """A run's models, its folder and its settings."""

    cfg: TrainConfig
    folder: Path
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sources: dict[str, Source] = field(default_factory=dict)
    faster: Faster | None = None  # what samples the next texts: the target alone, when None

    @cached_property
    def halves(self) -> tuple[Head, Head]:
        """The target's, see `teacher.split`, which tries them."""
        return split(self.target)

    @cached_property
    def read(self) -> Read:
        """What reads texts: the target, or its hidden states on disk where trainer.cache= names a folder."""
        live, _ = self.halves
        cache = self.cfg.trainer.cache
        return Shards(live, Path(cache), identity(self.target, self.tokenizer)) if cache else live

    def sampled(self) -> Sampled:
        place = Path(self.cfg.rollout.folder or self.folder / "rollouts")
        found = sampled(self.cfg, self.target, self.tokenizer, place)
        faster = self.faster
        return found if faster is None else replace(found, by=lambda: faster)

    def source(self, split: str) -> Source:
        """The configured texts of a split, read once."""
        if split not in self.sources:
            self.sources[split] = source(self.cfg, split, self.target, self.tokenizer)
        return self.sources[split]

    @property
    def chats(self) -> bool:
        return self.cfg.data.path is not None and isinstance(self.source("train"), Chats)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Own ones, to measure with; none: those shipped."""
        ask = self.cfg.rollout
        return self.source("held_out").several(ask.prompt_tokens, ask.seed) if self.cfg.data.path else []

    def given(self, kind: str) -> Texts:
        """The configured texts as they stand."""
        source, ask = self.source(kind), self.sampled().ask
        if isinstance(source, Chats):
            return logged(source, ask.texts[kind], ask, self.cfg.rollout.seed)
        return blocks_texts(source)

    def texts(self, kind: str, temperature: float, part: Share = WHOLE) -> Texts:
        """Of the target at a temperature: logs of its own in the regime, else sampled."""
        data, regime = self.cfg.data, self.cfg.regime
        if data.on_target and temperature == regime.temperature and self.chats:
            return self.given(kind)
        return self.sampled().texts(kind, sampling(regime, temperature), partial(self.source, kind), part=part)

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
            own=self.prompts,
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


def source(
    cfg: TrainConfig | RolloutConfig | BenchConfig,
    split: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Source:
    """The configured texts of a split, see `data.source_of`."""
    return source_of(cfg.data, split, tokenizer, ends_of(target))


def models(
    cfg: TrainConfig | RolloutConfig | BenchConfig | ServeCheckConfig,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target as it will be served, and its tokenizer. Raises as `teacher.load_pair` and `teacher.adapted`."""
    asked = cfg.target
    target, tokenizer = load_pair(asked.path, cfg.quantisation.kind, asked.dtype, asked.trust_remote_code)
    return adapted(target, asked.adapter) if asked.adapter else target, tokenizer


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
    cfg = job.cfg
    taught = stages(cfg.loss)  # a wrong name is refused before texts are sampled
    cut = truncation(cfg.regime)
    judged = {
        t: held_out(job.read, job.texts("held_out", t), t, cut)
        # checkpoints are ranked in the regime
        for t in sorted({*cfg.rollout.temperatures, *cfg.rollout.train_temperatures, cfg.regime.temperature})
    }
    _own(job, judged)
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
        steps=cfg.trainer.steps,
    )


def _own(job: Job, judged: dict[float, HeldOut]) -> None:
    """Say so when texts that were sampled are not the target's own: another server's, or of passes gone wrong."""
    if job.cfg.data.on_target:
        return  # `foreign` says it of logs
    for t, held in judged.items():
        found = surprise(held, job.halves[1], job.target.device)
        if not found.own:
            said = f"texts sampled at temperature {t:g} are not the target's own: {found.line()}"
            print(f"warning: {said}", file=sys.stderr)


def parts(job: Job, rounds: int) -> tuple[Part, Part]:
    """The texts as they were given, where steps learn from them, and texts of the target of so many rounds, each at its
    own temperature, the regime's or several. A later round's come behind the others."""
    cfg = job.cfg
    corpus = corpus_part(job.given("train") if cfg.trainer.corpus_steps else None, cfg.regime.temperature)
    sampled = [
        sampled_part(job.texts("train", t, Share(i, cfg.rollout.rounds)), cfg.data.shares, t, prompts=not job.chats)
        for i in range(rounds)
        for t in cfg.rollout.train_temperatures or [cfg.regime.temperature]
    ]
    return corpus, joined(sampled, len(corpus))


def foreign(job: Job) -> tuple[HeldOut, Surprise] | None:
    """Some of the given texts that are learnt from, read by the target, if it did not sample them in the regime, and
    how much they surprise it; says so. data.on_target= that is not true is said first."""
    cfg = job.cfg
    if not cfg.trainer.corpus_steps and not (cfg.data.on_target and job.chats):
        return None
    texts = job.given("held_out").spread(CHECKED)
    held = held_out(job.read, texts, cfg.regime.temperature, truncation(cfg.regime))
    found = surprise(held, job.halves[1], job.target.device)
    if found.own:
        return None
    first = f"the texts of the first {cfg.trainer.corpus_steps} steps"
    which = "data.on_target=true, but the texts of data.path" if cfg.data.on_target else first
    print(f"warning: {which} were not sampled from this target in this regime: {found.line()}", file=sys.stderr)
    return held, found
