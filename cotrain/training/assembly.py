"""A run put together from its settings: the first draft, losses, texts and the module that wires them."""

import sys
from functools import partial

import torch
from transformers import PreTrainedModel

from cotrain.config.groups import Draft, Init, Loss
from cotrain.config.regimes import judged, learnt, truncation
from cotrain.config.settings import TrainConfig
from cotrain.data.texts import Texts, joined, none, shared
from cotrain.evaluation.held_out import DEPTHS, HeldOut, held_out
from cotrain.evaluation.provenance import Provenance, provenance
from cotrain.losses.spec import parse
from cotrain.rollout.samplers import Sampler
from cotrain.rollout.training_texts import Share
from cotrain.students.base import OPTIONAL, UNTRAINED, Student, refuse_keys, student_class
from cotrain.students.rounding import refuse_unknown
from cotrain.teacher.target_model import halves, keeps_apart
from cotrain.training import optim
from cotrain.training.job import Job
from cotrain.training.module import Distillation, refuse_widths
from cotrain.training.progress import Progress, trapezoid
from cotrain.training.run_budget import timed
from cotrain.training.stages import Stage, refuse_merged
from inference.models.dtypes import quantisation_of

CHECKED = 32  # texts that are asked whether they are the target's own


def initial(cfg: TrainConfig, target: PreTrainedModel) -> PreTrainedModel:
    """The draft before training. Raises ValueError naming the key that is wrong."""
    kind = student_class(cfg.draft.kind)
    refuse_keys(cfg.draft, *(key for key in OPTIONAL if key not in kind.takes))
    _refuse_weights(cfg.draft, cfg.init)
    return kind.initial(cfg.draft, cfg.init, target)


def _refuse_weights(draft: Draft, init: Init) -> None:
    """Raise ValueError for settings of where weights come from, or of how they learn, that would change nothing."""
    if draft.kind not in UNTRAINED:
        if draft.path and init.kind != "pretrained":
            raise ValueError(f"draft.path={draft.path}: it is read with init=pretrained, not init={init.kind}")
    elif init.kind == "pretrained":
        raise ValueError(f"init=pretrained: {draft.kind} drafts learn nothing; init=scratch")
    elif draft.quantisation != "none":
        raise ValueError(f"draft.quantisation={draft.quantisation}: {draft.kind} drafts learn nothing; "
                         "draft.quantisation=none")  # fmt: skip


def stages(loss: Loss) -> list[Stage]:
    """The loss, or two in turn, see `spec.parse`."""
    first = Stage(loss.switch if loss.then else 1.0, parse(loss.first))
    return [first, Stage(1.0, parse(loss.then))] if loss.then else [first]


def begun(cfg: TrainConfig, target: PreTrainedModel, vocabulary: int) -> Student:
    """The student before training; vocabulary: ids that have mass. Raises as `initial`."""
    return student_class(cfg.draft.kind)(initial(cfg, target), target, vocabulary)


def held_out_texts(job: Job) -> dict[float, HeldOut]:
    """Texts of the target to judge on, by temperature; says so where they are not its own."""
    cfg = job.cfg
    found = {t: held_out(job.read, job.texts("held_out", t), t, truncation(cfg.regime)) for t in judged(cfg)}
    _own(job, found)
    return found


def prune(job: Job, student: Student) -> None:
    """Give a draft of draft.vocabulary= tokens those that are most in the texts that it learns from, with rows of the
    target's head; one that began with the weights of a folder keeps that folder's."""
    if not job.cfg.draft.vocabulary or job.cfg.init.kind == "pretrained":
        return
    learnt = parts(job, 1)[1]
    tokens = learnt.ids[:, 1:][learnt.predicted].long()
    student.know(torch.bincount(tokens, minlength=job.vocabulary))


def coverage(held: HeldOut, known: torch.Tensor) -> float:
    """The share of sampled tokens that a draft knows, known (V,) bool: no other is ever drafted."""
    tokens = held.texts.ids[:, 1:][held.texts.predicted]
    return float(known.cpu()[tokens.long()].double().mean())


