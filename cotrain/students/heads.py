"""Draft heads on the target's last hidden state, while they train. Medusa's heads read only this state. Hydra's heads
also read the tokens that earlier heads drafted.

The anchor of a round is the last token of its text. If the target's newest state in a round is that of token m, the
anchor is token m + 1, and the guess at depth j (0-based) is at position m + 1 + j. All rounds of all texts are computed
in one pass over the heads.

B texts, T tokens, D width of the target's states, K heads, R rounds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.config.drafts import Draft
from cotrain.config.groups import Init
from cotrain.losses.guess import chosen, sent
from cotrain.students.base import LAST, Guess, Seen, Student
from cotrain.students.eagle import places, refuse_other, segments
from cotrain.students.independent import pretrained_network
from cotrain.students.markov import after_tokens
from cotrain.teacher.target_model import halves
from inference.proposers import kind_of


class MedusaStudent(Student):
    """Trains the Medusa heads that `inference.proposers.heads` serves (Cai et al. 2024, 2401.10774). Their logits come
    from the target's own output head, which is frozen."""

    kind = "medusa"
    sourced = True
    # A block adds silu to a state, and silu is above -0.28, so heads cannot reach every state of the target. With
    # random targets of width 64 and one block, the best heads for 15 positions are accepted with 0.72 to 0.77.
    memorises = 0.7
    layouts = {"vllm": "cotrain.export.medusa_layout"}
    network: Any
    target: PreTrainedModel

    def prepare(self) -> None:
        self.head = halves(self.target, self.vocabulary)[1]

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Return the network before training: new heads, which predict the same token as the target's output head, or
        with init=pretrained the heads in the folder draft.path=. Raises ValueError, which names the key to change."""
        network_class = kind_of(cls.kind).network_class
        if init.kind == "pretrained":
            network = pretrained_network(cls, draft, target)
            refuse_other(network, draft, {"markov_rank": draft.markov})
            return network
        if not draft.depths:
            raise ValueError(
                f"draft.depths=null: each {draft.kind} head guesses one token: set the number of heads, for example "
                "draft.depths=4"
            )
        theirs = target.config.get_text_config()
        return network_class(
            network_class.config_class(
                hidden_size=theirs.hidden_size,
                vocab_size=theirs.vocab_size,
                num_heads=draft.depths,
                num_hidden_layers=draft.layers,
                **({"markov_rank": draft.markov} if draft.markov else {}),
            )
        )

    def refuse(self) -> None:
        """Raise ValueError if the heads were made for a target of other sizes."""
        self.network.fits(self.target, "draft")

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        ids, position_ids, guesses = batch["ids"], batch.get("position_ids"), []
        text, T = None if position_ids is None else segments(position_ids), ids.shape[1]
        states = self.head_states(ids, seen.states[LAST][:, :-1], min(self.network.depths, T - 1))
        for depth, of_depth in enumerate(states):
            at, inside = places(ids, text, depth + 1)
            guesses.append(Guess(depth, at, chosen(of_depth[:, : T - 1 - depth], inside), self.head))
        return after_tokens(guesses, ids, self.network.markov_head, lambda logits: logits[..., : self.vocabulary])

    def head_states(self, ids: Tensor, newest: Tensor, depths: int) -> list[Tensor]:
        """Return, for each depth (0-based), the states (B, R, D) that the target's output head reads, one row per
        round, R >= T-1-depth. Row m belongs to the round whose newest state is at token m.

        ids (B, T). newest (B, T-1, D): the target's last hidden state at tokens 0 .. T-2. depths: how many depths to
        compute.
        """
        states: Tensor = self.network.states(newest.flatten(0, 1), depths)
        return list(states.unflatten(1, newest.shape[:2]))

    def proposer(self, *, greedy: bool = False, int8: bool = False, shape: Sequence[int] | None = None) -> Any:
        proposer_class: Any = kind_of(self.kind)
        return proposer_class(self.network, greedy, shape=shape)


class HydraStudent(MedusaStudent):
    """Trains the Hydra heads that `inference.proposers.heads` serves (Ankner et al. 2024, 2402.05109). Each head reads
    the target's last hidden state, the anchor (the text's last token) and the tokens drafted before its own. In
    training these are the text's own tokens."""

    kind = "hydra"
    sourced = False
    memorises = Student.memorises  # what its heads add has no such bound
    layouts = {}

    def head_states(self, ids: Tensor, newest: Tensor, depths: int) -> list[Tensor]:
        """Return, for each depth (0-based), the states (B, T-1-depth, D) that the target's output head reads. Row m
        belongs to the round whose newest state is at token m; its drafted token i (0-based) is token m + 2 + i of the
        text.

        ids (B, T). newest (B, T-1, D): the target's last hidden state at tokens 0 .. T-2. depths: how many depths to
        compute.
        """
        network, states = self.network, []
        with torch.no_grad():
            embedded = self.target.get_input_embeddings()(sent(ids, newest.device)).to(newest.dtype)
        # the sums of the heads that have not been computed yet, so of heads j, j + 1, ... in the loop
        sums = network.read_state(newest.flatten(0, 1), depths).unflatten(1, newest.shape[:2])
        for j in range(depths):
            count = newest.shape[1] - j  # rounds that have token j
            sums = sums[:, :, :count].flatten(1, 2)
            sums = network.read(sums, embedded[:, j + 1 :].flatten(0, 1), j)
            here = newest[:, :count].flatten(0, 1)
            states.append(network.head_states(sums[0], here, j).unflatten(0, (newest.shape[0], count)))
            sums = sums.unflatten(1, (newest.shape[0], count))[1:]
        return states
