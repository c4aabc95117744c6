"""A Markov head before training, and the cosine loss of a draft that has one."""

import torch

from cotrain import losses
from cotrain.losses.guess import Guess
from cotrain.students.base import LAST
from cotrain.training.module import _cosine_distance
from inference.proposers.block import BlockConfig, BlockNetwork
from inference.proposers.p_eagle import PEagleConfig, PEagleNetwork


def test_a_new_markov_head_adds_nothing_and_can_learn() -> None:
    settings = {"markov_rank": 3, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    for network in (BlockNetwork(BlockConfig(**settings)), PEagleNetwork(PEagleConfig(**settings))):
        assert not bool(network.markov_head(torch.arange(9)).any())
        assert 0.3 < float(network.markov_head.markov_w1.weight.detach().std()) < 0.9  # of rank 3: 3 ** -0.5
        network.markov_head(torch.arange(9)).sum().backward()
        assert bool(network.markov_head.markov_w2.weight.grad.any())


def test_the_cosine_is_of_states_without_the_rows_of_a_markov_head() -> None:
    theirs, states = torch.randn(2, 4, 6), torch.randn(3, 6 + 2)
    at, predicted = torch.tensor([1, 2, 5]), torch.tensor([[True, True, True], [False, True, True]])
    expected = losses.misaligned(states[:, :6], theirs.flatten(0, 1)[at]).sum()
    assert torch.equal(_cosine_distance({LAST: theirs}, Guess(0, at, states, lambda one: one), predicted), expected)
