"""A draft with a tokenizer of its own: it drafts the tokens that both vocabularies have, of text told in its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from inference.drafts.draft_folder import load_tokenizer
from inference.drafts.weight_files import load_weights
from inference.lookup.suffix_array import common
from inference.models.dtypes import widened
from inference.proposers.base import Beside, Host, Outcome, Proposal, Proposer, Round, States
from inference.proposers.independent import Independent
from inference.proposers.retelling import Retelling, Shared


class OtherTokenizer(Proposer):
    """An independent draft of another vocabulary (Timor et al. 2025, token-level intersection, 2502.05202): its
    distribution is that of its own model over the tokens that both have, as equal byte strings, renormalised under the
    row's settings. Drafts are drawn from that very distribution, so the text's distribution is the target's.

    model: the draft's, of its own ids. shared, retelling: see `between`. greedy, compile: as of `Independent`.
    """

    network_class = AutoModelForCausalLM
    own_tokenizer = True

    def __init__(
        self,
        model: PreTrainedModel,
        shared: Shared,
        retelling: Retelling,
        greedy: bool = False,
        compile: bool | None = None,
    ) -> None:
        self.inner, self.greedy = Independent(model, greedy, compile=compile), greedy
        self.shared, self.retelling = shared, retelling
        self.size = model.config.get_text_config().vocab_size
        self.host: Host
        self.rows: list[list[int]] = []  # of each row, its text in draft ids, as it was when last drafted for
        self.staged: dict[int, list[int]] = {}
        self.vocabulary = 0  # the target's ids that the tables are of
        self.tabled: Any = None  # the model whose recordings read them

    @classmethod
    def between(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        greedy: bool = False,
        compile: bool | None = None,
    ) -> "OtherTokenizer":
        """A draft and its tokenizer beside a target's. Raises ValueError for tokenizers without a byte string a token,
        or that share none."""
        shared = Shared.of(target_tokenizer, tokenizer)
        return cls(model, shared, Retelling(target_tokenizer, tokenizer), greedy, compile)

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "OtherTokenizer":
        """A Hugging Face folder with a tokenizer of its own. Raises ValueError where it or the target has none."""
        model, problems, _ = load_weights(folder)
        tokenizer = load_tokenizer(folder)
        if problems or tokenizer is None or beside.tokenizer is None:
            raise ValueError("; ".join(problems) or f"{folder}: the draft and its target each need a tokenizer")
        torch.nn.Module.to(model, beside.target.device)
        return cls.between(widened(model), tokenizer, beside.tokenizer, beside.greedy, beside.compile)

    @property
    def weights(self) -> str | None:
        return self.inner.weights

    def open(self, host: Host) -> None:
        self.host = host
        # a text may be longer in the draft's tokens: what it cannot hold is not drafted for
        own = Host(host.rows, host.spare, self.size, 4 * host.context, host.target)
        if host.vocabulary != self.vocabulary:
            self.vocabulary, self.inner.opened = host.vocabulary, None  # with recordings of its own
        self.inner.open(own)
        self.rows, self.staged = [], {}
        self.retelling.keep([])
        if self.tabled is not self.inner.lm:  # its recordings read these very tables, so they live as long
            self.tabled = self.inner.lm
            self.to_target, self.to_draft = self.shared.tables(host.vocabulary, self.size, self.inner.lm.device)

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        told = self._told(prompts)
        self.inner.admit(low, told, {})
        self.rows[low:] = told

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        told = self._told(prompts)
        self.inner.stage(low, told, {})
        self.staged |= {low + place: ids for place, ids in enumerate(told)}

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        ids = self.staged.pop(source)
        self.inner.enter(source, target, ids)
        self.rows.append(ids)

    def move(self, source: int, target: int) -> None:
        self.inner.move(source, target)
        last = self.rows.pop()
        if target < len(self.rows):
            self.rows[target] = last

    def commit(self, outcome: Outcome) -> None:
        """Its drafts are dropped from its slots: the text may be told in other tokens with what came behind them."""
        valid = [len(ids) if kept else 0 for ids, kept in zip(self.rows, outcome.valid, strict=True)]
        self.inner.commit(Outcome(valid, outcome.accepted, {}))

    def propose(self, round: Round) -> Proposal:
        self.retelling.keep(round.texts)
        told = self._told(round.texts)
        kept = [min(common(old, new), len(new) - 1) for old, new in zip(self.rows, told, strict=True)]
        self.inner.stored = [min(stored, same) for stored, same in zip(self.inner.stored, kept, strict=True)]
        self.rows = told
        whole = [k if self.retelling.whole(text) else 0 for text, k in zip(round.texts, round.k, strict=True)]
        x, q, k, _ = self.inner.propose(Told(round, told, whole, self.to_target, self.to_draft))
        return Proposal(self.to_target[x], q, k)

    def _told(self, texts: Sequence[list[int]]) -> list[list[int]]:
        return [self.retelling(text) for text in texts]


class Told:
    """A round as a draft of another vocabulary sees it: texts and draws in its ids, distributions over the target's."""

    def __init__(self, round: Round, texts: list[list[int]], k: list[int], to_target: Tensor, to_draft: Tensor) -> None:
        self.round, self.texts, self.k, self.to_target, self.to_draft = round, texts, k, to_target, to_draft
        self.temperatures = None  # its distributions are made by `distribution`, not by a temperature alone

    def __getattr__(self, name: str) -> Any:
        return getattr(self.round, name)

    def on(self, given: Any) -> "Told":
        """As it is recorded; see `Round.on`."""
        return Told(self.round.on(given), self.texts, self.k, self.to_target, self.to_draft)

    def probs(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        """Logits (A, Vd) -> distribution (A, V): tokens that the draft lacks have no mass."""
        seen = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)  # the last column: not shared
        return self.round.probs(seen[:, self.to_draft], [self.to_target[x] for x in drafted])

    def draw(self, probs: Tensor, depth: int) -> Tensor:
        """Draft ids (A,) of what is drawn from distribution (A, V)."""
        return self.to_draft[self.round.draw(probs, depth)].clamp(max=len(self.to_target) - 1)
