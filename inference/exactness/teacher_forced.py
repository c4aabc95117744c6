"""Teacher-forced passes. They give the logits of known texts, in passes of any width or over trees of any shape.

The width of a pass decides its rounding. Decoding makes passes of one id; verification makes passes over k + 1 ids or
over a tree. Models, especially quantised ones, give slightly different logits in each. A rows, n positions, N nodes, V
vocabulary. A tree's anchor is the text's last token before it. A route is a path of nodes from a child of the anchor
down to a leaf.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from inference.engine import Engine
from inference.models.encoder_decoder import own_inputs
from inference.models.lm import LM, store_prompts
from inference.models.pretrained import own_logits
from inference.proposers.base import Proposal
from inference.request import Request
from inference.sampling import Sampling, wide
from inference.sampling.penalties import needs_history, process
from inference.source import source_in_text
from inference.trace import traced_rows
from inference.verify.rules import RULES
from inference.verify.tree import Tree, chain, depths_of, node_paths

CELLS = 1 << 26  # most logits of whole texts in memory at once
Parents = tuple[int, ...]
Routes = Iterator[Parents]


class TextLogits(NamedTuple):
    """The logits of a block of tokens. rows: the numbers of the A texts. start: index of the first of the block's n
    tokens in each text. logits (A, n, V): they predict the tokens x (A, n). valid (A, n): whether the text has this
    token; other entries have no meaning. scale (A, n): root mean square of the model's own logits, before the settings
    that read the text."""

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
) -> Iterator[TextLogits]:
    """Yield the logits that predict every token of `texts`, in blocks. texts: the new ids after each prompt. prompts:
    ids, at least one each; for an encoder-decoder, texts from `Engine.starts`. sampling: the settings of these texts.

    A model runs in its own dtype, `rows` texts at a time. An `LM` runs as many texts at a time as it has rows, and its
    slots are overwritten. All but the last id of each prompt are read first, as in the engine. Then come passes of
    `width` ids (None for `block`), or passes over trees of the shape `tree`, in which the text follows one route after
    another. Settings that read the text are applied, so `probs(logits, sampling)` is the distribution. vocabulary:
    number of ids whose logits are returned, None for all. Each block has at most `block` tokens of each text in a
    batch, so that the logits of all texts are never in memory at once.
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
) -> Iterator[TextLogits]:
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
        yield TextLogits(numbers, start, logits, _columns(texts, start, n, lm.device), valid, scale)


def _columns(rows: list[list[int]], start: int, n: int, device: torch.device) -> Tensor:
    """Return the ids start to start + n - 1 of each row, (A, n); 0 past a row's end."""
    return torch.tensor([(row[start : start + n] + [0] * n)[:n] for row in rows], device=device)


def _processed(
    logits: Tensor, prompts: list[list[int]], texts: list[list[int]], start: int, sampling: Sampling
) -> Tensor:
    """Return logits (A, n, V), in float32 or wider, after the settings that read the text (penalties, bans and others)
    were applied. start: index of the first token in each text. prompts, texts: the ids of each prompt, and the new ids
    after it."""
    positions = [(a, j) for a, text in enumerate(texts) for j in range(min(logits.shape[1], len(text) - start))]
    row, column = (torch.tensor(index, device=logits.device) for index in zip(*positions, strict=True))
    histories = [prompts[a] + texts[a][: start + j] for a, j in positions]
    processed = process(logits[row, column], histories, [start + j for _, j in positions], sampling)
    out = logits.to(processed.dtype)
    out[row, column] = processed
    return out


