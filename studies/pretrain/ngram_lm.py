"""Baselines without a network: an interpolated Kneser-Ney n-gram model, and a bigram table that serves as a draft.

N tokens in training, M tokens in scoring, V vocabulary, n order, G distinct k-grams, H contexts.
A k-gram w_1..w_k is packed into one int64, first token first: ((w_1 V + w_2) V + ..) + w_k.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cotrain.losses.divergences import alpha
from studies.pretrain.blocks import Blocks

FALLBACK = (0.5, 1.0, 1.5)  # discounts if the counts define none, as with KenLM's --discount_fallback


@dataclass(frozen=True)
class Level:
    """The model of one order k. It has the sorted k-grams hw with their discounted shares, and the sorted contexts h
    with the probability mass that each leaves to the shorter context."""

    grams: np.ndarray  # (G,)
    share: np.ndarray  # (G,) (c(hw) - D(c(hw))) / c(h)
    contexts: np.ndarray  # (H,)
    left: np.ndarray  # (H,) sum_w D(c(hw)) / c(h)

    @classmethod
    def of(cls, grams: np.ndarray, counts: np.ndarray, vocabulary: int) -> "Level":
        """Build a level from the sorted packed k-grams (G,) and their counts (G,)."""
        cut = discounts(counts)[np.minimum(counts, 3)]
        contexts, starts, sizes = np.unique(grams // vocabulary, return_index=True, return_counts=True)
        total = np.add.reduceat(counts, starts)  # c(h), (H,)
        share = (counts - cut) / np.repeat(total, sizes)
        return cls(grams, share, contexts, left=np.add.reduceat(cut, starts) / total)


@dataclass(frozen=True)
class KneserNey:
    """An interpolated modified Kneser-Ney model (Chen and Goodman 1998, TR-10-98). `KneserNey.train` builds it."""

    vocabulary: int
    levels: list[Level]  # orders 1..n

    @classmethod
    def train(cls, stream: np.ndarray, order: int, vocabulary: int) -> "KneserNey":
        """Count the n-grams of a stream of token ids (N,).

        P_k(w|h) = (c_k(hw) - D(c_k(hw))) / c_k(h) + left(h) P_{k-1}(w|h'), with h' = h without its first
        token, left(h) = sum_w D(c_k(hw)) / c_k(h), c_k(h) = sum_w c_k(hw), P_0 = 1/V. c_n counts occurrences;
        for k < n, c_k(w_1..w_k) is the number of distinct tokens seen before this k-gram. D is `discounts` of the
        counts of the same order. The peak memory is about 60 bytes per token, or 200 if no n-gram repeats.
        Raises ValueError if V**order does not fit into 63 bits, for ids outside the vocabulary, and for a stream
        shorter than the order.
        """
        if order < 1 or vocabulary < 1 or vocabulary**order > 2**63:
            raise ValueError(f"order {order} over {vocabulary} ids must be >= 1 and fit 63 bits: lower it")
        if len(stream) < order:
            raise ValueError(f"a stream of {len(stream)} tokens has no {order}-gram")
        grams, counts = np.unique(pack(stream, order, vocabulary), return_counts=True)
        levels = [Level.of(grams, counts, vocabulary)]
        for k in reversed(range(1, order)):
            # each distinct (k+1)-gram adds one distinct token before its last k tokens
            grams, counts = np.unique(grams % vocabulary**k, return_counts=True)
            levels.append(Level.of(grams, counts, vocabulary))
        return cls(vocabulary, levels[::-1])

    def log_prob(self, ids: np.ndarray) -> np.ndarray:
        """Return log P of each token of ids (M,) given up to n - 1 tokens before it -> (M,) float64, in nats.

        For a context that was not seen in training, the shorter context is used. P sums to 1 over V. Raises ValueError
        for ids outside the vocabulary.
        """
        probs = np.full(len(ids), 1 / self.vocabulary)
        for k, level in enumerate(self.levels, 1):
            grams = pack(ids, k, self.vocabulary)
            share = find(level.grams, level.share, grams, 0.0)
            left = find(level.contexts, level.left, grams // self.vocabulary, 1.0)
            probs[k - 1 :] = share + left * probs[k - 1 :]
        return np.log(probs)


def pack(ids: np.ndarray, k: int, vocabulary: int) -> np.ndarray:
    """Return the packed k-grams of ids (M,) -> (max(M - k + 1, 0),) int64.

    Raises ValueError for ids outside 0..V-1.
    """
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ValueError(f"ids {ids.min()}..{ids.max()} do not fit a vocabulary of {vocabulary}")
    packed = np.zeros(max(len(ids) - k + 1, 0), dtype=np.int64)
    for first in range(k):
        packed *= vocabulary
        packed += ids[first : first + len(packed)]
    return packed


def discounts(counts: np.ndarray) -> np.ndarray:
    """Return the discounts (0, D_1, D_2, D_3+) of the counts 0, 1, 2 and 3 or more (Chen and Goodman 1998).

    n_i is the number of counts that equal i. Y = n_1 / (n_1 + 2 n_2) and D_i = i - (i + 1) Y n_{i+1} / n_i. If one of
    n_1..n_4 is 0, or one D_i is not positive, the discounts are `FALLBACK`.
    """
    n = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(float)
    if (n == 0).any():
        return np.array([0.0, *FALLBACK])
    i = np.arange(1, 4)
    discounts = i - (i + 1) * n[0] / (n[0] + 2 * n[1]) * n[1:] / n[:-1]
    return np.array([0.0, *(FALLBACK if (discounts <= 0).any() else discounts)])


def find(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, default: float) -> np.ndarray:
    """Return the value of each key in `wanted`, with the shape of `wanted`. A missing key has the value `default`. keys
    must be sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], default)


