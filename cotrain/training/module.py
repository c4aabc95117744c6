"""Distillation of a draft from a frozen target: the losses of a step, and the LightningModule.

B texts, T tokens of a text, S tokens of an encoder input, K guesses (one for each depth).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import lightning
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from cotrain.console import Counter, counting
from cotrain.data.texts import columns_of, shortened
from cotrain.errors import NotFinite
from cotrain.evaluation.divergence import Decode, divergence
from cotrain.evaluation.held_out import DEPTHS, HeldOut, Scores, evaluate, figures
from cotrain.evaluation.profile import profile
from cotrain.losses.batch import LossBatch, shares
from cotrain.losses.chunked import Statistics, TargetDistributions, Truncate, chunk_positions
from cotrain.losses.guess import draftable
from cotrain.losses.spec import LossSpec
from cotrain.ranks import rank
from cotrain.students.base import LAST, Guess, Seen, Student, refuse_mixed
from cotrain.teacher.states_cache import MemoryCache
from cotrain.teacher.target_distributions import FromStates, Masses, remembered
from cotrain.teacher.target_model import ENCODER, Head, Reader, Record, part_of_head, served
from cotrain.training.deadline import JUDGING, ONCE
from cotrain.training.distributed import (
    StepCounts,
    counted,
    divisors,
    ends_step,
    gathered,
    rest,
    sampled_mask,
    sharded,
    within,
)
from cotrain.training.progress import Progress
from inference.sampling import noise

WATCHED = 5  # figures are logged every 5 steps
FEW, BATCH = 4, 16  # held-out texts: the fewest that evaluate a draft, and the texts of a timed batch
Logs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Stage:
    """A loss, and the share of the training, in [0, 1], at which it ends."""

    until: float
    loss: LossSpec


def current(stages: Sequence[Stage], progress: float) -> LossSpec:
    """Return the loss at a progress in [0, 1]: the loss of the first stage that has not ended, or of the last stage."""
    return next((stage.loss for stage in stages if progress < stage.until), stages[-1].loss)


class PositionLosses(NamedTuple):
    """The losses per position of a batch.

    mean: their sum over guesses, divided by the step's count of positions; a scalar.
    terms: each term's part in `mean`, a scalar by name.
    statistics: the acceptance statistics of each guess.
    """

    mean: Tensor
    terms: dict[str, Tensor]
    statistics: list[Statistics]


@dataclass(frozen=True)
class StepLoss:
    """The loss of a batch. Sequence losses are summed over texts, and losses per position over positions and depths.

    spec: the current loss.
    asked: the batch, with the target's distributions.
    guesses: the student's K predictions, one for each depth.
    logs: log p and log q of the sampled tokens, (B, L) or (B, L, K) each (L tokens of the longest completion); None if
    neither the loss nor the weights of the depths need them.
    counts: the numbers by which the sums are divided.
    k: the draft length of the sequence losses.
    """

    spec: LossSpec
    asked: LossBatch
    guesses: Sequence[Guess]
    logs: Logs | None
    counts: StepCounts
    k: int

    @cached_property
    def saved(self) -> Tensor | None:
        """Return how many target calls one more unit of acceptance saves at each sampled token, (B, L) or (B, L, K),
        without gradient. Return None if `logs` is None. Rounds draft k tokens, or K if that is more: depths from k on
        would not learn."""
        return None if self.logs is None else self.asked.saved(self.logs, max(self.k, len(self.guesses)))

    def of_texts(self) -> dict[str, Tensor]:
        """Return each sequence loss by name, as a mean over the tokens that the target sampled."""
        means = {}
        for term in self.spec.sequence:
            assert self.logs is not None
            means[term.name] = self.asked.of_texts(term, self.logs, self.k) / self.counts.tokens
        return means

    def of_positions(self, predicted: Tensor, share: Tensor, measured: bool) -> PositionLosses:
        """Return the losses per position. A weighted loss is a mean over tokens, each weighted by the target calls that
        acceptance there saves.

        predicted (B, T-1) bool: entry t is True if the loss counts token t+1.
        share (K,): the weight of each guess.
        measured: whether the statistics of the guesses are computed.
        """
        every = pad(predicted, (0, 1))
        total = self.asked.ids.new_zeros((), dtype=torch.float32)
        terms: list[Tensor] = []
        statistics: list[Statistics] = []
        for guess, part in zip(self.guesses, share.unbind(), strict=True):
            weight = self._weight(guess, every)
            value, one = self.asked.of_positions(self.spec, guess, weight, measured)
            total = total + part * value
            terms.append(part * one.terms)
            statistics.append(one)
        count = self.counts.tokens if self.spec.weighted else self.counts.positions
        return PositionLosses(total / count, self._named(total, terms, count), statistics)

    def _weight(self, guess: Guess, every: Tensor) -> Tensor:
        if not self.spec.weighted:
            return draftable(every, guess.depth)
        assert self.saved is not None
        return self.asked.weight(self.saved, guess.depth)

    def _named(self, total: Tensor, terms: list[Tensor], count: Tensor) -> dict[str, Tensor]:
        names = [term.name for term in self.spec.terms]
        if len(names) < 2:
            return {names[0] if names else "position": total.detach() / count}
        return dict(zip(names, torch.stack(terms).sum(0) / count, strict=True))


def logs_for(spec: LossSpec, asked: LossBatch, guesses: Sequence[Guess], by_depth: bool) -> Logs | None:
    """Return log p and log q of the sampled tokens, (B, L) or (B, L, K) each (L tokens of the longest completion). They
    have gradients only for a sequence loss. Return None if neither the loss nor the weights of the depths need them.
    by_depth: whether the weights of the depths need them."""
    if spec.sequence:
        return asked.logs(guesses)
    if not spec.weighted and not (by_depth and len(guesses) > 1):
        return None
    with torch.no_grad():
        return asked.logs(guesses)


class Distillation(lightning.LightningModule):
    """Lightning module that trains a student so that `target` accepts its drafts under a regime.

    stages: the losses, in order.
    optimizer, scheduler: factories; the first is called with the draft, the second with the optimiser.
    held_out: texts sampled from the target, keyed by temperature. Every validation evaluates the draft on them.
    temperature: the regime's.
    truncate: a function that sets the logits cut by the regime's top-k / top-p to -inf, (n, V) -> (n, V); None without
    a cut.
    chunk: the number of positions whose distributions are in memory at once; None: chosen by vocabulary and device.
    remember: bytes of memory in which the target's states are cached.
    k: draft length of the sequence losses.
    seed: seed of the student's random choices.
    progress: the progress of the whole training, by which `stages` end; None: the trainer's steps.
    decay: the weight of depth j (0-based) is decay ** j; None: the target calls that acceptance at this depth saves.
    teacher: the target as two functions, ids -> states by layer and last states -> logits (`target_model.served`);
    None: made from `target`.

    Raises ValueError for a student that cannot be trained.
    """

    def __init__(
        self,
        student: Student,
        target: PreTrainedModel,
        stages: Sequence[Stage],
        optimizer: Callable[..., Any],
        scheduler: Callable[..., Any],
        held_out: dict[float, HeldOut],
        temperature: float = 1.0,
        truncate: Truncate | None = None,
        chunk: int | None = None,
        remember: int = 0,
        k: int = 4,
        seed: int = 0,
        progress: Progress | None = None,
        decay: float | None = None,
        teacher: tuple[Reader, Head] | None = None,
    ) -> None:
        super().__init__()
        student.refuse()
        self.student, self.draft, self.stages = student, student.network, stages
        self.make_optimizer, self.make_scheduler, self.held_out = optimizer, scheduler, held_out
        self.temperature, self.truncate, self.decay = temperature, truncate, decay
        vocabulary = student.vocabulary or target.config.get_text_config().vocab_size
        self.chunk = chunk or chunk_positions(vocabulary, target.device.type)
        self.k, self.seed, self.progress = k, seed, progress
        self.unread: list[tuple[int, Tensor, dict[str, Any]]] = []  # steps, losses and batches, see `require_finite`
        self.batch_sums: dict[str, Tensor] = {}  # sums over the batches of the current step
        self.step_figures: dict[str, float] = {}  # figures of the last step, by name, if they are logged
        self.whole: list[
            PreTrainedModel
        ] = []  # the whole draft, while `draft` is sharded; a list, as it is no submodule
        # functions instead of the target, which would be saved in checkpoints
        read, self.head_target = teacher or served(target, vocabulary, student.reads)
        self.teacher = MemoryCache(read, remember)
        part = part_of_head(target)
        self.masses = Masses(part) if part else None
        self.judged: dict[float, dict[str, Scores]] = {}
        self.seconds, self.trial = 0.0, 0.0  # seconds of the last evaluation, and of timing texts before the first
        self.fitted = False  # whether `_fit_texts` has run

    def configure_model(self) -> None:
        """Shard the draft if the strategy shards it. `assemble` undoes this."""
        if self.device_mesh is not None and not self.whole:
            self.whole = [self.draft]
            self._replace(sharded(self.draft, self.device_mesh["data_parallel"]))

    def _replace(self, draft: PreTrainedModel) -> None:
        self.draft, self.student = draft, self.student.of(draft)

    @contextmanager
    def assembled(self) -> Iterator[PreTrainedModel]:
        """Yield the whole draft. If it is sharded, only the first process has its current weights, and all processes
        must enter the block."""
        if not self.whole:
            yield self.draft
            return
        draft = gathered(self.draft, self.whole[0], everywhere=False)
        if self.global_rank == 0:
            torch.nn.Module.to(draft, self.device)
        yield draft
        torch.nn.Module.to(draft, "cpu")

    def assemble(self) -> None:
        """Replace a sharded draft, in place, by the whole draft with the same weights."""
        if self.whole:
            self._replace(gathered(self.draft, self.whole[0]))
            self.whole = []

    def transfer_batch_to_device(self, batch: dict[str, Any], device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device. Its entry "host" is the same batch on the CPU, which can be read without
        waiting for a GPU."""
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return moved | {"host": batch} if isinstance(moved, dict) else moved

    def training_step(self, batch: dict[str, Any], _: int) -> Tensor:
        """Return the loss of a batch, a scalar. batch: ids (B, T), predicted (B, T-1) and the other entries that
        `learn` lists. If the loss is not finite, NotFinite is raised now or at the next logged step."""
        loss = within(self.draft, lambda: self.learn(batch))
        self.unread.append((self.global_step + 1, loss.detach(), batch.get("host", batch)))
        if self.watched or loss.device.type == "cpu":  # else a GPU would wait for the host in each step
            self.require_finite()
        return loss

    def require_finite(self) -> None:
        """Raise NotFinite, which names the step and its texts, if the loss of any step since the last call is not
        finite."""
        if not self.unread:
            return
        losses = torch.stack([loss for _, loss, _ in self.unread]).tolist()
        unread, self.unread = self.unread, []
        for value, (step, _, batch) in zip(losses, unread, strict=True):
            if not math.isfinite(value):
                texts = ", ".join(map(str, batch["key"].tolist()))
                raise NotFinite(f"the loss of step {step} is {value:g}, on texts {texts}", batch["ids"].tolist())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise NotFinite instead of saving weights after a step whose loss was not finite."""
        self.require_finite()

    def learn(self, batch: dict[str, Any]) -> Tensor:
        """Return the loss of a batch, a scalar.

        The batch has ids (B, T); predicted (B, T-1) bool: entry t is whether the loss counts token t+1; key (B,): the
        number of each text; temperature (B,); position_ids (B, T) if texts are packed; source (B, S) if the target has
        an encoder; length (B,): the number of tokens of each text; sampled (B, T-1) bool: entry t is whether the target
        sampled token t+1 (without it, every predicted token counts as sampled). If a step has several batches, it also
        has counts (2,), the step's numbers of predicted and sampled tokens, and group, the pair (index of the batch in
        the step, number of batches).
        """
        if not self.batch_sums:
            self.step_figures = {}
        host = batch.get("host", batch)
        record = self.teacher(
            batch["ids"], host["key"], host.get("position_ids"), host.get("source"), host.get("length")
        )
        columns = columns_of(host["ids"].shape[1], host.get("length"))
        ids, host = batch["ids"][:, :columns], shortened(host, columns)
        record = {layer: states if layer == ENCODER else states[:, :columns] for layer, states in record.items()}
        uniforms = self._uniforms(host["key"], columns)
        guesses = self.student.guesses(host | {"uniforms": uniforms}, Seen(record))
        refuse_mixed(guesses)
        spec, counts, watched = current(self.stages, self.done), self._counts(batch), self.watched
        if spec.argmax:
            guesses = [guess.whole() for guess in guesses]
        distributions: TargetDistributions = self.distributions(record)
        pruned = guesses[0].pruned is not None
        if len(guesses) > 1 or spec.sequence or spec.weighted or pruned:  # else each distribution is read once
            counted_positions = pad(host["predicted"] | sampled_mask(host), (0, 1))
            how = (guesses, counted_positions, host["temperature"], self.truncate, self.chunk)
            distributions = remembered(distributions, *how, self.masses, host["key"].tolist())
        asked = LossBatch(distributions, ids, host["temperature"], sampled_mask(host), self.truncate, self.chunk)
        logs = logs_for(spec, asked, guesses, self.decay is None)
        step = StepLoss(spec, asked, guesses, logs, counts, self.k)
        parts = step.of_texts()
        summands = list(parts.values())
        if spec.position:
            by_position = step.of_positions(host["predicted"], self._shares(step), watched)
            summands, parts = [*summands, by_position.mean], parts | by_position.terms
            if watched:
                self._note_acceptance(guesses, by_position.statistics)
        if further := self.further(batch, counts):
            parts, summands = parts | further, [*summands, *further.values()]
        mean = sum(summands[1:], summands[0])
        self._note({"loss": mean} | {f"loss_{name}": part for name, part in parts.items()}, batch, watched)
        return mean

    def distributions(self, record: Record) -> FromStates:
        """Return the target's distributions for a batch. record: the target's states (B, T, D) for this batch, by
        layer."""
        return FromStates(record[LAST], self.head_target)

    def further(self, batch: dict[str, Any], counts: StepCounts) -> dict[str, Tensor]:
        """Return further terms of the loss, scalars by name; {} except in joint training. batch: ids (B, T), predicted
        (B, T-1) and the other entries that `learn` lists. counts: the numbers by which losses are divided."""
        return {}

    @property
    def watched(self) -> bool:
        """Return whether the figures of the current step are logged. Between two steps, the next one counts as the
        current one."""
        return (self.global_step + 1) % WATCHED == 0

    @property
    def done(self) -> float:
        """Return which share of the training is done, in [0, 1]."""
        return (self.progress or Progress(self.trainer.max_steps)).at(self.global_step)

    def _note(self, values: dict[str, Tensor], batch: dict[str, Any], watched: bool) -> None:
        """Add scalars to the sums over the batches of a step. After the last batch, the sums become the figures of the
        step. values: the scalars by name. batch: says whether it is the last of its step. watched: whether the figures
        of this step are logged."""
        _, number = batch.get("group", (0, 1))
        for name, value in values.items():
            self.batch_sums[name] = self.batch_sums.get(name, 0.0) + value.detach() / number
        if not ends_step(batch):
            return
        if watched:
            read = torch.stack(list(self.batch_sums.values())).tolist()  # one wait for a GPU
            self.step_figures |= dict(zip(self.batch_sums, read, strict=True))
        self.batch_sums = {}

    def _note_acceptance(self, guesses: Sequence[Guess], statistics: Sequence[Statistics]) -> None:
        """Add the acceptance at each depth to the figures of the step. Names for later depths end in the depth's number
        (1-based)."""
        values = {"acceptance_greedy_draft": statistics[0].alpha_greedy}
        for guess, one in zip(guesses, statistics, strict=True):
            if one.positions:  # else no text of the batch is long enough
                values[f"acceptance_depth_{guess.depth + 1}" if guess.depth > 0 else "acceptance"] = one.alpha
        if "acceptance" in values:
            self.step_figures |= dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))

    def _shares(self, step: StepLoss) -> Tensor:
        """Return the weight of each guess, (K,), the same on every process."""
        if step.spec.weighted or len(step.guesses) == 1:
            return torch.ones(len(step.guesses))
        by_depth = None if step.saved is None else step.saved.sum((0, 1))
        if by_depth is not None and self.trainer.world_size > 1:
            by_depth = self.trainer.strategy.reduce(by_depth, reduce_op="mean")
        return shares(step.guesses, self.decay, by_depth)

    def _counts(self, batch: dict[str, Any]) -> StepCounts:
        """Return the numbers by which the losses of a batch are divided. They are averaged over processes, because DDP
        averages gradients."""
        _, number = batch.get("group", (0, 1))
        total = batch["counts"] if number > 1 else counted(batch)
        if self.trainer.world_size == 1:
            return divisors(total, number)
        return divisors(self.trainer.strategy.reduce(total, reduce_op="mean"), number)

    def _uniforms(self, keys: Tensor, positions: int) -> Tensor:
        """Return uniforms (B, T) that depend only on seed, step, text and position, so that a resumed run repeats them.
        keys (B,): the number of each text. positions: T."""
        step = torch.full_like(keys, self.global_step)
        return noise.uniform(self.seed, keys, step, torch.arange(positions), noise.ACCEPT)

    def validation_step(self, *_: Any) -> None:
        """Do nothing. Lightning would run this method in the trainer's precision; `judge`, at the end of the
        validation, evaluates in the precision of the weights."""

    def on_validation_epoch_end(self) -> None:
        self.judge()

    def judge(self) -> None:
        """Score the current draft on the held-out texts. `acceptance`, `tau` and `scores` then return these figures.
        With a time limit, fewer texts may be used."""
        self.require_finite()
        self._fit_texts()
        began = time.monotonic()
        self.judged = within(self.draft, self._scored)
        rest(self.draft)
        self.seconds = time.monotonic() - began

    def _scored(self) -> dict[float, dict[str, Scores]]:
        with self._display("held-out texts", self.held_out) as add:
            return {t: evaluate(held, self.student, self.head_target, add) for t, held in self.held_out.items()}

    def _fit_texts(self) -> None:
        """Reduce the held-out texts, in place, to as many as one evaluation has time for. A few texts are timed to
        estimate this. A resumed run uses as many texts as before."""
        progress, longest = self.progress, max(map(len, self.held_out.values()))
        if progress is None or self.fitted:
            return
        if progress.texts is None and (judging := progress.deadline.seconds(JUDGING)) and self._trainer is not None:
            once = judging * ONCE
            progress.texts = max(int(once / self._seconds_a_text(once)), FEW)
        if progress.texts is not None and progress.texts < longest:
            self.held_out = {t: held.spread(progress.texts) for t, held in self.held_out.items()}
            judged = max(map(len, self.held_out.values()))
            if not rank():
                print(f"{judged} of {longest} held-out texts are used: minutes= leaves no time for more")
        self.fitted = True

    def _seconds_a_text(self, budget: float) -> float:
        """Return the seconds per held-out text. The first texts are only a warm-up. If a whole batch fits into `budget`
        seconds, it is timed instead, since a GPU then needs less time per text."""
        start = time.monotonic()
        each = 0.0
        for count in (FEW, FEW, BATCH):
            if count == BATCH and each * BATCH > budget:
                break
            some = [held.spread(count) for held in self.held_out.values()]
            began = time.monotonic()
            within(self.draft, partial(lambda part: [self.on(held) for held in part], some))
            # one clock decides for all processes, which must make the same passes
            each = self.trainer.strategy.broadcast((time.monotonic() - began) / max(map(len, some)))
        self.trial = time.monotonic() - start
        return each

    def _display(self, title: str, held_out: Mapping[float, HeldOut]) -> AbstractContextManager[Counter]:
        return counting(title, sum(map(len, held_out.values())), "texts", hidden=bool(rank()))

    def on(self, held_out: HeldOut) -> dict[str, Scores]:
        """Return the draft's scores on the texts `held_out`, which need not be the module's, keyed by domain; "all" is
        for all of them together."""
        return evaluate(held_out, self.student, self.head_target)

    def profiles(self) -> dict[float, dict[str, Any]]:
        """Return, keyed by temperature of the held-out texts, the acceptance by the draft's temperature and by the
        length of the context (`evaluation.profile`)."""
        with self._display("profiles", self.held_out) as add:
            return {t: profile(held, self.student, self.head_target, add) for t, held in self.held_out.items()}

    def divergence(self, decode: Decode) -> dict[str, Any]:
        """Return where draft and target differ on the regime's held-out texts: the mean total variation, how few
        positions contribute most of it, and the worst positions (`evaluation.divergence`). decode: token ids -> text.
        """
        held = self.held_out[self.temperature]
        with self._display("divergence", {self.temperature: held}) as add:
            return divergence(held, self.student, self.head_target, decode, add)

    def acceptance(self) -> dict[str, float]:
        """Return all figures on held-out texts by name, at all temperatures, such as alpha_T0.5/code
        (`held_out.figures` with the temperature in the name)."""
        return {_tag(name, t): value for t, scores in self.judged.items() for name, value in figures(scores).items()}

    def without_markov(self) -> dict[str, float]:
        """Return the tau that the draft has without its Markov head, because some engines do not support one, by name,
        such as tau_without_markov_T1/all/4 at draft length 4 and temperature 1. Return {} for a draft without a Markov
        head."""
        network: Any = self.student.network
        markov = getattr(network, "markov_head", None)
        if markov is None:
            return {}
        network.markov_head = None
        try:
            judged = {t: self.on(held)["all"] for t, held in self.held_out.items()}
        finally:
            network.markov_head = markov
        names = {"tau": "sampled", "tau_greedy_draft": "greedy"}
        return {
            _tag(f"{name}_without_markov/all/{k}", t): tau_of(scores, k, objective)
            for t, scores in judged.items()
            for k in range(1, scores.drafted(DEPTHS) + 1)
            for name, objective in names.items()
        }

    def tau(self, k: int, objective: str = "sampled", verify: str = "token") -> float:
        """Return the tokens per target call at draft length k in the regime, as predicted by the last evaluation on the
        held-out texts. objective: "sampled" or "greedy" drafting. verify: the verification rule; every rule other than
        "block" counts as the token rule."""
        return tau_of(self.judged[self.temperature]["all"], k, objective, verify)

    def scores(self) -> dict[float, Scores]:
        """Return the scores on all held-out texts together, keyed by temperature."""
        return {t: scores["all"] for t, scores in self.judged.items()}

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.draft)
        schedule = self.make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def alpha_of(scores: Scores, objective: str = "sampled") -> float:
    """Return the mean acceptance of the first drafted token on held-out texts. objective: "sampled" drafting (sum_v
    min(p, q)), or "greedy" drafting (p(argmax q))."""
    return float(scores.alpha_greedy if objective == "greedy" else scores.alpha)


def tau_of(scores: Scores, k: int, objective: str = "sampled", verify: str = "token") -> float:
    """Return the tokens per target call at draft length k, as predicted from the scores of held-out texts. objective:
    "sampled" or "greedy" drafting. verify: the verification rule; every rule other than "block" counts as the token
    rule."""
    return scores.tau_greedy(k) if objective == "greedy" else scores.tau(k, verify)


def _tag(name: str, temperature: float) -> str:
    """Return the report's name for a figure at a temperature: alpha/code at 0.5 gives alpha_T0.5/code."""
    figure, rest = name.split("/", 1)
    return f"{figure}_T{temperature:g}/{rest}"
