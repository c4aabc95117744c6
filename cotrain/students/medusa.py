"""Draft heads on the target's last state while they train: Medusa's, each of which sees that state alone.

B texts, T tokens, D width of the target's states, K heads. A round whose newest state is that of token m has anchor
m + 1, and its guess of depth j is at place m + 1 + j. All rounds of all texts are made in one pass over the heads.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import LAST, Guess, Seen, Student, refuse_keys
from cotrain.students.pretrained import network_of
from cotrain.teacher.target_model import halves
from inference.proposers import kind_of

UNUSED = ("width", "intermediate", "head_dim", "kv_heads")  # of drafts that are models of their own


class Medusa(Student):
    """The student of `inference.proposers.medusa` (Cai et al. 2024, 2401.10774), with the target's own head, frozen."""

    kind = "medusa"
    takes = ("depths",)
    network: Any
    target: PreTrainedModel

    def __init__(
        self, network: PreTrainedModel, target: PreTrainedModel | None = None, vocabulary: int | None = None
    ) -> None:
        if target is None:
            raise ValueError(f"draft.kind={self.kind}: heads read the states of a target, and none is given")
        super().__init__(network, target, vocabulary)
        self.head = halves(target, vocabulary)[1]

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Heads that say what the target's own head says (init=scratch or target_layers), or those of a folder."""
        refuse_keys(draft, *UNUSED)
        network = kind_of(cls.kind).network_class
        if init.kind == "pretrained":
            return cast(PreTrainedModel, network_of(draft, target))
        if init.kind not in ("scratch", "target_layers"):
            raise ValueError(f"init.kind: {init.kind!r} is none of scratch, target_layers, pretrained (with "
                             "draft.path=)")  # fmt: skip
        if not draft.depths:
            raise ValueError(f"draft.depths: {draft.kind} heads guess one token each: say how many, as draft.depths=4")
        theirs = target.config.get_text_config()
        made: PreTrainedModel = network(network.config_class(
            hidden_size=theirs.hidden_size, vocab_size=theirs.vocab_size, num_heads=draft.depths,
            num_hidden_layers=draft.layers,
        ))  # fmt: skip
        return made

    def refuse(self) -> None:
        """Raises ValueError for a target of other sizes."""
        self.network.fits(self.target, "draft")

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        rounds = Rounds(batch["ids"], batch.get("position_ids"), self.network.depths)
        made = self.head_states(batch["ids"], seen.states[LAST][:, :-1], rounds.depths)
        return [Guess(depth, *rounds.of(depth, states), self.head) for depth, states in enumerate(made)]

    def head_states(self, ids: Tensor, newest: Tensor, depths: int) -> list[Tensor]:
        """newest (B, T-1, D) -> what the target's head reads at each depth (B, T-1-depth or more, D), by round."""
        found: Tensor = self.network.states(newest.flatten(0, 1), depths)
        return list(found.unflatten(1, newest.shape[:2]))

    def proposer(
        self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False,
        shape: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        proposes: Any = kind_of(self.kind)
        return proposes(self.network, greedy, shape=shape)


class Rounds:
    """The rounds of texts ids (B, T), one for each newest state m; position_ids (B, T) of packed texts: the drafts of a
    round are of its own text. depths: those that some round has."""

    def __init__(self, ids: Tensor, position_ids: Tensor | None, heads: int) -> None:
        every = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        self.positions = every if position_ids is None else position_ids.to(ids.device)
        self.places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        self.depths = min(heads, ids.shape[1] - 1)

    def of(self, depth: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """Flat places (N,) of the guesses of a depth, and their states (N, D) of `states` (B, T-1-depth or more, D), by
        round."""
        ahead = depth + 1
        inside = self.positions[:, ahead:] == self.positions[:, :-ahead] + ahead
        at = self.places[:, ahead:][inside]
        return at.to(states.device), states[:, : inside.shape[1]][inside.to(states.device)]
