"""What is measured: a pair of models, its regime, its rule, and the sizes of the benchmark."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.config.groups import Bench
from cotrain.data.corpora import shipped_ids
from cotrain.data.splits import Prompts, apart
from cotrain.students.base import DEFAULT, Student, student_class
from inference import Engine, Sampling
from inference.drafts.draft_folder import PlannedTree
from inference.measure.costs import RealRound
from inference.models.lm import takes_int8
from inference.models.pretrained import cast, widened
from inference.policy import Fixed
from inference.proposers.base import Proposer


class CompiledParts(NamedTuple):
    """Which parts run compiled: the target of plain decoding, the target of rounds, the draft."""

    plain: bool = False
    target: bool = False
    draft: bool = False


@dataclass(frozen=True)
class Plan:
    """What is measured, and the engines and prompts that measure it."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel
    sampling: Sampling
    verify: str
    bench: Bench
    names: tuple[str, str]  # of target and draft, to print
    objective: str = "sampled"  # how it drafts; "greedy": its likeliest tokens
    compiled: CompiledParts = CompiledParts()
    given: Prompts | None = None  # None: the shipped prompts
    kind: str = DEFAULT  # of draft
    known: dict[int, RealRound] = field(default_factory=dict)  # by draft length, of one shape of draft: measured once
    tree: PlannedTree | None = None  # drafted in place of a chain; before it is measured, one to consider

    @cached_property
    def served(self) -> PreTrainedModel:
        """The draft as it will be served: itself if dtype and mode are right already, else a copy."""
        wanted = self.bench.draft_dtype
        dtype = self.draft.dtype if wanted == "auto" else getattr(torch, wanted)
        if self.draft.dtype == dtype and not self.draft.training:
            return self.draft
        return cast(copy.deepcopy(self.draft).eval(), dtype)

    @cached_property
    def int8(self) -> bool:
        return self.bench.draft_int8 and takes_int8(self.served)

    @cached_property
    def running(self) -> PreTrainedModel:
        """The served draft's numbers, in float32 if this machine would emulate their dtype; the 8-bit kernel does
        not."""
        return self.served if self.int8 else widened(self.served, copied=True)

    def student(self, network: PreTrainedModel) -> Student:
        """A student of the draft's kind with other weights."""
        return student_class(self.kind)(network, self.target)

    def proposer(self, counted: bool = False) -> Proposer:
        """The proposer that serves the draft. counted: for counts alone, which are not worth compiling on a CPU."""
        compile = None if counted else self.compiled.draft
        greedy, shape = self.objective == "greedy", {}
        if self.tree is not None:
            greedy, shape = greedy or self.tree.likeliest, {"shape": self.tree.parents}
        return self.student(self.running).proposer(greedy=greedy, compile=compile, int8=self.int8, **shape)

    @cached_property
    def depths(self) -> list[int]:
        """Draft lengths to choose from: those of bench.depths that the draft reaches, or else its longest."""
        most = self.proposer(counted=True).depths or inf
        return [k for k in self.bench.depths if k <= most] or [int(most)]

    def engine(self, k: int, rows: int | None = None, proposer: Proposer | None = None) -> Engine:
        """The speculative engine. k: drafts of a round, of trees the levels. rows: for counts alone, so many at a time.
        proposer: another one, of chains."""
        rule = self.tree.rule if self.tree and proposer is None else self.verify
        return Engine(self.target, proposer or self.proposer(bool(rows)), verify=rule, policy=Fixed(k),
                      tokenizer=self.tokenizer, rows=rows or self.bench.rows,
                      compile=None if rows else self.compiled.target)  # fmt: skip

    def plain(self, rows: int | None = None) -> Engine:
        """The engine that decodes without a draft."""
        compile = None if rows else self.compiled.plain
        return Engine(self.target, tokenizer=self.tokenizer, rows=rows or self.bench.rows, compile=compile)

    @cached_property
    def prompts(self) -> Prompts:
        return self.given or apart(*shipped_ids(self.tokenizer, self.bench.prompt_tokens), [], "shipped")

    def ranking(self, first: int, count: int) -> list[list[int]]:
        """Prompts `first`, `first` + 1, ... of those that rank checkpoints and draft lengths; they repeat when they run
        out."""
        return _repeated(self.prompts.ranking, first, count)

    def final(self, first: int, count: int) -> list[list[int]]:
        """The same of the prompts that time and check the exported draft."""
        return _repeated(self.prompts.final, first, count)


def _repeated(prompts: Sequence[list[int]], first: int, count: int) -> list[list[int]]:
    return [prompts[(first + i) % len(prompts)] for i in range(count)]
