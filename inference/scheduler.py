"""Slots and admission: the queue of a call, rows that enter and leave, and moves that fill freed slots.

A slot stores one row's keys and values. Slots [0, rows) of the target and of the proposer hold the active rows, without
a gap. The spare slots after them hold prompts that wait: several are stored in one pass, in about half the time of one
pass each.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from inference.models.lm import LM, store_prompts, worth_a_pass
from inference.models.passes import wait_for
from inference.output import Counts, Stats
from inference.policy import Decisions, Policy
from inference.proposers.base import Host, Proposer
from inference.request import Request
from inference.round import Batch
from inference.sampling.noise import Uniforms
from inference.sampling.parameters import is_whole
from inference.source import like


@dataclass
class Call:
    """The state of one call of `generate` or `stream`. rows: all requests. proposer: makes the drafts, None for plain
    decoding. noise: the call's random numbers. waiting: requests whose prompts are not stored yet. staged: triples of a
    request whose prompt is stored in a spare slot, that slot, and the ids of the prompt that the draft model has read.
    active: requests being decoded, by slot. batch: the settings of the active rows. decisions: those of an adaptive
    policy, else None."""

    rows: list[Request]
    proposer: Proposer | None
    noise: Uniforms
    waiting: deque[Request] = field(init=False)
    stats: Stats = field(init=False)
    staged: deque[tuple[Request, int, list[int]]] = field(default_factory=deque)
    active: list[Request] = field(default_factory=list)
    batch: Batch | None = None  # settings of the active rows on the device
    decisions: Decisions | None = None  # of an adaptive policy

    def __post_init__(self) -> None:
        self.waiting, self.stats = deque(self.rows), Stats(rows=[Counts() for _ in self.rows])

    def read_by_draft(self, prompts: Sequence[list[int]], rows: int) -> Sequence[list[int]]:
        """Return, for each new prompt, the ids that the draft model reads now: all, or only the first. Only the first
        if the policy would draft nothing with this many rows and the draft model can catch up later. rows: the largest
        number of active rows."""
        coming = min(rows, len(self.active) + len(self.staged) + len(self.waiting) + len(prompts))
        if (
            self.proposer
            and self.proposer.catches_up
            and self.decisions
            and self.decisions.idle(coming, self.proposer.asks)
        ):
            return [like(prompt, prompt[:1]) for prompt in prompts]
        return prompts

    def lengths(self, policy: Policy) -> list[int]:
        """Begin a round: return the draft length of each active row. It is the policy's choice, shortened to the row's
        limit; 0 for a row that is decoded without drafts. An adaptive policy chooses through the call's `decisions`.
        Raises ValueError unless the policy gives one whole number >= 0 per row."""
        if not self.proposer:
            return [0] * len(self.active)
        if self.decisions:
            most = self.decisions.open([row.index for row in self.active], self.proposer.asks)
            lengths = [most] * len(self.active)
        else:
            given: Any = policy.lengths([row.text for row in self.active])
            lengths = list(given) if isinstance(given, Sequence | np.ndarray | torch.Tensor) else given
        whole = isinstance(lengths, list) and all(is_whole(length, 0) for length in lengths)
        if not whole or len(lengths) != len(self.active):
            raise ValueError(
                f"policy.lengths must return a list of {len(self.active)} draft lengths of at least 0, not {lengths!r}"
            )
        return [
            0 if row.alone else min(int(length), row.limit - row.emitted - 1)
            for length, row in zip(lengths, self.active, strict=True)
        ]


# by id of a proposer: the call, of any engine, whose rows are in the proposer's slots
_PROPOSING: WeakValueDictionary[int, Call] = WeakValueDictionary()


class Slots:
    """The slots of a target, and those of the current call's proposer. target: its LM, whose cache has the slots."""

    def __init__(self, target: LM) -> None:
        self.target = target
        self.current: Call | None = None  # whose rows are in the slots
        self.busy = False  # in a round

    def begin(self, rows: list[Request], proposer: Proposer | None, seed: int) -> Call:
        """Start a new call with these rows, and return it. From now on it uses the slots of the target and of the
        proposer. seed: the seed of its random numbers."""
        target = self.target
        self.current = Call(rows, proposer, Uniforms(seed, target.device))
        if proposer:
            proposer.open(Host(target.rows, target.spare, target.vocabulary, target.context, target))
            _PROPOSING[id(proposer)] = self.current
        return self.current

    def require(self, call: Call) -> None:
        """Raise RuntimeError if a later call has taken this call's slots or proposer."""
        if self.current is not call:
            raise RuntimeError(
                "Engine: a later call took the slots of this stream, so the stream cannot continue; end it before the "
                "next call, or use another engine"
            )
        if call.proposer and _PROPOSING.get(id(call.proposer)) is not call:
            raise RuntimeError(
                "Engine: another engine's call took this engine's proposer before this stream "
                "ended; give each engine its own proposer"
            )

    @torch.inference_mode()
    def admit(self, call: Call) -> None:
        """Fill the free slots with prompts from the spare slots, or, if none is stored there, with waiting prompts. If
        more waiting prompts fit into the spare slots than into the free slots, they are first stored in the spare
        slots, those of like length in one pass."""
        rows, spare, proposer = self.target.rows, self.target.spare, call.proposer
        while len(call.active) < rows and (call.staged or call.waiting):
            with call.stats.clock("prefill"):
                low = len(call.active)
                if call.staged:
                    row, slot, text = call.staged.popleft()
                    self.target.move(slot, low, len(row.text) - 1)
                    if proposer:
                        proposer.enter(slot, low, text)
                    call.active.append(row)
                else:
                    stages = rows - low < min(spare, len(call.waiting))
                    low, most = (rows, spare) if stages else (low, rows - low)
                    new = [call.waiting.popleft() for _ in range(min(most, len(call.waiting)))]
                    read = call.read_by_draft([row.text for row in new], rows)
                    for some in of_like_length([*zip(new, read, strict=True)], worth_a_pass(self.target.device)):
                        prompts, read = [row.text for row, _ in some], [text for _, text in some]
                        states = store_prompts(self.target, low, prompts, states=proposer.reads if proposer else ())
                        if proposer and stages:
                            proposer.stage(low, read, states)
                        elif proposer:
                            proposer.admit(low, read, states)
                        if stages:
                            call.staged += [(row, low + i, text) for i, (row, text) in enumerate(some)]
                        else:
                            call.active += [row for row, _ in some]
                        low += len(some)
                wait_for(self.target.device)

    def retry_or_fail(self, slot: int, row: Request, doubtful: bool, reason: Callable[[], str]) -> None:
        """End a row whose next token has no distribution, or let it try again without drafts if drafts may be the
        cause. slot: the row's slot. doubtful: whether there is a proposer, so that the slot may hold keys and values of
        drafts, of this row or of an earlier one. Then, once per row, its text is stored again without them. reason:
        returns the message of the error."""
        if doubtful and not row.alone:
            row.alone = True
            self.target.clear(slot)
            store_prompts(self.target, slot, [row.text])
        else:
            row.fail(reason())

    def leave(self, call: Call) -> None:
        """Free the slots of ended rows, and move the last active rows into them."""
        ended = deque(slot for slot, row in enumerate(call.active) if row.finish)
        for slot in ended:
            if call.active[slot].stained:
                self.target.clear(slot)
        while ended:
            # the lowest slots are filled first, so that no row moves twice
            slot = ended.pop() if call.active[-1].finish else ended.popleft()
            mover = call.active.pop()
            if slot < len(call.active):
                call.active[slot] = mover
                self.target.move(len(call.active), slot, len(mover.text) - 1)
                if mover.stained:
                    self.target.clear(len(call.active))
            if call.proposer:
                call.proposer.move(len(call.active), slot)


def of_like_length(new: Sequence[tuple[Request, list[int]]], worth: int) -> Iterator[list[tuple[Request, list[int]]]]:
    """Yield new requests, each with the ids that the draft model reads, in groups to store in one pass each. No group
    has more than `worth` ids of padding; several groups are in order of their prompts' lengths."""
    lengths = [len(row.text) for row, _ in new]
    if sum(max(lengths) - length for length in lengths) > worth:
        new = sorted(new, key=lambda one: len(one[0].text))
    some: list[tuple[Request, list[int]]] = []
    for one in new:
        if sum(len(one[0].text) - len(row.text) for row, _ in some) > worth:
            yield some
            some = []
        some.append(one)
    yield some
