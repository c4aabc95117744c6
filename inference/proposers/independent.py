"""An independent draft: a small causal LM of its own, run one token at a time."""

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference.drafts.draft_folder import load_draft
from inference.models.dtypes import widened
from inference.models.lm import LM, load_model, takes_int8
from inference.models.passes import States
from inference.models.prefill import padded, store_prompts
from inference.proposers.base import Beside, Host, Outcome, Proposal, Proposer, Round
from inference.proposers.branching import Branching, Nodes
from inference.proposers.growing import Growing, Shape, trees_of
from inference.sampling import certain


class Independent(Proposer):
    """Drafts with a causal LM (Leviathan et al. 2023, 2211.17192).

    model: a transformers model, used as it is, or a path / hub id. greedy: draft argmax q with a one-hot distribution,
    as serving engines do by default, instead of drawing from q. compile: its passes are compiled, see
    `compiled`, or replayed, see `cuda_graphs`; None: on a GPU alone. int8: its weights are rounded to 8 bits, see
    `llama`: q is then the rounded draft's distribution. shape: of the trees that it drafts, the parents of their nodes
    (see `topology` and `branching`) or a `growing.Dynamic`, to be verified by tree, traversal or coupled; None: chains.
    """

    network_class = AutoModelForCausalLM
    scaled = False  # whether it writes to `LM.scale`
    tail = 2  # ids of a text that a round feeds when all drafts are made at once: rounds that accept all lack so many

    def __init__(
        self, model: PreTrainedModel | str | PathLike[str], greedy: bool = False, *, compile: bool | None = None,
        int8: bool = False, shape: Shape = None,
    ) -> None:  # fmt: skip
        self.model = _load(fspath(model)) if isinstance(model, str | PathLike) else model
        self.greedy, self.compile, self.int8 = greedy, compile, int8
        self.branching = trees_of(shape)
        # of a round that drafts trees: the anchors' slots, here and on the device, and its levels
        self.anchors: tuple[list[int], Tensor, int]
        self.opened: tuple[int, int, int, int] | None = None
        self.lm: LM
        self.stored: list[int] = []  # tokens of each row's text that its slot holds
        self.sent: dict[str, Tensor] = {}  # this round's numbers, once they are on the device
        self.longest = 0  # drafts of a round that are made at once, as many each time: other lengths are other graphs

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "Independent":
        """Raises as `load_draft`; warns of a target of another shape than the draft was made for."""
        draft = cls.network_beside(folder, beside)
        int8 = beside.metadata is not None and beside.metadata.int8 and takes_int8(draft)
        network = draft if int8 else widened(draft)
        return cls(network, beside.greedy, compile=beside.compile, int8=int8, shape=beside.shape)

    def language_model(self, rows: int, vocabulary: int) -> LM | None:
        return None if self.branching else LM(self.model, rows, vocabulary, int8=self.int8)

    @property
    def context(self) -> int | None:
        return self.lm.context

    @property
    def weights(self) -> str | None:
        """What its weights are held in."""
        return "int8" if self.int8 else str(self.model.dtype).removeprefix("torch.")

    def open(self, host: Host) -> None:
        if self.branching:
            self.branching.require(host.vocabulary, self.depths)
        wanted = host.rows, host.vocabulary, host.context, host.spare
        if wanted != self.opened or self.lm.stale:  # slots are kept from call to call
            self.opened = wanted
            self.lm = LM(self.model, *wanted[:3], compile=self.compile, int8=self.int8, spare=host.spare,
                         scaled=self.scaled)  # fmt: skip
        self.stored, self.longest = [], 0

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        store_prompts(self.lm, low, [prompt[: self.lm.context] for prompt in prompts])

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        held = self._held(prompt)
        self.lm.move(source, target, held)
        self.stored.append(held)

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        self.stage(low, prompts, states)
        self.stored[low:] = map(self._held, prompts)

    def _held(self, prompt: list[int]) -> int:
        """Tokens of a prompt that are stored; one that the draft's context cannot hold is never drafted for."""
        return min(len(prompt), self.lm.context) - 1

    def propose(self, round: Round) -> Proposal:
        """Feed what the slots lack (one or two ids, more after rounds without drafts), then draft: all at once where
        the draft is compiled, else step by step.

        A row that has outgrown the draft's own context is not drafted for.
        """
        k = [max(0, min(k, self.lm.context - len(text))) for k, text in zip(round.k, round.texts, strict=True)]
        K = max(k)
        if K == 0:
            return Proposal(torch.empty(len(k), 0, dtype=torch.int64, device=self.lm.device), None, k)
        self.sent = {}
        if self.branching:
            return self._by_level(round, k, self.branching)
        return self._at_once(round, k) or self._stepwise(round, k, K)

    def _by_level(self, round: Round, k: list[int], shape: Branching | Growing) -> Proposal:
        """Trees, a pass a level; where passes are replayed always all levels, since other trees are other graphs."""
        lacking = self._lacking(round.texts, k)
        self.sent = round.send(shape.nodes(k), **lacking, **shape.numbers(k))
        depth = shape.depth if self.lm.replayed else min(max(k), shape.depth)
        logits, follows = self._catch_up(round, k), lacking["follows"]
        start, (at,) = [end - 1 for end in follows], self._here(round.send()["follows"] - 1)

        def follow(ids: Tensor, nodes: Nodes) -> Tensor:
            return self.lm.forward(ids, start, at=at, tree=nodes.tree).logits

        x, q = shape.grown(round, depth, logits, follow, self.greedy)
        self.anchors, rows = (start, at, depth), zip(round.texts, k, self.stored, strict=True)
        # of the last level nothing is stored
        self.stored = [len(text) + depth - 1 if wanted else stored for text, wanted, stored in rows]
        return shape.proposal(k, x, q)

    def _at_once(self, round: Round, k: list[int]) -> Proposal | None:
        """None where the model has no such call, or distributions take more than a temperature and passes are not
        replayed."""
        self.longest, K, ends = max(self.longest, *k), max(k), [len(text) for text in round.texts]
        rows = list(zip(ends, self.stored, k, strict=True))
        fits = self.tail <= min(ends) and max(ends) + self.longest <= self.lm.context
        if not self.lm.compiled or not fits:
            return None
        temperatures = round.temperatures
        greedy = self.greedy or temperatures is not None and not any(temperatures)
        simple = temperatures is not None and (greedy or all(temperatures))
        if not simple and not self.lm.replayed:
            return None
        # single steps may still follow, with no copy of their own
        lacking = self._lacking(round.texts, k)
        sent = self.sent = round.send(k, last=[text[-self.tail :] for text in round.texts], ends=ends, **lacking)
        if any(wanted and end - stored > self.tail for end, stored, wanted in rows):
            self._catch_up(round, k)  # after rounds that something else drafted for
        found, (last, at) = None, self._here(sent["last"], sent["ends"])
        if simple:
            u, temperature = self._here(*round.simple(self.longest))
            found = self.lm.draft(last, ends, u, temperature, greedy, at)
        if found is None:
            found = self.lm.draft_for(round, self.longest, self.greedy, last, ends, at)
        if found is None:
            return None
        # of a row that is not drafted for, no draft of its own (another part may draft for it), and no hole behind it
        left = [end if end - stored <= self.tail else stored for end, stored, _ in rows]
        self.stored = [end + self.longest - 1 if k_b else own for end, own, k_b in zip(ends, left, k, strict=True)]
        return Proposal(found[0][:, :K], found[1][:, :K], k)

    def _stepwise(self, round: Round, k: list[int], K: int) -> Proposal:
        follows = self._lacking(round.texts, k)["follows"]
        logits = self._catch_up(round, k)
        drafted: list[Tensor] = []
        distributions: list[Tensor] = []
        for depth in range(K):
            probs = round.probs(logits, drafted)
            distributions.append(certain(probs) if self.greedy else probs)
            drafted.append(round.draw(distributions[-1], depth))
            if depth + 1 < K:
                ids, at = self._here(drafted[-1].unsqueeze(1), round.send()["follows"] + depth)
                logits = self.lm.forward(ids, [end + depth for end in follows], at=at).logits[:, -1]
        rows = zip(round.texts, k, self.stored, strict=True)
        self.stored = [len(text) + K - 1 if wanted else stored for text, wanted, stored in rows]
        return Proposal(torch.stack(drafted, 1), torch.stack(distributions, 1), k)

    def _catch_up(self, round: Round, k: list[int]) -> Tensor:
        """Logits (A, V) after each whole text; ragged tails are padded on the right, past what is read."""
        sent = self.sent or round.send(k, **self._lacking(round.texts, k))
        ids, only, at = self._here(sent["lacking"], sent["only"], sent["stored"])
        return self.lm.forward(ids, self.stored, only=only, at=at).logits[:, 0]

    def _lacking(self, texts: Sequence[list[int]], k: list[int]) -> dict[str, Any]:
        """Ids that the slots lack, which of them is the last one, where they go, and where the first draft goes: of a
        row that is not drafted for, where it stands, since its slot may have no place behind its text."""
        rows = list(zip(texts, k, self.stored, strict=True))
        tails = [text[stored:] if wanted else text[-1:] for text, wanted, stored in rows]
        follows = [len(text) if wanted else stored for text, wanted, stored in rows]
        only = [len(tail) - 1 for tail in tails]
        return {"lacking": padded(tails), "only": only, "stored": self.stored, "follows": follows}

    def _here(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors on the draft's own device."""
        return [tensor.to(self.lm.device) for tensor in tensors]

    def commit(self, outcome: Outcome) -> None:
        if outcome.path is not None:
            self._keep(outcome.path, outcome.valid)
        self.stored = [min(stored, length) for stored, length in zip(self.stored, outcome.valid, strict=True)]
        for slot, length in enumerate(outcome.valid):
            if length == 0:
                self.lm.clear(slot)

    def _keep(self, path: Tensor, valid: Sequence[int]) -> None:
        """Of the accepted nodes path (A, D), those that were read become text."""
        assert self.branching is not None
        (path,), (start, at, depth) = self._here(path), self.anchors
        self.lm.keep(start, self.branching.stored(path, depth), at)
        read = [max(length - self.branching.unread, anchor + 1) for length, anchor in zip(valid, start, strict=True)]
        self.stored = list(map(min, self.stored, read))

    def move(self, source: int, target: int) -> None:
        if source != target:
            self.lm.move(source, target, self.stored[source])
            self.stored[target] = self.stored[source]
        self.stored.pop()


def _load(path: str) -> PreTrainedModel:
    """A local folder is checked as a draft folder; anything else is a hub id."""
    return widened(load_draft(path)[0]) if Path(path).is_dir() else load_model(path)
