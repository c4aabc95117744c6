"""P-EAGLE: pairs and masks of a round by hand, packed texts, dropped starts, folders, and rounds on CUDA graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cotrain.students.base import Guess, Seen
from cotrain.students.eagle import EagleStudent
from cotrain.students.parallel import PEagleStudent, starts
from cotrain.students.quantised import refuse_unknown
from cotrain.teacher.target_model import served
from cotrain.training.optim import adamw
from inference import proposers
from inference.drafts.published import LAYER_IDS
from inference.proposers.p_eagle import PEagleConfig, PEagleNetwork
from tests import kinds
from tests.cotrain.students.test_eagle import distributions, draft
from tests.dropped_starts import check_dropped_starts
from tests.tiny import tiny

IDS = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(4))
PREDICTED = torch.tensor([[False, False, True, True, False], [True, False, False, True, False]])


def student(**settings: Any) -> PEagleStudent:
    return PEagleStudent(kinds.p_eagle(tiny(), 0.3, **settings), tiny())


def states_of(one: EagleStudent, ids: Tensor) -> Seen:
    with torch.no_grad():
        return Seen(dict(served(one.target, layers=one.reads)[0](ids)))  # type: ignore[arg-type]


def guessed(one: EagleStudent, ids: Tensor, seen: Seen | None = None, **more: Tensor) -> list[Guess]:
    return list(one.guesses({"ids": ids, **more}, seen or states_of(one, ids)))


def by_hand(one: PEagleStudent, ids: Tensor, m: int, depths: int) -> Tensor:
    """Log distributions (depths, V) of the round with newest pair m of a text ids (T,): its pairs, then masks, with
    causal attention, head by head."""
    network, seen, width = one.network, states_of(one, ids[None, : m + 2]), one.network.config.hidden_size
    states = torch.cat([seen.states[layer] for layer in network.config.layers], -1)[0, : m + 1]
    rows = torch.cat([states, network.mask_hidden.expand(depths - 1, -1)]) @ network.fc.weight.T
    tokens = [*ids[1 : m + 2].tolist(), *[network.mask] * (depths - 1)]
    embedded = one.target.get_input_embeddings().weight[tokens]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = torch.zeros(q.shape[1], width, dtype=q.dtype)
        for i in range(q.shape[1]):
            for head in range(2):
                share = torch.stack([q[0, i, head] @ k[0, j, 0] for j in range(i + 1)]) * (width // 2) ** -0.5
                part = slice(head * width // 2, (head + 1) * width // 2)
                output[i, part] = share.softmax(-1) @ v[0, : i + 1, 0]
        return output[None]

    angles = network.angles(torch.arange(len(tokens))[None])
    outputs = network.layer(embedded[None], rows[None], *angles, attend)
    return one.head(network.norm(outputs))[0, m:].log_softmax(-1)


@pytest.mark.parametrize("size", [None, 16])
def test_guesses_are_those_of_rounds_by_hand(size: int | None) -> None:
    one = student(draft_vocab_size=size)
    by_depth = guessed(one, IDS[:1])
    assert [guess.depth for guess in by_depth] == [0, 1, 2]
    for m in range(IDS.shape[1] - 1):
        expected = by_hand(one, IDS[0], m, 3)
        for depth, guess in enumerate(by_depth):
            here = guess.at == m + 1 + depth
            assert int(here.sum()) == (m + 1 + depth < IDS.shape[1])
            torch.testing.assert_close(distributions(guess)[here], expected[depth : depth + 1][: int(here.sum())])


@pytest.mark.parametrize("name", ["kl", "0.3*kl+0.7*tv"])
def test_dropped_starts_keep_the_expected_loss(name: str) -> None:
    check_dropped_starts(student(), name, 3)


def test_starts_are_those_with_tokens_to_learn() -> None:
    """Pair m has the anchor m + 1."""
    given = {"ids": IDS[:, :6], "predicted": PREDICTED, "uniforms": torch.zeros(2, 6)}
    assert starts(given, 1).tolist() == [1, 2] and starts(given).tolist() == [0, 2, 3]
    assert starts({"ids": given["ids"]}, 1).tolist() == [0, 1, 2, 3, 4]
    by_depth = guessed(student(), **given)
    assert [sorted(guess.at.tolist()) for guess in by_depth[1:]] == [[3, 4, 9, 10], [4, 5, 10, 11]]


def test_mixed_precision_is_near_float32() -> None:
    one = PEagleStudent(kinds.p_eagle(tiny(dtype=torch.float32), 0.3), tiny(dtype=torch.float32))
    seen = states_of(one, IDS)
    whole = guessed(one, IDS, seen)
    with torch.autocast("cpu", torch.bfloat16):
        half = guessed(one, IDS, seen)
        for guess, expected in zip(half, whole, strict=True):
            assert (distributions(guess).float() - distributions(expected)).abs().max() < 0.5


def test_first_weights_are_an_eagles_and_a_mask() -> None:
    """As an eagle does, with a mask of the size of states; the mask's id is one that texts do not have."""
    target, init = tiny(), SimpleNamespace(kind="target_layers", layers=[0, -1])
    network: Any = PEagleStudent.initial(draft(kind="p_eagle"), init, target)  # type: ignore[arg-type]
    assert isinstance(network, PEagleNetwork) and 0.5 < float(network.mask_hidden.detach().square().mean()) < 2
    one = PEagleStudent(network.to(target.dtype), target, 30)
    assert one.network.mask == 30 and one.proposer().depths == 3
    (first, *_), p = guessed(one, IDS), target(IDS).logits.log_softmax(-1).detach()
    rows, places = first.at // IDS.shape[1], first.at % IDS.shape[1]
    torch.testing.assert_close(distributions(first), p[rows, places - 1][:, :30].log_softmax(-1), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="need their target and a network of class PEagleNetwork, not EagleNetwork"):
        PEagleStudent(kinds.eagle(target), target)
    with pytest.raises(ValueError, match="config.json of a p_eagle draft has no pard_token, the id"):
        proposers.kind_of("p_eagle")(PEagleNetwork(PEagleConfig(eagle_config={LAYER_IDS: [0, 1, 1]})))  # type: ignore[call-arg]


def test_its_mask_is_a_vector_that_is_neither_rounded_nor_decayed() -> None:
    network = student().network
    refuse_unknown(network)
    decayed, others = adamw(network, 1e-3, 0.1, (0.9, 0.95)).param_groups
    assert not any(weight is network.mask_hidden for weight in decayed["params"])
    assert any(weight is network.mask_hidden for weight in others["params"]) and others["weight_decay"] == 0
