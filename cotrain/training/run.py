"""A training, from its settings to the draft folder. Each checkpoint is measured with the real engine, and the
checkpoint with the highest tau is exported."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.bench import measurement
from cotrain.bench.measurement import sample_text
from cotrain.board import curves
from cotrain.board.curves import other_loggers, tensorboard
from cotrain.config.settings import TrainConfig, from_target
from cotrain.data.prompt_rows import Source
from cotrain.errors import UserError
from cotrain.evaluation import comparison
from cotrain.evaluation.held_out import DEPTHS, HeldOut
from cotrain.evaluation.profile import Provenance
from cotrain.ranks import rank
from cotrain.rollout.training_texts import Sampled
from cotrain.teacher.servers import open_servers
from cotrain.training import exits, results
from cotrain.training.assembly import fit_weights, foreign, held_out_texts, new_student, prune, trained_by
from cotrain.training.callbacks import MeasureSpeed
from cotrain.training.deadline import PROMPTS, Deadline
from cotrain.training.fit import CHECKPOINT, START, as_served, fit
from cotrain.training.interrupts import listening
from cotrain.training.job import Job, models, objective, sample_prompts, settle
from cotrain.training.module import Distillation, alpha_of
from cotrain.training.preconditions import read_texts, refuse_packed, require_texts
from inference.drafts.weight_files import read_json


def train(
    cfg: TrainConfig,
    folder: Path,
    deadline: Deadline,
    sources: Mapping[str, Source] | None = None,
    *,
    texts: Callable[[PreTrainedModel, PreTrainedTokenizerBase], Sampled] | None = None,
    prompts: str | None = None,
    build: Callable[..., Distillation] = trained_by,
    write: Callable[..., dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Run or resume a training in `folder`. Return the report of the exported draft; {} with measure=false, when the
    weights of the last step are exported, and in all processes except the first.

    cfg: settings that `preconditions.require` has accepted.
    deadline: the run's time limit.
    sources: split -> the user's texts, if they have been read.

    The other arguments are for the stages of a joint training:
    texts: a function (target, tokenizer) -> training texts, if another target sampled them; None otherwise.
    prompts: the rows of data.path=, if another target sampled them for data=self; None otherwise.
    build: returns the module that trains the student; called like `trained_by`.
    write: writes the results and returns the report; called like `finish`, the default.

    Raises Interrupted when a signal ends the run; the same command resumes it.
    """
    with open_servers(), listening() as signals, other_loggers(cfg, folder) as loggers:
        settle(cfg.trainer.threads, cfg.trainer.seed)
        target, tokenizer = models(cfg)
        if from_target(cfg.data):
            place = Path(cfg.rollout.folder or folder / "rollouts")
            prompts, sources = target_prompts(cfg, target, tokenizer, place, deadline)
        sources = dict(sources or read_texts(cfg, target, tokenizer))
        job = Job(
            cfg,
            folder,
            target,
            tokenizer,
            sources,
            signals=signals,
            loggers=loggers,
            deadline=deadline,
            sampled_prompts=prompts,
            train_texts=texts and texts(target, tokenizer),
        )
        job.shape = exits.plan_exits(job)
        student = new_student(cfg, target, job.vocabulary)
        if not cfg.draft.trained:
            return untrained(job, student.network)
        job.reads = student.reads
        job.keep_states()
        student.refuse()
        refuse_packed(job, student)
        held_out = held_out_texts(job)  # `fit` samples the texts to learn from
        prune(job, student, held_out[cfg.regime.temperature])
        if not (folder / CHECKPOINT).exists():
            fit_weights(job, student)
        module = build(job, student, held_out)
        given = foreign(job)
        speed = ranking(job, module) if cfg.measure else None
        steps = fit(job, module, speed)
        return {} if rank() else (write or finish)(job, module, steps, speed, given)


