"""Builds the parts of a run from its settings: the draft, the texts, the losses, and the module that combines them."""

import sys
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from cotrain.config.groups import OF_PATH, Loss
from cotrain.config.settings import TrainConfig, judged, learnt, truncation
from cotrain.console import working
from cotrain.data.texts import Texts, joined_texts, none, shared_texts
from cotrain.evaluation.held_out import DEPTHS, HeldOut, held_out
from cotrain.evaluation.profile import Provenance, provenance
from cotrain.losses.spec import parse
from cotrain.ranks import rank
from cotrain.students.base import Student, student_class
from cotrain.students.rounding import TOKENS
from cotrain.students.transplant import transplanted
from cotrain.teacher.server_states import COMPARED, ServerReader, agreement
from cotrain.teacher.target_model import Head, load_words
from cotrain.training import optim
from cotrain.training.job import Job, reads_given
from cotrain.training.module import Distillation, Stage
from cotrain.training.progress import Progress

CHECKED = 32  # number of the user's texts whose provenance is checked


# --- the draft


def new_student(cfg: TrainConfig, target: PreTrainedModel, vocabulary: int) -> Student:
    """Return the student before training. vocabulary: the number of ids that can have mass. Raises ValueError, which
    names the key to change, for settings that do not fit the target or have no effect, and for a network that cannot be
    trained."""
    return student_class(cfg.draft.kind)(initial(cfg, target), target, vocabulary)


def initial(cfg: TrainConfig, target: PreTrainedModel) -> PreTrainedModel:
    """Return the draft's network before training. Raises ValueError, which names the key to change, for settings that
    do not fit the target, and for a setting of the initial weights or of the training that would have no effect."""
    draft, init = cfg.draft, cfg.init
    if draft.trained:
        if draft.path and init.kind not in OF_PATH:
            raise ValueError(
                f"draft.path={draft.path} has no effect with init={init.kind}: set init=pretrained, or leave out "
                "draft.path="
            )
    elif init.kind in OF_PATH:
        raise ValueError(f"init={init.kind}: {draft.kind} drafts are not trained; set init=scratch")
    elif draft.quantisation != "none":
        raise ValueError(
            f"draft.quantisation={draft.quantisation}: {draft.kind} drafts are not trained; set draft.quantisation=none"
        )
    if init.kind == "transplant":
        return transplanted(draft, target, load_words(cfg.target.path, cfg.target.trust_remote_code))
    return student_class(draft.kind).initial(draft, init, target)


def prune(job: Job, student: Student, held: HeldOut) -> None:
    """Choose the vocabulary of a draft with draft.vocabulary=, in place: the most frequent tokens in the training
    texts. Print which share of the held-out texts they cover. A draft that begins with a folder with a pruned
    vocabulary keeps that one. held: the held-out texts."""
    if job.cfg.draft.vocabulary and (job.cfg.init.kind != "pretrained" or student.undecided):
        learnt = parts(job)[1]
        tokens = learnt.ids[:, 1:][learnt.predicted].long()
        student.know(torch.bincount(tokens, minlength=job.vocabulary))
    if not bool(student.known.all()):
        count, covered = int(student.known.sum()), coverage(held, student.known)
        print(f"the draft's vocabulary has {count} tokens: they cover {100 * covered:.2f} % of the held-out texts")


def fit_weights(job: Job, student: Student) -> None:
    """Let a draft with draft.bits=, which does not begin with a folder, set its weights by the training texts."""
    if job.cfg.draft.bits and job.cfg.init.kind != "pretrained":
        learnt = parts(job)[1]
        count = max(1, int(TOKENS / learnt.length.float().mean()))
        with working("draft.bits: rounding the target's weights on training texts"):
            student.fit(learnt.ids[i, : int(learnt.length[i])] for i in learnt.evenly(count))


def coverage(held: HeldOut, known: torch.Tensor) -> float:
    """Return the share of the sampled tokens in the held-out texts that are in the draft's vocabulary, in [0, 1]. known
    (V,) bool: True at the tokens of this vocabulary."""
    return float(known.cpu()[held.texts.ids[:, 1:][held.texts.predicted].long()].double().mean())


# --- texts


def parts(job: Job) -> tuple[Texts, Texts]:
    """Return two sets of training texts: the user's, for the first trainer.corpus_steps steps (no texts if that is 0),
    and the target's, at every temperature to learn."""
    cfg = job.cfg
    given = cfg.draft.temperatures or [cfg.regime.temperature]
    corpus = job.given("train").in_turn(given) if cfg.trainer.corpus_steps else none()
    sampled = [shared_texts(job.texts("train", t), shares_of(cfg)).at(t, whole=not job.chats) for t in learnt(cfg)]
    return corpus, joined_texts(sampled)


