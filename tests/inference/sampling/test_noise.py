"""Counter-based random numbers: functions of their key, uniform, independent along every part of it."""

import itertools
import math

import pytest
import torch

from inference.sampling import draw
from inference.sampling.noise import ACCEPT, DRAFT, NOISE, RESIDUAL, Uniforms, gumbel, row_ids, uniform, uniforms
from tests.exact import chi_square

# From splitmix64 in unbounded integers: saved runs can be repeated only while these hold.
KNOWN = [[4346070621897902, 3033794921651860], [4706393685188553, 6586857680330660]]
KNOWN_IDS = [
    3536840807250730212,
    5445730902178207520,
    6248907544327298672,
    2058389505783658055,
    893442142816765029,
    7746188998690994945,
    6656574830346784245,
]
ROWS = torch.tensor(row_ids([[1, 2], [3], [3, 1], [0] * 9]))


def test_uniforms_are_53_bit_float64_in_the_unit_interval():
    u = uniform(0, torch.arange(1000), torch.zeros(1000, dtype=torch.int64), torch.arange(200), DRAFT)
    assert u.dtype == torch.float64 and u.shape == (1000, 200)
    assert u.min() >= 0 and u.max() < 1
    assert u.unique().numel() == u.numel()  # float32 would collide thousands of times
    assert ((u * 2**53) % 2 == 1).any() and ((u * 2**53) % 1 == 0).all()
    assert chi_square(torch.histc(u, 100, 0, 1), torch.full((100,), 2000.0)) > 1e-4


def test_known_values_never_change():
    u = uniform(7, torch.tensor([1, -5]), torch.tensor([0, 12]), torch.tensor([0, 3]), ACCEPT)
    assert (u * 2**53).long().tolist() == KNOWN
    first, second = (gumbel(7, torch.tensor([1]), torch.tensor([[t]]), 3) for t in (4, 5))
    assert not torch.equal(first, second)


def test_every_part_of_the_key_counts_and_parts_do_not_mix():
    """(row, start, depth) = (1, 2, 3) and its permutations are all different numbers."""
    keys = list(itertools.product((1, 2, 3), repeat=4))
    values = [
        uniform(seed, torch.tensor([row]), torch.tensor([start]), torch.tensor([depth]), stream).item()
        for (seed, row, start, depth) in keys
        for stream in (DRAFT, ACCEPT, RESIDUAL)
    ]
    assert len(set(values)) == len(values)
    assert len({DRAFT, ACCEPT, RESIDUAL, NOISE}) == 4


def test_a_row_does_not_see_its_batch():
    start, depth = torch.tensor([0, 4, 4, 9]), torch.arange(5)
    whole = uniform(1, ROWS, start, depth, ACCEPT)
    noise = gumbel(1, ROWS, start.unsqueeze(-1) + depth, 7)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(uniform(1, ROWS[order], start[order], depth, ACCEPT), whole[order])
    for b in range(4):
        alone = slice(b, b + 1)
        assert torch.equal(uniform(1, ROWS[alone], start[alone], depth[2:4], ACCEPT), whole[alone, 2:4])
        assert torch.equal(gumbel(1, ROWS[alone], start[alone].unsqueeze(-1) + depth, 7), noise[alone])


def test_tokens_of_successive_rounds_are_independent():
    """Pairs (t, t+1) of an i.i.d. model, within one row and over many rows."""
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    pair = torch.outer(probs, probs).flatten()
    for rows, steps in ((1, 20_000), (2_000, 10)):
        row, start = torch.arange(rows).repeat_interleave(steps), torch.arange(steps).repeat(rows)
        u = uniform(0, row, start, torch.tensor([0]), RESIDUAL).view(rows, steps)
        ids = draw(probs.expand(rows, steps, 3), u)
        pairs = torch.bincount((ids[:, 0:-1:2] * 3 + ids[:, 1::2]).flatten(), minlength=9).double()
        assert chi_square(pairs, pair * pairs.sum()) > 1e-4


def test_gumbel_noise_is_finite_and_gumbel():
    g = gumbel(0, torch.arange(200), torch.arange(10).expand(200, 10), 500).flatten()
    assert g.dtype == torch.float64 and g.isfinite().all()
    assert g.unique().numel() == g.numel()
    u = (-(-g).exp()).exp()
    assert chi_square(torch.histc(u, 50, 0, 1), torch.full((50,), g.numel() / 50)) > 1e-4
    extreme = (g > 10).sum().item()  # 1 - exp(-exp(-10)) = 4.5e-5: 45 of a million
    assert abs(extreme - 45.4) < 5 * math.sqrt(45.4)


def test_numbers_of_the_table_are_those_of_each_round():
    """Rows come, go and move on at their own pace, some starts far ahead, draft lengths shrink and grow."""
    noise = Uniforms(5, torch.device("cpu"))
    visits = [
        ([7], [0], 3),
        ([7], [2], 3),
        ([7, 9], [5, 0], 5),
        ([7, 9], [68, 3], 2),
        ([7, 9], [69, 66], 2),
        ([9, 7], [70, 70], 4),
        ([9], [71], 6),
        ([9], [40], 6),
    ]
    for rows, starts, depths in visits:
        key = torch.tensor(rows), torch.tensor(starts), torch.arange(depths)
        wanted = uniforms(5, *key, (DRAFT, ACCEPT, RESIDUAL))
        offsets, fresh = noise.offsets(rows, starts, depths)
        if fresh:
            noise.fill(*key[:2], depths)
        assert torch.equal(noise.at(torch.tensor(offsets), depths), wanted)


def test_row_ids_are_stable_and_tell_equal_prompts_apart():
    prompts = [[5, 6], [5, 6], [7], [5, 6], [], [1, 5, 6], [5, 6, 0]]
    ids = row_ids(prompts)
    assert len(set(ids)) == len(ids) and all(0 <= i < 2**63 for i in ids)
    assert ids == KNOWN_IDS
    assert row_ids([prompts[2]])[0] == ids[2] and row_ids([prompts[0]])[0] == ids[0]  # alone or in a call


@pytest.mark.gpu
def test_the_same_numbers_on_the_gpu():
    start, depth = torch.tensor([0, 4, 4, 9]), torch.arange(50)
    on = [t.cuda() for t in (ROWS, start, depth)]
    assert torch.equal(uniform(-3, *on, ACCEPT).cpu(), uniform(-3, ROWS, start, depth, ACCEPT))
    noise = gumbel(9, on[0], on[1].unsqueeze(-1) + on[2], 99).cpu()
    torch.testing.assert_close(noise, gumbel(9, ROWS, start.unsqueeze(-1) + depth, 99), rtol=1e-13, atol=1e-13)
