"""Kneser-Ney against Chen and Goodman's recursion and by hand; the bigram draft against its definition."""

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from studies.pretrain.blocks import Blocks
from studies.pretrain.ngram_lm import KneserNey, bigram_alpha, discounts, evaluate


def zipf(size: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    """A skewed stream whose tokens depend on the one before."""
    draws = np.random.default_rng(seed).zipf(1.3, size) - 1
    return (np.cumsum(draws % 5) + draws) % vocabulary


def distributions(model: KneserNey, length: int) -> np.ndarray:
    """P(. | h) of every context h of so many tokens, (V**length, V)."""
    grams = np.array(list(itertools.product(range(model.vocabulary), repeat=length + 1)))
    last = [model.log_prob(gram)[-1] for gram in grams]
    return np.exp(last).reshape(-1, model.vocabulary)


def textbook(stream: list[int], order: int, vocabulary: int, gram: tuple[int, ...]) -> float:
    """P(last token | the others) by Chen and Goodman's recursion over sets of n-grams."""
    if not gram:
        return 1 / vocabulary
    counts = Counter(tuple(stream[i : i + order]) for i in range(len(stream) - order + 1))
    while len(next(iter(counts))) > len(gram):
        before = defaultdict(set)
        for first, *rest in counts:
            before[tuple(rest)].add(first)
        counts = Counter({rest: len(tokens) for rest, tokens in before.items()})
    cut = discounts(np.array(list(counts.values())))
    same = [count for found, count in counts.items() if found[:-1] == gram[:-1]]
    shorter = textbook(stream, order, vocabulary, gram[1:])
    if not same:
        return shorter
    left = sum(cut[min(count, 3)] for count in same) * shorter
    return (counts[gram] - cut[min(counts[gram], 3)] + left) / sum(same)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_distributions_sum_to_one(order: int) -> None:
    """Also in contexts never seen, and in those shorter than the order allows."""
    model = KneserNey.train(zipf(400, 6), order, 6)
    for length in range(order):
        assert np.abs(distributions(model, length).sum(1) - 1).max() < 1e-12


def test_textbook_recursion() -> None:
    """With discounts that the counts themselves give, at every order but the lowest."""
    stream = zipf(600, 20)
    model, ids = KneserNey.train(stream, 3, 20), zipf(60, 20, seed=1)
    assert discounts(np.unique(stream[:-1] * 20 + stream[1:], return_counts=True)[1])[1] != 0.5
    want = [math.log(textbook(stream.tolist(), 3, 20, tuple(ids[max(i - 2, 0) : i + 1].tolist()))) for i in range(60)]
    assert model.log_prob(ids) == pytest.approx(np.array(want), abs=1e-12)


def test_discounts_by_hand() -> None:
    """n_1..n_4 = 10, 5, 3, 2: Y = 1/2."""
    counts = np.repeat([1, 2, 3, 4, 9], [10, 5, 3, 2, 7])
    assert discounts(counts) == pytest.approx([0, 1 / 2, 2 - 9 / 10, 3 - 4 / 3])


def test_five_tokens_of_twelve_bits() -> None:
    """The largest ids of the bundled vocabulary survive packing."""
    stream = np.tile(np.array([4095, 4094, 4095, 4093, 4092, 0], dtype=np.int32), 30)
    assert np.exp(KneserNey.train(stream, 5, 4096).log_prob(stream[:12])[5:]).min() > 0.9


def test_bigram_alpha_by_hand() -> None:
    """Chunks of other sizes weigh by their positions; the draft's distribution is that after ids[b,t]."""
    probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    one = (torch.tensor([[0]]), p[None, :1].log())  # min: 1/4 + 1/4
    two = (torch.tensor([[1, 0]]), p[None, 1:].log())  # 1, then 3/4
    assert bigram_alpha(probs, [one, two]) == pytest.approx((0.5 + 1 + 0.75) / 3)


def test_evaluate() -> None:
    """In `cycle` a token is known from the three before it, but not from its block; `noise` is uniform."""
    generator = torch.Generator().manual_seed(0)
    cycle = torch.tensor([0, 1, 0, 2], dtype=torch.int32).repeat(200).view(-1, 2)
    noise = torch.randint(3, 7, (2000, 2), generator=generator, dtype=torch.int32)
    blocks = Blocks(torch.cat([cycle, noise]), torch.arange(2).repeat_interleave(torch.tensor([400, 2000])), ["c", "n"])
    sizes = torch.tensor([0, 2, 2, 1, 1, 1, 1])
    found = evaluate(blocks, blocks, sizes, order=4)
    assert found.keys() == {"all/c", "all/n", "c/c", "n/n"}
    assert max(found["c/c"], found["all/c"]) < 0.01  # 0.5 with the context of a block alone
    assert 1.5 < found["n/n"] <= found["all/n"] < 2.2