def finish(
    job: Job,
    module: Distillation,
    steps: int,
    speed: MeasureSpeed | None,
    given: tuple[HeldOut, Provenance] | None,
) -> dict[str, Any]:
    """Write the figures of the last step, and the draft folder. Return the report, or {} if `speed` is None.

    steps: the last step. speed: the checkpoints; the one with the highest tau is measured and exported. None: the
    weights of the last step are exported without a measurement. given: texts of the user that the target did not
    sample, from `foreign`; None if there are none.
    """
    tau, report = ranking_tau(job, module), dict[str, Any]()
    texts = comparison.per_text(module.scores(), module.held_out)
    results.keep_figures(job, steps, {"tau": tau(), "texts": texts})
    if (start := job.folder / START).is_file():
        record = comparison.own_acceptance(Path(str(job.cfg.draft.path)))
        print(*comparison.since_start(read_json(start), texts, record), sep="\n")
    if speed:
        choose_best(job, module, speed)
        report = results.export(job, module, steps, speed, given)
    else:
        with as_served(job, module):
            results.unmeasured(job, module.draft, results.training(job, module, steps))
    alpha = alpha_of(module.scores()[module.temperature], objective(job.cfg.objective))
    loggers = [tensorboard(job.folder), *job.loggers]
    curves.write_final(job.cfg, loggers, steps, curves.final_figures(alpha, tau(), report))
    return report


def untrained(job: Job, draft: PreTrainedModel) -> dict[str, Any]:
    """Write the folder of a draft that is not trained, and measure it unless measure=false. Return its report, or
    {}."""
    if rank():
        return {}
    report, origin = dict[str, Any](), results.about_target(job)
    if job.cfg.measure:
        report = results.write_measured(job, draft, origin, {})
    else:
        results.unmeasured(job, draft, origin)
    tau = {"tau": report["acceptance"]["tau"]["measured"]} if report else {}
    results.keep_figures(job, 0, {"texts": {}} | tau)
    return report


def target_prompts(
    cfg: TrainConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, deadline: Deadline
) -> tuple[str, dict[str, Source]]:
    """Let the target sample the prompts for data=self into `folder`, and set data.path in `cfg`, in place, to their
    file. Return the content of the file (one JSON row per line), and the prompts, keyed by split. tokenizer: the
    target's. deadline: the run's time limit."""
    timed = cfg.bench.prompts * cfg.measure
    file = sample_prompts(cfg, target, tokenizer, folder, timed, deadline.seconds(PROMPTS))
    rows = file.read_text(encoding="utf-8")  # another run may replace the file of a shared folder
    return rows, require_texts(cfg, target, tokenizer)


def ranking(job: Job, module: Distillation) -> MeasureSpeed:
    """Return the callback that measures each checkpoint, and ranks checkpoints by tau on the held-out texts."""
    cfg, k, tau = job.cfg, job.cfg.policy.k, ranking_tau(job, module)
    assert k is not None
    return MeasureSpeed(
        lambda draft: measurement.quick(job.plan(draft), k),
        tau,
        job.folder / "checkpoints",
        cfg.trainer.patience,
        lambda draft: sample_text(job.plan(draft), k),
    )


def ranking_tau(job: Job, module: Distillation) -> Callable[[], float]:
    """Return a function that returns tau by the module's latest scores on the held-out texts, at the draft length, way
    of drafting and verification rule of the settings."""
    return partial(module.tau, job.cfg.policy.k or DEPTHS, objective(job.cfg.objective), job.cfg.verify)


def choose_best(job: Job, module: Distillation, speed: MeasureSpeed) -> None:
    """Load the weights of the checkpoint with the highest tau into the module's draft, in place. They are quantised if
    the draft is served so. speed: has the checkpoints. Raises UserError, which names the checkpoint, if it cannot be
    read."""
    chosen = speed.best()
    print(f"measuring the checkpoint of the highest tau (step {chosen.step}) on prompts that did not rank checkpoints")
    if chosen.step < job.cfg.trainer.steps or job.cfg.draft.quantisation != "none":
        try:
            best = type(module.student).load(chosen.path, job.target, job.vocabulary)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{chosen.path} cannot be read ({reason}): delete {chosen.path.parent}, and the same "
                "command starts the training again"
            ) from error
        module.draft.load_state_dict(best.network.state_dict())
        module.judge()
