"""Joint training of a draft and its target (`mode=joint`), with a bound on how far the target moves.

A run has four stages, each in a folder of its own. A stage is skipped if its files exist:

    warm/     the draft learns from the original target, as with mode=distil
    joint/    draft and adapter learn together. The loss is the draft's, now with gradients in the target too, plus a
              multiplier times KL(original || moved). The multiplier grows while the KL exceeds the bound (dual ascent),
              so epsilon is a bound and no weight
    target/   the adapter is scaled down until the KL on held-out texts is within epsilon. It is then merged, and
              certified on other held-out texts: the original target's, and new ones that the moved target samples
    .         the draft learns from the moved target, which is now frozen; measurement, report and export are as usual

So everything after the third stage is the ordinary training of a draft for a target in a folder.
"""

import copy
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.config.groups import Joint, Loss
from cotrain.config.settings import TrainConfig, from_target, sampling
from cotrain.data.prompt_rows import Source
from cotrain.data.splits import shared
from cotrain.data.texts import Texts
from cotrain.errors import UserError, user_errors, warn
from cotrain.evaluation.held_out import HeldOut, Scores
from cotrain.evaluation.held_out import held_out as read_held_out
from cotrain.evaluation.moved import CLAIMED, CONFIDENCE, Movement, movement, movement_figures
from cotrain.losses import divergences
from cotrain.ranks import awaited, rank
from cotrain.rollout.samplers import Own, Sampler
from cotrain.rollout.training_texts import Sampled
from cotrain.students.base import Student
from cotrain.teacher.states_cache import MemoryCache
from cotrain.teacher.target_distributions import FromStates
from cotrain.teacher.target_model import Head, Reader, Record, served
from cotrain.training.assembly import trained_by
from cotrain.training.deadline import Deadline
from cotrain.training.distributed import StepCounts
from cotrain.training.job import Job, models, sampled_texts, settle
from cotrain.training.module import Distillation
from cotrain.training.preconditions import RunOutline, refuse_given
from cotrain.training.results import unmeasured
from cotrain.training.run import target_prompts, train
from inference import Engine
from inference.drafts.atomic import new_folder, write_json
from inference.drafts.gguf_target import sha256
from inference.drafts.moved_target import IDENTITY, MOVED, movement_of, said
from inference.drafts.weight_files import json_if_any, read_json
from inference.models.passes import LAST
from inference.models.pretrained import cast as cast_to
from inference.models.pretrained import weights_quantisation
from inference.sampling import wide

AIM = 0.8  # of epsilon: the KL that the multiplier steers to, which leaves room for the confidence interval
RATE, START = 0.1, 0.03  # of the multiplier: change of its logarithm per step, and first value
STEEPEST = 2.0  # the largest excess over the bound that one step reacts to, as a share of the bound
SEARCHES = 6  # evaluations of the KL to find the scale of the adapter
# of epsilon: the bound up to which the adapter is not scaled; and of a scaled one, the bound that is high enough, that
# is aimed at, that is allowed. Other texts certify, at a higher confidence, so room is left: in simulated runs 36 texts
# certified a scaled target in 70 to 99 of 100 cases, and in 55 to 70 when .87 was aimed at
WHOLE, NEAR, MIDDLE, MOST = 0.92, 0.68, 0.75, 0.8
FEWEST = 4  # held-out texts: two choose the scale, and two certify
WARM, MOVING, TARGET = "warm", "joint", "target"
WRITTEN = ((f"{WARM}/draft",), (f"{MOVING}/draft", TARGET))  # by each stage for the next ones
SEALS = "stages.json"  # hashes of these files