def rms(x: Tensor) -> Tensor:
    """Return the root mean square (...) of x (..., V) over its last dimension, in float32 or wider."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide(x[..., :0]).dtype) / math.sqrt(x.shape[-1])


def _passes(lm: LM, ids: Tensor, first: list[int], width: int) -> Tensor:
    """Return the logits (A, n, V) after each id of ids (A, n), in passes of `width` ids. first: for each row, the
    position (0-based) of its first id."""
    parts = [
        lm.forward(ids[:, at : at + width], [position + at for position in first]).logits.clone()
        for at in range(0, ids.shape[1], width)
    ]
    return torch.cat(parts, 1)


def along_tree(lm: LM, ids: Tensor, first: list[int], tree: Tree, ways: Routes) -> Tensor:
    """Return the logits (A, n, V) after each id of ids (A, n), in passes over an anchor and a tree. first: for each
    row, the position (0-based) of its first id. In each pass, the ids after the anchor are put on the next route of
    `ways`; this route is then accepted, as in a round."""
    parts, at = [], 0
    while at < ids.shape[1]:
        route = next(ways)[: ids.shape[1] - at - 1]
        here, start = ids[:, at : at + len(route) + 1], [position + at for position in first]
        nodes = _nodes(here, route, tree, lm.size)
        logits = lm.forward(torch.cat((here[:, :1], nodes), 1), start, tree=tree).logits
        parts.append(logits[:, [0, *(node + 1 for node in route)]])
        path = torch.tensor([route], device=ids.device, dtype=torch.int64).expand(len(ids), -1)
        lm.keep(start, pad(path, (0, int(tree.depths.max()) - len(route)), value=-1))
        at += len(route) + 1
    return torch.cat(parts, 1)


def _nodes(here: Tensor, route: Parents, tree: Tree, size: int) -> Tensor:
    """Return the ids (A, N) of a tree's nodes. Nodes of the route have the text's ids. here (A, 1 + length of the
    route): the ids of the anchor and of these nodes. All other nodes have wrong ids, each a different one, so that
    logits change if a pass lets a node see a wrong node. size: number of ids in the vocabulary."""
    wrong = (here[:, :1] + 1 + torch.arange(tree.nodes, device=here.device)) % size
    wrong[:, list(route)] = here[:, 1:]
    return wrong


def routes(parents: Parents) -> Routes:
    """Return an endless iterator over the routes to all leaves, deepest leaves first. Every node is on some route."""
    paths = node_paths(parents)
    ways = [paths[leaf] for leaf in set(range(len(parents))) - set(parents)]
    return cycle(sorted(ways, key=lambda route: (-len(route), route)))


def depth_of(parents: Parents) -> int:
    """Return the number of levels of the tree with these parents."""
    return max(depths_of(parents))


def tree_of(engine: Engine, prompt: list[int]) -> Parents | None:
    """Return the parents of the tree that an engine drafts, or None for chains. A short call of the engine with this
    prompt shows the tree."""
    coupled, levels = copy.copy(engine), max(engine.policy.lengths([prompt]))
    shapes: Any = _Shapes()
    coupled.rule, coupled.record = RULES["coupled"], shapes  # as in check (a)
    coupled.generate([prompt], max_new_tokens=levels + 2, ignore_eos=True)
    # a draft that reads states has none after a prompt of one token, so its first round drafts nothing
    parents = max(shapes.parents, key=len, default=())
    return None if parents == chain(len(parents)) else parents


class _Shapes:
    """A recorder of tree shapes (`trace.RoundRecorder`). It records the parents of the nodes that the first row drafts
    in the first two rounds of a call."""

    def __init__(self) -> None:
        self.parents: list[Parents] = []

    def begin(self, rule: str, rows: Sequence[Request]) -> None:
        self.parents = []

    def note(
        self, rows: Sequence[Request], starts: Sequence[int], proposal: Proposal, table: Sequence[Sequence[int]]
    ) -> None:
        if len(self.parents) < 2:
            first = traced_rows(rows, starts, proposal, table)[0]
            self.parents.append(tuple(first.parents[: first.drafted]))


def whole_texts(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    sampling: Sampling,
    vocabulary: int,
    block: int | None = None,
) -> Iterator[TextLogits]:
    """Yield the logits that predict every token of `texts`, in blocks, from transformers' own forward of each whole
    text. No cache and no code of the engine is used. The arguments are those of `teacher_forced`.

    Each block has one text. A long text gives several blocks, each from its own forward, so that a block has at most
    `block` tokens; None for as many as have CELLS logits.
    """
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids = torch.tensor([[*prompt, *text[:-1]]], device=model.device)
        n = block or max(1, CELLS // model.config.get_text_config().vocab_size)
        for start in range(0, len(text), n):
            x = torch.tensor([text[start : start + n]], device=model.device)
            at = [len(prompt) - 1 + start + j for j in range(x.shape[1])]
            inputs = own_inputs(model, ids, source_in_text(prompt))
            logits = own_logits(model, at, **inputs)[:, :vocabulary].unsqueeze(0)
            scale = rms(logits)
            if needs_history(sampling):
                logits = _processed(logits, [prompt], [text], start, sampling)
            yield TextLogits([row], start, logits, x, torch.ones_like(x, dtype=torch.bool), scale)
