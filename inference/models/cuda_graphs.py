"""Short passes, and all drafts of a round, recorded once as CUDA graphs and replayed: on a GPU a pass over a few ids is
bound by its launches.

A graph belongs to a bucket of shapes: rows, ids a row and slots read, each rounded up, and to what is asked for: one id
of each row, states of layers, a tree. What it reads and writes stays where it was when it was recorded: inputs and
results have memory of their own, keys and values are the cache's, the scale of what the head reads is the LM's. Graphs
are dropped before the cache grows, so that the old one can be freed, and when weights change. All graphs of a model
share one memory pool. On a CPU the same buckets run without a graph, so that one test covers both.
"""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, arange
from transformers import PreTrainedModel

from inference.models.cache import SlotCache, Window, kept
from inference.models.forward import SHORT, Lean, most_ids
from inference.models.passes import MOST_NODES, Branches, Layers, Pass
from inference.models.recording import Recording, bits, numbers_of, pool_for, repeated
from inference.models.replays import Replays
from inference.models.step import Drafting, Step, by_round

if TYPE_CHECKING:
    from inference.proposers.base import Round

FEWEST = 64  # slots of the smallest bucket
WIDTHS = (1, 2, 3, 5, 9, SHORT)  # ids a row of a bucket: an anchor and 0, 1, 2, 4, 8 drafts, or more
TREE_WIDTHS = (*WIDTHS[:-1], 17, 33, MOST_NODES + 1)  # of one of a tree

Bucket = tuple[Any, ...]
Run = Callable[[Tensor], Any]  # the buffer of a recording -> its results


