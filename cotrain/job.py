"""What a training run has, from its settings: the target, texts of it, and a plan to measure with."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import datasets
import lightning
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain import bench
from cotrain.chats import Chats
from cotrain.config import BenchConfig, RolloutConfig, ServeCheckConfig, TrainConfig
from cotrain.data import source_of
from cotrain.evaluate import Head, Read
from cotrain.regimes import sampling
from cotrain.rollout import Ask, Faster, Mixed, Own, Remote, Sampler
from cotrain.rollouts import Texts
from cotrain.sets import WHOLE, Sampled, Share, Source, blocks_texts, logged, regime
from cotrain.shards import Shards
from cotrain.teacher import adapted, identity, load_pair, split
from inference import load
from inference.client import Client
from inference.engine import ends_of
from inference.store import OBJECTIVES


@dataclass
class Job:
    """A run's models, its folder and its settings."""

    cfg: TrainConfig
    folder: Path
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sources: dict[str, Source] = field(default_factory=dict)
    faster: Faster | Mixed | None = None  # what samples the next texts: the target alone, when None

    @cached_property
    def halves(self) -> tuple[Read, Head]:
        """The target's, see `teacher.split`, which tries them."""
        return split(self.target)

    @cached_property
    def read(self) -> Read:
        """Hidden states of texts: what is on disk, unless laws are kept there."""
        live, _ = self.halves
        return live if self.cfg.trainer.top else self.cached(live)

    def cached(self, read: Read) -> Read:
        """What the target says of texts, on disk where trainer.cache= names a folder: hidden states, or kept laws."""
        cache, top = self.cfg.trainer.cache, self.cfg.trainer.top
        if not cache:
            return read
        maker = identity(self.target, self.tokenizer) | {"dtype": str(self.target.dtype)}
        if top:
            maker["laws"] = f"top {top} of {regime(sampling(self.cfg.regime))}"
        return Shards(read, Path(cache), maker)

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
    return Sampled(target, tokenizer, folder, wanted, ask.rows, ask.seed, source, by, ask.url, ask.on_draft)


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
    target, tokenizer = load_pair(str(asked.path), cfg.quantisation.kind, asked.dtype, asked.trust_remote_code)
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
