"""Trees of drafts, enumerated: topologies, all drafts of one with their chances, and the rules node by node.

The rules here are written as they are stated, one node at a time on lists, and share nothing with `inference.verify`.
"""

import itertools

import torch

from tests.exact import F64, Tree

SHAPE = (-1, 0, -1, 1, -1, 0, 2, 2, 6)  # uneven, and not numbered level by level
MODES = ("without", "deterministic")  # children drawn without replacement; or the likeliest


def topologies(N: int) -> list[tuple[int, ...]]:
    """Every tuple of parents of N nodes."""
    return list(itertools.product(*(range(-1, node) for node in range(N))))


def path_of(parents: tuple[int, ...], node: int) -> list[int]:
    """Nodes from the anchor's child down to `node`; [] for -1."""
    return [] if node < 0 else [*path_of(parents, parents[node]), node]


def depth(parents: tuple[int, ...]) -> int:
    return max((len(path_of(parents, node)) for node in range(len(parents))), default=0)


def siblings_before(parents: tuple[int, ...], node: int) -> list[int]:
    return [other for other in range(node) if parents[other] == parents[node]]


class Case:
    """Distributions after every prefix and a topology; rows of all drafts that can be made, with their chances.

    p (B, N+1, V), q (B, N, V), x (B, N), weight (B,).
    """

    def __init__(
        self, parents: tuple[int, ...], mode: str, V: int = 3, kinds=("dense", "dense"), like: Tree | None = None
    ) -> None:
        self.parents, self.mode, self.N, self.V, self.D = parents, mode, len(parents), V, depth(parents)
        self.distributions = like or Tree(V, self.D, kinds)
        rows = [found for x in itertools.product(range(V), repeat=self.N) if (found := self.row(x))]
        self.p, self.q, self.x = (torch.stack([row[i] for row in rows]) for i in range(3))
        self.weight = torch.tensor([row[3] for row in rows], dtype=F64)

    def row(self, x: tuple[int, ...]):
        """Distributions of one draft and its chance; None where it cannot be made."""
        p, q, chance = [], [], 1.0
        for node in range(-1, self.N):
            p.append(self.probs(self.distributions.p, x, node))
            if node < 0:
                continue
            probs = self.probs(self.distributions.q, x, self.parents[node])
            before = [x[other] for other in siblings_before(self.parents, node)]
            if self.mode == "deterministic":
                ranked = probs.argsort(descending=True, stable=True).tolist()
                chance *= float(x[node] == [*ranked, *ranked][len(before)])  # more children than tokens: one twice
                probs = torch.zeros_like(probs).index_fill_(0, torch.tensor([x[node]]), 1.0)
            else:
                left = [0.0 if token in before else float(mass) for token, mass in enumerate(probs)]
                # more children than tokens: what a draft then names counts for nothing
                chance *= left[x[node]] / sum(left) if sum(left) > 0 else float(x[node] == 0)
            q.append(probs)
        return (torch.stack(p), torch.stack(q), torch.tensor(x), chance) if chance > 0 else None

    def probs(self, distributions: list[torch.Tensor], x: tuple[int, ...], node: int) -> torch.Tensor:
        path = path_of(self.parents, node)
        number = self.distributions.number(torch.tensor([[x[step] for step in path]], dtype=torch.int64))
        return distributions[len(path)][number[0]]

    def emitted(self, x: torch.Tensor, verdict, weight: torch.Tensor) -> torch.Tensor:
        """Joint distribution of D + 1 tokens that the verdicts on drafts x (B, N) give."""
        return self.distributions.emitted(x.gather(1, verdict.path.clamp(min=0)), verdict, weight)


def judged(rule: str, p, q, x, parents) -> tuple[list[float], list[list[float]]]:
    """Thresholds of each node, and what p is at the anchor and at each node when all its children were refused."""
    N, thresholds = len(parents), [0.0] * len(parents)
    rests: list[list[float]] = [[]] * (N + 1)

    def visit(node: int, w: float) -> float:
        probs, tried = list(p[node + 1]), set()
        for child in range(N):
            if parents[child] != node:
                continue
            draft = [0.0 if v in tried else mass for v, mass in enumerate(q[child])]
            total = sum(draft)
            if total == 0:
                continue
            draft = [mass / total for mass in draft]
            tried.add(x[child])
            thresholds[child] = min(w * probs[x[child]] / draft[x[child]], 1.0)
            inside = visit(child, thresholds[child] if rule == "traversal" else 1.0)
            thresholds[child] = inside if rule == "traversal" else thresholds[child]
            refused = [max(w * a - b, 0.0) for a, b in zip(probs, draft, strict=True)]
            mass = sum(refused)
            if rule == "traversal":
                w = mass / (mass + 1 - w) if mass + 1 - w > 0 else 1.0
            probs = [a / mass for a in refused] if mass > 0 else probs
        rests[node + 1] = probs
        return w

    visit(-1, 1.0)
    return thresholds, rests
