"""Two levels: a small draft guesses for the target in fewer bits, which verifies it exactly and drafts for the target.

Both steps are exact, each by its own rule: the drafted tokens have the distribution of the rounded target, so that
distribution is the q
of the proposal, and the small draft decides about speed alone (three models in a row, as in TriForce: Sun et al. 2024,
2404.11912).
A rows, K tokens drafted for the target, n guesses of the small draft in an inner round, V vocabulary.
"""

from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from inference.batched.batch import Numbers
from inference.drafts.weight_files import CONFIG, read_json
from inference.models.lm import LM
from inference.models.prefill import padded
from inference.proposers.base import Beside, Outcome, Proposal, Round
from inference.proposers.independent import Independent
from inference.proposers.inner_round import InnerRound, inner_rule
from inference.proposers.of_parts import OfParts
from inference.proposers.quantised import Quantised
from inference.sampling import certain

SETTINGS = "two_levels"  # of config.json: bits, inner


class TwoLevels(OfParts):
    """Drafts of `model`, the target in fewer bits, `inner` of them at a time guessed by `small` and verified by `rule`
    (token, block or match). An inner round gives its accepted guesses and one token more, so a round of the target
    takes as many inner rounds as it needs; none drafts a token that would not be used.

    Rows whose settings read history (penalties, bans, processors) are drafted for by the model alone, a token at a
    time: how far a row has come differs by row, and its settings read every token before. Raises ValueError for a small
    draft that reads the target, and for a rule or a number of guesses that is none.
    """

    network_class: Any = AutoModelForCausalLM

    def __init__(self, model: Quantised, small: Independent, inner: int = 3, rule: str = "block") -> None:
        if type(small) is not Independent or small.branching or model.branching:
            raise ValueError(f"TwoLevels: {type(small).__name__} cannot be its small draft; it takes an Independent, "
                             "which reads nothing of the target, and chains")  # fmt: skip
        if inner < 1:
            raise ValueError(f"TwoLevels: inner must be at least 1, not {inner}")
        self.model, self.small, self.guesses, self.rule = model, small, inner, inner_rule(rule)
        self.greedy, self.parts = model.greedy, (model, small)

    def __copy__(self) -> "TwoLevels":
        """With parts of its own: what each has stored is told by numbers that its rounds change."""
        return TwoLevels(copy(self.model), copy(self.small), self.guesses, self.rule.name)

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "TwoLevels":
        """An independent draft, whose config.json says under `two_levels` the bits, and the guesses of an inner
        round."""
        settings = read_json(folder / CONFIG).get(SETTINGS) or {}
        model = Quantised.of_settings(beside, settings.get("bits"), str(folder / CONFIG))
        return cls(model, Independent.load(folder, beside), int(settings.get("inner", 3)))

    @property
    def weights(self) -> str | None:
        return f"{self.model.weights} and {self.small.weights}"

    @property
    def context(self) -> int | None:
        return self.model.context

    def language_model(self, rows: int, vocabulary: int) -> LM | None:
        """The rounded target: the distribution of a draft is its own, whoever guessed it."""
        return self.model.language_model(rows, vocabulary)

    def propose(self, round: Round) -> Proposal:
        """Inner rounds until each row has its drafts; a row that has outgrown the context is not drafted for."""
        k = [max(0, min(k, self.model.lm.context - len(text))) for k, text in zip(round.k, round.texts, strict=True)]
        if not max(k):
            return Proposal(torch.empty(len(k), 0, dtype=torch.int64, device=self.model.lm.device), None, k)
        made = Drafted(round, k, self.guesses + 1)
        while made.left:
            self._inner_round(made)
        return made.proposal()

    def _inner_round(self, made: "Drafted") -> None:
        """The small draft guesses, one pass of the rounded target gives its distributions there, both keep what was
        accepted."""
        inner = made.begun(self.guesses, self.model.stored)
        drafts = self.small.propose(inner)
        p = made.distributions(inner, self._read(inner, drafts))
        p = certain(p) if self.greedy else p
        accepted, token = inner.verified(self.rule, p, drafts)
        valid = made.take(inner, p, drafts.x, accepted, token)
        self.model.stored = [max(one) for one in zip(self.model.stored, made.read(valid), strict=True)]
        self.small.commit(Outcome(valid, accepted, {}))

    def _read(self, inner: InnerRound, drafts: Proposal) -> Tensor:
        """Logits (A, n+1, V) of the rounded target after each text and after each guess; ids that its slot lacks are
        read in the same pass."""
        lm, length = self.model.lm, inner.length(drafts.k)
        unread, end, at, x, length = (
            part.to(lm.device) for part in (*(inner.send()[name] for name in UNREAD), drafts.x, length)
        )
        n, end = x.shape[1], end.unsqueeze(1)
        last, place = unread.gather(1, end), torch.arange(n, device=lm.device)
        x = torch.where(place < length.unsqueeze(1), x, last)  # behind its guesses a row reads what it has read
        ids = torch.cat([unread, last.expand(-1, n)], 1).scatter(1, end + 1 + place, x)
        logits = lm.forward(ids, self.model.stored, at=at).logits
        if unread.shape[1] == 1:
            return logits
        places = end + torch.arange(n + 1, device=lm.device)
        return logits.gather(1, places.unsqueeze(2).expand(-1, -1, logits.shape[2]))


