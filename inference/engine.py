"""Speculative decoding of many rows at once. Each round has four steps: propose, target pass, verify, commit.

row           a prompt and the tokens that follow it so far
slot          the storage of a row's keys and values; active rows use slots 0, 1, ... without a gap (see `scheduler`)
anchor        a row's last token: part of its text, not yet read by the target
distribution  the probability of each next token under a row's sampling settings: p is the target's, q the draft's
draft         a token x that the proposer drew from q
proposal      the drafts of a round with their distributions; they form a chain or a tree, with k drafts per row
target pass   one forward of the target over the anchors and all drafts; it gives p after each of them
verification  the number of accepted drafts per row, and the distribution of the one token that follows them
correction    the token that follows the accepted drafts if a draft was rejected; otherwise it is called the bonus
commit        the accepted drafts and the token after them are appended to the text
rollback      the keys and values of rejected drafts lie past the row's length, so they are masked and later
              overwritten; the accepted path of a tree is moved next to the anchor (`Engine.rollback`)
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from inference.drafts.bundled_target import resolve
from inference.models.cache import spare_slots
from inference.models.lm import LM
from inference.models.passes import ALONE, Pass, States
from inference.models.pretrained import load_model
from inference.models.replay import replay_of
from inference.output import Event, Logprobs, Output, RequestError
from inference.policy import Fixed, LearningPolicy, Policy
from inference.proposers.base import Outcome, Proposal, Proposer
from inference.request import Prompt, PromptReader, ends_of, pads_of, single, source_limits, vocabulary_of
from inference.round import DecodingRound
from inference.sampling import Sampling, up_to
from inference.sampling.parameters import is_whole
from inference.scheduler import Call, Slots
from inference.trace import RoundRecorder
from inference.verification import RoundResult, reason, verify
from inference.verify.rules import Rule, rule_of


class Engine:
    """An engine for speculative decoding of many rows at once. The distribution of its text is exactly the target's.

    target: a transformers causal LM, an encoder-decoder (T5, BART, Marian, Whisper and models built like them) or a
    PEFT model of one of these, used unchanged; or a path or hub id to load. dtype: dtype of a target that is loaded;
    None for the checkpoint's dtype, or float32 on a CPU that would emulate it. device: device of a target that is
    loaded; None for the CPU. The engine reads only the end tokens of the target's generation_config; `Sampling.of`
    reads its sampling settings. proposer: makes the drafts; None for plain decoding by the same code. verify: a name of
    `verify.rules.RULES`, or a custom rule. policy: chooses the draft length of each row in each round. tokenizer:
    encodes and decodes text; None for the one at the target's path, or for prompts as ids only. rows: number of prompts
    that are decoded together; other prompts wait (see `scheduler`). context: the largest number of tokens per row,
    prompt included; None for the target's own. graphs: whether rounds are recorded as CUDA graphs on a GPU (see
    `models.replay`). record: receives the rounds of each call, with p, q and u of each draft (see `report.replay`).
    template: arguments of the chat template that renders messages, such as enable_thinking.

    A row ends with finish "error" if its next token has no distribution. The causes: its settings allow no token, one
    of its processors raises, or the target's logits are NaN or infinite. Other rows continue.

    Several engines may share one proposer if their calls run one after the other. Threads: calls of all engines of a
    process run one at a time. Other calls may run between the rounds of a stream. If such a call uses the stream's
    slots or proposer, the stream raises RuntimeError. Every call checks whether the models were changed (weights,
    adapters, hooks, modules); if they were, the engine decodes as a new engine would. Raises ValueError for an unknown
    rule or an unsupported model.
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
        graphs: bool = True,
        record: RoundRecorder | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        rule = rule_of(verify)
        _require_whole("rows", rows)
        if context is not None:
            _require_whole("context", context)
        for name, value in (
            ("target", target),
            ("proposer", proposer),
            ("policy", policy),
            ("tokenizer", tokenizer),
            ("record", record),
        ):
            if isinstance(value, type):
                raise ValueError(f"{name}: {value.__name__} is a class; give an object, {value.__name__}(...)")
        _require_parts(target, proposer, policy, tokenizer)
        if isinstance(target, str | PathLike):
            path = resolve(fspath(target))
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(path)
            target = load_model(path, dtype, device=device)
        elif dtype is not None or device is not None and torch.device(device).type != target.device.type:
            raise ValueError(
                f"{'dtype' if dtype is not None else 'device'}: a model is used unchanged ({target.dtype} on "
                f"{target.device}); cast or move it first, or give its path"
            )
        self.proposer, self.rule, self.policy, self.tokenizer, self.rows = proposer, rule, policy, tokenizer, rows
        self.record, self.template = record, template or {}
        self._new_target = partial(LM, target, rows, context=context, graphs=graphs, spare=spare_slots(rows))
        self._open()

    def _open(self) -> None:
        """Prepare the target with its present weights, and allocate new slots."""
        self.target = self._new_target(vocabulary=vocabulary_of(self._new_target.args[0], self.tokenizer))
        self.replay = replay_of(self.target.model, self.target.graphs)
        self.ends, self.slots = ends_of(self.target.model), Slots(self.target)
        pads, encoder = pads_of(self.target.model, self.tokenizer), source_limits(self.target.model)
        self.reader = PromptReader(self.target, self.ends, self.tokenizer, pads, encoder, self.template)

    def generate(
        self,
        prompts: Sequence[Prompt] | Mapping[str, Any],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
        seed: int = 0,
        ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        logprobs: int | None | Sequence[int | None] = None,
    ) -> Output:
        """Continue every prompt, and return the new tokens and texts.

        prompts: a list of texts, of token ids (a list, tensor or array per prompt) or of chats (each a list of
        messages: dicts of role and content, which the tokenizer's template renders). It may also be the tokenizer's
        output for several texts; then ids that the attention mask excludes are dropped. Text is encoded by the
        tokenizer, with at most one start token.

        For an encoder-decoder a prompt is a source, in any of these forms, or a processor's output with input_features.
        A dict may also have decoder_input_ids, the first ids of the decoder's text. Without them the text begins with
        the start token and the forced ids of the generation config. `Output.tokens` does not contain these first ids.
        For the sampling settings and the draft, the row's text is the decoder's text.

        max_new_tokens, sampling: one value, or one value per prompt. seed, ids: the key of the random numbers; `ids`
        has one whole number per prompt. By default it has hashes of the prompts, so a prompt gives the same tokens
        alone or in a batch. This holds exactly in float64, and in float32 up to rare rounding; in bfloat16 the text may
        differ, but has the same probabilities (see docs/trust.md). ignore_eos: whether the target's end tokens do not
        end a row; stop strings, stop_ids and lengths still do. `Output.tokens` contains a row's end token,
        `Output.text` does not.

        logprobs: how many of the likeliest tokens `Output.logprobs` has at the position of each new token, beside the
        token's own log-probability under the target, before and after the settings; None for none of it. One value, or
        one per prompt. They come from the passes that verify the drafts, and equal those of plain decoding.

        Raises ValueError before decoding starts: if a prompt has another type, is empty or fills the context; if ids in
        a prompt or in the settings lie outside the vocabulary; or if a list does not have one entry per prompt.
        """
        with ALONE:
            call = self.begin(prompts, max_new_tokens, sampling, seed, ids, ignore_eos, logprobs)
            for _ in self.rounds(call):
                pass
        rows = call.rows
        texts = [str(self.tokenizer.decode(row.shown)) for row in rows] if self.tokenizer else None
        finish = [row.finish or "length" for row in rows]
        logprobs_of = [None if row.top is None else row.logprobs for row in rows]
        return Output([row.new for row in rows], texts, finish, call.stats, [row.error for row in rows], logprobs_of)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        seed: int = 0,
        ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
    ) -> Iterator[Event]:
        """Yield the events of one prompt, as each round ends. prompt: one text, list of ids or chat. The other
        arguments have the meaning that they have in `generate`, for this one prompt.

        Raises ValueError as `generate` does. Raises RuntimeError if a later call has taken the stream's slots or
        proposer. Raises RequestError, after the events so far, if the row ends with an error.
        """
        call = self.begin(single(prompt), max_new_tokens, sampling, seed, ids, ignore_eos, logprobs)
        for events in self.rounds(call):
            yield from events
        if call.rows[0].error:
            raise RequestError(f"Engine.stream: {call.rows[0].error}")

    def starts(self, prompts: Sequence[Prompt] | Mapping[str, Any]) -> list[list[int]]:
        """Return, for each prompt, the ids that its text begins with: the prompt's own ids, or the first ids of the
        decoder's text, which carry the prompt as their source. `generate` accepts these ids in place of the prompts.
        Used by checks of texts."""
        return self.reader.texts(prompts)

    def begin(
        self,
        prompts: Sequence[Prompt] | Mapping[str, Any],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling],
        seed: int = 0,
        ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        logprobs: int | None | Sequence[int | None] = None,
    ) -> Call:
        """Start a call, and return it; `rounds` then decodes it. The call takes over the slots, so an earlier call
        cannot continue. All arguments have the meaning that they have in `generate`.

        Raises ValueError as `generate` does, and RuntimeError if a round of this engine is running.
        """
        if not is_whole(seed, -(2**63), 2**64):
            raise ValueError(f"seed must be a whole number from -2**63 to 2**64 - 1, not {seed!r}")
        with ALONE:
            if self.slots.busy:
                raise RuntimeError(
                    "Engine: a processor, policy or recorder of this engine called the engine during a round; let it "
                    "call another engine, with another proposer"
                )
            if self.target.stale:
                self._open()
            rows = self.reader.requests(prompts, max_new_tokens, sampling, ids, ignore_eos, logprobs)
            if self.record:
                self.record.begin(self.rule.name, rows)
            call = self.slots.begin(rows, self.proposer, seed)
            call.decisions = self.policy.begin() if self.proposer and isinstance(self.policy, LearningPolicy) else None
            return call

    def rounds(self, call: Call) -> Iterator[list[Event]]:
        """Decode round by round until every row of the call has ended, and yield the events of each round. Rows that
        end free their slots for rows that wait."""
        while call.waiting or call.staged or call.active:
            with ALONE:  # not while the caller has the events
                self.slots.require(call)
                self.slots.busy = True
                try:
                    self.slots.admit(call)
                    events = self._round(call)
                finally:
                    self.slots.busy = False
            yield events

    @torch.inference_mode()
    def _round(self, call: Call) -> list[Event]:
        """Run one round of the active rows of a call (propose, target pass, verify, commit), and return its events."""
        target, traced = self.target, self.record is not None
        with call.stats.clock("draft"):
            k = call.lengths(self.policy)
            round = DecodingRound(
                call.active, k, self.rule, call.noise, target.vocabulary, target.device, call.batch, call.decisions
            )
            call.batch = round.batch
            proposal = self.propose(round)
        with call.stats.clock("target"):
            logits, states = self.target_pass(round, proposal)
        with call.stats.clock("verify"):
            top = max((row.top for row in call.active if row.top is not None), default=None)
            result = verify(self.replay, round, logits, proposal, round.length(proposal.k), traced, top)
            states = self.rollback(round, states, result.path)
            table = result.table.tolist()  # the one read from the device
        with call.stats.clock("other"):
            events, valid = self._commit(call, round, proposal, logits, result, table)
            if call.proposer:
                call.proposer.commit(Outcome(valid, result.table[:, 0], states, result.path))
            if self.record:
                self.record.note(call.active, round.starts, proposal, table)
            self.slots.leave(call)
            return events

    def propose(self, round: DecodingRound) -> Proposal:
        """Return the drafts that the proposer makes for the round, on the target's device. Without a proposer, or if
        every draft length is 0, the proposal has no drafts.

        Raises ValueError if the rule cannot verify these drafts, or if an adaptive policy meets a tree.
        """
        if not self.proposer or not max(round.k):
            round.send([0] * len(round.k))
            return Proposal.empty([0] * len(round.k), self.target.device)
        x, q, k, tree = self.proposer.propose(round)
        self.rule.require(self.proposer, tree)
        if round.decisions:
            if tree is not None:
                raise ValueError(
                    f"policy: {type(self.policy).__name__} chooses lengths of chains, but this "
                    f"{type(self.proposer).__name__} drafts trees; make the proposer without shape="
                )
            most = next((depth + 1 for depth in range(x.shape[1] - 1) if not round.goes_on(depth)), x.shape[1])
            x, q, k = x[:, :most], q if q is None else q[:, :most], [min(length, most) for length in k]
        if x.device.type == "cpu" != self.target.device.type:
            round.send(k, x=x.tolist())  # in the round's one copy, if nothing was sent yet
            x = round.sent["x"]
        round.send(k)
        return Proposal(x.to(self.target.device), q if q is None else q.to(self.target.device), k, tree)

    def target_pass(self, round: DecodingRound, proposal: Proposal) -> Pass:
        """Run one forward of the target over the anchors and all drafts of `proposal`. Returns logits (A, N+1, V),
        after each row's anchor (column 0) and after each of its drafts, and the hidden states that the proposer reads:
        (A, N+1, width) by layer, with the same columns."""
        start, anchor, x = [len(text) - 1 for text in round.texts], round.sent["anchor"], proposal.x
        if min(proposal.k) < x.shape[1]:  # columns past a row's k repeat its anchor, so they have no NaN
            drafted = up_to(round.length(proposal.k), x.shape[1])
            x = torch.where(drafted, x, anchor)
        reads = self.proposer.reads if self.proposer else ()
        return self.target.forward(
            torch.cat([anchor, x], 1), start, at=round.sent["read"], states=reads, tree=proposal.tree
        )

    def rollback(self, round: DecodingRound, states: States, path: Tensor | None) -> States:
        """Roll back the rejected drafts. Return the states (A, D+1, width) of the anchor and of the accepted drafts, by
        layer.

        states: the target pass's states, (A, N+1, width) by layer. path (A, D): the accepted nodes of a tree, or None
        for a chain. For a chain nothing moves, and `states` is returned unchanged: keys and values past a row's length
        are masked and later overwritten. For a tree, the keys and values of the path are moved to the positions after
        the anchor.
        """
        if path is None:
            return states
        columns = torch.nn.functional.pad(path.clamp(min=0) + 1, (1, 0)).unsqueeze(-1)  # of the anchor and the path
        along = {layer: part.gather(1, columns.expand(-1, -1, part.shape[-1])) for layer, part in states.items()}
        # after the states were gathered, since the move may overwrite them
        self.target.keep([len(text) - 1 for text in round.texts], path, at=round.sent["read"])
        return along

    def _commit(
        self,
        call: Call,
        round: DecodingRound,
        proposal: Proposal,
        logits: Tensor,
        result: RoundResult,
        table: list[list[int]],
    ) -> tuple[list[Event], list[int]]:
        """Append each row's new tokens to its text. Returns the events, and for each row the number of its tokens whose
        keys and values are valid in the slot.

        round: the round that ends. proposal: its drafts. logits (A, N+1, V): of the target pass. result: the
        verification's result. table: `result.table` as lists on the host.
        """
        events, valid, drafts = [], [], []
        lines = zip(call.active, table, strict=True)
        logprobs: Any = None if result.logprobs is None else result.logprobs.tolist()
        for slot, (row, (n, token, k, missing, stains, rejected, *draft)) in enumerate(lines):
            before, doubtful = len(row.text), row.stained or call.proposer is not None
            row.stained |= bool(stains) or (proposal.tree is None and k < proposal.k[slot])
            new = row.take(draft[:n] if missing else [*draft[:n], token])
            emitted = len(new)
            drafted = min(k, emitted) if row.finish else k  # drafts beyond a row's last token do not count
            if missing and not row.finish:
                why = partial(reason, round, slot, logits, result.path, n)
                self.slots.retry_or_fail(slot, row, doubtful, why)
            call.stats.count(row.index, emitted, drafted, min(emitted, n))
            drafts.append((drafted, min(emitted, n)))
            measured = None if row.top is None else Logprobs.of_round(logprobs[slot], emitted, row.top)
            if measured:
                row.logprobs.extend(measured)
            if emitted:
                last = "drafted" if emitted <= n else "corrected" if rejected else "bonus"
                events.append(Event(row.index, new, ["drafted"] * (emitted - 1) + [last], measured))
            valid.append(0 if row.finish and row.stained else before + n)
        if call.decisions:
            call.decisions.close(drafts)
        return events, valid

    def __copy__(self) -> "Engine":
        """Return another engine that shares this one's target, proposer and slots."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: object) -> "Engine":
        return self.__reduce__()

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, so that `copy.deepcopy` and pickle fail with a clear message."""
        raise TypeError(
            "Engine: an engine cannot be copied or pickled, because of its keys, values and CUDA graphs; copy "
            "its model and make another engine: Engine(copy.deepcopy(model), ...)"
        )


