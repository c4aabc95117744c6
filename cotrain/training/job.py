"""What a training run is made of, from its settings: the target, texts of it, and a plan to measure with."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import datasets
import lightning
import torch
from lightning.pytorch.loggers import Logger
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.bench import measurement
from cotrain.config.groups import Loss
from cotrain.config.settings import BenchConfig, RolloutConfig, ServeCheckConfig, TrainConfig, learnt, sampling
from cotrain.data.corpora import shipped_ids
from cotrain.data.fingerprints import identity
from cotrain.data.prompt_rows import PromptRows
from cotrain.data.sources import pack, prompt_origin, source_of
from cotrain.data.splits import SPLITS, Prompts, apart
from cotrain.data.texts import Texts, of_blocks
from cotrain.rollout.samplers import Ask, Own, Remote, Sampler
from cotrain.rollout.training_texts import WHOLE, Sampled, Share, Source, logged, regime
from cotrain.students.base import LAST, student_class
from cotrain.teacher.states_cache import DiskCache
from cotrain.teacher.target_distributions import TopKAndRest
from cotrain.teacher.target_model import Head, Reader, adapted, load_pair, served
from cotrain.training.interrupts import Signals
from cotrain.training.progress import sampling_seconds
from inference import load
from inference.drafts.draft_folder import OBJECTIVES
from inference.measure.costs import RealRound
from inference.request import ends_of
from inference.servers.openai_client import Client


@dataclass
class Job:
    """A run's models, its folder and its settings. reads: layers of the target that its student reads besides LAST;
    start: of the run, on the monotonic clock."""

    cfg: TrainConfig
    folder: Path
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sources: dict[str, Source] = field(default_factory=dict)
    texts_given: dict[str, Texts] = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)
    loggers: list[Logger] = field(default_factory=list)  # besides TensorBoard's
    reads: tuple[int, ...] = ()
    rounds: dict[int, RealRound] = field(default_factory=dict)  # by draft length: all checkpoints have one shape
    start: float = field(default_factory=time.monotonic)
    shape: dict[str, Any] | None = None  # how the shape of its draft was chosen, see `students.base.shape`

    @cached_property
    def halves(self) -> tuple[Reader, Head]:
        """The target's reader and head, see `target_model.served`, which tests them."""
        return served(self.target, self.vocabulary, self.reads)

    @property
    def vocabulary(self) -> int:
        """Number of ids that have mass, in training as when served: rows after the tokenizer's last id only pad."""
        size: int = self.target.config.get_text_config().vocab_size
        return min(size, 1 + max(self.tokenizer.get_vocab().values()))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The target's identity, saved with texts and states that come from it."""
        return identity(self.target, self.tokenizer)

    @cached_property
    def read(self) -> Reader:
        """Reads states of texts, from disk if trainer.cache= names a folder; with trainer.top=, which caches
        distributions there, from a folder inside."""
        live, _ = self.halves
        cache = self.cfg.trainer.cache
        if not cache:
            return live
        folder = Path(cache) / "states" if self.cfg.trainer.top else Path(cache)
        return self._shards(live, folder, {}, (LAST, *self.reads))

    def training_reader(self, read: Reader) -> Reader:
        """Reads what training learns from, states or top-k distributions; from disk if trainer.cache= names a folder.
        read: of the live target."""
        cache, top = self.cfg.trainer.cache, self.cfg.trainer.top
        if not cache:
            return read
        if not top:
            return self.read
        parts: tuple[int | str, ...] = (*self.reads, *TopKAndRest._fields)
        return self._shards(
            read, Path(cache), {"distributions": f"top {top} of {regime(sampling(self.cfg.regime))}"}, parts
        )

    def _shards(self, read: Reader, folder: Path, what: dict[str, str], parts: tuple[int | str, ...]) -> DiskCache:
        return DiskCache(read, folder, self.identity | {"dtype": str(self.target.dtype)} | what, parts)

    def sampled(self, by: Sampler | None = None) -> Sampled:
        """Texts of the target. by: samples those that are not on disk; the target alone, or a server, when None."""
        folder = Path(self.cfg.rollout.folder or self.folder / "rollouts")
        texts = replace(
            sampled(self.cfg, self.target, self.tokenizer, folder), identity=self.identity,
            minutes=self.cfg.minutes, seconds=sampling_seconds(self.cfg),
        )  # fmt: skip
        return texts if by is None else replace(texts, by=lambda: by)

    def source(self, split: str) -> Source:
        """The configured texts of a split, read once."""
        if split not in self.sources:
            texts = source(self.cfg, split, self.target, self.tokenizer)
            self.sources[split] = texts
            print(texts.left_out(self.cfg.rollout.prompt_tokens, split), end="")
        return self.sources[split]

    @property
    def chats(self) -> bool:
        """Whether the given texts are prompts, with or without completions. Only completions are learnt from."""
        return self.cfg.data.path is not None and isinstance(self.source("train"), PromptRows)

    @cached_property
    def prompts(self) -> Prompts:
        """To measure with: the user's, or the shipped ones; final prompts neither train the draft nor rank
        checkpoints."""
        return self._own() if self.cfg.data.path else self._shipped()

    def _own(self) -> Prompts:
        ask = self.cfg.rollout
        learnt, ranking, final = (self.source(split).several(ask.prompt_tokens, ask.seed) for split in SPLITS)
        return apart(ranking, final, learnt, "own")

    def _shipped(self) -> Prompts:
        first = Share(0, self.cfg.rollout.rounds)  # other rounds have prompts of the same source
        texts = self.texts("train", learnt(self.cfg)[0], first), self.texts("held_out", self.cfg.regime.temperature)
        ranking, final = shipped_ids(self.tokenizer, self.cfg.bench.prompt_tokens)
        return apart(ranking, final, [prompt for part in texts for prompt in part.prompts], "shipped")

    def given(self, kind: str) -> Texts:
        """The configured texts, packed into blocks unless they are prompts."""
        if kind not in self.texts_given:
            source, ask = self.source(kind), self.sampled().ask
            self.texts_given[kind] = (
                logged(source, ask.texts[kind], ask, self.cfg.rollout.seed)
                if isinstance(source, PromptRows)
                else of_blocks(pack(source.texts, self.tokenizer, self.cfg.data.block))
            )
        return self.texts_given[kind]

    def texts(self, kind: str, temperature: float, part: Share = WHOLE, by: Sampler | None = None) -> Texts:
        """Texts of the target at a temperature: logs of its own, in the regime and with data.on_target=; else
        sampled."""
        data, regime = self.cfg.data, self.cfg.regime
        if data.on_target and temperature == regime.temperature and self.chats:
            return self.given(kind)
        return self.sampled(by).texts(kind, sampling(regime, temperature), partial(self.source, kind), part=part)

    def plan(self, draft: PreTrainedModel) -> measurement.Plan:
        """To measure a draft on the run's prompts."""
        return self.plan_with(draft, self.prompts)

    def plan_with(self, draft: PreTrainedModel, prompts: Prompts | None) -> measurement.Plan:
        """To measure a draft on other prompts; None: for a draft that is not measured."""
        names = (self.cfg.target.path, draft_name(self.cfg))
        return measurement.Plan(
            self.target,
            self.tokenizer,
            draft,
            sampling(self.cfg.regime),
            self.cfg.verify,
            self.cfg.bench,
            names,
            objective(self.cfg.objective),
            given=prompts,
            kind=self.cfg.draft.kind,
            known=self.rounds,
        )


