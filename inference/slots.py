"""Which row has which slot: the queue of a call, admission as rows leave, and moves that close the holes.

Slots [0, rows) of the target and of the proposer hold the active rows, without holes; in the slots after them prompts
wait that were stored several at a time, since one by one they take twice as long.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch

from inference.batched.batch import Batch
from inference.models.lm import LM
from inference.models.prefill import store_prompts
from inference.noise import Uniforms
from inference.policy import Policy, lengths_of
from inference.proposers.base import Host, Proposer
from inference.request import Request
from inference.stats import Counts, Stats


@dataclass
class Run:
    """State of one call. rows: all of its rows; waiting: those to come; staged: those whose prompts are stored in a
    spare slot, and in which; active: those being decoded, by slot."""

    rows: list[Request]
    proposer: Proposer | None
    noise: Uniforms
    waiting: deque[Request] = field(init=False)
    stats: Stats = field(init=False)
    staged: deque[tuple[Request, int]] = field(default_factory=deque)
    active: list[Request] = field(default_factory=list)
    batch: Batch | None = None  # settings of the active rows on the device

    def __post_init__(self) -> None:
        self.waiting, self.stats = deque(self.rows), Stats(rows=[Counts() for _ in self.rows])

    @property
    def reads(self) -> tuple[int, ...]:
        """Layers of the target's states that its proposer wants."""
        return self.proposer.reads if self.proposer else ()

    def lengths(self, policy: Policy) -> list[int]:
        """How many tokens to draft for each active row: what the policy wants, but none that could not be emitted."""
        if not self.proposer:
            return [0] * len(self.active)
        wanted = lengths_of(policy, [row.text for row in self.active])
        return [0 if row.alone else min(length, row.limit - row.emitted - 1)
                for length, row in zip(wanted, self.active, strict=True)]  # fmt: skip


# by id of a proposer: the run whose rows its slots hold, of whichever engine
_PROPOSING: WeakValueDictionary[int, Run] = WeakValueDictionary()


class Slots:
    """The slots of a target and, of the run that has them, of its proposer."""

    def __init__(self, target: LM) -> None:
        self.target = target
        self.current: Run | None = None  # whose rows hold the slots

    def begin(self, rows: list[Request], proposer: Proposer | None, seed: int) -> Run:
        """The slots are this call's from here on."""
        target = self.target
        self.current = Run(rows, proposer, Uniforms(seed, target.device))
        if proposer:
            proposer.open(Host(target.rows, target.spare, target.vocabulary, target.context, target))
            _PROPOSING[id(proposer)] = self.current
        return self.current

    def require(self, run: Run) -> None:
        """Raise RuntimeError once a later call has taken the slots, or the proposer."""
        if self.current is not run:
            raise RuntimeError("Engine: a later call took the slots of this stream before it ended")
        if run.proposer and _PROPOSING.get(id(run.proposer)) is not run:
            raise RuntimeError("Engine: another engine's call took this engine's proposer before this stream "
                               "ended; give each engine a proposer of its own")  # fmt: skip

    @torch.inference_mode()
    def admit(self, run: Run) -> None:
        """Fill the free slots with rows that wait."""
        while len(run.active) < self.target.rows and (run.staged or run.waiting):
            with run.stats.clock("prefill"):
                if run.staged:
                    self._enter(run, *run.staged.popleft())
                elif self.target.rows - len(run.active) < min(self.target.spare, len(run.waiting)):
                    self._stage(run)
                else:
                    self._store(run)
                self.target.wait()

    def _store(self, run: Run) -> None:
        """As many waiting rows as there is room for."""
        low = len(run.active)
        new = _taken(run.waiting, self.target.rows - low)
        prompts = [row.text for row in new]
        states = store_prompts(self.target, low, prompts, states=run.reads)
        if run.proposer:
            run.proposer.admit(low, prompts, states)
        run.active += new

    def _stage(self, run: Run) -> None:
        """Prompts of waiting rows, in spare slots."""
        low, new = self.target.rows, _taken(run.waiting, self.target.spare)
        prompts = [row.text for row in new]
        states = store_prompts(self.target, low, prompts, states=run.reads)
        if run.proposer:
            run.proposer.stage(low, prompts, states)
        run.staged.extend((row, low + place) for place, row in enumerate(new))

    def _enter(self, run: Run, row: Request, slot: int) -> None:
        self.target.move(slot, len(run.active), len(row.text) - 1)
        if run.proposer:
            run.proposer.enter(slot, len(run.active), row.text)
        run.active.append(row)

    def without_probs(self, slot: int, row: Request, doubtful: bool, reason: Callable[[], str]) -> None:
        """A row that has come to a place without a distribution ends there. With drafts, of this round or of earlier
        ones, it is
        not certain yet (doubtful): what one of them left in the slot may be to blame. The row then goes on without any,
        from a slot that is stored again."""
        if doubtful and not row.alone:
            row.alone = True
            self.target.clear(slot)
            store_prompts(self.target, slot, [row.text])
        else:
            row.fail(reason())

    def leave(self, run: Run) -> None:
        """Ended rows give up their slots; the last active row takes each freed one."""
        ended = deque(slot for slot, row in enumerate(run.active) if row.finish)
        for slot in ended:
            if run.active[slot].stained:
                self.target.clear(slot)
        while ended:
            # the lowest ones are filled, so that no row moves twice
            slot = ended.pop() if run.active[-1].finish else ended.popleft()
            mover = run.active.pop()
            if slot < len(run.active):
                run.active[slot] = mover
                self.target.move(len(run.active), slot, len(mover.text) - 1)
                if mover.stained:
                    self.target.clear(len(run.active))
            if run.proposer:
                run.proposer.move(len(run.active), slot)


def _taken(waiting: deque[Request], most: int) -> list[Request]:
    """The first `most` of a queue, or all."""
    return [waiting.popleft() for _ in range(min(most, len(waiting)))]
