"""The objects of a training run: the target, its texts, and a plan to measure a draft."""

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
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
from cotrain.config.settings import DraftFolderConfig, RolloutConfig, TrainConfig, judged, learnt, sampling
from cotrain.data.conversations import Template
from cotrain.data.corpora import shipped_ids
from cotrain.data.fingerprints import identity
from cotrain.data.prompt_rows import PromptRows, Source
from cotrain.data.sources import pack_blocks, prompt_origin, sources_apart
from cotrain.data.splits import SPLITS, Prompts, apart
from cotrain.data.texts import Texts
from cotrain.errors import UserError
from cotrain.rollout.sampled_states import SampledStates
from cotrain.rollout.samplers import Ask, Own, Remote, Sampler
from cotrain.rollout.self_prompts import LONGEST, SelfPrompts, needed
from cotrain.rollout.training_texts import Sampled, logged, start_of
from cotrain.students.base import LAST
from cotrain.teacher.server_states import load_ends, served_elsewhere
from cotrain.teacher.servers import servers_at
from cotrain.teacher.states_cache import DiskCache
from cotrain.teacher.target_model import Head, Reader, load_config, load_pair, served
from cotrain.training.deadline import Deadline
from cotrain.training.distributed import sharded_target
from cotrain.training.interrupts import Signals
from inference import Engine, load
from inference.drafts.atomic import write_atomic
from inference.drafts.bundled_target import resolve
from inference.drafts.compatibility import hash_weights
from inference.measure.costs import RealRound
from inference.models.pretrained import length_of
from inference.policy import Fixed
from inference.request import ends_of, vocabulary_of
from inference.servers.openai_client import Client

TEACHER = "teacher.url"  # in the manifest of texts: the servers' addresses may change
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)


