"""A draft on two levels. The rounded target (the target in fewer bits) drafts for the target. A small draft model
guesses the rounded target's next tokens, and the rounded target verifies these guesses exactly.

The target's verification is exact too, with its own rule. Drafted tokens have the rounded target's distribution,
whatever was guessed, so that distribution is the proposal's q. The small draft affects only speed (three models in a
row, as in TriForce: Sun et al. 2024, 2404.11912).

A rows, K tokens drafted for the target, n guesses of the small draft in an inner round, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.drafts.causal_lm import CausalLM
from inference.drafts.weight_files import CONFIG, read_json
from inference.models.passes import ChainDraws
from inference.proposers.base import (
    CompositeProposer,
    LoadArguments,
    Numbers,
    Outcome,
    Proposal,
    Proposer,
    Round,
    RoundView,
)
from inference.proposers.independent import Independent
from inference.proposers.quantised import Quantised
from inference.sampling import at_ids, certain, draw, up_to
from inference.verify.rules import RULES, Rule
from inference.verify.tree import usable_lengths

SETTINGS = "two_levels"  # of config.json: bits, inner
DRAWS, COINS, LAST = range(3)  # the streams of `Round.inner`


class TwoLevels(CompositeProposer):
    """A proposer that drafts with `model`, the rounded target, in inner rounds. In each inner round, `small` guesses
    `inner` tokens, and `rule` (token, block or match) verifies them. The accepted guesses and one more token become
    drafts. A round of the target runs as many inner rounds as its number of drafts needs.

    For rows whose settings read the text (penalties, bans, processors) only the model drafts, one token at a time.
    Their settings need every earlier token, and rows advance at different speeds. Raises ValueError if one of the
    drafts drafts trees, if the small one is not an `Independent`, for another rule, and if inner < 1.
    """

    network_class: Any = CausalLM

    def __init__(self, model: Quantised, small: Independent, inner: int = 3, rule: str = "block") -> None:
        if type(small) is not Independent or small.branching or model.branching:
            raise ValueError(
                "TwoLevels: make both drafts without shape=, and give an Independent as the small one, not a "
                f"{type(small).__name__}"
            )
        if inner < 1:
            raise ValueError(f"TwoLevels: inner must be at least 1, not {inner}")
        self.model, self.small, self.guesses, self.rule = model, small, inner, inner_rule(rule)
        self.greedy, self.parts = model.greedy, (model, small)

    def __copy__(self) -> "TwoLevels":
        """Return a copy with copies of the parts, since rounds change the parts' counts of stored tokens."""
        return TwoLevels(copy(self.model), copy(self.small), self.guesses, self.rule.name)

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "TwoLevels":
        """Return a proposer for a draft folder. In its config.json the key `two_levels` has `bits`, the format of the
        rounded target's weights, and `inner`, the number of guesses per inner round. Raises FileNotFoundError if the
        folder does not exist, and ValueError if its files, weights or settings are wrong or do not fit the target."""
        settings = read_json(folder / CONFIG).get(SETTINGS) or {}
        model = Quantised.of_settings(arguments, settings.get("bits"), str(folder / CONFIG))
        return cls(model, Independent.load(folder, arguments), int(settings.get("inner", 3)))

    @property
    def weights(self) -> str | None:
        return f"{self.model.weights} and {self.small.weights}"

    @property
    def context(self) -> int | None:
        return self.model.context

    @property
    def for_forced_rounds(self) -> Proposer:
        """Return the rounded target: each draft has its distribution, for any guesses. It is a copy, since another
        engine's call may be using this one's."""
        return copy(self.model)

    def propose(self, round: Round) -> Proposal:
        """Run inner rounds until each row has its drafts, and return them. A text that is longer than the model's
        context gets no drafts."""
        k = [max(0, min(k, self.model.lm.context - len(text))) for k, text in zip(round.k, round.texts, strict=True)]
        if not max(k):
            return Proposal.empty(k, self.model.lm.device)
        outer = OuterDrafts(round, k, self.guesses + 1)
        while outer.left:
            self._inner_round(outer)
        return outer.proposal()

    def _inner_round(self, outer: "OuterDrafts") -> None:
        """Run one inner round: the small draft guesses, and the rounded target verifies the guesses in one pass. Add
        the accepted guesses and one more token to `outer`, with their distributions."""
        inner = outer.inner_round(self.guesses)
        drafts = self.small.propose(inner)
        p = outer.distributions(inner, self._read(inner, drafts))
        p = certain(p) if self.greedy else p
        accepted, token = inner.verified(self.rule, p, drafts)
        valid = outer.append(inner, p, drafts.x, accepted, token)
        self.small.commit(Outcome(valid, accepted, {}))

    def _read(self, inner: "InnerRound", drafts: Proposal) -> Tensor:
        """Return the rounded target's logits (A, n+1, V): column 0 after each text, column i after guess i (1-based).
        inner: the inner round. drafts: the guesses, x (A, n)."""
        lm, sent, length = self.model.lm, inner.send(), inner.length(drafts.k)
        last, at, x, length = (part.to(lm.device) for part in (sent["newest_id"], sent["newest_at"], drafts.x, length))
        index = torch.arange(x.shape[1], device=lm.device)
        x = torch.where(index < length.unsqueeze(1), x, last)  # after its guesses a row repeats its last id
        start = [len(text) - 1 for text in inner.texts]
        return lm.forward(torch.cat([last, x], 1), start, at=at).logits


