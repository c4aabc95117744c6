"""What becomes of a round, column by column, beside the same said of one row at a time in plain Python."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from inference.models.passes import Tree
from inference.proposers.base import Proposal
from inference.settled import COLUMNS, column_of, settled, sound

V, A, N = 5, 40, 6
SHAPES = {"chain": None, "tree": (-1, 0, -1, 1, 0, 2), "bush": (-1, -1, -1, 0, 1, 1)}


def distributions(draw: random.Random, places: int) -> torch.Tensor:
    """(A, places, V), now and then none."""
    found = torch.rand(A, places, V, generator=torch.Generator().manual_seed(draw.randrange(99)))
    for a in range(A):
        if draw.random() < 0.6:
            found[a, draw.randrange(places)] = math.nan
    return found


def parents_of(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(range(-1, N - 1)) if shape is None else shape


def path_to(node: int, parents: tuple[int, ...]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("certain", [True, False])
def test_drafts_count_up_to_the_first_without_distributions(shape: str, certain: bool) -> None:
    draw, parents = random.Random(shape), parents_of(SHAPES[shape])
    p, q = distributions(draw, N + 1), None if certain else distributions(draw, N)
    k = [draw.randrange(N + 1) for _ in range(A)]
    tree = None if SHAPES[shape] is None else Tree(parents)
    found = sound(p, q, torch.tensor(k), tree).tolist()
    for a in range(A):
        node = 0
        while node < k[a] and not p[a, parents[node] + 1, 0].isnan() and (q is None or not q[a, node, 0].isnan()):
            node += 1
        assert found[a] == node
    assert 0 < sum(found) < sum(k)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_is_told_as_row_by_row(shape: str) -> None:
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
    verdict = SimpleNamespace(accepted=accepted, path=path)
    proposal = Proposal(x, None, asked, tree)
    table, kept = settled(p, proposal, verdict, last, torch.tensor(length), torch.tensor(asked))
    assert (kept is None) == (tree is None) and table.shape == (A, COLUMNS + (depth if tree else N))
    for a in range(A):
        nodes = [path_to(node, parents) for node in range(length[a])]
        deep = max(map(len, nodes), default=0)
        lost = bool(p[a, ends[a] + 1].isnan().any())
        stains = bool(p[a].isnan().any()) or (tree is not None and length[a] < asked[a])
        refused = any(one[:-1] == paths[a] for one in nodes)
        assert table[a, :COLUMNS].tolist() == [len(paths[a]), a, deep, lost, stains, refused], a
        assert table[a, COLUMNS:][: len(paths[a])].tolist() == x[a, paths[a]].tolist()
        assert column_of(kept, a, len(paths[a])) == ends[a] + 1
    for column in range(2, COLUMNS):
        assert len({*table[:, column].tolist()}) > 1  # both were met
