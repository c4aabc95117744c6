"""The input of a measurement: target and draft, regime, verification rule, and the sizes of the benchmark."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.config.groups import Bench
from cotrain.data.corpora import shipped_ids
from cotrain.data.splits import Prompts, apart
from cotrain.rollout.training_texts import start_of
from cotrain.students.base import DEFAULT, Student, student_class
from cotrain.students.independent import shares_encoder
from inference import Engine, Sampling
from inference.drafts.draft_folder import PlannedTree
from inference.measure.arms import Arm, engine_arm
from inference.measure.costs import RealRound
from inference.models import packing
from inference.models.pretrained import widened
from inference.policy import Fixed
from inference.proposers.base import Proposer
from inference.proposers.eagle import FeatureNetwork
from inference.source import SourcedText


@dataclass(frozen=True)
class Plan:
    """A target and a draft to measure. Its methods return the engines and prompts that a measurement uses."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel
    sampling: Sampling
    verify: str
    bench: Bench
    names: tuple[str, str]  # of target and draft, for messages and the report
    objective: str = "sampled"  # "sampled": drafts are drawn from q; "greedy": the likeliest tokens are drafted
    given: Prompts | None = None  # None: the shipped prompts
    kind: str = DEFAULT  # the draft's
    known: dict[int, RealRound] = field(default_factory=dict)  # rounds by draft length, shared by all checkpoints
    planned: int | None = None  # the draft length to measure; None: the fastest of bench.depths
    adapter: str | None = None  # the target's, for the report
    graphs: bool = True  # whether a GPU records rounds as CUDA graphs
    tree: PlannedTree | None = None  # drafted instead of a chain; `measure` compares it with the best chain first

    @cached_property
    def served(self) -> PreTrainedModel:
        """Return the draft in eval mode, in the dtype bench.draft_dtype. It is a copy unless the draft is already in
        eval mode and in this dtype. A draft that uses the target's encoder keeps its own dtype if a conversion would
        change the encoder's weights, because it could then no longer use the target's."""
        wanted = self.bench.draft_dtype
        dtype = self.draft.dtype if wanted == "auto" else getattr(torch, wanted)
        if self.draft.dtype == dtype and not self.draft.training:
            return self.draft
        rounded = student_class(self.kind).cast(copy.deepcopy(self.draft).eval(), dtype)
        if shares_encoder(self.draft, self.target) and not shares_encoder(rounded, self.target):
            return copy.deepcopy(self.draft).eval()
        return rounded

    @cached_property
    def int8(self) -> bool:
        return self.bench.draft_int8 is not False and student_class(self.kind).takes_int8(self.served)

    @cached_property
    def running(self) -> PreTrainedModel:
        """Return the served draft as this machine runs it. It is converted to float32 if the CPU would emulate its
        dtype, or if it is a draft over states that `kernels.cpp` serves."""
        return (packing.widened_draft if isinstance(self.served, FeatureNetwork) else widened)(self.served, copied=True)

    def batched(self, rows: int) -> "Plan":
        """Return a copy of the plan for `rows` texts decoded at once, with the same served draft."""
        bench = copy.copy(self.bench)
        bench.rows = rows
        return replace(self, draft=self.served, bench=bench)

    def student(self, network: PreTrainedModel) -> Student:
        """Return the student for the draft's kind, with `network` as its model."""
        return student_class(self.kind)(network, self.target)

    def proposer(self) -> Proposer:
        """Return the proposer that serves the draft."""
        greedy, shape = self.objective == "greedy", {}
        if self.tree is not None:
            greedy, shape = greedy or self.tree.likeliest, {"shape": self.tree.parents}
        return self.student(self.running).proposer(greedy=greedy, int8=self.int8, **shape)

    @property
    def rule(self) -> str:
        """Return the verification rule: the tree's if a tree is drafted, otherwise `verify`."""
        return self.tree.rule if self.tree else self.verify

    @cached_property
    def depths(self) -> list[int]:
        """Return the draft lengths to choose from: the planned one if there is one, otherwise those in bench.depths
        that the draft supports, or else its longest. A planned length is cut to the draft's longest. If the proposer
        shortens its rounds itself, it is the longest of bench.depths."""
        proposer = self.proposer()
        most = proposer.depths or inf
        if self.planned:
            return [int(min(self.planned, most))]
        lengths = [k for k in self.bench.depths if k <= most] or [int(most)]
        return [max(lengths)] if proposer.shortens else lengths

    def engine(self, k: int, rows: int | None = None, proposer: Proposer | None = None) -> Engine:
        """Return the speculative engine.

        k: draft length, or the number of levels of a tree. rows: how many texts are decoded at once; None for
        bench.rows. proposer: drafts chains in place of the plan's own proposer; None for the plan's own.
        """
        rule = self.rule if proposer is None else self.verify
        return Engine(
            self.target,
            proposer or self.proposer(),
            verify=rule,
            policy=Fixed(k),
            tokenizer=self.tokenizer,
            rows=rows or self.bench.rows,
            graphs=self.graphs,
        )

    def plain(self, rows: int | None = None) -> Engine:
        """Return the engine that decodes without a draft. rows: how many texts are decoded at once; None
        for bench.rows."""
        return Engine(self.target, tokenizer=self.tokenizer, rows=rows or self.bench.rows, graphs=self.graphs)

    def arms(self, engines: Mapping[str, Engine], sampling: Sampling | None = None) -> list[Arm]:
        """Return one arm of a timing for each engine. engines: by the arm's name. sampling: the arms' regime; None for
        the plan's."""
        new_tokens = self.bench.new_tokens
        return [engine_arm(name, engine, sampling or self.sampling, new_tokens) for name, engine in engines.items()]

    @cached_property
    def prompts(self) -> Prompts:
        if self.given:
            return self.given
        encoder = self.target.config.is_encoder_decoder
        return apart(*shipped_ids(self.tokenizer, self.bench.prompt_tokens, encoder), [], "shipped")

    def ranking(self, first: int, count: int) -> list[list[int]]:
        """Return `count` ranking prompts from number `first` (0-based) on, as token ids; after the last prompt, the
        first follows. For an encoder-decoder, a prompt is the first ids of the decoder's text, and has the encoder
        input as an attribute."""
        return self._read(self.prompts.ranking, first, count)

    def final(self, first: int, count: int) -> list[list[int]]:
        """Return `count` final prompts, on which the exported draft is timed and checked, from number `first` (0-based)
        on, as token ids; after the last prompt, the first follows. For an encoder-decoder, a prompt is the first ids of
        the decoder's text, and has the encoder input as an attribute."""
        return self._read(self.prompts.final, first, count)

    def _read(self, prompts: Sequence[list[int]], first: int, count: int) -> list[list[int]]:
        chosen, start = [prompts[(first + i) % len(prompts)] for i in range(count)], start_of(self.target)
        return chosen if start is None else [SourcedText(start, tuple(prompt)) for prompt in chosen]
