"""Teacher-forced passes over trees: texts that are already known, read as an engine that drafts trees reads them.

A rows, n tokens, N nodes, V vocabulary. A route is a path of nodes from the anchor's child down to a leaf.
"""

import copy
from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.functional import pad

from inference.engine import Engine
from inference.models.lm import LM
from inference.models.passes import Tree
from inference.proposers.topology import chain
from inference.report.recorder import Recorder
from inference.verify.rules import RULES
from inference.verify.tree import depths_of

Parents = tuple[int, ...]
Routes = Iterator[Parents]


def tree_of(engine: Engine, prompt: list[int]) -> Parents | None:
    """The shape of the trees that an engine drafts, found out in a call of its own; None where they do not branch."""
    beside, levels = copy.copy(engine), max(engine.policy.lengths([prompt]))
    beside.rule, beside.record = RULES["coupled"], Recorder(2)  # as the texts of (a) are made
    beside.generate([prompt], max_new_tokens=levels + 2, ignore_eos=True)
    rounds = beside.record.replay()["rounds"]
    shapes = [tuple(draft["parent"] for draft in one[0]["drafts"]) for one in rounds]
    parents = max(shapes, key=len, default=())  # a kind that reads states has none yet behind a prompt of one token
    return None if parents == chain(len(parents)) else parents


def depth_of(parents: Parents) -> int:
    """Levels of a shape."""
    return max(depths_of(parents))


def routes(parents: Parents) -> Routes:
    """The route to every leaf, deepest leaves first, again and again: so every node is read on some route."""
    found = []
    for leaf in set(range(len(parents))) - set(parents):
        route = [leaf]
        while parents[route[0]] >= 0:
            route.insert(0, parents[route[0]])
        found.append(tuple(route))
    return cycle(sorted(found, key=lambda route: (-len(route), route)))


def along_tree(lm: LM, ids: Tensor, first: list[int], tree: Tree, ways: Routes) -> Tensor:
    """Logits (A, n, V) after ids (A, n), of which row b's stand from position first[b] on: each pass reads an anchor
    and a tree, on one route of which the ids behind the anchor stand; what is accepted there is kept as in a round."""
    parts, at = [], 0
    while at < ids.shape[1]:
        route = next(ways)[: ids.shape[1] - at - 1]
        here, start = ids[:, at : at + len(route) + 1], [position + at for position in first]
        found = lm.forward(torch.cat((here[:, :1], beside(here, route, tree, lm.size)), 1), start, tree=tree).logits
        parts.append(found[:, [0, *(node + 1 for node in route)]])
        path = torch.tensor([route], device=ids.device, dtype=torch.int64).expand(len(ids), -1)
        lm.keep(start, pad(path, (0, int(tree.depths.max()) - len(route)), value=-1))
        at += len(route) + 1
    return torch.cat(parts, 1)


def beside(here: Tensor, route: Parents, tree: Tree, size: int) -> Tensor:
    """Nodes (A, N) of a tree: along the route the text's ids, here (A, 1 + its length) from the anchor on; elsewhere
    other ids, all different, so that a node that saw one of them would show it. size: number of ids."""
    wrong = (here[:, :1] + 1 + torch.arange(tree.nodes, device=here.device)) % size
    wrong[:, list(route)] = here[:, 1:]
    return wrong