class OuterDrafts:
    """The tokens drafted so far in one round of the target. k: number of drafts wanted per row. width: number of
    uniforms per row in an inner round, one more than its guesses.

    texts: for each row, the ids of its text and its drafts so far. done: for each row, its number of drafts so far. x
    (A, K + width), q (A, K + width, V): drafts and their distributions; entries past `done` have no meaning.
    """

    def __init__(self, round: Round, k: list[int], width: int) -> None:
        self.round, self.k, self.width = round, k, width
        self.texts, self.done = [list(text) for text in round.texts], [0] * len(k)
        self.history = round.reads_history
        self.rounds = 0
        self.x: Tensor
        self.q: Tensor

    @cached_property
    def uniforms(self) -> Tensor | None:
        """Return the uniforms (3, A, S) of all inner rounds, with S numbers per stream and row; None if the rule shares
        noise. Rows that have all their drafts read the last numbers."""
        return self.round.inner((max(self.k) + 1) * self.width)

    @property
    def left(self) -> bool:
        """Return whether some row still lacks drafts."""
        return any(done < k for done, k in zip(self.done, self.k, strict=True))

    def inner_round(self, guesses: int) -> "InnerRound":
        """Return the next inner round. guesses: the largest number of guesses per row."""
        room = [k - done for k, done in zip(self.k, self.done, strict=True)]
        # one token comes after the guesses
        wanted = [
            0 if reads or not left else min(guesses, left - 1) for left, reads in zip(room, self.history, strict=True)
        ]
        numbers: dict[str, Numbers] = {
            "newest_id": [text[-1:] for text in self.texts],
            "newest_at": [len(text) - 1 for text in self.texts],
            "historic": [int(reads) for reads in self.history],
        }
        return InnerRound(self.round, self.k, self.texts, self.done, wanted, self, numbers)

    def distributions(self, inner: "InnerRound", logits: Tensor) -> Tensor:
        """Return the rounded target's distributions p (A, n+1, V). logits (A, n+1, V): column i comes after each text
        and i guesses. Rows whose settings read the text have no guesses, so each of them gets one token per inner
        round. inner: the inner round."""
        p = self.round.probs(logits, None)
        if not any(self.history):
            return p
        own = self.round.probs(logits[:, 0], [self.x[:, j] for j in range(self.rounds)]).unsqueeze(1)
        reads = inner.send()["historic"].view(-1, 1, 1) > 0
        return torch.cat([torch.where(reads, own, p[:, :1].to(own.dtype)), p[:, 1:].to(own.dtype)], 1)

    def append(self, inner: "InnerRound", p: Tensor, x: Tensor, accepted: Tensor, token: Tensor) -> list[int]:
        """Add the accepted guesses and the token after them to the drafts, with their distributions. Returns, for each
        row, how many tokens of its text the small draft has stored correctly.

        p (A, n+1, V): the rounded target's distributions; column i comes after the text and i guesses. x (A, n): the
        guesses. accepted (A,): number of accepted guesses. token (A,): the token after them. inner: the inner round
        that ended.
        """
        n, x = x.shape[1], x.to(p.device)
        if not self.rounds:
            A, _, V = p.shape
            self.x = x.new_zeros(A, max(self.k) + self.width)
            self.q = p.new_zeros(A, max(self.k) + self.width, V)
        last = accepted.unsqueeze(1)
        tokens = torch.cat([x, token.unsqueeze(1)], 1).scatter(1, last, token.unsqueeze(1))
        columns = inner.done.unsqueeze(1) + torch.arange(n + 1, device=p.device)
        self.x.scatter_(1, columns, tokens)
        self.q.scatter_(1, columns.unsqueeze(2).expand(-1, -1, p.shape[2]), p)
        return self._extend_texts(torch.cat([last, tokens], 1).tolist())  # the inner round's one read

    def _extend_texts(self, table: list[list[int]]) -> list[int]:
        """Update texts and counts of the rows that still lack drafts. Returns, for each row, how many tokens of its
        text the small draft has stored correctly. table: for each row, its number of accepted guesses, then its n + 1
        tokens."""
        valid = []
        self.rounds += 1
        for row, (n, *tokens) in enumerate(table):
            more = self.done[row] < self.k[row]
            valid.append(len(self.texts[row]) + n * more)
            if more:
                self.texts[row] += tokens[: n + 1]
                self.done[row] += n + 1
        return valid

    def proposal(self) -> Proposal:
        K = max(self.k)
        return Proposal(self.x[:, :K], self.q[:, :K], self.k)