def joint(
    cfg: TrainConfig, folder: Path, deadline: Deadline, sources: Mapping[str, Source] | None = None
) -> dict[str, Any]:
    """Run or resume the joint training in `folder`, all four stages. Return the report of the exported draft.

    cfg: settings that `preconditions.require` and `refuse_joint` have accepted. deadline: the run's time limit.
    sources: split -> the user's texts, if they have been read. The moved target is written to `target/` in the folder.
    Raises UserError if its KL to the original is not certified to be within joint.epsilon, unless
    joint.uncertified=true.
    """
    prompts, place = None, folder / TARGET
    if from_target(cfg.data):  # the original target samples the prompts of all stages
        cfg = copy.deepcopy(cfg)
        settle(cfg.trainer.threads, cfg.trainer.seed)
        prompts, sources = target_prompts(cfg, *models(cfg), rollouts(cfg, folder), deadline)
    for parts in WRITTEN:
        remove_changed(folder, parts)
    if cfg.joint.warm_steps and not (folder / WARM / "draft").exists():
        train(warming(cfg), folder / WARM, deadline, sources)
        awaited(lambda: (folder / WARM / "draft").exists(), "the process that trains the first draft")
        seal(folder, WRITTEN[0])
    if not (place / MOVED).is_file():
        stage = SecondStage(cfg, folder)
        train(moving(cfg, folder), folder / MOVING, deadline, build=stage.build, write=stage.write)
        awaited(lambda: (place / MOVED).is_file(), "the process that writes the moved target")
        seal(folder, WRITTEN[1])
    refuse_uncertified(cfg, place)
    texts = partial(original_texts, cfg, folder)
    return train(serving_settings(cfg, folder), folder, deadline, texts=texts, prompts=prompts)


def seal(folder: Path, parts: Sequence[str]) -> None:
    """Note the hashes of the files that a stage has written to the folders `parts` of the run's folder, with which
    `remove_changed` compares when the run goes on."""
    if not rank():
        files = [file for part in parts for file in (folder / part).rglob("*") if file.is_file()]
        new = {str(file.relative_to(folder)): sha256(file) for file in files}
        write_json(folder / SEALS, json_if_any(folder / SEALS) | new)


def remove_changed(folder: Path, parts: Sequence[str]) -> None:
    """Remove the folders `parts` of the run's folder if a file in them is not as its stage wrote it. The stage, which
    has its checkpoint, then writes them again."""
    seals = json_if_any(folder / SEALS)
    known = [folder / name for name in seals if name.startswith(tuple(f"{part}/" for part in parts))]
    changed = [file for file in known if file.is_file() and sha256(file) != seals[str(file.relative_to(folder))]]
    if not changed:
        return
    warn(f"{changed[0]} was changed since it was written: it is made again")
    if not rank():
        for part in parts:
            shutil.rmtree(folder / part, ignore_errors=True)
    awaited(lambda: not any((folder / part).exists() for part in parts), "the process that removes damaged files")


def rollouts(cfg: TrainConfig, folder: Path) -> Path:
    """Return the folder for the texts and prompts that the original target samples. folder: the run's folder."""
    return Path(cfg.rollout.folder or folder / WARM / "rollouts")


