"""Distillation of a draft from a frozen target, as a LightningModule that only wires its parts together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import lightning
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain import acceptance, losses
from cotrain.errors import NotFinite
from cotrain.evaluation.divergence import Decode, divergence
from cotrain.evaluation.held_out import HeldOut, Scores, evaluate, figures
from cotrain.evaluation.profile import profile
from cotrain.losses.chunked import Law, Truncate, chunked, positions, token_logs
from cotrain.losses.completions import columns, placed, possible, taken
from cotrain.losses.spec import BY_TEXT, MERGED, LossSpec
from cotrain.teacher.target_model import Remembering, halves, served, split
from cotrain.teacher.top_k import TopKLaws, completed, outside
from cotrain.training.counts import Counts, counted, divisors, sampled
from cotrain.training.distributed import gathered, rest, sharded, within
from cotrain.training.progress import Progress
from inference import noise

WATCHED = 5  # every so many steps, what a step found is logged


@dataclass(frozen=True)
class Stage:
    """A loss that is used until this fraction of the steps is done."""

    until: float
    loss: LossSpec


def current(stages: Sequence[Stage], progress: float) -> LossSpec:
    """The loss at a progress in [0, 1]: the first stage that has not ended, else the last."""
    return next((stage.loss for stage in stages if progress < stage.until), stages[-1].loss)


def leading(weight: float, stages: Sequence[Stage], done: float) -> float:
    """The cosine's weight: it leads early on, and falls in a line to 0 where the first stage ends."""
    return weight * max(0.0, 1 - done / stages[0].until) if stages[0].until else 0.0