def inner_rule(name: str) -> Rule:
    """Return the verification rule of this name, for inner rounds. Raises ValueError unless the rule is exact, verifies
    chains and uses uniforms."""
    fit = [rule.name for rule in RULES.values() if rule.exact and not rule.shared and not rule.trees]
    if name not in fit:
        raise ValueError(f"TwoLevels: rule must be one of {', '.join(fit)}, not {name!r}")
    return RULES[name]


class InnerRound(RoundView):
    """One exact inner round: the rounded target verifies the small draft's guesses. Every token that an inner round
    adds has the rounded target's distribution after the text before it. That distribution, not the small draft's, is
    the q of the outer round.

    round: the outer round. asked: number of tokens that the outer round drafts per row. texts: the ids of each row's
    text and its drafts so far. done: number of these drafts per row. k: number of guesses per row. outer: has the
    uniforms of all inner rounds; each inner round uses `outer.width` numbers per stream and row, and inner rounds that
    begin at different tokens use different numbers. numbers: further numbers for the first copy to the device, by name.
    """

    def __init__(
        self,
        round: Round,
        asked: list[int],
        texts: Sequence[list[int]],
        done: list[int],
        k: list[int],
        outer: OuterDrafts,
        numbers: Mapping[str, Numbers],
    ) -> None:
        super().__init__(round, k)
        self.asked, self.texts, self.outer = asked, texts, outer
        self.numbers = {"done": done, "guessed": k, **numbers}
        self.sent: dict[str, Tensor] = {}

    def send(self, k: list[int] | None = None, **numbers: Numbers) -> dict[str, Tensor]:
        """Copy numbers to the device and return the tensors by name: (A,) or (A, n) for `numbers`, and the engine's
        own. The small draft's `k` is not used: the outer round's draft lengths are sent."""
        numbers |= {} if self.sent else self.numbers
        self.sent = self.round.send(self.asked, **numbers)
        return self.sent

    @property
    def done(self) -> Tensor:
        """Return the number (A,) of tokens that each row has drafted so far."""
        return self.send()["done"]

    @cached_property
    def streams(self) -> Tensor | None:
        """Return the uniforms (3, A, width) of this inner round; None if the rule shares noise."""
        width, uniforms = self.outer.width, self.outer.uniforms
        columns = self.done.unsqueeze(1) * width + torch.arange(width, device=self.done.device)
        return None if uniforms is None else uniforms.gather(2, columns.expand(3, -1, -1))

    def probs(self, logits: Tensor, drafted: list[Tensor] | None) -> Tensor:
        """Return the distributions (A, ..., V) of logits (A, ..., V), without the settings that read the text. Rows
        with such settings have no guesses. drafted is not used."""
        return self.round.probs(logits, None)

    def draw(self, probs: Tensor, depth: int | Tensor) -> Tensor:
        """Return ids (A,) drawn from probs (A, V) at a depth (0-based) of this inner round, with the random numbers of
        this inner round. If the rule shares noise, use the noise of the target's tokens. Rows that have all their
        drafts continue to draw, so their depth is limited to the last one."""
        if self.streams is None:
            return self.round.draw(probs, (self.done + depth).clamp(max=max(self.asked)))
        return draw(probs, self.streams[DRAWS, :, depth])

    def chain_draws(self, depths: int, greedy: bool) -> ChainDraws | None:
        """Return what draws the guesses, with the uniforms of this inner round."""
        draws = self.round.chain_draws(depths, greedy)
        return None if draws is None or self.streams is None else draws._replace(u=self.streams[DRAWS, :, :depths])

    def pure(self, depths: int = 0, trees: bool = False) -> None:
        """Return None: a recording cannot read the progress of each row."""

    def length(self, k: list[int]) -> Tensor:
        """Return the numbers of guesses `k` as a tensor (A,) on the device."""
        return self.send()["guessed"] if k == self.k else torch.tensor(k, device=self.done.device)

    def verified(self, rule: Rule, p: Tensor, drafts: Proposal) -> tuple[Tensor, Tensor]:
        """Return the number (A,) of accepted guesses and the token (A,) after them. drafts: the guesses x (A, n), drawn
        from q (A, n, V). p (A, n+1, V): the rounded target's distributions after the text and after each guess. rule:
        for chains, exact and without shared noise."""
        x, q = drafts.x.to(p.device), None if drafts.q is None else drafts.q.to(p.device)
        length = usable_lengths(p, q, self.length(drafts.k))
        if self.streams is None:
            return self._coupled(p, x, length)
        verification = rule.verify(p, q, x, self.streams[COINS], length)
        return verification.accepted, draw(verification.probs, self.streams[LAST, :, 0])

    def _coupled(self, p: Tensor, x: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number (A,) of accepted guesses and the token (A,) after them, for a rule that shares noise: the
        rounded target draws with the noise of the target's tokens, and a guess is accepted if it equals the drawn
        token. p (A, n+1, V): the rounded target's distributions. x (A, n): the guesses. length (A,): number of usable
        guesses."""
        y = torch.stack([self.draw(p[:, i], i) for i in range(p.shape[1])], 1)
        same = (y[:, :-1] == x) & up_to(length, x.shape[1])
        accepted = same.to(torch.int64).cumprod(1).sum(1)
        return accepted, at_ids(y, accepted)