def bigram(stream: Tensor, vocabulary: int, add: float) -> Tensor:
    """Return P(w|v) = (c(vw) + add) / (c(v) + add V) from a stream of token ids (N,) -> (V, V) float64, rows v.

    Raises ValueError for ids outside 0..V-1, and unless add > 0, since tokens v that were not seen would have no
    distribution.
    """
    if not add > 0:
        raise ValueError(f"add must be positive, not {add}")
    pairs = torch.bincount(torch.from_numpy(pack(stream.numpy(), 2, vocabulary)), minlength=vocabulary**2)
    smoothed = pairs.view(vocabulary, vocabulary).double() + add
    return smoothed / smoothed.sum(1, keepdim=True)


def bigram_alpha(probs: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the mean acceptance sum_v min(p, q) over all positions, with the bigram table `probs` (V, V) as the draft
    q.

    Each chunk is ids (B, T) and log p (B, T, V), the target's distribution of the token after ids[b, t]. Raises
    ValueError if there is no position.
    """
    logs = probs.log()
    total, positions = 0.0, 0
    for ids, log_p in chunks:
        total += alpha(log_p, logs[ids.long()]).sum().item()
        positions += ids.numel()
    if not positions:
        raise ValueError("no positions to average over")
    return total / positions


def bits_per_byte(nats: float, size: float) -> float:
    """Return nats / (ln 2 * size), the bits per byte of a text of `size` bytes whose negative log probability is
    `nats`."""
    return nats / size / math.log(2)


def evaluate(train: Blocks, held_out: Blocks, sizes: Tensor, order: int = 5) -> dict[str, float]:
    """Return the held-out bits per byte of Kneser-Ney for each domain D. The key "all/D" is for the model trained on
    all domains, and "D/D" for the model trained on D.

    sizes (V,): bytes of each id. As for a network, the first token of each held-out block is not scored. Unlike for a
    network, contexts reach into earlier blocks, which favours the n-gram model. Raises ValueError if the splits have
    different domains.
    """
    if train.domains != held_out.domains:
        raise ValueError(f"train and held-out must have the same domains, not {train.domains} and {held_out.domains}")
    bits = _measure(train.ids, held_out, range(len(train.domains)), "all", sizes, order)
    for index, name in enumerate(train.domains):
        bits |= _measure(train.ids[train.domain == index], held_out, [index], name, sizes, order)
    return bits


def _measure(
    ids: Tensor, held_out: Blocks, domains: Iterable[int], label: str, sizes: Tensor, order: int
) -> dict[str, float]:
    model = KneserNey.train(ids.flatten().numpy(), order, len(sizes))
    bits = {}
    for index in domains:
        blocks = held_out.ids[held_out.domain == index]
        logs = model.log_prob(blocks.flatten().numpy()).reshape(blocks.shape)
        size = sizes[blocks[:, 1:].long()].sum().item()
        bits[f"{label}/{held_out.domains[index]}"] = bits_per_byte(float(-logs[:, 1:].sum()), size)
    return bits
