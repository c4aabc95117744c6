"""Students of every kind that tests can afford, each beside its target: a new kind adds a line."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from cotrain.students.base import LAST, Guess, Seen, Student
from cotrain.students.independent import Independent
from cotrain.students.parallel import Parallel
from cotrain.teacher.target_model import halves
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


class Heads:
    """Heads on the target's last state, each with the target's own output layer. The newest state at a round's start is
    that of the token before the anchor: the guess of depth j at place t is made from the state at place t - 1 - j."""

    kind = "heads"
    reads: tuple[int, ...] = ()

    def __init__(self, network: PreTrainedModel, target: PreTrainedModel | None, vocabulary: int | None = None) -> None:
        assert target is not None
        self.network, self.target, self.vocabulary = network, target, vocabulary
        self.head = halves(target, vocabulary)[1]

    def of(self, network: PreTrainedModel) -> "Heads":
        return Heads(network, self.target, self.vocabulary)

    def refuse(self) -> None: ...

    def keeps_apart(self) -> bool:
        return True  # it reads no text but through the target

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
        return Guess(depth, places.flatten().to(states.device), made.flatten(0, 1), self.head)

    def save(self, folder: Path) -> None:
        self.network.save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path, target: PreTrainedModel | None, vocabulary: int | None = None) -> "Heads":
        return cls(HeadsNetwork.from_pretrained(folder, dtype=torch.float32), target, vocabulary)


def independent(target: LlamaForCausalLM) -> Student:
    return Independent(near(target, 0.3), target)


def heads(target: LlamaForCausalLM, depths: int = 3) -> Any:
    torch.manual_seed(5)
    network = HeadsNetwork(HeadsConfig(16, depths)).double()
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.3)
    return Heads(network, target)


def parallel(target: LlamaForCausalLM) -> Student:
    return Parallel(masked(target, 0.3), target)


STUDENTS: dict[str, Callable[[LlamaForCausalLM], Any]] = {
    "independent": independent,
    "parallel": parallel,
    "heads": heads,
}
SERVED = ("independent", "parallel")  # those that tests can run in an engine


def target() -> LlamaForCausalLM:
    return tiny(VOCABULARY)
