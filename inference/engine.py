"""Speculative decoding of many rows at once, round by round: propose, pass, verify, commit.

row         a prompt and the tokens that follow it so far
slot        where keys and values of a row stand; active rows have slots 0, 1, ... without holes (see `slots`)
anchor      a row's last token: part of its text, not yet read by the target
distribution         the probability of each next token under a row's sampling settings: p is the target's, q the
draft's draft       a token x that the proposer guesses, drawn from q proposal    the drafts of a round with their
distributions, a chain or a tree; k: how many a row has pass        one forward of the target over the anchors and all
drafts; it gives p at every one of them verdict     how many drafts of a row are accepted, and the distribution of the
one token that follows them correction  that token where a draft was refused; where none was, it is the bonus commit
accepted drafts and that token join the text; what is stored of refused ones lies past the row's
            length, where it is masked and overwritten: rolling back is no more than that; of a tree, the accepted
            path is moved behind the anchor first (`settled.kept`)
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from inference.models.lm import LM, load_model
from inference.models.memory import spare_slots
from inference.models.passes import ALONE, Pass
from inference.models.replays import Replays
from inference.output import Event, Output, RequestError
from inference.policy import Fixed, Policy
from inference.proposers.base import Outcome, Proposal, Proposer
from inference.request import Accepts, Prompt, ends_of, pads_of, single, vocabulary_of
from inference.round import DecodingRound
from inference.sampling import Sampling
from inference.settled import Settled, kept
from inference.slots import Run, Slots
from inference.verify.rules import Rule, rule_of

if TYPE_CHECKING:
    from inference.report.recorder import Recorder


class Engine:
    """Speculative decoding of many rows at once; the distribution of the text is exactly the target's.

    target: a transformers causal LM or a PEFT model of one, used as it is, or a path / hub id loaded in `dtype` (None:
    the checkpoint's own, or float32 on a CPU that would emulate it) on `device` (None: the CPU). The end tokens of its
    generation_config are read and nothing else of it, see `Sampling.of`. proposer: what drafts; None is plain decoding
    by the same machinery.
    verify: a name of `verify.rules.RULES`, or a rule of one's own. rows: how many prompts are decoded together;
    more wait (see `slots`). context: most tokens a row may hold. compile: the target's short passes are compiled (see
    `compiled`), which costs seconds at the first ones, on a GPU replayed (see `cuda_graphs`); None: on a GPU alone.
    record: keeps the rounds of the last call, with p, q and u of each draft (see `report.recorder`); None: nothing is.
    A row that comes to a place without a distribution (its settings leave no token, a processor of its own raises, the
    target's logits are NaN or infinite) ends there, alone, with finish "error". One proposer may serve several engines
    one call after the other. Threads: calls of all engines of a process run one after the other, a call of another
    thread waits; a stream lets others run between its rounds, and ends in RuntimeError once one took its slots or its
    proposer. Every call looks whether the models were changed (weights, adapters, hooks, modules); it then decodes as a
    new engine would. Raises ValueError for an unknown rule or an unsupported model.
    """

    def __init__(
        self,
        target: PreTrainedModel | str | PathLike[str],
        proposer: Proposer | None = None,
        *,
        verify: str | Rule = "token",
        policy: Policy = Fixed(4),  # noqa: B008 - frozen
        tokenizer: PreTrainedTokenizerBase | None = None,
        rows: int = 8,
        context: int | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        compile: bool | None = None,
        record: "Recorder | None" = None,
    ) -> None:
        rule = rule_of(verify)
        if rows < 1:
            raise ValueError(f"rows: at least one row, not {rows}")
        if isinstance(target, str | PathLike):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(target)
            target = load_model(fspath(target), dtype)
            if device is not None:
                target.to(torch.device(device))  # type: ignore[arg-type]
        elif dtype is not None or device is not None and torch.device(device).type != target.device.type:
            raise ValueError(
                f"{'dtype' if dtype is not None else 'device'}: a model is used as it is ({target.dtype} on "
                f"{target.device}); cast or move it first, or give its path"
            )
        self.proposer, self.rule, self.policy, self.tokenizer, self.rows = proposer, rule, policy, tokenizer, rows
        self.record = record
        self._made = partial(LM, target, rows, context=context, compile=compile, spare=spare_slots(rows))
        self._open()

    def _open(self) -> None:
        """The target as it is now, with slots of its own."""
        self.target = self._made(vocabulary=vocabulary_of(self._made.args[0], self.tokenizer))
        self.replays = Replays(self.target.device) if self.target.replayed else None
        self.ends, self.slots = ends_of(self.target.model), Slots(self.target)
        self.pads = pads_of(self.target.model, self.tokenizer)

    def generate(
        self,
        prompts: Sequence[Prompt] | Mapping[str, Any],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
        seed: int = 0,
        ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
    ) -> Output:
        """Continue every prompt.

        prompts: a list, of text, token ids (a list, tensor or array) or chat messages (dicts of role and content, which
        the tokenizer's template renders), or what a tokenizer returns for several texts, without what its mask leaves
        out. Text is encoded as the tokenizer does, with one start token at most. `Output.text` leaves out the end token
        that ended a row, `Output.tokens` has it.
        max_new_tokens and sampling: one, or one a prompt. seed, ids: the key of the random numbers; ids default to a
        hash of each prompt, so a prompt gives the same tokens alone or in a batch: exactly in float64, in float32 but
        for rare rounding; in bfloat16 another text with the same probabilities. ignore_eos: the target's end tokens end
        no row; stop strings, stop_ids and lengths do.
        Raises ValueError for anything else as a prompt, for one that is empty, leaves no room in the context or holds
        ids outside the vocabulary, for settings with such ids, and for lists of other lengths, before anything is run.
        """
        with ALONE:
            run = self.begin(prompts, max_new_tokens, sampling, seed, ids, ignore_eos)
            for _ in self.rounds(run):
                pass
        texts = [str(self.tokenizer.decode(row.shown)) for row in run.rows] if self.tokenizer else None
        finish = [row.finish or "length" for row in run.rows]
        return Output([row.new for row in run.rows], texts, finish, run.stats, [row.error for row in run.rows])

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        seed: int = 0,
        ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
    ) -> Iterator[Event]:
        """Events of one prompt as its rounds end; settings as in generate. RuntimeError once a later call began, and
        with its message, behind the events before, where the row ends in an error."""
        run = self.begin(single(prompt), max_new_tokens, sampling, seed, ids, ignore_eos)
        for events in self.rounds(run):
            yield from events
        if run.rows[0].error:
            raise RequestError(f"Engine.stream: {run.rows[0].error}")

    def begin(
        self, prompts: Sequence[Prompt] | Mapping[str, Any], max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling],
        seed: int = 0, ids: Sequence[int] | None = None, ignore_eos: bool = False,
    ) -> Run:  # fmt: skip
        """A call that is to decode these prompts, see `generate`; it takes the slots of the call before it."""
        with ALONE:
            if self.target.stale:
                self._open()
            rows = Accepts(self.target, self.ends, self.tokenizer, self.pads).requests(
                prompts, max_new_tokens, sampling, ids, ignore_eos
            )
            if self.record:
                self.record.begin(self.rule.name, rows)
            return self.slots.begin(rows, self.proposer, seed)

    def rounds(self, run: Run) -> Iterator[list[Event]]:
        """Decode round by round until every row has ended; rows that end make room for rows that wait."""
        while run.waiting or run.staged or run.active:
            with ALONE:  # not while the caller has the events
                self.slots.require(run)
                self.slots.admit(run)
                events = self._round(run)
            yield events

    def __deepcopy__(self, memo: object) -> "Engine":
        return self.__reduce__()

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: also for pickle."""
        raise TypeError("Engine: the keys, values and compiled passes of an engine cannot be copied or pickled; copy "
                        "its model and make another: Engine(copy.deepcopy(model), ...)")  # fmt: skip

    def __copy__(self) -> "Engine":
        """Another engine on the same target, proposer and slots."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    @torch.inference_mode()
    def _round(self, run: Run) -> list[Event]:
        """One round of the active rows: propose, pass, verify, commit."""
        with run.stats.clock("draft"):
            round = self._turn(run)
            proposal = self.propose(round)
        with run.stats.clock("target"):
            found = self.read(round, proposal)
        with run.stats.clock("verify"):
            settled = round.settle(found.logits, proposal)
            states = kept(self.target, round.texts, round.sent["read"], found.states, settled.path)
            table = settled.table.tolist()  # the round's one read
        with run.stats.clock("other"):
            events, valid = self._commit(run, round, proposal, found, settled, table)
            if run.proposer:
                run.proposer.commit(Outcome(valid, settled.table[:, 0], states, settled.path))
            if self.record:
                self.record.note(run.active, round.starts, proposal, table)
            self.slots.leave(run)
            return events

    def _turn(self, run: Run) -> DecodingRound:
        target, k = self.target, run.lengths(self.policy)
        round = DecodingRound(
            run.active, k, self.rule, run.noise, target.vocabulary, target.device, run.batch, self.replays,
            self.record is not None,
        )  # fmt: skip
        run.batch = round.batch
        return round

    def propose(self, round: DecodingRound) -> Proposal:
        """The proposer's drafts, on the target's device."""
        if not self.proposer or not max(round.k):
            round.send([0] * len(round.k))
            nothing = torch.empty(len(round.k), 0, dtype=torch.int64, device=self.target.device)
            return Proposal(nothing, None, [0] * len(round.k))
        x, q, k, tree = self.proposer.propose(round)
        self.rule.require(self.proposer, tree)
        if tree is not None and tree.shape is None:  # paths that the host does not know: such rows draft nothing
            k = [0 if reads else length for reads, length in zip(round.reads_history, k, strict=True)]
        if x.device.type == "cpu" != self.target.device.type:
            round.send(k, x=x.tolist())  # with all else that goes to the device, where nothing was sent yet
            x = round.sent["x"]
        round.send(k)
        return Proposal(x.to(self.target.device), q if q is None else q.to(self.target.device), k, tree)

    def read(self, round: DecodingRound, proposal: Proposal) -> Pass:
        """The target's pass: logits (A, N+1, V) after each row's anchor and after each draft, and the states that the
        proposer reads."""
        start, anchor, x = [len(text) - 1 for text in round.texts], round.sent["anchor"], proposal.x
        if min(proposal.k) < x.shape[1]:  # behind its drafts a row reads what it has read, which leaves no NaN
            drafted = torch.arange(x.shape[1], device=x.device) < round.length(proposal.k).unsqueeze(1)
            x = torch.where(drafted, x, anchor)
        reads = self.proposer.reads if self.proposer else ()
        return self.target.forward(torch.cat([anchor, x], 1), start, at=round.sent["read"], states=reads,
                                   tree=proposal.tree)  # fmt: skip

    def _commit(
        self, run: Run, round: DecodingRound, proposal: Proposal, found: Pass, settled: Settled, table: list[list[int]]
    ) -> tuple[list[Event], list[int]]:
        """Each row takes its tokens; what of its text agrees with what is stored. table: of `settled`."""
        events, valid = [], []
        for slot, (row, (n, token, k, lost, stains, refused, *draft)) in enumerate(zip(run.active, table, strict=True)):
            before, doubtful = len(row.text), row.stained or proposal.k[slot] > 0
            row.stained |= bool(stains) or (proposal.tree is None and k < proposal.k[slot])
            taken = len(row.take(draft[:n] if lost else [*draft[:n], token]))
            drafted = min(k, taken) if row.finish else k  # drafts beyond a row's last token do not count
            if lost and not row.finish:
                self.slots.without_probs(
                    slot, row, doubtful, partial(round.reason, slot, found.logits, settled.path, n)
                )
            run.stats.count(row.index, taken, drafted, min(taken, n))
            kinds = ["drafted"] * n + ["corrected" if refused else "bonus"]
            if taken:
                events.append(Event(row.index, row.text[before:], kinds[:taken]))
            valid.append(0 if row.finish and row.stained else before + n)
        return events, valid
