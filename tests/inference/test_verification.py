"""The result of a round, column by column, compared with one row at a time in plain Python."""

import math
import random

import pytest
import torch

from inference.proposers.base import Proposal
from inference.trace import COLUMNS
from inference.verification import column_of, round_result
from inference.verify.chain import Verification
from inference.verify.tree import Tree, TreeVerification, usable_lengths

V, A, N = 5, 40, 6
SHAPES = {"chain": None, "tree": (-1, 0, -1, 1, 0, 2), "bush": (-1, -1, -1, 0, 1, 1)}


def distributions(draw: random.Random, columns: int) -> torch.Tensor:
    """(A, columns, V), some of them missing."""
    probs = torch.rand(A, columns, V, generator=torch.Generator().manual_seed(draw.randrange(99)))
    for a in range(A):
        if draw.random() < 0.6:
            probs[a, draw.randrange(columns)] = math.nan
    return probs


def parents_of(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(range(-1, N - 1)) if shape is None else shape


def path_to(node: int, parents: tuple[int, ...]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("certain", [True, False])
def test_drafts_are_usable_up_to_the_first_without_distributions(shape: str, certain: bool) -> None:
    draw, parents = random.Random(shape), parents_of(SHAPES[shape])
    p, q = distributions(draw, N + 1), None if certain else distributions(draw, N)
    k = [draw.randrange(N + 1) for _ in range(A)]
    tree = None if SHAPES[shape] is None else Tree(parents)
    usable = usable_lengths(p, q, torch.tensor(k), tree).tolist()
    for a in range(A):
        node = 0
        while node < k[a] and not p[a, parents[node] + 1, 0].isnan() and (q is None or not q[a, node, 0].isnan()):
            node += 1
        assert usable[a] == node
    assert 0 < sum(usable) < sum(k)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_result_of_a_round_is_that_of_each_row(shape: str) -> None:
    draw, parents = random.Random(shape), parents_of(SHAPES[shape])
    p, x, last = distributions(draw, N + 1), torch.randint(V, (A, N)), torch.arange(A)
    asked = [draw.randrange(N + 1) for _ in range(A)]
    length = [draw.randint(0, most) for most in asked]
    ends = [draw.randrange(-1, most) for most in length]
    paths = [path_to(end, parents) for end in ends]
    depth = max(len(path_to(node, parents)) for node in range(N))
    path = torch.tensor([one + [-1] * (depth - len(one)) for one in paths])
    accepted = torch.tensor([len(one) for one in paths])
    tree = None if SHAPES[shape] is None else Tree(parents)
    verification = TreeVerification(accepted, path, p[:, 0]) if tree else Verification(accepted, p[:, 0])
    proposal = Proposal(x, None, asked, tree)
    table, path_out, _ = round_result(p, proposal, verification, last, torch.tensor(length), torch.tensor(asked))
    assert (path_out is None) == (tree is None) and table.shape == (A, COLUMNS + (depth if tree else N))
    for a in range(A):
        nodes = [path_to(node, parents) for node in range(length[a])]
        deep = max(map(len, nodes), default=0)
        missing = bool(p[a, ends[a] + 1].isnan().any())
        stains = bool(p[a].isnan().any()) or (tree is not None and length[a] < asked[a])
        rejected = any(one[:-1] == paths[a] for one in nodes)
        assert table[a, :COLUMNS].tolist() == [len(paths[a]), a, deep, missing, stains, rejected], a
        assert table[a, COLUMNS:][: len(paths[a])].tolist() == x[a, paths[a]].tolist()
        assert column_of(path_out, a, len(paths[a])) == ends[a] + 1
    for column in range(2, COLUMNS):
        assert len({*table[:, column].tolist()}) > 1  # both values occur