def sampled(
    cfg: TrainConfig | RolloutConfig,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    draft_path: str | None = None,
) -> Sampled:
    """Texts of the target as configured, saved in `folder`; a draft makes sampling them faster.

    Raises ValueError for a draft and a server together: the server would not use the draft.
    """
    rollout, source = cfg.rollout, {kind: prompt_origin(cfg.data, kind) for kind in ("train", "held_out")}
    ask = Ask({"train": rollout.texts, "held_out": rollout.held_out_texts}, rollout.prompt_tokens, rollout.new_tokens)
    if rollout.url and draft_path:
        raise ValueError("rollout.url: the server samples, draft.path= would not be used")
    by: Callable[[], Sampler] | None = None
    if rollout.url:
        by = partial(_remote, rollout.url, tokenizer, rollout.rows)
    elif draft_path:
        by = partial(_speculative, draft_path, target, tokenizer, rollout.rows)
    return Sampled(
        target, tokenizer, folder, ask, rollout.rows, rollout.seed, source, by, rollout.url, rollout.on_draft
    )


def _remote(url: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> Sampler:
    return Remote(Client(url), tokenizer, rows)


def _speculative(path: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int) -> Sampler:
    return Own(load(path, target, tokenizer=tokenizer, rows=rows))


def source(
    cfg: TrainConfig | RolloutConfig | BenchConfig,
    split: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Source:
    """The configured texts of a split, see `data.prompt_rows`."""
    return source_of(cfg.data, split, tokenizer, ends_of(target))


def models(
    cfg: TrainConfig | RolloutConfig | BenchConfig | ServeCheckConfig,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target as it will be served, and its tokenizer. Raises as `load_pair` and `adapted`."""
    ask = cfg.target
    target, tokenizer = load_pair(str(ask.path), cfg.quantisation.kind, ask.dtype, ask.trust_remote_code)
    return adapted(target, ask.adapter) if ask.adapter else target, tokenizer


def objective(name: str) -> str:
    """The name in cotrain.json of sampled_draft or greedy_draft: sampled, greedy. Raises ValueError for other names."""
    short = name.removesuffix("_draft")
    if short not in OBJECTIVES:
        raise ValueError(f"objective: {name!r} is none of {', '.join(f'{one}_draft' for one in OBJECTIVES)}")
    return short


def settle(threads: int, seed: int) -> None:
    """Set threads (0: torch's choice) and seeds of a run, and silence the progress bars of `datasets`."""
    datasets.disable_progress_bars()
    if threads:
        torch.set_num_threads(threads)
    lightning.seed_everything(seed, verbose=False)


def loss_name(loss: Loss) -> str:
    """As reports and comparisons call it: `kl`, or `kl_then_tv` if another loss follows."""
    return f"{loss.first}_then_{loss.then}" if loss.then else loss.first


def draft_name(cfg: TrainConfig) -> str:
    """As reports call it: `medusa, scratch, kl_then_tv`; the kind alone if nothing is learnt."""
    kind = cfg.draft.kind
    return kind if not student_class(kind).trained else f"{kind}, {cfg.init.kind}, {loss_name(cfg.loss)}"
