"""One round of the active rows: their distributions, their noise and the verdict on their drafts.

A rows, K drafted at most, V vocabulary. The noise of a row is a function of (seed, row id, tokens it had emitted
when the round began, depth, stream), see `noise`; only the coupled rule keys it by position. What the host decides
goes to the device in one copy (`send`), and what it must know comes back in one (`settle`).
"""

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from functools import cached_property, partial

import torch
from torch import Tensor

from inference.batched.batch import Batch, Numbers, send
from inference.batched.levels_of_round import LevelsOfRound
from inference.batched.user_processors import processed
from inference.models.passes import Tree
from inference.models.replays import Replays
from inference.noise import ACCEPT, DRAFT, RESIDUAL, Uniforms, gumbel_after
from inference.proposers.base import Proposal
from inference.report.recorder import trace
from inference.request import Request
from inference.sampling import draw, wide
from inference.settled import Settled, column_of, settled, sound
from inference.trees_of_round import TreesOfRound
from inference.verify import Verification
from inference.verify.rules import Rule


class DecodingRound(TreesOfRound, LevelsOfRound):
    """What the engine and a proposer share during one round; implements `base.Round`.

    batch: of an earlier round of the same rows, so that their settings are not copied again. replays: where
    distributions, verdict and last draw are recorded; None: they run as they are, as those of rows with own processors
    do. traced: its table tells p, q and u of each draft too.
    """

    def __init__(
        self,
        rows: Sequence[Request],
        k: list[int],
        rule: Rule,
        noise: Uniforms,
        vocabulary: int,
        device: torch.device,
        batch: Batch | None = None,
        replays: Replays | None = None,
        traced: bool = False,
    ) -> None:
        self.rows, self.k, self.rule, self.noise = rows, k, rule, noise
        self.vocabulary, self.device, self.replays, self.traced = vocabulary, device, replays, traced
        self.batch = batch if batch and batch.holds(rows) else Batch(rows, vocabulary, device)
        self.texts = [row.text for row in rows]
        self.ids, self.starts = [row.id for row in rows], [row.emitted for row in rows]
        self.messages: dict[int, str] = {}  # by row: what its own processors raised first
        self.done: set[int] = set()  # rows with own processors that left their draft no token
        self.sent: dict[str, Tensor] = {}
        self.lengths: list[int] = []  # of the drafts, as they were sent

    def send(self, k: list[int] | None = None, **numbers: Numbers) -> dict[str, Tensor]:
        """Copy what this round needs to the device, once: of a later call only `numbers` go, in a copy of their own.

        k: how many are drafted for each row, where that differs from what was asked for.
        """
        if self.sent:
            self.sent |= send(self.device, **numbers) if numbers else {}
            return self.sent
        self.lengths = list(self.k if k is None else k)
        depths = max(*self.k, *self.lengths) + 1  # a tree has more nodes than levels
        places, fresh = self.noise.places(self.ids, self.starts, depths)
        read, history = self._read(), self.batch.history
        if history:
            numbers |= {"newest": history.newest(), "tails": history.tails()}
        self.sent = send(self.device, length=self.lengths, start=self.starts, place=places, read=read,
                         anchor=[text[-1:] for text in self.texts], **numbers)  # fmt: skip
        if fresh:
            self.noise.make(self.batch.ids, self.sent["start"], depths)
        if history:
            history.count(self.sent["newest"])
        return self.sent

    def _read(self) -> list[int]:
        """Where the target reads each row's anchor."""
        return [len(text) - 1 for text in self.texts]

    def length(self, k: list[int]) -> Tensor:
        """Draft lengths (A,) on the device."""
        sent = self.send(k)
        return sent["length"] if k == self.lengths else torch.tensor(k, device=self.device)

    def probs(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        """Logits (A, V) after the texts and `drafted` ids (A,) -> distribution (A, V)."""
        return self.batch.regimes.probs(self.scores(logits, drafted))

    def scores(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        """The logits, as settings that read history leave them."""
        logits = logits.to(self.device)
        if self.batch.history:
            x = torch.stack(drafted, 1) if drafted else self._nothing()
            self.send()
            needed = [-1 if a in self.done else k - 1 for a, k in enumerate(self.lengths)]  # behind them none is drawn
            logits = self._processed(logits.unsqueeze(1), x, needed, len(drafted)).squeeze(1)
            self.done |= {a for a in self.batch.own if not bool(logits[a].amax().isfinite())}
        return logits

    def target_probs(self, logits: Tensor, x: Tensor, k: list[int], tree: Tree | None = None) -> Tensor:
        """Target logits (A, K+1, V) of the texts and drafts x (A, K) -> p (A, K+1, V); past k_b unread."""
        if self.batch.history and tree is not None:
            logits = self._branched(logits, x, k, tree)
        elif self.batch.history:
            logits = self._processed(logits, x, k, 0)
        return self.batch.regimes.probs(logits)

    def _processed(self, logits: Tensor, x: Tensor, k: list[int], first: int) -> Tensor:
        """Logits (A, n, V) of the places after first, first + 1, ... of the drafts x (A, K), as settings leave them."""
        history, sent = self.batch.history, self.send()
        assert history is not None
        found = history(logits, x, first, sent["tails"], sent["start"])
        return processed(found, self.rows, self.batch.own, x, k, first, self.messages) if self.batch.own else found

    def _nothing(self) -> Tensor:
        return torch.empty(len(self.ids), 0, dtype=torch.int64, device=self.device)

    @property
    def temperatures(self) -> list[float] | None:
        """Of each row, where distributions and draws need no more than these."""
        if self.rule.shared or self.batch.history or self.batch.regimes.cut:
            return None
        return self.batch.regimes.temperatures

    @property
    def temperature(self) -> Tensor:
        """Of each row (A,), another tensor when rows come or go."""
        return self.batch.regimes.temperature

    def simple(self, depths: int) -> tuple[Tensor, Tensor]:
        """Uniforms (A, depths) of the drafts and temperatures (A,)."""
        return self._streams(depths)[0], self.temperature

    def draw(self, probs: Tensor, depth: int) -> Tensor:
        """Ids (A,) from distribution (A, V): the draft's own stream, or the noise shared with the target."""
        if self.rule.shared:
            return (probs.log() + self._gumbel[:, depth]).argmax(-1)
        return draw(probs, self._uniforms[DRAFT][:, depth])

    @cached_property
    def _gumbel(self) -> Tensor:
        start, depth = self.send()["start"], torch.arange(self._numbers.shape[-1], device=self.device)
        return gumbel_after(self._states, start.unsqueeze(1) + depth, self.vocabulary)

    @cached_property
    def _states(self) -> Tensor:
        return self.batch.gumbel_states(self.noise.seed)

    @cached_property
    def _numbers(self) -> Tensor:
        """Uniforms (S, A, K+1), on a GPU as many as there are, so that a recording serves rounds of any K."""
        made = 0 if self.device.type == "cpu" else self.noise.table.shape[-1]
        return self._streams(max(max(*self.k, *self.lengths, 0) + 1, made))

    @property
    def _uniforms(self) -> dict[int, Tensor]:
        """Uniforms (A, K+1 or more) of each stream."""
        return dict(zip((DRAFT, ACCEPT, RESIDUAL), self._numbers, strict=True))

    def _streams(self, depths: int) -> Tensor:
        """Uniforms (S, A, depths)."""
        sent = self.send()
        if depths > self.noise.table.shape[-1]:  # deeper than any round so far
            places, _ = self.noise.places(self.ids, self.starts, depths)
            self.noise.make(self.batch.ids, sent["start"], depths)
            sent["place"] = send(self.device, place=places)["place"]
        return self.noise.at(sent["place"], depths)

    def verdict(
        self, p: Tensor, q: Tensor | None, x: Tensor, k: list[int] | Tensor, tree: Tree | None = None
    ) -> Verification:
        """The rule on p (A, K+1, V), q (A, K, V) or None for certain drafts, x (A, K), k (A,)."""
        length = k if isinstance(k, Tensor) else self.length(k)
        noise = self._gumbel if self.rule.shared else self._uniforms[ACCEPT]
        if tree is not None:
            return self.rule.verify(p, q, x, noise, length, tree=tree)
        return self.rule.verify(p, q, x, noise, length)

    def last(self, probs: Tensor) -> Tensor:
        """The token (A,) emitted after the accepted ones, drawn from the verdict's distribution (A, V)."""
        return draw(probs, self._uniforms[RESIDUAL][:, 0])

    def settle(self, logits: Tensor, proposal: Proposal) -> Settled:
        """The verdict, for the host in one tensor, see `settled.Settled`; traced, `recorder.trace` stands behind it."""
        length, inputs = self.length(proposal.k), self.inputs() if self.replays else None
        shape = None if proposal.tree is None else proposal.tree.shape
        if self.replays and inputs is not None and (proposal.tree is None or shape):
            inputs |= {"logits": logits, "x": proposal.x, "length": length}
            inputs |= {} if proposal.q is None else {"q": proposal.q}
            run = partial(self._settled_on, tree=proposal.tree)
            found: Settled | None = self.replays((self.key, shape), inputs, self.steady, lambda: run)
            if found is not None:
                return found
        return self._settled(logits, proposal, length)

    def _settled(self, logits: Tensor, proposal: Proposal, asked: Tensor) -> Settled:
        p = self.target_probs(logits, proposal.x, proposal.k, proposal.tree)
        length = sound(p, proposal.q, asked, proposal.tree)
        verdict = self.verdict(p, proposal.q, proposal.x, length, proposal.tree)
        found = settled(p, proposal, verdict, self.last(verdict.probs), length, asked)
        if not self.traced:
            return found
        u = None if self.rule.shared else self._uniforms[ACCEPT]
        return found._replace(table=torch.cat((found.table, trace(p, proposal, u, length, found.path)), 1))

    def _settled_on(self, given: Mapping[str, Tensor], tree: Tree | None = None) -> Settled:
        proposal = Proposal(given["x"], given.get("q"), [], tree)
        return self.on(given)._settled(given["logits"], proposal, given["length"])

    @property
    def key(self) -> Hashable:
        """All that distributions, draws and verdict depend on but tensors."""
        return type(self), self.rule, self.batch.key, self.traced

    @property
    def steady(self) -> frozenset[str]:
        """Of `inputs`, what changes only when rows come or go."""
        return frozenset({*self.batch.tensors, "states", "branches"} - {"history.generated"})

    def inputs(self, trees: bool = False) -> dict[str, Tensor] | None:
        """The tensors by name that distributions, draws and verdict read of this round, and with `trees` the children
        of nodes; None where own processors read more."""
        if self.batch.own:
            return None
        sent = self.send()
        found = self.batch.tensors | {"start": sent["start"], "uniforms": self._numbers}
        found |= {"tails": sent["tails"]} if self.batch.history else {}
        found |= {"branches": self._branches} if trees else {}
        return found | ({"states": self._states} if self.rule.shared else {})

    def on(self, given: Mapping[str, Tensor]) -> "DecodingRound":
        """This round, read from other tensors of the names and shapes of `inputs`."""
        round = copy(self)
        round.replays, round.batch = None, self.batch.on(given)
        round.sent = {name: given[name] for name in ("start", "tails") if name in given}
        made = {f"_{name}": given[name] for name in ("states", "branches") if name in given}
        made |= {"_numbers": given["uniforms"]}
        for name in ("_gumbel", "_children"):
            vars(round).pop(name, None)
        vars(round).update(made)
        return round

    def reason(self, row: int, logits: Tensor, path: Tensor | None, n: int) -> str:
        """Why a row has no distribution behind its n accepted drafts, given the logits (A, N+1, V) of the target's pass
        and the `path` of `Settled`; reads from the device."""
        if row in self.messages:
            return self.messages[row]
        place = f"after {len(self.texts[row])} tokens"
        if not bool(wide(logits[row, column_of(path, row, n)]).amax().isfinite()):
            return f"{place}: the target's logits are NaN, infinite or all -inf"
        return (f"{place}: no token is left; Sampling.banned, logit_bias, min_new_tokens or processors forbid every "
                f"one that the model allows")  # fmt: skip