def shares_of(cfg: TrainConfig) -> dict[str, float]:
    """Return data.shares as domain -> the share of its texts that is learnt from, in [0, 1]. All texts of a domain
    without an entry are learnt from."""
    return dict(cfg.data.shares if cfg.data.path else {**cfg.data.embedded_shares, **cfg.data.shares})


def held_out_texts(job: Job) -> dict[float, HeldOut]:
    """Return the target's held-out texts with its hidden states, keyed by temperature. Warn if the texts do not look as
    if this target sampled them."""
    cfg = job.cfg
    texts = {t: held_out(job.read, job.texts("held_out", t), t, truncation(cfg.regime)) for t in judged(cfg)}
    if isinstance(job.halves[0], ServerReader) and not rank():
        some = texts[cfg.regime.temperature].texts
        rows = zip(some.ids[:COMPARED].tolist(), some.length.tolist(), strict=False)
        print(agreement(*job.halves, [ids[:end] for ids, end in rows]))
    for held in () if cfg.data.on_target else texts.values():  # `foreign` checks the user's texts
        warn_of_other_target(held, job.halves[1], job.target.device, cfg.rollout.url)
    return texts


def warn_of_other_target(held: HeldOut, head: Head, device: torch.device, url: str | None) -> None:
    """Print a warning if the sampled texts do not look as if this target sampled them. Likely causes: the server has
    another model, or the target's forward passes were wrong when the texts were sampled.

    held: the texts, with the target's states. head: the target's, on `device`. url: the server that sampled them, or
    None.
    """
    origin = provenance(held, head, device)
    if not origin.own:
        message = f"texts sampled at temperature {held.temperature:g} do not look as if this target sampled them"
        server = f"rollout.url={url}: " if url else ""
        print(f"warning: {server}{message}: {origin.line()}", file=sys.stderr)


def foreign(job: Job) -> tuple[HeldOut, Provenance] | None:
    """Check, on CHECKED of the user's held-out texts, whether the target sampled them in the regime. If it did not,
    print a warning and return the texts and the evidence. Otherwise, or if no step learns from the user's texts, return
    None."""
    cfg = job.cfg
    if not reads_given(cfg, job.chats):
        return None
    texts = job.given("held_out").spread(CHECKED)
    held = held_out(job.read, texts, cfg.regime.temperature, truncation(cfg.regime))
    origin = provenance(held, job.halves[1], job.target.device)
    if origin.own:
        return None
    first = f"the texts of the first {cfg.trainer.corpus_steps} steps"
    which = "data.on_target=true, but the texts of data.path" if cfg.data.on_target else first
    print(f"warning: {which} were not sampled from this target in this regime: {origin.line()}", file=sys.stderr)
    return held, origin


# --- the module


def stages(loss: Loss) -> list[Stage]:
    """Return the losses of a training in order, each with the share of the training at which it ends: one loss, or two
    if loss.then is set. Raises ValueError, which names the key, for an expression that cannot be parsed."""
    first = Stage(loss.switch if loss.then else 1.0, parse(loss.first))
    return [first, Stage(1.0, parse(loss.then, "loss.then"))] if loss.then else [first]


def trained_by(
    job: Job,
    student: Student,
    judged: dict[float, HeldOut],
    build: Callable[..., Distillation] = Distillation,
) -> Distillation:
    """Return the module that trains the student. judged: the held-out texts, keyed by temperature. build: the module's
    class."""
    cfg = job.cfg
    rate, progress = cfg.optimizer, Progress(cfg.trainer.steps, cfg.trainer.minutes, deadline=job.deadline)
    return build(
        student,
        job.target,
        stages(cfg.loss),
        partial(optim.adamw, lr=rate.lr, weight_decay=rate.weight_decay, betas=rate.betas),
        partial(optim.trapezoid, progress=progress, warmup=rate.warmup, decay=rate.decay),
        judged,
        cfg.regime.temperature,
        truncation(cfg.regime),
        # the processes of a sharded target read it in step: none may find states that another must read
        remember=0 if cfg.shards_target else cfg.trainer.remember_mb * 2**20,
        k=cfg.policy.k or DEPTHS,
        seed=cfg.trainer.seed,
        progress=progress,
        decay=cfg.loss.decay,
        teacher=(job.read, job.halves[1]),
    )
