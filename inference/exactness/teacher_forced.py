"""Teacher-forced passes: the logits of texts that are already known, in passes of any width.

The width decides the rounding: decoding makes passes of one id, verification of k + 1, and models (quantised
ones above all) differ between them. A rows, n positions, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.exactness.tree_passes import Parents, along_tree, routes
from inference.models.lm import LM
from inference.models.output_head import own_logits
from inference.models.passes import Tree
from inference.models.prefill import store_prompts
from inference.processors import needs_history, process
from inference.sampling import Sampling, wide

CELLS = 1 << 26  # numbers of logits of whole texts that are there at once


class Block(NamedTuple):
    """Logits (A, n, V) of tokens start .. start + n - 1 of the texts numbered `rows`; those past a text's end
    are to be ignored. x (A, n): the tokens themselves, valid (A, n): which of them exist; scale (A, n): root mean
    square of the model's own logits, before settings that read history."""

    rows: list[int]
    start: int
    logits: Tensor
    x: Tensor
    valid: Tensor
    scale: Tensor


def teacher_forced(
    model: PreTrainedModel | LM,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    sampling: Sampling,
    *,
    vocabulary: int | None = None,
    block: int = 64,
    width: int | None = None,
    rows: int = 8,
    tree: Parents | None = None,
) -> Iterator[Block]:
    """Logits of every token of `texts` (new ids), given its prompt (at least one id) and the tokens before
    it.

    A model runs in its own dtype on `rows` texts together; an `LM` runs as it is, on as many as it has rows, and its
    slots are overwritten. Prompts are stored as the engine stores them, then come passes of `width` ids (None:
    `block`), or over trees of the shape `tree`, whose routes the text takes in turn. Settings that read history are
    applied, so `probs(logits, sampling)` is the distribution. Yields blocks of at most `block` tokens, batch after
    batch, so that (B, T, V) never exists whole.
    """
    lm = model if isinstance(model, LM) else LM(model, max(1, min(rows, len(texts))), vocabulary)
    rows = lm.rows
    passes = partial(_passes, width=width or block)
    if tree is not None:
        passes = partial(along_tree, tree=Tree(tree), ways=routes(tree))
    for low in range(0, len(texts), rows):
        chosen = list(range(low, min(low + rows, len(texts))))
        yield from _batch(lm, [prompts[i] for i in chosen], [texts[i] for i in chosen], chosen, sampling, block, passes)


@torch.inference_mode()
def _batch(
    lm: LM,
    prompts: list[list[int]],
    texts: list[list[int]],
    numbers: list[int],
    sampling: Sampling,
    block: int,
    passes: Callable[[LM, Tensor, list[int]], Tensor],
) -> Iterator[Block]:
    store_prompts(lm, 0, prompts)
    for start in range(0, max(map(len, texts)), block):
        n = min(block, max(map(len, texts)) - start)
        read = _columns([[p[-1], *text[:-1]] for p, text in zip(prompts, texts, strict=True)], start, n, lm.device)
        first = [len(prompt) - 1 + start for prompt in prompts]
        logits = passes(lm, read, first)
        valid = torch.tensor([[start + j < len(text) for j in range(n)] for text in texts], device=lm.device)
        scale = rms(logits[..., : lm.size])
        if needs_history(sampling):
            logits = _processed(logits, prompts, texts, start, sampling)
        yield Block(numbers, start, logits, _columns(texts, start, n, lm.device), valid, scale)


def whole_texts(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    sampling: Sampling,
    vocabulary: int,
) -> Iterator[Block]:
    """`teacher_forced` by transformers' own forward of each whole text, without a cache and without an engine's code.

    Blocks of one row; a long text gives several, each by its own forward, so that logits stay within CELLS numbers.
    """
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids = torch.tensor([[*prompt, *text[:-1]]], device=model.device)
        n = max(1, CELLS // model.config.get_text_config().vocab_size)
        for start in range(0, len(text), n):
            x = torch.tensor([text[start : start + n]], device=model.device)
            at = [len(prompt) - 1 + start + j for j in range(x.shape[1])]
            logits = own_logits(model, at, input_ids=ids)[:, :vocabulary].unsqueeze(0)
            scale = rms(logits)
            if needs_history(sampling):
                logits = _processed(logits, [prompt], [text], start, sampling)
            yield Block([row], start, logits, x, torch.ones_like(x, dtype=torch.bool), scale)


def rms(x: Tensor) -> Tensor:
    """Root mean square (..., V) -> (...), float32 at least."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide(x[..., :0]).dtype) / math.sqrt(x.shape[-1])


def _columns(rows: list[list[int]], start: int, n: int, device: torch.device) -> Tensor:
    """Ids start .. start + n - 1 of each row, 0 past its end -> (A, n)."""
    return torch.tensor([(row[start : start + n] + [0] * n)[:n] for row in rows], device=device)


def _passes(lm: LM, ids: Tensor, first: list[int], width: int) -> Tensor:
    """Logits (A, n, V) after ids (A, n), `width` of them a pass, row b from position first[b]."""
    parts = [
        lm.forward(ids[:, at : at + width], [position + at for position in first]).logits
        for at in range(0, ids.shape[1], width)
    ]
    return torch.cat(parts, 1)


def _processed(
    logits: Tensor, prompts: list[list[int]], texts: list[list[int]], start: int, sampling: Sampling
) -> Tensor:
    """Penalties, bans and the like with each token's own history; (A, n, V), float32 at least."""
    places = [(a, j) for a, text in enumerate(texts) for j in range(min(logits.shape[1], len(text) - start))]
    row, column = (torch.tensor(index, device=logits.device) for index in zip(*places, strict=True))
    histories = [prompts[a] + texts[a][: start + j] for a, j in places]
    found = process(logits[row, column], histories, [start + j for _, j in places], sampling)
    out = logits.to(found.dtype)
    out[row, column] = found
    return out
