"""A run put together from its settings: the first draft, losses, texts and the module that wires them."""

import sys
from functools import partial

from transformers import PreTrainedModel

from cotrain.bench.quantisation_table import refuse_unknown
from cotrain.config.regimes import truncation
from cotrain.config.settings import Loss, TrainConfig
from cotrain.data.training_texts import Part, Share, corpus_part, joined, sampled_part
from cotrain.evaluation.held_out import DEPTHS, HeldOut, held_out
from cotrain.losses.spec import parse
from cotrain.students.base import student_class
from cotrain.teacher.provenance import Provenance, provenance
from cotrain.teacher.target_model import halves, keeps_apart
from cotrain.training import optim
from cotrain.training.job import Job
from cotrain.training.module import Distillation
from cotrain.training.progress import Progress, trapezoid
from cotrain.training.stages import Stage, refuse_merged

CHECKED = 32  # texts that are asked whether they are the target's own


def initial(cfg: TrainConfig, target: PreTrainedModel) -> PreTrainedModel:
    """The draft before training. Raises ValueError naming the key that is wrong."""
    return student_class(cfg.draft.kind).initial(cfg.draft, cfg.init, target)


def stages(loss: Loss) -> list[Stage]:
    """The loss, or two in turn, see `spec.parse`."""
    first = Stage(loss.switch if loss.then else 1.0, parse(loss.first))
    return [first, Stage(1.0, parse(loss.then))] if loss.then else [first]


def build(job: Job, network: PreTrainedModel) -> Distillation:
    """Wire the module: losses, optimiser, held-out texts of each temperature."""
    cfg = job.cfg
    taught = stages(cfg.loss)  # a wrong name is refused before texts are sampled
    _refuse(job, network, taught)
    cut = truncation(cfg.regime)
    judged = {
        t: held_out(job.read, job.texts("held_out", t), t, cut)
        # checkpoints are ranked in the regime
        for t in sorted({*cfg.rollout.temperatures, *cfg.rollout.train_temperatures, cfg.regime.temperature})
    }
    _own(job, judged)
    rate, progress = cfg.optimizer, Progress(cfg.trainer.steps, cfg.trainer.minutes)
    module = Distillation(
        student_class(cfg.draft.kind)(network, job.target, job.vocabulary),
        job.target,
        taught,
        partial(optim.adamw, lr=rate.lr, weight_decay=rate.weight_decay, betas=rate.betas),
        partial(trapezoid, progress=progress, warmup=rate.warmup, decay=rate.decay),
        judged,
        cfg.regime.temperature,
        cut,
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
    """Raise ValueError for losses that texts or kept laws do not have."""
    if cfg.trainer.top:
        refuse_merged(taught, cfg.init.cosine)
        if {*cfg.rollout.train_temperatures} - {cfg.regime.temperature}:
            raise ValueError("trainer.top: laws are kept at one temperature, the regime's: "
                             "rollout.train_temperatures=[]")  # fmt: skip
    if cfg.rollout.on_draft and any(_emitted(s) or s.loss.takes == "text" for s in taught):
        raise ValueError("rollout.on_draft: a loss of the tokens that were emitted (calls, length, mix) is of texts of "
                         "the target")  # fmt: skip


def refuse_draft(cfg: TrainConfig, network: PreTrainedModel) -> None:
    """Raise ValueError where a draft's projections are not ones that can be quantised as asked."""
    if cfg.draft.quantisation != "none":
        refuse_unknown(network)


def _refuse(job: Job, network: PreTrainedModel, taught: list[Stage]) -> None:
    """Raises ValueError, before texts are sampled, as `refuse`, and where a model would read texts that are packed into
    blocks as one."""
    refuse(job.cfg, taught)
    refuse_draft(job.cfg, network)
    if not (job.cfg.data.on_target and job.chats):
        refuse_given(job.cfg, taught)
    if not job.cfg.trainer.corpus_steps or job.chats:
        return
    for key, model in (("target.path", job.target), ("draft", network)):
        if not keeps_apart(model, halves(model)[0]):
            raise ValueError(f"{key}: {type(model).__name__} reads texts packed into blocks as one text; "
                             "learn from texts of the target alone: trainer.corpus_steps=0")  # fmt: skip


def _emitted(stage: Stage) -> bool:
    """Whether its loss is of target calls, which are of the tokens that the target emitted."""
    return bool(stage.loss.sequence) or stage.loss.weighted


def refuse_given(cfg: TrainConfig, taught: list[Stage]) -> None:
    """Raise ValueError where steps that learn from given texts have a loss of texts that the target sampled."""
    corpus, begins = cfg.trainer.corpus_steps, [0.0, *(stage.until * cfg.trainer.steps for stage in taught[:-1])]
    early = bool(cfg.trainer.minutes)  # a budget of time may end a stage before its steps
    met = [stage for stage, begin in zip(taught, begins, strict=True) if corpus > begin or (corpus and early)]
    if any(map(_emitted, met)):
        raise ValueError("trainer.corpus_steps: calls, calls_tv, length and length_block are of texts that the target "
                         "sampled, not of given ones: trainer.corpus_steps=0")  # fmt: skip


def _own(job: Job, judged: dict[float, HeldOut]) -> None:
    """Say so when texts that were sampled are not the target's own: another server's, or of passes gone wrong."""
    if job.cfg.data.on_target:
        return  # `foreign` says it of logs
    for t, held in judged.items():
        found = provenance(held, job.halves[1], job.target.device)
        if not found.own:
            said = f"texts sampled at temperature {t:g} are not the target's own: {found.line()}"
            print(f"warning: {said}", file=sys.stderr)


def parts(job: Job, rounds: int) -> tuple[Part, Part]:
    """The texts as they were given, where steps learn from them, and texts of the target of so many rounds, each at its
    own temperature, the regime's or several. A later round's come behind the others."""
    cfg = job.cfg
    corpus = corpus_part(job.given("train") if cfg.trainer.corpus_steps else None, cfg.regime.temperature)
    shares = cfg.data.shares if cfg.data.path else {**cfg.data.embedded_shares, **cfg.data.shares}
    sampled = [
        sampled_part(job.texts("train", t, Share(i, cfg.rollout.rounds)), shares, t, prompts=not job.chats)
        for i in range(rounds)
        for t in cfg.rollout.train_temperatures or [cfg.regime.temperature]
    ]
    return corpus, joined(sampled, len(corpus))


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