def trained_by(job: Job, student: Student, taught: list[Stage], judged: dict[float, HeldOut]) -> Distillation:
    """The module: the student, its losses, optimiser, and what it is judged on."""
    cfg = job.cfg
    rate, progress = cfg.optimizer, Progress(cfg.trainer.steps, cfg.trainer.minutes, whole=cfg.minutes)
    module = Distillation(
        student,
        job.target,
        taught,
        partial(optim.adamw, lr=rate.lr, weight_decay=rate.weight_decay, betas=rate.betas),
        partial(trapezoid, progress=progress, warmup=rate.warmup, decay=rate.decay),
        judged,
        cfg.regime.temperature,
        truncation(cfg.regime),
        cosine=cfg.init.cosine,
        remember=cfg.trainer.remember_mb * 2**20,
        k=cfg.policy.k or DEPTHS,
        hardest=cfg.loss.hardest,
        seed=cfg.trainer.seed,
        progress=progress,
        top=cfg.trainer.top,
        decay=cfg.loss.decay,
    )
    module.teacher.read = job.taught(module.teacher.read)
    return module


def refuse(cfg: TrainConfig, taught: list[Stage]) -> None:
    """Raise ValueError for losses that texts or kept distributions do not have."""
    if cfg.trainer.top:
        refuse_merged(taught, cfg.init.cosine)
        if {*learnt(cfg)} - {cfg.regime.temperature}:
            change = "rollout.train_temperatures=[]" if cfg.rollout.train_temperatures else "trainer.top=0"
            raise ValueError(f"trainer.top: distributions are kept at one temperature, the regime's: {change}")
    cut = cfg.regime.top_k > 0 or cfg.regime.top_p < 1
    if (cut or 0.0 in learnt(cfg)) and any(term.name == "rkl" for stage in taught for term in stage.loss.terms):
        why = "regime.top_k=0 regime.top_p=1" if cut else "no temperature 0 in regime or rollout.train_temperatures"
        said = "loss: rkl is infinite where the target's probability is 0"
        raise ValueError(f"{said}: another loss, as loss=tv, or {why}")
    if missing := [t for t in cfg.draft.temperatures if t not in learnt(cfg)]:
        raise ValueError(f"draft.temperatures: no text is learnt at {missing[0]:g}: rollout.train_temperatures=[], or "
                         "with it")  # fmt: skip
    if cfg.rollout.on_draft and any(_emitted(s) or s.loss.takes == "text" for s in taught):
        raise ValueError("rollout.on_draft: a loss of the tokens that were emitted (calls, length, mix) is of texts of "
                         "the target")  # fmt: skip