@dataclass
class Job:
    """The models, folder, settings and texts of a run.

    sources: split -> the user's prompts or documents, as far as they have been read.
    texts_given: split -> the user's own texts, as far as they have been built (`given`).
    loggers: all except TensorBoard's.
    reads: the layers whose states the student reads from the target, besides LAST.
    sampled_states: states of the passes that sample texts, see `keep_states`; None to read all texts again.
    rounds: draft length -> timed decoding rounds, shared by the measurements of all checkpoints.
    sampled_prompts: the prompts that the target sampled for data=self, one JSON row per line; None for other prompts.
    train_texts: the training texts, if another target sampled them. This target's held-out texts then continue the
    other target's held-out prompts.
    shape: how the draft's layers were chosen, the result of `exits.plan_exits`; None if nothing was chosen.
    """

    cfg: TrainConfig
    folder: Path
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sources: dict[str, Source] = field(default_factory=dict)
    texts_given: dict[str, Texts] = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)
    loggers: list[Logger] = field(default_factory=list)  # besides that of TensorBoard
    reads: tuple[int, ...] = ()
    sampled_states: SampledStates | None = None
    rounds: dict[int, RealRound] = field(default_factory=dict)  # by draft length, for all checkpoints
    deadline: Deadline = field(default_factory=Deadline)
    sampled_prompts: str | None = None
    train_texts: Sampled | None = None
    shape: dict[str, Any] | None = None  # how the layers of the draft were chosen, see `exits.plan_exits`

    @cached_property
    def halves(self) -> tuple[Reader, Head]:
        """Return the target as two functions: ids (B, T) -> states (B, T, D) by layer, and last states (..., D) ->
        logits (..., V). Raises ValueError if they do not compute the same logits as the model."""
        if urls := self.cfg.teacher.urls:
            return served_elsewhere(urls, self.target, self.vocabulary, self.reads)
        return served(self.target, self.vocabulary, self.reads)

    @property
    def vocabulary(self) -> int:
        """Return the number of ids that can have mass, in training and in serving. Rows of the head after the
        tokenizer's last id are padding."""
        return vocabulary_of(self.target, self.tokenizer)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return the target's fingerprint. It is saved with the target's texts and states."""
        return identity_of(self.cfg, self.target, self.tokenizer)

    @cached_property
    def read(self) -> Reader:
        """Return a function from ids (B, T) to the target's states (B, T, D) by layer. If trainer.cache= names a
        folder, the states are cached there."""
        live, _ = self.halves
        if not self.cfg.trainer.cache:
            return live
        maker = self.identity | {"dtype": str(self.target.dtype)}
        return DiskCache(live, Path(self.cfg.trainer.cache), maker, (LAST, *self.reads))

    def sampled(self) -> Sampled:
        """Return the texts that the target samples. Those that are not on disk are sampled when they are first used."""
        folder = Path(self.cfg.rollout.folder or self.folder / "rollouts")
        sampled = sampled_texts(self.cfg, self.target, self.tokenizer, folder)
        if self.sampled_states and sampled.by is None:
            parts = self.target, self.sampled_states
            own = partial(Engine, *parts, policy=Fixed(0), tokenizer=self.tokenizer, rows=sampled.rows)
            sampled = replace(sampled, by=lambda: Own(own()))
        return replace(
            sampled,
            identity=self.identity,
            minutes=self.cfg.minutes,
            seconds=self.deadline.sampling(self.cfg),
        )

    def keep_states(self) -> None:
        """Keep the target's states of the passes that sample texts, so that it need not read the texts again. They
        differ from those of later passes by rounding. So this is only for runs with minutes=, which give other weights
        each time, and it is not for states that are stored on disk."""
        cfg, elsewhere = self.cfg, self.cfg.trainer.cache or self.train_texts or self.target.config.is_encoder_decoder
        if cfg.minutes and cfg.trainer.remember_mb and not elsewhere:
            self.sampled_states = SampledStates((LAST, *self.reads), cfg.trainer.remember_mb * 2**20)

    def source(self, split: str) -> Source:
        """Return the prompts or documents of a split ("train", "held_out" or "final"). Training and held-out ones are
        read together, once, so that held-out prompts that begin like a training prompt are left out."""
        if split not in self.sources:
            splits = SPLITS[:2] if split in SPLITS[:2] else (split,)
            template, cfg = template_of(self.cfg, self.target, self.tokenizer), self.cfg
            encoder, tokens = self.target.config.is_encoder_decoder, cfg.rollout.prompt_tokens
            self.sources |= sources_apart(cfg.data, splits, template, encoder, lambda _: tokens)
        return self.sources[split]

    @property
    def chats(self) -> bool:
        """Return whether each text is a separate prompt with a completion, as for the user's prompts and for an
        encoder-decoder. Then only completions are learnt."""
        return (
            self.target.config.is_encoder_decoder
            or self.cfg.data.path is not None
            and isinstance(self.source("train"), PromptRows)
        )

    @property
    def messages(self) -> bool:
        """Return whether the user's prompts are messages, which the target's chat template renders."""
        return self.chats and self.source("train").rendered

    @cached_property
    def prompts(self) -> Prompts:
        """Return the prompts to measure a draft with: the user's, or those that ship with this package. Final prompts
        are in no training text, and no checkpoint is ranked by them."""
        ask = self.cfg.rollout
        if self.cfg.data.path:
            own, ranking, final = (self.source(split).several(ask.prompt_tokens, ask.seed) for split in SPLITS)
            return apart(ranking, final, own, "own")
        texts = self.texts("train", learnt(self.cfg)[0]), self.texts("held_out", self.cfg.regime.temperature)
        encoder = self.target.config.is_encoder_decoder
        ranking, final = shipped_ids(self.tokenizer, self.cfg.bench.prompt_tokens, encoder)
        return apart(ranking, final, [prompt for part in texts for prompt in part.prompts], "shipped")

    def given(self, split: str) -> Texts:
        """Return the user's texts for a split: prompts with their completions, or documents packed into blocks."""
        if split not in self.texts_given:
            source = self.source(split)
            self.texts_given[split] = (
                logged(source, asked(self.cfg), split, self.cfg.rollout.seed, start_of(self.target))
                if isinstance(source, PromptRows)
                else pack_blocks(source.texts, self.tokenizer, self.cfg.data.block)
            )
        return self.texts_given[split]

    def texts(self, split: str, temperature: float) -> Texts:
        """Return texts for a split ("train" or "held_out") at a temperature. They are the user's own if
        data.on_target=true, `chats` is True and the temperature is the regime's; otherwise the target samples them."""
        data, regime = self.cfg.data, self.cfg.regime
        if data.on_target and temperature == regime.temperature and self.chats:
            return self.given(split)
        asked, sampled = sampling(regime, temperature), self.train_texts or self.sampled()
        others = partial(sampled.texts, split, asked, lambda *ask: self.source(split).prompts(*ask))
        if split == "train" or self.train_texts is None:
            return others()
        return self.sampled().texts(
            split, asked, lambda *_: list(zip((one := others()).domain, one.prompts, strict=True))
        )

    def plan(self, draft: PreTrainedModel) -> measurement.Plan:
        """Return a plan to measure a draft with the run's prompts."""
        return self.plan_with(draft, self.prompts)

    def plan_with(self, draft: PreTrainedModel, prompts: Prompts | None) -> measurement.Plan:
        """Return a plan to measure a draft with these prompts. prompts: None for the shipped ones, as for a draft whose
        measurement is never run."""
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
            adapter=self.cfg.target.adapter,
        )


