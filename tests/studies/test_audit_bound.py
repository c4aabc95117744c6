"""The bound on what texts show of a wrong residual."""

from collections import defaultdict
from itertools import product

import torch

from inference.verify import chain
from studies.audit_bound import moved


def test_the_moved_distribution_is_that_of_enumerated_rounds() -> None:
    """Of the second token after a first one, by all drafts of rounds of two and their tests on a grid of uniforms."""
    p = torch.tensor([[0.3, 0.35, 0.35], [0.5, 0.45, 0.05], [0.2, 0.2, 0.6], [0.1, 0.2, 0.7]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.3, 0.6], [0.4, 0.3, 0.3], [0.3, 0.4, 0.3]], dtype=torch.float64)
    u = (torch.arange(150, dtype=torch.float64) + 0.5) / 150
    coins, law = torch.cartesian_prod(u, u), defaultdict[tuple[int, ...], float](float)

    def rounds(start: int, text: tuple[int, ...], weight: float) -> None:
        if len(text) >= 2:
            law[text[:2]] += weight
            return
        for drafts in product(range(3), repeat=2):
            own = [law[start : start + n].expand(len(coins), -1, -1) for law, n in ((p, 3), (q, 2))]
            accepted = chain.block(*own, torch.tensor(drafts).expand(len(coins), -1), coins).accepted
            for n, y in product(range(3), range(3)):
                after = p[start + 2] if n == 2 else (p[start + n] - q[start + n]).clamp(min=0)
                share = float((accepted == n).double().mean() * after[y] / after.sum())
                drawn = float(q[start, drafts[0]] * q[start + 1, drafts[1]])
                rounds(start + n + 1, (*text, *drafts[:n], y), weight * drawn * share)

    rounds(0, (), 1.0)
    shifts = []
    for first in range(3):
        found = torch.tensor([law[first, y] for y in range(3)], dtype=torch.float64)
        shifts.append(p[0, first] * moved(p[:2], q[:2], torch.tensor([first, 0]), 2)[1])
        torch.testing.assert_close(found - p[0, first] * p[1], shifts[-1], atol=0.004, rtol=0)
    assert float(torch.stack(shifts).abs().max()) > 0.02
