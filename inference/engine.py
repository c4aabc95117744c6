"""The batched loop: propose, one target pass, verify, commit; ended rows make room for waiting prompts."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from inference.batched.batch import Batch
from inference.models.lm import LM, load_model
from inference.models.memory import spare_slots
from inference.models.replays import Replays
from inference.noise import Uniforms, row_ids
from inference.policy import Fixed, Policy, lengths_of
from inference.proposers.base import Proposal, Proposer
from inference.proposers.independent import store_prompts
from inference.request import Request
from inference.round import DecodingRound
from inference.sampling import Sampling
from inference.stats import Counts, Stats
from inference.verify.rules import Rule, rule_of

Prompt = str | Sequence[int]


class RequestError(RuntimeError, ValueError):
    """A prompt that ended in an error where whole texts are wanted."""


@dataclass
class Output:
    """tokens: B lists of new ids, prompt excluded, stop token included; text: B strings, None without a tokenizer;
    finish: B times "stop", "length" or "error"; errors: B messages, None for rows without an error."""

    tokens: list[list[int]]
    text: list[str] | None
    finish: list[str]
    stats: Stats
    errors: list[str | None] = field(default_factory=list)

    def whole(self) -> "Output":
        """Itself; raises RequestError naming the first prompt that ended in an error."""
        for index, message in enumerate(self.errors):
            if message is not None:
                raise RequestError(f"prompt {index}: {message}")
        return self


@dataclass(frozen=True)
class Event:
    """Tokens of one row that became certain in one round, and how: "drafted" (accepted), "corrected" (after a
    refusal) or "bonus" (after all drafts were accepted, or none was made)."""

    row: int
    ids: list[int]
    kinds: list[str]


@dataclass
class _Run:
    """State of one call: rows waiting, those whose prompts are stored already and in which slot, rows being decoded,
    counts."""

    waiting: deque[Request]
    noise: Uniforms
    stats: Stats
    staged: deque[tuple[Request, int]] = field(default_factory=deque)
    active: list[Request] = field(default_factory=list)
    batch: Batch | None = None  # settings of the active rows on the device


# by id of a proposer: the run whose rows its slots hold, of whichever engine
_PROPOSING: WeakValueDictionary[int, _Run] = WeakValueDictionary()


class Engine:
    """Speculative decoding of many rows at once; the law of the text is exactly the target's.

    target: a transformers causal LM, used as it is, or a path / hub id loaded in `dtype` (None: the checkpoint's own,
    or float32 on a CPU that would emulate it). proposer: what drafts; None is plain decoding by the same machinery.
    verify: one of token, block, match, coupled. rows: how many prompts are decoded together; more wait, and half as
    many again, 8 at most, are stored several at a time before their turn comes, since one by one they take twice as
    long. context: most tokens a row may hold. compile: the target's short passes are compiled (see `compiled`), which
    costs seconds at the first ones, on a GPU replayed as CUDA graphs (see `cuda_graphs`); None: on a GPU alone.
    A row that comes to a place without a law (its settings leave no token, a processor of its own raises, the target's
    logits are NaN or infinite) ends there, alone, with finish "error". One proposer may serve several engines one call
    after the other.
    Raises ValueError for an unknown rule or an unsupported model.
    """

    def __init__(
        self,
        target: PreTrainedModel | str,
        proposer: Proposer | None = None,
        *,
        verify: str | Rule = "token",
        policy: Policy = Fixed(4),  # noqa: B008 - frozen
        tokenizer: PreTrainedTokenizerBase | None = None,
        rows: int = 8,
        context: int | None = None,
        dtype: torch.dtype | str | None = None,
        compile: bool | None = None,
    ) -> None:
        rule = rule_of(verify)
        if rows < 1:
            raise ValueError(f"rows: at least one row, not {rows}")
        if isinstance(target, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(target)
            target = load_model(target, dtype)
        self.proposer, self.rule, self.policy, self.tokenizer, self.rows = proposer, rule, policy, tokenizer, rows
        self.spare = spare_slots(rows)
        vocabulary = _vocabulary(target, tokenizer)
        self.target = LM(target, rows, vocabulary, context, compile=compile, spare=self.spare)
        self.replays = Replays(self.target.device) if self.target.replayed else None
        self.ends = ends_of(target)
        self.current: _Run | None = None  # whose rows hold the slots

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
        seed: int = 0,
        ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
    ) -> Output:
        """Continue every prompt (strings, or lists of token ids).

        max_new_tokens and sampling: one, or one a prompt. seed, ids: the key of the random numbers; ids default to a
        hash of each prompt, so a prompt gives the same tokens alone or in a batch. ignore_eos: only lengths end rows.
        Raises ValueError for a prompt that is empty, leaves no room in the context or holds ids outside the
        vocabulary, for settings with such ids, and for lists of other lengths, before anything is run.
        """
        rows = self._rows(prompts, max_new_tokens, sampling, ids, ignore_eos)
        run = self._run(rows, seed)
        for _ in self._rounds(run):
            pass
        texts = [str(self.tokenizer.decode(row.new)) for row in rows] if self.tokenizer else None
        finish = [row.finish or "length" for row in rows]
        return Output([row.new for row in rows], texts, finish, run.stats, [row.error for row in rows])

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[Event]:
        """Events of one prompt as its rounds end; settings as in generate. RuntimeError once a later call began, and
        with its message, behind the events before, where the row ends in an error."""
        options: dict[str, Any] = {"max_new_tokens": 128, "sampling": Sampling(), "ids": None, "ignore_eos": False}
        seed = settings.pop("seed", 0)
        unknown = set(settings) - set(options)
        if unknown:
            raise TypeError(f"Engine.stream has no setting {sorted(unknown)}")
        rows = self._rows([prompt], *(options | settings).values())
        for events in self._rounds(self._run(rows, seed)):
            yield from events
        if rows[0].error:
            raise RequestError(f"Engine.stream: {rows[0].error}")

    def _run(self, rows: list[Request], seed: int) -> _Run:
        self.current = _Run(deque(rows), Uniforms(seed, self.target.device), Stats(rows=[Counts() for _ in rows]))
        if self.proposer:
            self.proposer.open(self.rows, self.target.vocabulary, self.target.context, self.spare)
            _PROPOSING[id(self.proposer)] = self.current
        return self.current

    def _rows(
        self,
        prompts: Sequence[Prompt],
        limits: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling],
        ids: Sequence[int] | None,
        ignore_eos: bool,
    ) -> list[Request]:
        if isinstance(prompts, str):
            raise ValueError("prompts: a list is wanted, not one string")
        texts = [self._encode(prompt) for prompt in prompts]
        limits = _each("max_new_tokens", limits, len(texts))
        regimes = _each("sampling", sampling, len(texts))
        keys = _each("ids", row_ids(texts) if ids is None else ids, len(texts))
        ends = frozenset() if ignore_eos else self.ends
        rows = []
        for index, (text, limit, regime, key) in enumerate(zip(texts, limits, regimes, keys, strict=True)):
            room = self.target.context - len(text)
            if not text or room < 1 or limit < 1:
                raise ValueError(f"prompt {index}: {len(text)} tokens and max_new_tokens={limit} do not fit "
                                 f"a context of {self.target.context}")  # fmt: skip
            if min(text) < 0 or max(text) >= self.target.vocabulary:
                raise ValueError(f"prompt {index}: ids from {min(text)} to {max(text)} are not all in "
                                 f"[0, {self.target.vocabulary})")  # fmt: skip
            named = {*(regime.logit_bias or ()), *chain(*regime.banned)}
            foreign = [token for token in named if not 0 <= token < self.target.vocabulary]
            if foreign:
                raise ValueError(f"prompt {index}: Sampling.logit_bias or banned has ids {sorted(foreign)[:5]}, the "
                                 f"vocabulary size is {self.target.vocabulary}")  # fmt: skip
            if regime.stop and self.tokenizer is None:
                raise ValueError("Sampling.stop: stop strings need a tokenizer")
            stops = ends | frozenset(regime.stop_ids)
            rows.append(Request(index, key, text, min(limit, room), regime, stops, self.tokenizer))
        return rows

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError("prompts: strings need a tokenizer; give Engine(tokenizer=...) or lists of ids")
        return list(self.tokenizer(prompt)["input_ids"])

    @torch.inference_mode()
    def _round(self, run: _Run) -> list[Event]:
        """One round of all active rows."""
        stats = run.stats
        with stats.clock("draft"):
            turn = self._turn(run)
            proposal = self._propose(turn)
        with stats.clock("target"):
            logits = self._target(turn, proposal)
        with stats.clock("verify"):
            settled = turn.settle(logits, proposal).tolist()  # the round's one read
        with stats.clock("other"):
            return self._commit(run, turn, proposal, logits, settled)

    def _turn(self, run: _Run) -> DecodingRound:
        texts = [row.text for row in run.active]
        wanted = lengths_of(self.policy, texts) if self.proposer else [0] * len(texts)
        # a draft past a row's last token could never be emitted
        k = [0 if row.alone else min(length, row.limit - row.emitted - 1)
             for length, row in zip(wanted, run.active, strict=True)]  # fmt: skip
        turn = DecodingRound(run.active, k, self.rule, run.noise, self.target.vocabulary, self.target.device, run.batch,
                    self.replays)  # fmt: skip
        run.batch = turn.batch
        return turn

    def _propose(self, turn: DecodingRound) -> Proposal:
        if not self.proposer or not max(turn.k):
            turn.send([0] * len(turn.k))
            nothing = torch.empty(len(turn.k), 0, dtype=torch.int64, device=self.target.device)
            return Proposal(nothing, None, [0] * len(turn.k))
        x, q, k = self.proposer.propose(turn)
        if x.device.type == "cpu" != self.target.device.type:
            turn.send(k, x=x.tolist())  # with all else that goes to the device, where nothing was sent yet
            x = turn.sent["x"]
        turn.send(k)
        return Proposal(x.to(self.target.device), q if q is None else q.to(self.target.device), k)

    def _target(self, turn: DecodingRound, proposal: Proposal) -> Tensor:
        """Logits (A, K+1, V) after each row's anchor, its last token, and after each draft."""
        start, anchor, x = [len(text) - 1 for text in turn.texts], turn.sent["anchor"], proposal.x
        if min(proposal.k) < x.shape[1]:  # behind its drafts a row reads what it has read, which leaves no NaN
            drafted = torch.arange(x.shape[1], device=x.device) < turn.length(proposal.k).unsqueeze(1)
            x = torch.where(drafted, x, anchor)
        return self.target.forward(torch.cat([anchor, x], 1), start, at=turn.sent["read"]).logits

    def _commit(
        self, run: _Run, turn: DecodingRound, proposal: Proposal, logits: Tensor, settled: list[list[int]]
    ) -> list[Event]:
        """settled: `DecodingRound.settle`."""
        events, valid = [], []
        for slot, (row, (n, token, k, lost, stains, *draft)) in enumerate(zip(run.active, settled, strict=True)):
            before, doubtful = len(row.text), row.stained or proposal.k[slot] > 0
            row.stained |= bool(stains) or k < proposal.k[slot]
            taken = len(row.take(draft[:n] if lost else [*draft[:n], token]))
            drafted = min(k, taken) if row.finish else k  # drafts beyond a row's last token do not count
            if lost and not row.finish:
                self._without_law(slot, row, turn, doubtful, logits[slot, n])
            run.stats.count(row.index, taken, drafted, min(taken, n))
            kinds = ["drafted"] * n + ["bonus" if n == k else "corrected"]
            if taken:
                events.append(Event(row.index, row.text[before:], kinds[:taken]))
            valid.append(0 if row.finish and row.stained else before + n)
        if self.proposer:
            self.proposer.commit(valid)
        self._leave(run)
        return events

    def _without_law(self, slot: int, row: Request, turn: DecodingRound, doubtful: bool, logits: Tensor) -> None:
        """A row that has come to a place without a law ends there. With drafts, of this round or of earlier ones, it is
        not certain yet: what one of them left in the slot may be to blame. The row then goes on without any, from a
        slot that is stored again."""
        if doubtful and not row.alone:
            row.alone = True
            self.target.clear(slot)
            store_prompts(self.target, slot, [row.text])
        else:
            row.fail(turn.reason(slot, logits))

    def _leave(self, run: _Run) -> None:
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
            if self.proposer:
                self.proposer.move(len(run.active), slot)

    @torch.inference_mode()
    def _admit(self, run: _Run) -> None:
        while len(run.active) < self.rows and (run.staged or run.waiting):
            with run.stats.clock("prefill"):
                if run.staged:
                    self._enter(run, *run.staged.popleft())
                elif self.rows - len(run.active) < min(self.spare, len(run.waiting)):
                    self._stage(run)
                else:
                    self._store(run)
                self.target.wait()

    def _store(self, run: _Run) -> None:
        """As many waiting rows as there is room for."""
        low = len(run.active)
        new = [run.waiting.popleft() for _ in range(min(self.rows - low, len(run.waiting)))]
        prompts = [row.text for row in new]
        store_prompts(self.target, low, prompts)
        if self.proposer:
            self.proposer.admit(low, prompts)
        run.active += new

    def _stage(self, run: _Run) -> None:
        """Prompts of waiting rows, in spare slots."""
        new = [run.waiting.popleft() for _ in range(min(self.spare, len(run.waiting)))]
        prompts = [row.text for row in new]
        store_prompts(self.target, self.rows, prompts)
        if self.proposer:
            self.proposer.stage(self.rows, prompts)
        run.staged.extend((row, self.rows + place) for place, row in enumerate(new))

    def _enter(self, run: _Run, row: Request, slot: int) -> None:
        self.target.move(slot, len(run.active), len(row.text) - 1)
        if self.proposer:
            self.proposer.enter(slot, len(run.active), row.text)
        run.active.append(row)

    def _rounds(self, run: _Run) -> Iterator[list[Event]]:
        while run.waiting or run.staged or run.active:
            if self.current is not run:
                raise RuntimeError("Engine: a later call took the slots of this stream before it ended")
            if self.proposer and _PROPOSING.get(id(self.proposer)) is not run:
                raise RuntimeError("Engine: another engine's call took this engine's proposer before this stream "
                                   "ended; give each engine a proposer of its own")  # fmt: skip
            self._admit(run)
            yield self._round(run)


def _each(name: str, value: Any, count: int) -> list[Any]:
    """One value a prompt; raises ValueError naming the argument when a list has another length."""
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name}: {len(values)} values for {count} prompts")
    return values


def _vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Ids that can be emitted: padded rows of the embedding have none of the mass."""
    size = int(model.config.get_text_config().vocab_size)
    return min(size, 1 + max(tokenizer.get_vocab().values())) if tokenizer else size


def ends_of(model: PreTrainedModel) -> frozenset[int]:
    """Ids that end a text, by the generation config, else the model's."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = model.config.eos_token_id if ends is None else ends
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