def sampled_texts(
    cfg: TrainConfig | RolloutConfig,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    draft_path: str | None = None,
) -> Sampled:
    """Return the target's texts for these settings, which are saved in `folder`. Those that are not on disk are sampled
    when they are first used. tokenizer: the target's. draft_path: a draft folder that makes sampling faster, or None.

    Raises ValueError for a draft together with rollout.url=, since a server would not use the draft.
    """
    rollout, written = cfg.rollout, template_of(cfg, target, tokenizer)
    dated = {"date": str(written.day)} if written.dated else {}
    if written.dated:
        write_atomic(_date_file(cfg), f"{written.day}\n")
    source = {kind: prompt_origin(cfg.data, kind) | dated for kind in ("train", "held_out")}
    server = rollout.url or (TEACHER if _teachers(cfg) else None)
    if server and draft_path:
        raise ValueError(
            "rollout.url: the server samples the texts and would not use draft.path=: leave out one of the two"
        )
    by: Callable[[], Sampler] | None = None
    if server:
        by = partial(_remote, cfg, tokenizer, ends_of(target))
    elif isinstance(cfg, TrainConfig) and cfg.shards_target:
        by = partial(_unsampled, cfg, folder)
    elif draft_path:
        by = partial(_speculative, draft_path, target, tokenizer, rollout.rows)
    return Sampled(target, tokenizer, folder, asked(cfg), rollout.rows, rollout.seed, source, by, server)


def asked(cfg: TrainConfig | RolloutConfig) -> Ask:
    """Return how much to sample: the number of texts of each split, and the most tokens of a prompt and of a
    continuation."""
    ask = cfg.rollout
    return Ask({"train": ask.texts, "held_out": ask.held_out_texts}, ask.prompt_tokens, ask.new_tokens)


def reads_given(cfg: TrainConfig, logs: bool) -> bool:
    """Return whether a run learns from, or is evaluated on, texts that the user gave. logs: whether the user's rows are
    whole prompts, which may have completions."""
    return cfg.draft.trained and (cfg.trainer.corpus_steps > 0 or (cfg.data.on_target and logs))


