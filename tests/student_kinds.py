"""Students of every kind that tests can afford, each beside its target: a new kind adds a line."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from cotrain.students import early_exit
from cotrain.students.base import LAST, Guess, Seen, Student
from cotrain.students.block import BlockStudent
from cotrain.students.conditioned import ConditionedStudent
from cotrain.students.eagle import EagleStudent
from cotrain.students.heads import HydraStudent, MedusaStudent
from cotrain.students.independent import IndependentStudent
from cotrain.students.parallel import ParallelStudent, PEagleStudent
from cotrain.students.retrieval import HybridExitStudent, HybridStudent
from cotrain.teacher.target_model import halves
from tests import kinds
from tests.kinds import masked
from tests.tiny import near, tiny

VOCABULARY = 32


class HeadsConfig(PretrainedConfig):
    model_type = "heads"

    def __init__(self, width: int = 16, depths: int = 3, **other: Any) -> None:
        super().__init__(**other)
        self.width, self.depths = width, depths


class HeadsNetwork(PreTrainedModel):
    """A residual block a depth (Cai et al. 2024, 2401.10774)."""

    config_class = HeadsConfig

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.depths))
        self.post_init()


class Heads(Student):
    """Heads on the target's last state, each with the target's own output layer. The newest state at a round's start is
    that of the token before the anchor: the guess of depth j at place t is made from the state at place t - 1 - j."""

    kind = "heads"

    @property
    def head(self) -> Any:
        return halves(self.target, self.vocabulary)[1]

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        states = seen.states[LAST]
        places = torch.arange(states.shape[0] * states.shape[1]).view(states.shape[:2])
        return [self._guess(depth, states[:, : -1 - depth], places[:, 1 + depth :]) for depth in range(self.depths)]

    @property
    def depths(self) -> int:
        return int(self.network.config.depths)

    def _guess(self, depth: int, states: Tensor, places: Tensor) -> Guess:
        block = self.network.blocks[depth]
        made = states + nn.functional.silu(block(states))
        return Guess(depth, places.flatten(), made.flatten(0, 1), self.head)

    @classmethod
    def load(cls, folder: Path, target: PreTrainedModel | None, vocabulary: int | None = None) -> "Heads":
        return cls(HeadsNetwork.from_pretrained(folder, dtype=torch.float32), target, vocabulary)


def independent(target: LlamaForCausalLM, *small: Any) -> Student:
    """small: the tokens and the rank of a small head."""
    return IndependentStudent(kinds.small(near(target, 0.3), *small) if small else near(target, 0.3), target)


def heads(target: LlamaForCausalLM) -> Any:
    torch.manual_seed(5)
    network = HeadsNetwork(HeadsConfig()).double()
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.3)
    return Heads(network, target)


def hybrid(target: LlamaForCausalLM) -> Student:
    network = near(target, 0.3)
    network.config.lookup = {"shortest": 2, "datastore": None}
    return HybridStudent(network, target)


def hybrid_exit(target: LlamaForCausalLM) -> Student:
    network = kinds.exit_network(target)
    network.config.lookup = {"shortest": 2, "datastore": None}
    return HybridExitStudent(network, target)


def of(student: Callable[..., Student], network: Callable[..., Any], **settings: Any) -> Callable[..., Student]:
    """Makes a student of a network that is farther from the target than those of proposers."""
    return lambda target: student(network(target, 0.3, **settings), target)


class HeadNetwork(PreTrainedModel):
    config_class = HeadsConfig

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.post_init()


def example(target: LlamaForCausalLM) -> Any:
    """The student of CONTRIBUTING.md."""
    found = dict(kinds.example())
    (code,) = re.findall(r"```python\n(# cotrain/.*?)```", kinds.CONTRIBUTING.read_text(encoding="utf-8"), re.S)
    assert len((kinds.example_code() + code).splitlines()) <= 60
    exec(compile(code, str(kinds.CONTRIBUTING), "exec"), found)

    class Loaded(found["NextHeadStudent"]):  # type: ignore[misc]
        @classmethod
        def load(cls, folder: Path, target: Any, vocabulary: int | None = None) -> Any:
            return cls(HeadNetwork.from_pretrained(folder, dtype=torch.float32), target, vocabulary)

    torch.manual_seed(6)
    network = HeadNetwork(HeadsConfig()).double()
    with torch.no_grad():
        network.head.weight.copy_(0.5 * target.lm_head.weight)
    return Loaded(network, target)


def parallel(target: LlamaForCausalLM, *small: Any) -> Student:
    """small: the tokens and the rank of a small head."""
    network = masked(target, 0.3)
    return ParallelStudent(kinds.small(network, *small) if small else network, target)


STUDENTS: dict[str, Callable[[LlamaForCausalLM], Any]] = {
    "independent": independent,
    "independent, pruned": lambda target: independent(target, 16),
    "independent, low rank": lambda target: independent(target, None, 5),
    "conditioned": of(ConditionedStudent, kinds.conditioned_near),
    "parallel": parallel,
    "parallel, pruned": lambda target: parallel(target, 16),
    "parallel, low rank": lambda target: parallel(target, None, 5),
    "parallel, low rank, pruned": lambda target: parallel(target, 16, 5),
    "parallel, markov": lambda target: ParallelStudent(kinds.chained(masked(target, 0.3)), target),
    "parallel, markov, pruned": lambda target: ParallelStudent(
        kinds.chained(kinds.small(masked(target, 0.3), 16)), target
    ),
    "heads": heads,
    "example": example,
    "hybrid": hybrid,
    "hybrid_exit": hybrid_exit,
    "eagle": of(EagleStudent, kinds.eagle),
    "eagle, pruned": of(EagleStudent, kinds.eagle, draft_vocab_size=16),
    "eagle, low rank": of(EagleStudent, kinds.eagle, head_rank=5),
    "p_eagle": of(PEagleStudent, kinds.p_eagle),
    "p_eagle, pruned": of(PEagleStudent, kinds.p_eagle, draft_vocab_size=16),
    "p_eagle, low rank, pruned": of(PEagleStudent, kinds.p_eagle, draft_vocab_size=16, head_rank=5),
    "p_eagle, markov": of(PEagleStudent, kinds.p_eagle, markov_rank=3),
    "block": of(BlockStudent, kinds.block),
    "block, causal": of(BlockStudent, kinds.block, causal=True, markov_rank=3),
    "block, pruned": of(BlockStudent, kinds.block, draft_vocab_size=16, markov_rank=3, head_rank=5),
    "block, target's head": of(BlockStudent, kinds.block, target_head=True, markov_rank=3),
    "medusa": of(MedusaStudent, kinds.medusa),
    "medusa, markov": of(MedusaStudent, kinds.medusa, markov_rank=3),
    "hydra": of(HydraStudent, kinds.hydra),
    "early_exit": lambda target: early_exit.EarlyExitStudent(kinds.exit_network(target), target),
    "early_exit, 4 bits": lambda target: early_exit.EarlyExitStudent(kinds.exit_network(target, bits=4), target),
}
SERVED = [
    kind for kind in STUDENTS if kind not in ("heads", "hybrid", "hybrid_exit")
]  # those that tests can run in an engine


def target() -> LlamaForCausalLM:
    return tiny(VOCABULARY)