class Distillation(lightning.LightningModule):
    """Trains `draft` to be accepted by `target` under a regime.

    stages: losses of `cotrain.losses.spec`, one after the other. optimizer, scheduler: factories that take the draft,
    and the optimiser. temperature, truncate: the regime, see `rows.chunked`. held_out: texts sampled from the target,
    by temperature; acceptance on them is logged at every validation, by domain. cosine: weight at first of
    `losses.misaligned` on the final hidden states, see `leading`, 0 for none. remember: bytes of the target's hidden
    states to keep.
    chunk: positions whose laws exist at once, by default `rows.positions`. k: draft length that sequence losses
    speak of. hardest: see `rows.chunked`. seed: of tokens drawn for a loss. progress: of the whole training, which
    stages are parts of; None: the trainer's steps. top: so many of each law's likeliest tokens are kept instead of
    hidden states, see `top_k`; 0: states. vocabulary: ids that have mass, see `target_model.split`.

    Raises ValueError for a cosine between states of different widths, and for one, or a loss that merged laws do not
    have, beside top.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
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
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        self.draft, self.stages = draft, stages
        self.make_optimizer, self.make_scheduler, self.held_out = optimizer, scheduler, held_out
        self.temperature, self.truncate, self.cosine = temperature, truncate, cosine
        self.vocabulary = vocabulary or target.config.get_text_config().vocab_size
        self.chunk = chunk or positions(self.vocabulary)
        self.k, self.hardest, self.seed, self.progress = k, hardest, seed, progress
        self.noted: dict[str, Tensor] = {}  # what the batches of a step add up to
        self.read_draft, self.head_draft = split(draft, self.vocabulary)
        self.whole: list[PreTrainedModel] = []  # the draft, while `draft` is it in parts; no module of this one's
        # plain functions: the target is not saved
        read_target, self.head_target = served(target, self.vocabulary)
        self.law: Law | None = None
        if top:
            refuse_merged(stages, cosine)
            self.law = completed
            read_target = TopKLaws(
                read_target, self.head_target, top, self.vocabulary, temperature, truncate, self.chunk
            )
        self.teacher = Remembering(read_target, remember)
        self.judged: dict[float, dict[str, Scores]] = {}
        widths = [model.config.get_text_config().hidden_size for model in (draft, target)]
        if cosine and len(set(widths)) > 1:
            raise ValueError(f"init.cosine: the draft's hidden states are {widths[0]} wide, the target's {widths[1]}")

    def configure_model(self) -> None:
        """Where a strategy shards, the draft in parts; `assemble` ends that."""
        if self.device_mesh is not None and not self.whole:
            self.whole = [self.draft]
            self.draft = sharded(self.draft, self.device_mesh["data_parallel"])
            self.read_draft, self.head_draft = halves(self.draft, self.vocabulary)

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
            self.draft, self.whole = gathered(self.draft, self.whole[0]), []
            self.read_draft, self.head_draft = halves(self.draft, self.vocabulary)

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
        ids, weight, places = batch["ids"], batch["predicted"], batch.get("position_ids")
        theirs = self.teacher(ids, batch["key"], places)[:, :-1]
        ours = self.read_draft(ids, places)[:, :-1]
        watched = (self.global_step + 1) % WATCHED == 0
        done = self.done
        spec, counts, found = current(self.stages, done), self._counts(batch), dict[str, Tensor]()
        if spec.sequence or spec.weighted:
            found["sequence"], weight = self._sequence(spec, batch, theirs, ours, counts)
        if spec.position:
            total = self._position(spec, batch, theirs, ours, weight, watched)
            found["position"] = total / (counts.tokens if spec.weighted else counts.positions)
        lead = leading(self.cosine, self.stages, done)
        if lead:
            apart = losses.misaligned(ours, theirs)[batch["predicted"]].sum() / counts.positions
            found["cosine"] = lead * apart
        first, *others = found.values()
        mean = sum(others, first)
        self._note({"train/loss": mean} | {f"train/loss_{name}": part for name, part in found.items()}, batch, watched)
        return mean

    @property
    def done(self) -> float:
        """The share of the training that is done, in [0, 1]."""
        return (self.progress or Progress(self.trainer.max_steps)).at(self.global_step)

    def _note(self, found: dict[str, Tensor], batch: dict[str, Any], watched: bool) -> None:
        """Log what the batches of a step add up to, behind the last of them."""
        index, number = batch.get("group", (0, 1))
        for name, value in found.items():
            self.noted[name] = self.noted.get(name, 0.0) + value.detach() / number
        if index + 1 < number:
            return
        for name, value in self.noted.items() if watched else ():
            self.log(name, value, prog_bar=name == "train/loss")
        self.noted = {}

    def _position(
        self, spec: LossSpec, batch: dict[str, Any], theirs: Tensor, ours: Tensor, weight: Tensor, watched: bool
    ) -> Tensor:
        """The sum over positions, and what acceptance it stands for, logged."""
        assert spec.position is not None
        total, found = chunked(
            spec.position, theirs, self.head_target, ours, self.head_draft, weight, batch["temperature"],
            chunk=self.chunk, truncate=self.truncate, measured=watched, hardest=self.hardest,
            parameters=list(self.draft.get_output_embeddings().parameters()), law=self.law,
            x=batch["ids"][:, 1:] if spec.takes == "text" else None,
            u=self._uniforms(batch["key"], weight.shape[1]) if spec.takes == "drawn" else None,
        )  # fmt: skip
        if watched:
            self.log("train/alpha", found.alpha, prog_bar=True)
            self.log("train/alpha_greedy_draft", found.alpha_greedy)
            if self.law:  # which alpha is too high by at most
                self.log("train/outside", outside(theirs)[batch["predicted"]].mean())
        return total

    def _counts(self, batch: dict[str, Any]) -> Counts:
        """What the losses are divided by: of this process's batches of the step, or the mean over processes, since
        gradients are averaged over these."""
        _, number = batch.get("group", (0, 1))
        total = batch["counts"] if number > 1 else counted(batch)
        if self.trainer.world_size == 1:
            return divisors(total, number)
        return divisors(cast(Tensor, self.trainer.strategy.reduce(total, reduce_op="mean")), number)

    def _sequence(
        self, spec: LossSpec, batch: dict[str, Any], theirs: Tensor, ours: Tensor, counts: Counts
    ) -> tuple[Tensor, Tensor]:
        """The sequence losses of the completions, and the weight of each position (B, T-1) for those a position: the
        calls that a unit of acceptance there saves, so that their mean has the slope of calls a token."""
        inside = sampled(batch)
        at, lengths = columns(inside), inside.sum(1)
        logs = possible(*token_logs(
            taken(theirs, at), self.head_target, taken(ours, at), self.head_draft, taken(batch["ids"][:, 1:], at),
            batch["temperature"], chunk=self.chunk, truncate=self.truncate,
        ))  # fmt: skip
        total = ours.new_zeros(())
        for w, loss in spec.sequence:
            total = total + w * loss(*logs, self.k, lengths)[0] / (counts.texts if loss in BY_TEXT else counts.tokens)
        if not spec.weighted:
            return total, batch["predicted"]
        return total, placed(acceptance.call_weights(acceptance.r_from(*logs), self.k, lengths), inside)

    def _uniforms(self, keys: Tensor, positions: int) -> Tensor:
        """A function of seed, step, text and position alone: a resumed run draws what it would have -> (B, T)."""
        step = torch.full_like(keys, self.global_step)
        return noise.uniform(self.seed, keys, step, torch.arange(positions, device=keys.device), noise.DRAFT)

    def validation_step(self, batch: Any, _: int) -> None:
        """The held-out texts are evaluated at the epoch's end, by regime; the loader only asks for it."""

    def on_validation_epoch_end(self) -> None:
        self.judge()
        self.log_dict(self.acceptance(), sync_dist=True)  # every process judges the same texts

    def judge(self) -> None:
        """Score the draft as it now is on the held-out texts; `acceptance` and `scores` tell what was found last."""
        self.judged = within(self.draft, lambda: {t: self.on(held) for t, held in self.held_out.items()})
        rest(self.draft)

    def on(self, held_out: HeldOut) -> dict[str, Scores]:
        """The draft's scores on other texts."""
        return evaluate(held_out, self.read_draft, self.head_draft, self.head_target)

    def profiles(self) -> dict[float, dict[str, Any]]:
        """Of the held-out texts of each temperature, see `profile`."""
        heads = (self.read_draft, self.head_draft, self.head_target)
        return {t: profile(held_out, *heads) for t, held_out in self.held_out.items()}

    def divergence(self, decode: Decode) -> dict[str, Any]:
        """Of the held-out texts of the regime, see `divergence`."""
        heads = (self.read_draft, self.head_draft, self.head_target)
        return divergence(self.held_out[self.temperature], *heads, decode)

    def acceptance(self) -> dict[str, float]:
        """Every figure of `held_out`, named for its temperature."""
        return {_tag(name, t): value for t, found in self.judged.items() for name, value in figures(found).items()}

    def tau(self, k: int, objective: str = "sampled", verify: str = "token") -> float:
        """Tokens per target call at draft length k in the regime, as predicted on the held-out texts; objective: how
        drafts are chosen, "sampled" or "greedy"; verify: the rule that decides about them."""
        found = self.judged[self.temperature]["all"]
        return found.tau_greedy(k) if objective == "greedy" else found.tau(k, verify)

    def scores(self) -> dict[float, Scores]:
        """Of all held-out texts together, by temperature."""
        return {t: found["all"] for t, found in self.judged.items()}

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.draft)
        schedule = self.make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def refuse_merged(stages: Sequence[Stage], cosine: float) -> None:
    """Raise ValueError for what merged laws do not have: some losses, and hidden states to compare."""
    if not all(stage.loss.merged for stage in stages):
        raise ValueError(f"trainer.top: the loss is not one of {', '.join(MERGED)}, which kept laws have")
    if cosine:
        raise ValueError("trainer.top: laws are kept, not hidden states: init.cosine=0")


def _tag(name: str, temperature: float) -> str:
    """alpha/code at 0.5 -> alpha_T0.5/code: TensorBoard draws one section a quantity and temperature."""
    kind, rest = name.split("/", 1)
    return f"{kind}_T{temperature:g}/{rest}"