def refuse_draft(cfg: TrainConfig, network: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise ValueError where a draft's projections are not ones that can be quantised as asked, its states are not as
    wide as init.cosine= wants them, or it is a target in fewer bits that has few already."""
    refuse_rounded(cfg.draft.kind, cfg.quantisation.kind, target)
    if cfg.draft.quantisation != "none":
        refuse_unknown(network)
    if cfg.init.cosine and cfg.draft.kind not in UNTRAINED:
        refuse_widths(network, target)


def refuse_rounded(kind: str, quantisation: str, target: PreTrainedModel) -> None:
    """Raise ValueError for a kind that drafts with the target in fewer bits beside one that is quantised."""
    found = quantisation if quantisation != "none" else quantisation_of(target.config)
    if student_class(kind).rounds_target and found != "none":
        raise ValueError(f"quantisation: {kind} drafts with the target in fewer bits, which is in {found} already: "
                         "serve it whole, or with a draft of another kind")  # fmt: skip


def refuse_run(job: Job, student: Student, taught: list[Stage]) -> None:
    """Raises ValueError, before texts are sampled, as `refuse`, for a network that its kind cannot train, and where a
    model would read texts that are packed into blocks as one."""
    refuse(job.cfg, taught)
    refuse_draft(job.cfg, student.network, job.target)
    student.refuse()
    if not (job.cfg.data.on_target and job.chats):
        refuse_given(job.cfg, taught)
    if not job.cfg.trainer.corpus_steps or job.chats:
        return
    apart = keeps_apart(job.target, halves(job.target)[0])
    for key, model, fits in (("target.path", job.target, apart), ("draft", student.network, student.keeps_apart())):
        if not fits:
            raise ValueError(f"{key}: {type(model).__name__} reads texts packed into blocks as one text; "
                             "learn from texts of the target alone: trainer.corpus_steps=0")  # fmt: skip


def _emitted(stage: Stage) -> bool:
    """Whether its loss is of target calls, which are of the tokens that the target emitted."""
    return bool(stage.loss.sequence) or stage.loss.weighted


def refuse_given(cfg: TrainConfig, taught: list[Stage]) -> None:
    """Raise ValueError where steps that learn from given texts have a loss of texts that the target sampled."""
    corpus, begins = cfg.trainer.corpus_steps, [0.0, *(stage.until * cfg.trainer.steps for stage in taught[:-1])]
    early = timed(cfg)  # a budget of time may end a stage before its steps
    met = [stage for stage, begin in zip(taught, begins, strict=True) if corpus > begin or (corpus and early)]
    if any(map(_emitted, met)):
        raise ValueError("trainer.corpus_steps: calls, calls_block, calls_tv, length and length_block are of texts "
                         "that the target sampled, not of given ones: trainer.corpus_steps=0")  # fmt: skip


def _own(job: Job, judged: dict[float, HeldOut]) -> None:
    """Say so when texts that were sampled are not the target's own: another server's, or of passes gone wrong."""
    if job.cfg.data.on_target:
        return  # `foreign` says it of logs
    for t, held in judged.items():
        found = provenance(held, job.halves[1], job.target.device)
        if not found.own:
            said = f"texts sampled at temperature {t:g} are not the target's own: {found.line()}"
            print(f"warning: {said}", file=sys.stderr)


def parts(job: Job, rounds: int, by: Sampler | None = None) -> tuple[Texts, Texts]:
    """The texts as they were given, where steps learn from them, and texts of the target of so many rounds, each at its
    own temperature, the regime's or several. A later round's come behind the others. by: samples those that are not
    kept; the target alone, when None."""
    cfg = job.cfg
    given = list(cfg.draft.temperatures) or [cfg.regime.temperature]
    corpus = job.given("train").in_turn(given) if cfg.trainer.corpus_steps else none()
    sampled = [
        shared(job.texts("train", t, Share(i, cfg.rollout.rounds), by), shares_of(cfg)).at(t, whole=not job.chats)
        for i in range(rounds)
        for t in learnt(cfg)
    ]
    return corpus, joined(sampled)


def shares_of(cfg: TrainConfig) -> dict[str, float]:
    """How many of a domain's texts are learnt from, all of one that is not named."""
    return dict(cfg.data.shares if cfg.data.path else {**cfg.data.embedded_shares, **cfg.data.shares})


def foreign(job: Job) -> tuple[HeldOut, Provenance] | None:
    """Some of the given texts that are learnt from, read by the target, if it did not sample them in the regime, and
    how much they surprise it; says so. data.on_target= that is not true is said first."""
    cfg = job.cfg
    if not cfg.trainer.corpus_steps and not (cfg.data.on_target and job.chats):
        return None
    texts = job.given("held_out").spread(CHECKED)
    held = held_out(job.read, texts, cfg.regime.temperature, truncation(cfg.regime))
    found = provenance(held, job.halves[1], job.target.device)
    if found.own:
        return None
    first = f"the texts of the first {cfg.trainer.corpus_steps} steps"
    which = "data.on_target=true, but the texts of data.path" if cfg.data.on_target else first
    print(f"warning: {which} were not sampled from this target in this regime: {found.line()}", file=sys.stderr)
    return held, found