UNREAD = "unread", "unread_end", "unread_at"  # ids that the model lacks (A, L), the last of a row, where they go


class Drafted:
    """What a round has drafted so far. k: tokens that each row is to have; width: see `InnerRound`.

    texts: with the drafts; done: how many each row has; x (A, K + width), q (A, K + width, V): drafts and their
    distributions, what stands behind a row's own being of no draft."""

    def __init__(self, round: Round, k: list[int], width: int) -> None:
        self.round, self.k, self.width = round, k, width
        self.texts, self.done = [list(text) for text in round.texts], [0] * len(k)
        self.history = round.reads_history
        self.rounds, self.uniforms = 0, torch.empty(0)
        self.x: Tensor
        self.q: Tensor

    def _numbers(self) -> Tensor:
        """Uniforms (3, A, S) of all inner rounds, made once; a last place is of rows that are done."""
        if not self.uniforms.numel():
            self.uniforms = self.round.inner((max(self.k) + 1) * self.width)
        return self.uniforms

    @property
    def left(self) -> bool:
        return any(done < k for done, k in zip(self.done, self.k, strict=True))

    def begun(self, guesses: int, stored: list[int]) -> InnerRound:
        """The next inner round. stored: tokens of each text that the model's slots hold."""
        room = [k - done for k, done in zip(self.k, self.done, strict=True)]
        # one token comes after the guesses
        wanted = [0 if reads or not left else min(guesses, left - 1)
                  for left, reads in zip(room, self.history, strict=True)]  # fmt: skip
        tails = [text[held:] if left else text[-1:] for text, held, left in zip(self.texts, stored, room, strict=True)]
        lacking: tuple[Numbers, ...] = padded(tails), [len(tail) - 1 for tail in tails], stored
        numbers = {**dict(zip(UNREAD, lacking, strict=True)), "historic": [int(reads) for reads in self.history]}
        return InnerRound(self.round, self.k, self.texts, self.done, wanted, self.width, self._numbers, numbers)

    def distributions(self, inner: InnerRound, logits: Tensor) -> Tensor:
        """Logits (A, n+1, V) after the texts and guesses -> distributions p. Rows that read history have no guesses and
        have come equally far, a token an inner round."""
        p = self.round.plain(logits)
        if not any(self.history):
            return p
        drafted = [self.x[:, j] for j in range(self.rounds)]
        own = self.round.probs(logits[:, 0], drafted).unsqueeze(1)
        reads = inner.send()["historic"].view(-1, 1, 1) > 0
        first = torch.where(reads, own, p[:, :1].to(own.dtype))
        return torch.cat([first, p[:, 1:].to(own.dtype)], 1)

    def take(self, inner: InnerRound, p: Tensor, x: Tensor, accepted: Tensor, token: Tensor) -> list[int]:
        """Accepted guesses and the token behind them become drafts with the distributions p. Returns how many tokens of
        each text agree with what the small draft stored."""
        n, x = x.shape[1], x.to(p.device)
        if not self.rounds:
            A, _, V = p.shape
            self.x = x.new_zeros(A, max(self.k) + self.width)
            self.q = p.new_zeros(A, max(self.k) + self.width, V)
        last = accepted.unsqueeze(1)
        tokens = torch.cat([x, token.unsqueeze(1)], 1).scatter(1, last, token.unsqueeze(1))
        place = inner.done.unsqueeze(1) + torch.arange(n + 1, device=p.device)
        self.x.scatter_(1, place, tokens)
        self.q.scatter_(1, place.unsqueeze(2).expand(-1, -1, p.shape[2]), p)
        return self._told(torch.cat([last, tokens], 1).tolist())  # the inner round's one read

    def _told(self, table: list[list[int]]) -> list[int]:
        """Texts and counts, of rows that were not done."""
        valid = []
        self.rounds += 1
        for row, (n, *tokens) in enumerate(table):
            more = self.done[row] < self.k[row]
            valid.append(len(self.texts[row]) + n * more)
            if more:
                self.texts[row] += tokens[: n + 1]
                self.done[row] += n + 1
        return valid

    def read(self, valid: list[int]) -> list[int]:
        """Tokens of each text that the model's slots hold behind the pass: but for its last one, where it grew."""
        return [length if length < len(text) else 0 for length, text in zip(valid, self.texts, strict=True)]

    def proposal(self) -> Proposal:
        K = max(self.k)
        return Proposal(self.x[:, :K], self.q[:, :K], self.k)