def original_texts(
    cfg: TrainConfig, folder: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Sampled:
    """Return the original target's training texts, from which the draft also learns in the last stage. The moved target
    is so near to the original that its own texts would add nothing except hours of sampling.

    target: the moved target, which samples the held-out texts of the last stage from the same prompts as the
    original's. folder: the run's folder. Reading the training texts raises UserError if they are no longer on disk.
    """
    place, about = rollouts(cfg, folder), read_json(folder / TARGET / MOVED)
    texts = sampled_texts(cfg, target, tokenizer, place)
    return replace(texts, identity=about[IDENTITY], by=partial(_refuse_sampling, place))


def _refuse_sampling(place: Path) -> Sampler:
    """Raise UserError that texts are missing in `place`. It is called instead of sampling, since texts of the moved
    target must not be stored as texts of the original."""
    raise UserError(
        f"the texts of the original target are missing in {place}: delete {place.parent.parent / MOVING} and "
        f"{place.parent.parent / TARGET}, and the same command samples them again"
    )


def refuse_joint(cfg: TrainConfig, known: RunOutline) -> None:
    """Raise UserError, which names the key, for settings that joint training does not support. known: the run before
    its weights are loaded, from `preconditions.require`."""
    if find_spec("peft") is None:
        raise UserError("mode=joint: it needs peft: pip install 'cotrain[adapter]'")
    if not cfg.draft.trained:
        raise UserError(f"mode=joint: {cfg.draft.kind} drafts are not trained: set mode=distil, or another draft=")
    for key, wrong, instead in (
        ("regime.temperature=0", cfg.regime.temperature == 0, "a one-hot distribution has no gradient: use regime=t1"),
        ("trainer.strategy=fsdp2", cfg.trainer.strategy == "fsdp2", "use trainer.strategy=ddp"),
        ("rollout.url", cfg.rollout.url, "a server samples only from the original target: set rollout.url=null"),
        (
            "data.on_target=true",
            cfg.data.on_target,
            "the texts are not those of the moved target: set data.on_target=false",
        ),
        ("minutes", cfg.minutes, "joint training is counted in steps: set minutes=null"),
        ("trainer.minutes", cfg.trainer.minutes, "joint training is counted in steps: set trainer.minutes=null"),
        (
            "target.adapter",
            cfg.target.adapter and (cfg.quantisation.kind != "none" or weights_quantisation(known.target.config)),
            "the target is quantised: merge the adapter into an unquantised checkpoint and give it as target.path=",
        ),
        (
            "joint.warm_steps=0",
            not cfg.joint.warm_steps and cfg.init.kind != "pretrained",
            "the draft must have learnt before the target moves: set joint.warm_steps=600, or init=pretrained",
        ),
    ):
        if wrong:
            raise UserError(f"{key}: not supported with mode=joint: {instead}")
    held, sources, tokens = cfg.rollout.held_out_texts, known.sources, cfg.rollout.prompt_tokens
    count = held
    if sources:  # one text of each conversation or document is used
        asked = sources["held_out"].prompts(held, tokens, cfg.rollout.seed)
        count = len(independent([prompt for _, prompt in asked], sources["held_out"], tokens))
    if count < FEWEST:
        raise UserError(
            f"rollout.held_out_texts={held}: there are {count} held-out texts of different conversations "
            f"or documents, and mode=joint needs at least {FEWEST} to scale the adapter and certify the "
            "target: raise rollout.held_out_texts=, or give more prompts with data.path="
        )
    with user_errors():
        for stage in ([warming(cfg)] if cfg.joint.warm_steps else []) + [serving_settings(cfg, Path(cfg.output))]:
            refuse_given(stage)  # a loss may apply to the user's texts in one stage alone


def refuse_uncertified(cfg: TrainConfig, place: Path) -> None:
    """Raise UserError if the moved target in the folder `place` is not certified, unless joint.uncertified=true."""
    about = movement_of(str(place))
    assert about is not None
    if not about["certified"] and not cfg.joint.uncertified:
        raise UserError(
            f"joint.epsilon={cfg.joint.epsilon:g}: the KL on held-out texts is {about['kl']:.4f} nats per "
            f"token, and at most {about['bound']:.4f} with 95 % confidence, so nothing is exported: set "
            "joint.uncertified=true, or raise rollout.held_out_texts=, with another output=, to certify with more texts"
        )


# --- the settings of each stage


def warming(cfg: TrainConfig) -> TrainConfig:
    """Return the settings of the first stage: the draft learns from the original target for joint.warm_steps= steps."""
    return _without_measurement(cfg, cfg.joint.warm_steps)


def _without_measurement(cfg: TrainConfig, steps: int) -> TrainConfig:
    """Return the settings of a stage of `steps` steps, which ends without a measurement."""
    stage = copy.deepcopy(cfg)
    stage.mode, stage.measure, stage.trainer.steps = "distil", False, steps
    stage.trainer.validations = min(cfg.trainer.validations, steps)
    return stage


def moving(cfg: TrainConfig, folder: Path) -> TrainConfig:
    """Return the settings of the second stage: draft and adapter learn for joint.steps= steps, with the training's last
    loss. folder: the run's folder."""
    second = _without_measurement(cfg, cfg.joint.steps)
    second.trainer.corpus_steps = 0
    second.draft.quantisation, second.trainer.minutes, second.trainer.cache = "none", None, None
    second.loss = _last_loss(cfg)
    if cfg.joint.warm_steps:
        _begins_with(second, folder / WARM / "draft")
    if cfg.joint.every > 1 and cfg.trainer.strategy == "ddp":  # in other steps the adapter has no gradient
        second.trainer.strategy = "ddp_find_unused_parameters_true"
    second.rollout.folder = str(rollouts(cfg, folder))
    return second


def serving_settings(cfg: TrainConfig, folder: Path) -> TrainConfig:
    """Return the settings of the last stage: the draft learns from the moved target for trainer.steps= steps. folder:
    the run's folder."""
    last = copy.deepcopy(cfg)
    last.mode = "distil"
    last.loss = _last_loss(cfg)
    last.target.adapter = None
    last.rollout.folder, last.trainer.cache = None, None  # shared folders are for the original's texts and states
    if (folder / TARGET / "config.json").is_file():
        last.target.path = str(folder / TARGET)
    else:
        last.target.adapter = str(folder / TARGET)
    _begins_with(last, folder / MOVING / "draft")
    return last


def _last_loss(cfg: TrainConfig) -> Loss:
    """Return the training's last loss, changed so that it applies from the first step on."""
    return Loss(first=cfg.loss.then or cfg.loss.first, then=None, switch=0.0, decay=cfg.loss.decay)


def _begins_with(cfg: TrainConfig, folder: Path) -> None:
    """Change `cfg`, in place, so that its draft begins with the weights in a folder. Settings for the sizes of a new
    draft then have no effect."""
    cfg.init.kind, cfg.draft = "pretrained", cfg.draft.model_copy(update={"path": str(folder)})


# --- the second stage: draft and adapter learn together


class MovingTeacher(MemoryCache):
    """The teacher for a target that moves. A call returns the states of the moved target, with gradients. `original`
    returns the states of the target without its adapter, and caches them.

    live: reads the target's states with its adapter, as a function ids (B, T) -> states (B, T, D) by layer. record: the
    states that the last call returned. moves: whether the adapter moves in the current step; if not, a call has no
    gradients. limit: bytes of the cache.
    """

    def __init__(self, live: Reader, target: nn.Module, limit: int) -> None:
        super().__init__(unadapted(live, target), limit)
        self.live = live
        self.record: Record = {}
        self.moves = True

    def __call__(
        self,
        ids: Tensor,
        keys: Tensor,
        position_ids: Tensor | None = None,
        source: Tensor | None = None,
        length: Tensor | None = None,
    ) -> Record:
        with torch.set_grad_enabled(self.moves and torch.is_grad_enabled()):
            self.record = self.live(ids, position_ids)
        return self.record

    def original(self, ids: Tensor, keys: Tensor, position_ids: Tensor | None = None) -> Record:
        """Return the states (B, T, D) of the target without its adapter, keyed by layer, without gradients. ids (B, T):
        token ids. keys (B,): the number of each text, under which its states are cached. position_ids (B, T): only if
        texts are packed."""
        return super().__call__(ids, keys, position_ids)


class JointTraining(Distillation):
    """Lightning module that trains a student and an adapter of its target. The loss is that of `Distillation`, with
    gradients in both, plus the multiplier times KL(original || moved) / epsilon.

    adapter: the adapter's parameters. settings: the settings joint.*. remember: bytes in which the original target's
    states are cached. parts, options: the other arguments of `Distillation`.
    """

    multiplier: Tensor

    def __init__(
        self,
        student: Student,
        target: PreTrainedModel,
        *parts: Any,
        adapter: Sequence[nn.Parameter],
        settings: Joint,
        remember: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(student, target, *parts, **options)
        self.settings, self.adapter = settings, nn.ParameterList(adapter)
        self.register_buffer("multiplier", torch.tensor(START))
        self.masses = None  # the target's distributions change
        self.live = self.teacher.read
        self.teacher = self.moving = MovingTeacher(self.live, target, remember)

    @property
    def moves(self) -> bool:
        """Return whether the adapter moves in the current step."""
        return self.global_step % self.settings.every == 0

    @property
    def detached(self) -> bool:
        """Return whether the target's probabilities pass no gradient in the current step. Among the steps in which the
        adapter moves, the share `detach` is such, evenly spaced: every second one for detach=0.5."""
        share, moved = self.settings.detach, self.global_step // self.settings.every
        return int((moved + 1) * share) > int(moved * share)

    def learn(self, batch: dict[str, Any]) -> Tensor:
        self.moving.moves = self.moves
        return super().learn(batch)

    def further(self, batch: dict[str, Any], counts: StepCounts) -> dict[str, Tensor]:
        if not self.moves:
            return {}
        kl = self._kl(batch) / counts.positions
        if self.watched:
            self.step_figures |= {"kl_to_original": float(kl.detach()), "multiplier": float(self.multiplier)}
        _, batches = batch.get("group", (0, 1))
        return {"bound": self._weight(kl.detach(), batches) * kl}

    def _kl(self, batch: dict[str, Any]) -> Tensor:
        """Return KL(original || moved) in nats, summed over the predicted positions of a batch."""
        inside = pad(batch["predicted"], (0, 1))
        before = self.moving.original(batch["ids"], batch["key"], batch.get("position_ids"))[LAST][inside]
        pairs = zip(before.split(self.chunk), self.moving.record[LAST][inside].split(self.chunk), strict=True)
        return torch.stack([checkpoint(self._divergence, *pair, use_reentrant=False) for pair in pairs]).sum()

    def _divergence(self, before: Tensor, now: Tensor) -> Tensor:
        p, moved = (torch.log_softmax(wide(self.head_target(states)), -1) for states in (before, now))
        return divergences.kl(p, moved).sum()

    def _weight(self, kl: Tensor, batches: int) -> Tensor:
        """Return the factor of the KL in a batch's loss, a scalar. The multiplier is updated, in place, by the KL over
        all processes. kl (): the mean per position of this batch, in nats. batches: the number of batches in the step.
        """
        if self.settings.weight is not None:
            return torch.full_like(kl, self.settings.weight)
        weight = self.multiplier / self.settings.epsilon
        if self.trainer.world_size > 1:
            kl = self.trainer.strategy.reduce(kl, reduce_op="mean")
        excess = (kl / (AIM * self.settings.epsilon) - 1).clamp(max=STEEPEST)
        self.multiplier *= torch.exp(RATE / batches * excess)
        return weight

    def distributions(self, record: Record) -> FromStates:
        """Return the moved target's distributions, with gradients in the target unless the step is detached."""
        states = record[LAST].detach() if self.detached else record[LAST]
        return FromStates(states, self.head_target, trained=states.requires_grad)

    def judge(self) -> None:
        self.held_out = {t: self._read_again(held) for t, held in self.held_out.items()}
        super().judge()

    def on(self, held_out: HeldOut) -> dict[str, Scores]:
        return super().on(self._read_again(held_out))

    def _read_again(self, held: HeldOut) -> HeldOut:
        """Return the held-out texts with the states of the target as it is now. held: the texts, whose states may be
        older."""
        return read_held_out(self.live, held.texts, held.temperature, held.truncate)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.draft)
        optimizer.add_param_group({"params": list(self.adapter), "lr": self.settings.lr, "weight_decay": 0.0})
        schedule = self.make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def add_lora(target: PreTrainedModel, rank: int) -> Any:
    """Put a LoRA adapter (Hu et al. 2021, 2106.09685) into every projection of the target, in place, and return peft's
    model around it. The new adapter does not change the target's outputs. rank: the rank of the adapter's matrices."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(target, LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")).eval()


def adapters(target: nn.Module) -> list[Any]:
    """Return the layers of a target that have a LoRA adapter."""
    from peft.tuners.lora import LoraLayer

    return [module for module in target.modules() if isinstance(module, LoraLayer)]


@contextmanager
def without_adapter(target: nn.Module) -> Iterator[None]:
    """Let the target compute without its adapter, and without gradients, until the block ends."""
    layers = adapters(target)
    try:
        for layer in layers:
            layer.enable_adapters(False)
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def unadapted(live: Reader, target: nn.Module) -> Reader:
    """Return a function ids (B, T) -> states (B, T, D) by layer of the target without its adapter. live: such a
    function with the adapter. target: the model with the adapter."""

    def read(ids: Tensor, position_ids: Tensor | None = None, *_: Tensor | None) -> Record:
        with without_adapter(target):
            return live(ids, position_ids)

    return read


@dataclass
class SecondStage:
    """The stage that trains draft and adapter together. cfg, folder: the settings and folder of the whole run. wrapped:
    peft's model around the target; None before `build` has run."""

    cfg: TrainConfig
    folder: Path
    wrapped: Any = None

    def build(self, job: Job, student: Student, held_out: dict[float, HeldOut]) -> Distillation:
        """Put the adapter into the target, in place, and return the module that trains both. held_out: the held-out
        texts, keyed by temperature."""
        cfg, target = self.cfg, job.target
        self.wrapped = add_lora(target, cfg.joint.rank)
        student = student.of(student.network)  # with the layers that have the adapter now
        adapter = [p for p in self.wrapped.parameters() if p.requires_grad]
        return trained_by(job, student, held_out, partial(JointTraining, adapter=adapter, settings=cfg.joint))

    def write(self, job: Job, module: JointTraining, *_: Any) -> dict[str, Any]:
        """Write the draft, and the moved target with its certificate, to the folder. Return {}, since this stage has no
        report."""
        joint = self.cfg.joint
        unmeasured(job, module.draft, {"joint": {"steps": joint.steps, "epsilon": joint.epsilon}})
        write_certified(self.cfg, job, module, self.wrapped, self.folder / TARGET)
        return {}


# --- the third stage: scale, merge and certify


def write_certified(cfg: TrainConfig, job: Job, module: JointTraining, wrapped: Any, place: Path) -> None:
    """Scale the adapter down, merge it, write the moved target to the folder `place`, and certify it. module: the
    trained module. wrapped: peft's model around the target.

    The original target's held-out texts, one per conversation or document, are split: even ones choose the scale, odd
    ones certify. The certificate is for the files after they are loaded again. It also covers texts that the moved
    target samples from the same prompts. If the target's weights are quantised, the adapter is written alone.
    """
    held = module.held_out[module.temperature].texts
    apart = independent(held.prompts, job.source("held_out"), cfg.rollout.prompt_tokens)
    choosing, judging = (held.rows(apart[part::2]) for part in (0, 1))
    scale, again = 1.0, copy.deepcopy(job.cfg)
    if cfg.joint.weight is None:
        scale = choose_scale(job.target, module.live, module.head_target, choosing, cfg.joint.epsilon)
    if not scale:
        warn(
            f"warning: joint.epsilon={cfg.joint.epsilon:g}: no scale of the adapter that was tried kept the upper "
            "confidence bound on the KL within epsilon, so the target is unchanged: raise rollout.held_out_texts= "
            "(more texts tighten the bound) or joint.epsilon="
        )
    with new_folder(place, replace=True) as new:
        if weights_quantisation(job.target.config):
            wrapped.save_pretrained(new)
            again.target.adapter = str(new)
        else:
            merged = wrapped.merge_and_unload()
            cast_to(merged, merged.config.dtype or merged.dtype).save_pretrained(new)  # that of the original's files
            job.tokenizer.save_pretrained(new)
            again.target.path, again.target.adapter = str(new), None
        original, (moved, _) = models(job.cfg)[0], models(again)
        first, second = (served(one, job.vocabulary) for one in (original, moved))
        sets = {"texts": judging, "own_texts": sampled_again(again, moved, job, judging)}
        parts = {name: movement(first, second, texts) for name, texts in sets.items()}
        about = _about(cfg, job, parts) | {"scale": scale, "multiplier": float(module.multiplier)}
        write_json(new / MOVED, about)
        print(said(about))


def independent(prompts: Sequence[Sequence[int]], source: Source, tokens: int) -> list[int]:
    """Return the indices of prompts that are independent of each other: the first prompt of each conversation or
    document in the source, unless it begins with a prompt returned before it, or such a prompt begins with it.

    prompts: token ids of each. source: knows the conversation or document of a prompt. tokens: the most tokens of a
    prompt. A prompt that is not in the source, for example a shipped one, counts as a separate document.
    """
    units = source.units(tokens)
    first: dict[Any, int] = {}
    for place, prompt in enumerate(map(tuple, prompts)):
        first.setdefault(units.get(prompt, prompt), place)
    chosen: list[int] = []
    for place in first.values():
        earlier = [list(prompts[other]) for other in chosen]
        if not shared([list(prompts[place])], earlier):
            chosen.append(place)
    return chosen


def _about(cfg: TrainConfig, job: Job, parts: Mapping[str, Movement]) -> dict[str, Any]:
    """Return the JSON object that is stored with the moved target (`moved_target.movement_of` reads it). parts: the
    movement on each set of texts, by name. Its bound is the largest of the sets' bounds. Each bound is computed with
    its part of the risk, so that all hold together."""
    confidence = 1 - (1 - CONFIDENCE) / len(parts)
    each = {
        name: movement_figures(part, confidence, lambda ids: str(job.tokenizer.decode(ids)))
        for name, part in parts.items()
    }
    return {
        "original": job.cfg.target.path,
        "identity": job.identity,
        "epsilon": cfg.joint.epsilon,
        "weight": cfg.joint.weight,
        "kl": max(one["kl"] for one in each.values()),
        "bound": max(one["bound"] for one in each.values()),
        "certified": all(one["bound"] <= cfg.joint.epsilon for one in each.values()),  # not if one is NaN
        "confidence": CLAIMED,
        **each,
    }


def choose_scale(target: PreTrainedModel, live: Reader, head: Head, texts: Texts, epsilon: float) -> float:
    """Scale the adapter's change, in place, by a factor in [0, 1] at which the bound on the KL is within epsilon, and
    return the factor; 0 if none was found. The search assumes that the KL of a small change is about quadratic in the
    factor.

    live: reads the target's states with its adapter, ids (B, T) -> states by layer. head: last states (..., D) ->
    logits (..., V). texts: on which the KL is computed. epsilon: nats per token.
    """
    ups = [up.weight for layer in adapters(target) for up in layer.lora_B.values()]
    whole = [up.detach().clone() for up in ups]
    original = unadapted(live, target)

    def bound(scale: float) -> float:
        _scaled(ups, whole, scale)
        return movement((original, head), (live, head), texts).bound(CONFIDENCE)

    low, high, scale = 0.0, 1.0, 1.0
    for _ in range(SEARCHES):
        value = bound(scale)
        if NEAR * epsilon <= value <= MOST * epsilon or (scale == 1.0 and value <= WHOLE * epsilon):
            low = scale
            break
        low, high = (scale, high) if value <= MOST * epsilon else (low, scale)
        guess = scale * math.sqrt(MIDDLE * epsilon / max(value, 1e-12))
        scale = guess if low < guess < high else (low + high) / 2
    _scaled(ups, whole, low)
    return low


@torch.no_grad()
def _scaled(ups: Sequence[Tensor], whole: Sequence[Tensor], scale: float) -> None:
    for up, value in zip(ups, whole, strict=True):
        up.copy_(scale * value)


def sampled_again(cfg: TrainConfig, target: PreTrainedModel, job: Job, texts: Texts) -> Texts:
    """Return new texts: the moved target continues the prompts of `texts`, in the regime. target: the moved target.
    job: has the tokenizer."""
    sampler = Own(Engine(target, tokenizer=job.tokenizer, rows=cfg.rollout.rows))
    seed, keys = cfg.rollout.seed + 1, list(range(len(texts)))
    new = sampler(texts.prompts, sampling(cfg.regime), cfg.rollout.new_tokens, seed, keys)
    rows = [torch.tensor(prompt + more) for prompt, more in zip(texts.prompts, new, strict=True)]
    length = torch.tensor(list(map(len, rows)))
    return replace(texts, ids=pad_sequence(rows, batch_first=True), length=length, position_ids=None)
