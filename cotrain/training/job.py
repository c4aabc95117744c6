"""What a training run has, from its settings: the target, texts of it, and a plan to measure with."""

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
from cotrain.config.regimes import learnt, sampling
from cotrain.config.settings import BenchConfig, RolloutConfig, ServeCheckConfig, TrainConfig
from cotrain.data.fingerprints import identity
from cotrain.data.inputs import made_from
from cotrain.data.prompt_rows import PromptRows
from cotrain.data.prompts import shipped_ids
from cotrain.data.sources import pack, source_of
from cotrain.data.splits import SPLITS, Prompts, apart
from cotrain.data.texts import Texts, of_blocks
from cotrain.rollout.samplers import Ask, Own, Remote, Sampler
from cotrain.rollout.training_texts import WHOLE, Sampled, Share, Source, logged, regime
from cotrain.students.base import LAST
from cotrain.teacher.states_cache import Shards
from cotrain.teacher.target_distributions import Head, Reader
from cotrain.teacher.target_model import adapted, load_pair, served
from cotrain.teacher.top_k import TopKAndRest
from cotrain.training.interrupts import Signals
from cotrain.training.names import of_draft
from cotrain.training.run_budget import sampling_seconds
from inference import load
from inference.drafts.draft_folder import OBJECTIVES
from inference.measure.real_costs import RealRound
from inference.request import ends_of
from inference.servers.openai_client import Client


@dataclass
class Job:
    """A run's models, its folder and its settings. reads: layers of the target that its student reads beyond LAST;
    start: when the run began, on the monotonic clock."""

    cfg: TrainConfig
    folder: Path
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sources: dict[str, Source] = field(default_factory=dict)
    texts_given: dict[str, Texts] = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)
    loggers: list[Logger] = field(default_factory=list)  # beside TensorBoard's
    reads: tuple[int, ...] = ()
    rounds: dict[int, RealRound] = field(default_factory=dict)  # by draft length: all checkpoints have one shape
    start: float = field(default_factory=time.monotonic)
    shape: dict[str, Any] | None = None  # how the shape of its draft was chosen, see `students.base.shape`

    @cached_property
    def halves(self) -> tuple[Reader, Head]:
        """The target's, see `target_model.served`, which tries them."""
        return served(self.target, self.vocabulary, self.reads)

    @property
    def vocabulary(self) -> int:
        """Ids that have mass, in training as when served: rows behind the tokenizer's last id only pad."""
        size: int = self.target.config.get_text_config().vocab_size
        return min(size, 1 + max(self.tokenizer.get_vocab().values()))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The target's: whose texts and states this run's are."""
        return identity(self.target, self.tokenizer)

    @cached_property
    def read(self) -> Reader:
        """States of texts, from disk where trainer.cache= names a folder; beside kept distributions in a folder of
        their own."""
        live, _ = self.halves
        cache = self.cfg.trainer.cache
        if not cache:
            return live
        folder = Path(cache) / "states" if self.cfg.trainer.top else Path(cache)
        return self._shards(live, folder, {}, (LAST, *self.reads))

    def taught(self, read: Reader) -> Reader:
        """What training reads of texts, from disk where trainer.cache= names a folder: states, or kept distributions.
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

    def _shards(self, read: Reader, folder: Path, what: dict[str, str], parts: tuple[int | str, ...]) -> Shards:
        return Shards(read, folder, self.identity | {"dtype": str(self.target.dtype)} | what, parts)

    def sampled(self, by: Sampler | None = None) -> Sampled:
        """Texts of the target, those that are not kept sampled by `by`: by the target alone, or a server, when None."""
        place = Path(self.cfg.rollout.folder or self.folder / "rollouts")
        found = replace(
            sampled(self.cfg, self.target, self.tokenizer, place), identity=self.identity,
            minutes=self.cfg.minutes, seconds=sampling_seconds(self.cfg),
        )  # fmt: skip
        return found if by is None else replace(found, by=lambda: by)

    def source(self, split: str) -> Source:
        """The configured texts of a split, read once."""
        if split not in self.sources:
            found = source(self.cfg, split, self.target, self.tokenizer)
            self.sources[split] = found
            print(found.left_out(self.cfg.rollout.prompt_tokens, split), end="")
        return self.sources[split]

    @property
    def chats(self) -> bool:
        """Whether the given texts are prompts, with or without completions, of which prompts are not learnt."""
        return self.cfg.data.path is not None and isinstance(self.source("train"), PromptRows)

    @cached_property
    def prompts(self) -> Prompts:
        """To measure with: own ones, or those shipped; no final one is learnt from or ranks checkpoints."""
        return self._own() if self.cfg.data.path else self._shipped()

    def _own(self) -> Prompts:
        ask = self.cfg.rollout
        learnt, ranking, final = (self.source(split).several(ask.prompt_tokens, ask.seed) for split in SPLITS)
        return apart(ranking, final, learnt, "own")

    def _shipped(self) -> Prompts:
        first = Share(0, self.cfg.rollout.rounds)  # other rounds are of such too
        texts = self.texts("train", learnt(self.cfg)[0], first), self.texts("held_out", self.cfg.regime.temperature)
        ranking, final = shipped_ids(self.tokenizer, self.cfg.bench.prompt_tokens)
        return apart(ranking, final, [prompt for part in texts for prompt in part.prompts], "shipped")

    def given(self, kind: str) -> Texts:
        """The configured texts as they stand, packed into blocks where they are no prompts."""
        if kind not in self.texts_given:
            source, ask = self.source(kind), self.sampled().ask
            self.texts_given[kind] = (
                logged(source, ask.texts[kind], ask, self.cfg.rollout.seed)
                if isinstance(source, PromptRows)
                else of_blocks(pack(source.texts, self.tokenizer, self.cfg.data.block))
            )
        return self.texts_given[kind]

    def texts(self, kind: str, temperature: float, part: Share = WHOLE, by: Sampler | None = None) -> Texts:
        """Of the target at a temperature: logs of its own in the regime, else sampled, see `sampled`."""
        data, regime = self.cfg.data, self.cfg.regime
        if data.on_target and temperature == regime.temperature and self.chats:
            return self.given(kind)
        return self.sampled(by).texts(kind, sampling(regime, temperature), partial(self.source, kind), part=part)

    def plan(self, draft: PreTrainedModel) -> measurement.Plan:
        return self.plan_with(draft, self.prompts)

    def plan_with(self, draft: PreTrainedModel, prompts: Prompts | None) -> measurement.Plan:
        """On other prompts than the run's own; None: of a draft that is not measured."""
        names = (self.cfg.target.path, of_draft(self.cfg))
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
    """Texts of the target as the settings ask for them, kept in `folder`; a draft makes sampling them faster.

    Raises ValueError for a draft beside a server, which samples as it does.
    """
    ask, source = cfg.rollout, {kind: made_from(cfg.data, kind) for kind in ("train", "held_out")}
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
    """The configured texts of a split, see `data.prompt_rows`."""
    return source_of(cfg.data, split, tokenizer, ends_of(target))


def models(
    cfg: TrainConfig | RolloutConfig | BenchConfig | ServeCheckConfig,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target as it will be served, and its tokenizer. Raises as `load_pair` and `adapted`."""
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
