"""Rows of a draft's embedding made as many as the target's, padding included."""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

BIAS = -1e4  # far below any logit, and finite in float16
PROBES = (8, 32)  # texts, tokens of each


def resize(model: PreTrainedModel, size: int, tokenizer: PreTrainedTokenizerBase) -> float:
    """Give the draft `size` rows in place; returns the most mass that added rows hold on a few random texts.

    No padded id v should be drafted: the target refuses it, so the text stays exact, but the round ends
    there. A head with a bias gets -1e4 at v: no mass at all. A head without one (Llama, and every tied
    embedding) has logit w_v . h, and no row w makes that small for every hidden state h; a zero row gives
    logit 0, often far from the least. So row v is a copy of the row of the draft's least likely token u, the
    one whose largest probability on the texts is smallest: q(v) = q(u) in every context, which training has
    pushed down with h itself. The mass returned, to be written beside the export, says how well that went.

    Rows past `size` are dropped: no target id reaches them. Raises ValueError when the tokenizer has more.
    """
    old, used = model.config.vocab_size, max(tokenizer.get_vocab().values()) + 1
    if size < used:
        raise ValueError(f"vocab_size: {size} rows are fewer than the tokenizer's {used} ids")
    if size <= old:
        model.resize_token_embeddings(size)
        return 0.0
    least = int(_laws(model, used).amax(0)[:used].argmin())
    model.resize_token_embeddings(size, mean_resizing=False)
    _fill(model, old, least)
    return float(_laws(model, used)[:, old:].sum(-1).max())


@torch.no_grad()
def _fill(model: PreTrainedModel, old: int, least: int) -> None:
    """Rows from `old` on become copies of row `least`, in the embedding and in the head."""
    head = model.get_output_embeddings()
    tables: tuple[Any, ...] = (model.get_input_embeddings(), head)
    for table in tables:
        table.weight[old:] = table.weight[least]
    if head.bias is not None:
        head.bias[old:] = BIAS


@torch.no_grad()
def _laws(model: PreTrainedModel, used: int) -> torch.Tensor:
    """Laws q after random tokens below `used`, (N, V) float32."""
    ids = torch.randint(used, PROBES, generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits
    return logits.flatten(0, 1).float().softmax(-1).cpu()