def _require_whole(name: str, value: Any) -> None:
    if not is_whole(value, 1):
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def _require_parts(target: Any, proposer: Any, policy: Any, tokenizer: Any) -> None:
    if isinstance(target, str | PathLike):
        place = Path(target)
        if (place.is_absolute() or fspath(target).startswith(".")) and not place.exists():
            raise ValueError(f"target: there is no folder {target}; give an existing folder, or a hub id")
    elif not hasattr(target, "config"):
        raise ValueError(f"target must be a model, a folder or a hub id, not {target!r}")
    if isinstance(proposer, str | PathLike):
        raise ValueError(
            f"proposer must be an object, not the path of a draft folder: inference.load({fspath(proposer)!r}) makes "
            "the engine of that folder"
        )
    if proposer is not None and not hasattr(proposer, "propose"):
        raise ValueError(
            f"proposer: a {type(proposer).__name__} is no proposer; give "
            "inference.proposers.Independent(model) for a draft model"
        )
    if not hasattr(policy, "lengths"):
        raise ValueError(
            f"policy: {policy!r} has no method lengths; give a policy, such as inference.policy.Fixed(4) for four "
            "drafts"
        )
    if isinstance(tokenizer, str | PathLike):
        raise ValueError(
            f"tokenizer must be an object, not a path; give AutoTokenizer.from_pretrained({fspath(tokenizer)!r})"
        )