def identity_of(
    cfg: TrainConfig | RolloutConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the target's fingerprint. Of a target on servers it also has a hash of the files, since the weights in
    this process lack the layers."""
    files = {"files": hash_weights(str(cfg.target.path))} if _teachers(cfg) else {}
    return identity(target, tokenizer) | files


def _teachers(cfg: TrainConfig | RolloutConfig) -> list[str]:
    return cfg.teacher.urls if isinstance(cfg, TrainConfig) else []


def _remote(cfg: TrainConfig | RolloutConfig, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> Sampler:
    """Return the sampler of rollout.url=, or else of teacher.url=."""
    rows = cfg.rollout.rows
    if cfg.rollout.url:
        return Remote(Client(cfg.rollout.url), tokenizer, rows, ends)
    servers = servers_at(_teachers(cfg), (), rows)
    return Remote(servers, tokenizer, servers.rows, ends)


def _unsampled(cfg: TrainConfig, folder: Path) -> Sampler:
    temperatures = {"train": learnt(cfg), "held_out": [*judged(cfg)]}
    texts = " and ".join(f"kind={kind} regime.temperature={t:g}" for kind, ts in temperatures.items() for t in ts)
    raise UserError(
        f"target.device_map=auto: several processes share the target, so none can sample texts, and {folder} lacks "
        f"some: sample them first, cotrain rollout target.device_map=auto output=FOLDER with {texts}, and set "
        "rollout.folder=FOLDER; rollout.temperatures=[] needs fewer"
    )


def _speculative(path: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int) -> Sampler:
    return Own(load(path, target, tokenizer=tokenizer, rows=rows))


def template_of(
    cfg: TrainConfig | RolloutConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Template:
    """Return the target's chat template. If the template writes the date, this is the day on which the texts in this
    run or in rollout.folder= were first sampled, so that a later command continues with the same prompts."""
    file, anew = _date_file(cfg), getattr(cfg, "overwrite", False) and not cfg.rollout.folder
    day = date.today() if anew or not file.is_file() else date.fromisoformat(file.read_text(encoding="utf-8").strip())
    return Template(tokenizer, cfg.data.template, ends_of(target), day)


def _date_file(cfg: TrainConfig | RolloutConfig) -> Path:
    return Path(cfg.rollout.folder or cfg.output) / "date.txt"


def sample_prompts(
    cfg: TrainConfig | RolloutConfig,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    timed: int = 0,
    seconds: float | None = None,
) -> Path:
    """Let the target sample prompts for data=self. Write them to a file in `folder`, set data.path in `cfg`, in place,
    to this file, and return its path.

    timed: how many prompts are needed to time a draft. seconds: the most time for sampling; None: no limit. Raises
    UserError if a split gets no prompt.
    """
    ask = cfg.rollout
    own = SelfPrompts(
        template_of(cfg, target, tokenizer),
        folder,
        identity_of(cfg, target, tokenizer),
        needed(ask.texts, ask.held_out_texts, timed),
        ask.seed,
        min(LONGEST, length_of(target.config.get_text_config()) // 2),
        seconds,
    )
    remote = partial(_remote, cfg, tokenizer, ends_of(target)) if _teachers(cfg) else None
    file = own.file(remote or (lambda: Own(Engine(target, tokenizer=tokenizer, rows=ask.rows))))
    cfg.data.path = str(file)
    return file


def models(cfg: TrainConfig | RolloutConfig | DraftFolderConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the target as it will be served (quantised, with its adapter), and its tokenizer. Raises ValueError or
    OSError, which names the key or file, for a missing or damaged model or adapter."""
    ask = cfg.target
    if isinstance(cfg, TrainConfig) and cfg.teacher.urls:
        _, tokenizer = load_config(str(ask.path), ask.trust_remote_code)
        return load_ends(resolve(str(ask.path)), ask.dtype, ask.trust_remote_code), tokenizer
    sharded = isinstance(cfg, TrainConfig) and cfg.shards_target
    place = "cpu" if sharded else ask.device_map
    target, tokenizer = load_pair(
        str(ask.path), cfg.quantisation.kind, ask.dtype, ask.trust_remote_code, ask.adapter, place
    )
    return sharded_target(target) if sharded else target, tokenizer


def objective(name: str) -> str:
    """Return the name of an objective in cotrain.json: "sampled" for the setting sampled_draft, "greedy" for
    greedy_draft."""
    return name.removesuffix("_draft")


def settle(threads: int, seed: int) -> None:
    """Set torch's threads (0: torch chooses) and all seeds for a run, and hide the progress bars of `datasets`."""
    datasets.disable_progress_bars()
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    lightning.seed_everything(seed, verbose=False)


def keep_freed_memory() -> None:
    """Let the C library reuse freed memory instead of returning it to the system. No effect if the library is not
    glibc.

    Each step frees and allocates the same large tensors. If the system takes their pages back, it clears them again on
    the next use: a step of an eagle draft on two cores took 17 % longer.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def loss_name(loss: Loss) -> str:
    """Return the name of a loss in reports and comparisons: `kl`, or `kl_then_tv` if another loss follows."""
    return f"{loss.first}_then_{loss.then}" if loss.then else loss.first


def draft_name(cfg: TrainConfig) -> str:
    """Return the name of a draft in reports, for example `medusa, scratch, kl_then_tv`. For a kind that is not trained
    it is the kind alone."""
    kind = cfg.draft.kind
    return kind if not cfg.draft.trained else f"{kind}, {cfg.init.kind}, {loss_name(cfg.loss)}"
