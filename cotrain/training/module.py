"""Distillation of a draft from a frozen target, as a LightningModule that only wires its parts together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import lightning
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain import losses
from cotrain.errors import NotFinite
from cotrain.evaluation.divergence import Decode, divergence
from cotrain.evaluation.held_out import HeldOut, Scores, evaluate, figures
from cotrain.evaluation.profile import profile
from cotrain.losses.chunked import Statistics, positions
from cotrain.losses.over_guesses import Asked, shares
from cotrain.losses.served_distributions import Truncate
from cotrain.students.base import LAST, Guess, Student, refuse_mixed
from cotrain.teacher.memory_cache import Remembering
from cotrain.teacher.target_distributions import Record, StatesTeacher, Teacher, seen
from cotrain.teacher.target_model import served
from cotrain.teacher.top_k import TopKTeacher, outside
from cotrain.training.counts import Counts, counted, divisors, sampled
from cotrain.training.distributed import gathered, rest, sharded, within
from cotrain.training.progress import Progress
from cotrain.training.stages import Stage, current, leading, refuse_merged
from cotrain.training.step_loss import StepLoss, logs_for
from inference import noise

WATCHED = 5  # every so many steps, what a step found is logged


class Distillation(lightning.LightningModule):
    """Trains a student to be accepted by `target` under a regime.

    stages: losses of `cotrain.losses.spec`, one after the other. optimizer, scheduler: factories that take the draft,
    and the optimiser. temperature, truncate: the regime, see `chunked`. held_out: texts sampled from the target,
    by temperature, judged at every validation. cosine: weight at first of
    `losses.misaligned` on the final hidden states, see `leading`, 0 for none. remember: bytes of what is read of the
    target to keep. chunk: guesses whose distributions exist at once, by default `chunked.positions`. k: draft length
    that sequence losses speak of. hardest: see `chunked`. seed: of tokens drawn for a loss. progress: of the whole
    training, which stages are parts of; None: the trainer's steps. top: so many of each distribution's likeliest tokens
    are kept instead of hidden states, see `top_k`; 0: states. decay: of a depth's weight, None: exact, see
    `over_guesses.shares`.

    Raises ValueError for a student that cannot be trained so, for a cosine between states of different widths, and for
    one, or a loss that merged distributions do not have, beside top.
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
        cosine: float = 0.0,
        remember: int = 0,
        k: int = 4,
        hardest: float = 1.0,
        seed: int = 0,
        progress: Progress | None = None,
        top: int = 0,
        decay: float | None = None,
    ) -> None:
        super().__init__()
        student.refuse()
        self.student, self.draft, self.stages = student, student.network, stages
        self.make_optimizer, self.make_scheduler, self.held_out = optimizer, scheduler, held_out
        self.temperature, self.truncate, self.cosine, self.decay = temperature, truncate, cosine, decay
        vocabulary = student.vocabulary or target.config.get_text_config().vocab_size
        self.chunk = chunk or positions(vocabulary)
        self.k, self.hardest, self.seed, self.progress, self.top = k, hardest, seed, progress, top
        self.noted: dict[str, Tensor] = {}  # what the batches of a step add up to
        self.found: dict[str, float] = {}  # what the last step found, if it was watched, by name
        self.whole: list[PreTrainedModel] = []  # the draft, while `draft` is it in parts; no module of this one's
        # plain functions: the target is not saved
        read, self.head_target = served(target, vocabulary, student.reads)
        self.distributions_of: Teacher = StatesTeacher(read, self.head_target)
        if top:
            refuse_merged(stages, cosine)
            self.distributions_of = TopKTeacher(
                read, self.head_target, top, vocabulary, temperature, truncate, self.chunk, student.reads
            )
        self.teacher = Remembering(self.distributions_of.read, remember)
        self.judged: dict[float, dict[str, Scores]] = {}
        if cosine:
            refuse_widths(self.draft, target)

    def configure_model(self) -> None:
        """Where a strategy shards, the draft in parts; `assemble` ends that."""
        if self.device_mesh is not None and not self.whole:
            self.whole = [self.draft]
            self._replace(sharded(self.draft, self.device_mesh["data_parallel"]))

    def _replace(self, draft: PreTrainedModel) -> None:
        self.draft, self.student = draft, self.student.of(draft)

    @contextmanager
    def assembled(self) -> Iterator[PreTrainedModel]:
        """The whole draft as it now is, for the first process to look at; all ask at once."""
        if not self.whole:
            yield self.draft
            return
        draft = gathered(self.draft, self.whole[0], everywhere=False)
        if self.global_rank == 0:
            torch.nn.Module.to(draft, self.device)
        yield draft
        torch.nn.Module.to(draft, "cpu")

    def assemble(self) -> None:
        """No parts any more."""
        if self.whole:
            self._replace(gathered(self.draft, self.whole[0]))
            self.whole = []

    def training_step(self, batch: dict[str, Any], _: int) -> Tensor:
        """The loss, see `learn`. Raises NotFinite, naming step and texts, where it is no number: before the step, so
        the weights are still those of the last good one."""
        loss = within(self.draft, lambda: self.learn(batch))
        if not bool(torch.isfinite(loss.detach())):
            said = f"the loss of step {self.global_step + 1} is {loss.item():g}, on texts "
            raise NotFinite(said + ", ".join(map(str, batch["key"].tolist())), batch["ids"].tolist())
        return loss

    def learn(self, batch: dict[str, Any]) -> Tensor:
        """batch: ids (B, T), predicted (B, T-1) bool, key and temperature (B,), position_ids (B, T) of packed texts,
        sampled (B, T-1) bool, see `counts.sampled`, counts and group of a step of several, see `counts.Grouped`."""
        if not self.noted:
            self.found = {}
        record = self.teacher(batch["ids"], batch["key"], batch.get("position_ids"))
        uniforms = self._uniforms(batch["key"], batch["ids"].shape[1], noise.ACCEPT)
        guesses = self.student.guesses(batch | {"uniforms": uniforms}, seen(record))
        refuse_mixed(guesses)
        distributions = self.distributions_of.distributions(record)
        asked = Asked(distributions, batch["ids"], batch["temperature"], sampled(batch), self.truncate, self.chunk)
        spec, counts, watched = current(self.stages, self.done), self._counts(batch), self.watched
        by_depth = self.decay is None and not self.top  # kept distributions lack the text's tokens
        logs = logs_for(spec, asked, guesses, by_depth)
        step = StepLoss(spec, asked, guesses, logs, counts, self.k, self.hardest)
        found = step.of_texts()
        wholes = list(found.values())
        if spec.position:
            u = self._uniforms(batch["key"], batch["ids"].shape[1])
            places = step.of_places(batch["predicted"], self._shares(step), u, watched)
            wholes, found = [*wholes, places.mean], found | places.terms
            if watched:
                self._show(guesses, places.statistics)
        if lead := leading(self.cosine, self.stages, self.done):
            found["cosine"] = lead * _apart(record, guesses[0], batch["predicted"]) / counts.positions
            wholes.append(found["cosine"])
        mean = sum(wholes[1:], wholes[0])
        self._note({"loss": mean} | {f"loss_{name}": part for name, part in found.items()}, batch, watched)
        if watched and self.top:  # which alpha is too high by at most
            self.found["outside"] = float(outside(record)[:, :-1][batch["predicted"]].mean())
        return mean

    @property
    def watched(self) -> bool:
        """Whether the step that is made next, or now, is one whose figures are kept in `found`."""
        return (self.global_step + 1) % WATCHED == 0

    @property
    def done(self) -> float:
        """The share of the training that is done, in [0, 1]."""
        return (self.progress or Progress(self.trainer.max_steps)).at(self.global_step)

    def _note(self, found: dict[str, Tensor], batch: dict[str, Any], watched: bool) -> None:
        """Keep what the batches of a step add up to, behind the last of them."""
        index, number = batch.get("group", (0, 1))
        for name, value in found.items():
            self.noted[name] = self.noted.get(name, 0.0) + value.detach() / number
        if index + 1 < number:
            return
        if watched:
            self.found |= {name: float(value) for name, value in self.noted.items()}
        self.noted = {}

    def _shares(self, step: StepLoss) -> Tensor:
        """Of each guess, the same on every process."""
        if step.spec.weighted or len(step.guesses) == 1:
            return torch.ones(len(step.guesses))
        by_depth = None if step.saved is None else step.saved.sum((0, 1))
        if by_depth is not None and self.trainer.world_size > 1:
            by_depth = cast(Tensor, self.trainer.strategy.reduce(by_depth, reduce_op="mean"))
        return shares(step.guesses, self.decay, by_depth)

    def _show(self, guesses: Sequence[Guess], statistics: Sequence[Statistics]) -> None:
        """Keep what acceptance each guess stands for, of later depths by their number."""
        for guess, found in zip(guesses, statistics, strict=True):
            if guess.depth > 0:
                self.found[f"acceptance_depth_{guess.depth + 1}"] = float(found.alpha)
            else:
                self.found |= {"acceptance": float(found.alpha), "acceptance_greedy_draft": float(found.alpha_greedy)}

    def _counts(self, batch: dict[str, Any]) -> Counts:
        """What the losses are divided by: of this process's batches of the step, or the mean over processes, since
        gradients are averaged over these."""
        _, number = batch.get("group", (0, 1))
        total = batch["counts"] if number > 1 else counted(batch)
        if self.trainer.world_size == 1:
            return divisors(total, number)
        return divisors(cast(Tensor, self.trainer.strategy.reduce(total, reduce_op="mean")), number)

    def _uniforms(self, keys: Tensor, positions: int, stream: int = noise.DRAFT) -> Tensor:
        """A function of seed, step, text and position alone: a resumed run draws what it would have -> (B, T)."""
        step = torch.full_like(keys, self.global_step)
        return noise.uniform(self.seed, keys, step, torch.arange(positions, device=keys.device), stream)

    def validation_step(self, batch: Any, _: int) -> None:
        """The held-out texts are evaluated at the epoch's end, by regime; the loader only asks for it."""

    def on_validation_epoch_end(self) -> None:
        self.judge()

    def judge(self) -> None:
        """Score the draft as it now is on the held-out texts; `acceptance` and `scores` tell what was found last."""
        self.judged = within(self.draft, lambda: {t: self.on(held) for t, held in self.held_out.items()})
        rest(self.draft)

    def on(self, held_out: HeldOut) -> dict[str, Scores]:
        """The draft's scores on other texts."""
        return evaluate(held_out, self.student, self.head_target)

    def profiles(self) -> dict[float, dict[str, Any]]:
        """Of the held-out texts of each temperature, see `profile`."""
        return {t: profile(held_out, self.student, self.head_target) for t, held_out in self.held_out.items()}

    def divergence(self, decode: Decode) -> dict[str, Any]:
        """Of the held-out texts of the regime, see `divergence`."""
        return divergence(self.held_out[self.temperature], self.student, self.head_target, decode)

    def acceptance(self) -> dict[str, float]:
        """Every figure of `held_out`, named for its temperature."""
        return {_tag(name, t): value for t, found in self.judged.items() for name, value in figures(found).items()}

    def tau(self, k: int, objective: str = "sampled", verify: str = "token") -> float:
        """Tokens per target call at draft length k in the regime, as predicted on the held-out texts; objective: how
        drafts are chosen, "sampled" or "greedy"; verify: the rule that decides about them."""
        return tau_of(self.judged[self.temperature]["all"], k, objective, verify)

    def scores(self) -> dict[float, Scores]:
        """Of all held-out texts together, by temperature."""
        return {t: found["all"] for t, found in self.judged.items()}

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.draft)
        schedule = self.make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def alpha_of(found: Scores, objective: str = "sampled") -> float:
    """Acceptance of the first draft as it will be drafted."""
    return float(found.alpha_greedy if objective == "greedy" else found.alpha)


def tau_of(found: Scores, k: int, objective: str = "sampled", verify: str = "token") -> float:
    """As `Distillation.tau`, of other scores."""
    return found.tau_greedy(k) if objective == "greedy" else found.tau(k, verify)


def refuse_widths(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise ValueError for states of two widths, which have no cosine."""
    ours, theirs = (model.config.get_text_config().hidden_size for model in (draft, target))
    if ours != theirs:
        raise ValueError(f"init.cosine: the draft's hidden states are {ours} wide, the target's {theirs}")


def _apart(record: Record, guess: Guess, predicted: Tensor) -> Tensor:
    """The sum of `losses.misaligned` over predicted places of a guess."""
    theirs = record[LAST].flatten(0, 1)[guess.at]
    inside = torch.nn.functional.pad(predicted, (0, 1)).flatten()[guess.at]
    return losses.misaligned(guess.states, theirs)[inside].sum()


def _tag(name: str, temperature: float) -> str:
    """alpha/code at 0.5 -> alpha_T0.5/code, a key of the report."""
    kind, rest = name.split("/", 1)
    return f"{kind}_T{temperature:g}/{rest}"