class Captured(Lean):
    """As `Lean`, short passes over the first slots replayed: logits, states, drafts and distributions are then views
    that the next call overwrites. Where recording fails, this model's passes run as they are, with one warning."""

    failed = False

    def __init__(self, model: PreTrainedModel, cache: SlotCache, int8: bool, rows: int) -> None:
        self.rows = rows
        super().__init__(model, cache, int8)
        cache.before_growth(self._forget)

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        found = self._replayed(ids, window, only, layers)
        if found is None:
            return super().forward(ids, window, only, layers)
        return Pass(found[0], dict(zip(layers, found[1:], strict=True)))

    def hidden(self, ids: Tensor, window: Window, depth: int) -> Tensor:
        found = self._replayed(ids, window, None, (depth,), head=False)
        return super().hidden(ids, window, depth) if found is None else found[0]

    def _replayed(
        self, ids: Tensor, window: Window, only: Tensor | None, layers: Layers, head: bool = True
    ) -> list[Tensor] | None:
        """What a `Step` with these layers and head gives; None where the pass is not replayed."""
        if not self._ready(ids, window):
            return None
        (A, n), branches = ids.shape, window.branches
        widths = WIDTHS if branches is None else TREE_WIDTHS
        width = widths[bisect_left(widths, n)]
        wholes = [ids, window.positions] + ([] if branches is None else [branches.slots, branches.seen])
        columns = [part for whole in wholes for part in (whole, repeated(whole, width))]
        columns += [] if branches is None else [branches.anchor]
        columns += [] if only is None else [only.unsqueeze(1)]
        bucket = self._rows(A), width, self._slots(window), only is not None, layers, head, branches is not None
        found = self._called(bucket, columns, self._pass)
        return None if found is None else [part[:A, :n] for part in found]

    def draft(
        self, tails: Tensor, ends: Tensor, u: Tensor, temperature: Tensor, greedy: bool, window: Window
    ) -> tuple[Tensor, Tensor] | None:
        """By `Drafting`; window.limit: the slots of the longest text with its drafts."""
        if not self._ready(tails, window):
            return None
        (A, k), tail = u.shape, tails.shape[1]
        columns = [tails, ends.unsqueeze(1), bits(u), bits(temperature.unsqueeze(1))]
        bucket = self._rows(A), f"{k} drafts", self._slots(window), greedy
        found = self._called(bucket, columns, lambda *bucket: self._drafting(k, tail, *bucket))
        return None if found is None else (found[0][:A], found[1][:A])

    def draft_for(
        self,
        round: "Round",
        k: int,
        greedy: bool,
        tails: Tensor,
        ends: Tensor,
        window: Window,
        fit: Callable[..., Tensor],
    ) -> tuple[Tensor, Tensor] | None:
        """As `draft`, k drafts by the round's own distributions and draws, whatever its settings; greedy: the likeliest
        tokens.
        fit: logits of the model -> of the round's vocabulary. None also where the round is of another device."""
        inputs = round.inputs() if self._ready(tails, window) else None
        if inputs is None or inputs["start"].device != self.model.device:
            return None
        slots = self._slots(window)
        found: tuple[Tensor, Tensor] | None = self.replays(
            ("drafts", k, greedy, slots, round.key), inputs | {"last": tails, "ends": ends}, round.steady,
            lambda: self._choosing(round, k, greedy, slots, fit),
        )  # fmt: skip
        return found

    def _choosing(self, round: "Round", k: int, greedy: bool, slots: int, fit: Callable[..., Tensor]) -> Any:
        step, stored, scale = Drafting(self.weights, self.shape, k), self._stored(slots), self.scale

        def run(given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            choose = by_round(round.on(given), greedy)
            return step.chosen(lambda z, x: choose(fit(z), x), given["last"], given["ends"], scale, *stored)

        return run

    def _ready(self, ids: Tensor, window: Window) -> bool:
        """Whether a pass is replayed. Finds new weights, and angles for new slots, which drop the graphs."""
        if self.failed or window.low or ids.shape[1] > most_ids(window) or not self.cache.stores[0].is_initialized:
            return False
        self._refresh(window.limit)
        return True

    def _rows(self, rows: int) -> int:
        return min(_power(rows), self.rows)  # prompts may wait in the slots after those

    def _slots(self, window: Window) -> int:
        return min(max(_power(window.limit), FEWEST), self.cache.slots)

    def _called(self, bucket: Bucket, columns: Sequence[Tensor], make: Callable[..., Run]) -> Any:
        """What the bucket's graph gives, recorded when there is none; None once recording has failed."""
        if bucket not in self.graphs:
            try:
                self.graphs[bucket] = self._recorded(make(*bucket), columns, bucket[0])
            except RuntimeError as error:
                self._fail(error)
                return None
        return self.graphs[bucket](columns)

    def _recorded(self, run: Run, columns: Sequence[Tensor], rows: int) -> Recording:
        if not self.graphs:
            self.pool = pool_for(self.model.device)
        return Recording(run, columns, rows, self.pool)

    def _fail(self, error: RuntimeError) -> None:
        self.failed = True
        self._forget()
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        name = type(self.model).__name__
        warnings.warn(f"{name}: CUDA graphs failed, passes run without: {reason}", stacklevel=5)

    def _pass(self, rows: int, width: int, slots: int, one: bool, layers: Layers, head: bool, tree: bool) -> Run:
        step, stored = Step(self.weights, self.shape, layers, head), self._stored(slots)

        def run(columns: Tensor) -> Any:
            ids, positions, *more = (columns[:, at : at + width] for at in range(0, (4 if tree else 2) * width, width))
            branches = Branches(columns[:, 4 * width : 4 * width + 1], *more) if tree else None
            return step(ids, positions, *stored, columns[:, -1] if one else None, branches, scale=self.scale)

        return run

    def keep(self, start: Tensor, path: Tensor) -> None:
        bucket, anchor = (self._rows(len(path)), f"{path.shape[1]} kept"), start.unsqueeze(1)
        if not self.failed and bucket not in self.graphs:  # what is recorded runs more than once, a move must not
            self._called(bucket, [anchor, torch.full_like(path, -1)], self._keeping)
        if self.failed or self._called(bucket, [anchor, path], self._keeping) is None:
            super().keep(start, path)

    def _keeping(self, rows: int, _: str) -> Run:
        keys, values = self.cache.held(rows)

        def run(columns: Tensor) -> Tensor:
            kept([*keys, *values], columns[:, 0], columns[:, 1:])
            return columns

        return run

    def _drafting(self, k: int, tail: int, rows: int, _: str, slots: int, greedy: bool) -> Run:
        step, stored = Drafting(self.weights, self.shape, k, greedy), self._stored(slots)

        def run(columns: Tensor) -> Any:
            tails, ends, u, temperature = columns.split((tail, 1, k, 1), 1)
            return step(tails, ends[:, 0], numbers_of(u), numbers_of(temperature[:, 0]), *stored, scale=self.scale)

        return run

    def _stored(self, slots: int) -> tuple[Any, ...]:
        """Angles of all positions, the slots that are read, and where keys and values are kept."""
        return *self.angles, arange(slots, device=self.model.device), *self.cache.held(self.rows)

    def _turn(self) -> None:
        self._forget()  # graphs hold the angles, and weights are read together with them
        super()._turn()

    def _forget(self) -> None:
        self.graphs: dict[Bucket, Recording] = {}
        self.replays = Replays(self.model.device)


def _power(size: int) -> int:
    """The least power of two that is no less."""
    return 1 << (size - 1).bit_length()
