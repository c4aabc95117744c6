"""Rows of a draft's embedding made as many as the target's, padding included."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

BIAS = -1e4  # far below any logit, and finite in float16
TEXTS, LENGTH = 8, 32


def resize(model: PreTrainedModel, size: int, tokenizer: PreTrainedTokenizerBase) -> float:
    """Give the draft `size` rows in place; returns the chance that a draft falls on a row that was added.

    A padded id v should never be drafted: the target refuses it, so the text stays exact, but the round ends
    there. A head with a bias gets -1e4 at v: no mass at all. A head without one (Llama, and every tied
    embedding) has logit w_v . h, and no row w makes that low for every hidden state h. So w_v is a copy of
    the row of the least likely token u, which gives q(v) = q(u) in every context, low because training
    pushed it down together with h; or 0, logit 0, where that is lower still. Both are judged by their mean
    mass on texts drawn from the draft, and the chance returned is the mean mass of all added rows there.

    Rows past `size` are dropped: no target id reaches them. Raises ValueError when the tokenizer has more.
    """
    old, used = model.config.vocab_size, max(tokenizer.get_vocab().values()) + 1
    if size < used:
        raise ValueError(f"vocab_size: {size} rows are fewer than the tokenizer's {used} ids")
    if size <= old:
        model.resize_token_embeddings(size)
        return 0.0
    texts = _own_texts(model, used)
    least = _least_likely(_logits(model, texts)[..., :used])
    model.resize_token_embeddings(size, mean_resizing=False)
    _fill(model, old, least)
    return float(_logits(model, texts).softmax(-1)[..., old:].sum(-1).mean())


def _least_likely(logits: Tensor) -> int | None:
    """The token of least mean mass, or None when a logit of 0 would have less. logits (B, T, V)."""
    norm = logits.logsumexp(-1, keepdim=True)
    masses = (logits - norm).exp().mean((0, 1))
    return None if (-norm).exp().mean() < masses.min() else int(masses.argmin())


@torch.no_grad()
def _fill(model: PreTrainedModel, old: int, least: int | None) -> None:
    """Rows from `old` on become copies of row `least`, or 0, in the embedding and in the head."""
    head = model.get_output_embeddings()
    tables: tuple[Any, ...] = (model.get_input_embeddings(), head)
    for table in tables:
        table.weight[old:] = 0 if least is None else table.weight[least]
    if head.bias is not None:
        head.bias[old:] = BIAS


def _own_texts(model: PreTrainedModel, used: int) -> Tensor:
    """Texts drawn from the draft at temperature 1, ids (TEXTS, LENGTH) below `used`, always the same."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(used, (TEXTS, 1), generator=random)
    while ids.shape[1] < LENGTH:
        probs = _logits(model, ids)[:, -1, :used].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=random)], 1)
    return ids


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(B, T, V) float32 on the CPU."""
    return model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()
