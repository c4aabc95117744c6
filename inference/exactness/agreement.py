"""Check (d) of the verdict: the logits of an engine's own passes must agree with transformers' forward of whole texts.

The tolerance for rounding is measured only with transformers' forward, never with the passes under test. It follows
from the change of logits when every embedding changes by one unit in the last place. A model whose routing or deep
layers amplify rounding therefore has a larger tolerance. The dtype sets an upper bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.exactness.teacher_forced import Parents, depth_of, rms, teacher_forced
from inference.models.encoder_decoder import own_inputs
from inference.models.llama import INT8_ROWS
from inference.models.lm import LM
from inference.models.pretrained import own_logits, quantisation_of
from inference.sampling import Sampling
from inference.source import source_in_text

# the most that rounding may change logits: mean over the tokens of a text, in units of the logits' root mean square
MOST = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
TOKEN = 6  # a single token may differ by this many times the tolerance of the mean
LEAST = 4  # units in the last place: the least tolerance, since layers round even if they do not amplify
MARGIN = 4
GAP = 8  # the gap between two logits may change by this many times the rounding of the logits
FEW = 4  # texts that are compared
POSITIONS, LAST = 128, 32  # tokens compared per text, and how many of them are the last ones; logits need memory


@dataclass(frozen=True)
class LogitsCheck:
    """The result of check (d): how far the engine's logits are from the logits of transformers' own forward.

    tokens: number of tokens compared. first, last: the range of their positions, counting the prompt. All other numbers
    are distances, in units of the logits' root mean square. one: root mean square, over the compared tokens, of the
    distance between the engine's passes of one id and transformers' own forward. many: the same root mean square for
    the engine's passes of several ids or over a tree. worst: largest distance at a single token. own: change of
    transformers' logits when embeddings change by one unit in the last place. limit: tolerance for `one` and `many`.
    worst_limit: tolerance for `worst`. Both tolerances follow from `own` and the dtype.
    """

    tokens: int
    one: float
    many: float
    worst: float
    own: float
    limit: float
    worst_limit: float
    first: int = 0
    last: int = 0

    @property
    def passed(self) -> bool:
        return self.one <= self.limit and self.many <= self.limit and self.worst <= self.worst_limit

    def line(self) -> str:
        """Return this check's numbers as one sentence. `Verdict.lines` appends whether the check passed."""
        return (
            f"logits are those of transformers' forward on {self.tokens} tokens at positions {self.first} to "
            f"{self.last}: they differ by {self.one:.2g} in passes of one id and {self.many:.2g} in passes of several, "
            f"{self.limit:.2g} is allowed; at the worst token by {self.worst:.2g}, {self.worst_limit:.2g} is allowed "
            f"(rounding alone changes them by {self.own:.2g})"
        )


@torch.inference_mode()
def check_logits(
    lm: LM, prompts: Sequence[list[int]], texts: Sequence[list[int]], width: int, tree: Parents | None = None
) -> LogitsCheck:
    """Return the result of check (d), which compares the logits of the engine's passes with transformers' forward of
    whole texts. The engine's passes read one id each; then, in a second run, `width` ids or a tree each.

    lm: the LM of the engine under test; its slots are overwritten. prompts, texts: the ids of each prompt, and the new
    ids after it. width: ids per row of a verifying pass. tree: the parents of the tree that the engine drafts, None for
    chains. The passes run over as many texts as `lm` has rows, but at least three if there are so many. Up to four of
    these texts are compared: a short text at all its tokens, a long one at a selection (`spread`).
    """
    chosen = range(min(max(lm.rows, FEW - 1), len(texts)))
    prompts, texts = [prompts[i] for i in chosen], [texts[i] for i in chosen]
    compared = sorted({round(i * (len(texts) - 1) / max(FEW - 1, 1)) for i in range(FEW)})
    at = {i: spread(len(texts[i])) for i in compared}
    right = {i: _forward(lm.model, prompts[i], texts[i], at[i])[:, : lm.vocabulary] for i in compared}
    moved = {i: _forward(lm.model, prompts[i], texts[i], at[i], moved=True)[:, : lm.vocabulary] for i in compared}
    own = torch.cat([difference(moved[i], right[i]) for i in compared])
    block = width if tree is None else 1 + depth_of(tree)
    one = _passes(lm, prompts, texts, at, right, block, 1)
    many = _passes(lm, prompts, texts, at, right, block, width, tree)
    least, bound = LEAST * step(lm.model), most(lm.model)
    return LogitsCheck(
        tokens=len(own),
        first=min(len(prompts[i]) for i in compared),
        last=max(len(prompts[i]) + at[i][-1] for i in compared),
        one=_mean(one),
        many=_mean(many),
        worst=float(torch.cat([one, many]).max()),
        own=_mean(own),
        limit=min(max(MARGIN * _mean(own), least), bound),
        worst_limit=min(max(MARGIN * float(own.max()), TOKEN * least), TOKEN * bound),
    )


def spread(length: int) -> list[int]:
    """Return the indices (0-based) of the tokens to compare in a text of this length: all of a short text; in a long
    text POSITIONS tokens, the last LAST and others evenly spaced before them. The passes always run over all tokens."""
    if length <= POSITIONS:
        return list(range(length))
    before, many = length - LAST, POSITIONS - LAST
    return [i * before // many for i in range(many)] + list(range(before, length))


def _forward(model: PreTrainedModel, prompt: list[int], text: list[int], at: list[int], moved: bool = False) -> Tensor:
    """Return the logits (n, V) that predict n tokens of a text, from transformers' own forward of the whole text
    without a cache. at: the indices of these tokens in `text`. moved: whether to change each number of the embeddings
    by one unit in its last place, up or down. prompt, text: token ids of the prompt, and the new ids after it."""
    ids = torch.tensor([prompt + text[:-1]], device=model.device)
    at, inputs = [len(prompt) - 1 + token for token in at], own_inputs(model, ids, source_in_text(prompt))
    if not moved:
        return own_logits(model, at, **inputs)

    def shifted(_: Any, __: Any, embeddings: Tensor) -> Tensor:
        signs = torch.randint(2, embeddings.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return embeddings * (1 + step(model) * signs.to(embeddings))

    body: Any = model.get_decoder() if model.config.is_encoder_decoder else model
    with body.get_input_embeddings().register_forward_hook(shifted):
        return own_logits(model, at, **inputs)


def _passes(
    lm: LM,
    prompts: list[list[int]],
    texts: list[list[int]],
    at: dict[int, list[int]],
    right: dict[int, Tensor],
    block: int,
    width: int,
    tree: Parents | None = None,
) -> Tensor:
    """Return the distances (n,) between the logits of the engine's passes and the logits `right`, one per compared
    token. The passes read `width` ids, or trees. at, right: by text number, the compared tokens and their logits (n,
    V). block: the largest number of tokens in memory at once. prompts, texts: the ids of each prompt, and the new ids
    after it. tree: the parents of the trees, None for chains."""
    parts = []
    for part in teacher_forced(lm, prompts, texts, Sampling(), block=block, width=width, tree=tree):
        for a, i in enumerate(part.rows):
            inside = [j for j, token in enumerate(at.get(i, ())) if 0 <= token - part.start < part.x.shape[1]]
            if inside:
                wanted = right[i][inside]
                columns = [at[i][j] - part.start for j in inside]
                parts.append(difference(part.logits[a, columns, : wanted.shape[-1]], wanted))
    return torch.cat(parts)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Return rms(d - mean(d)) / rms(b) with d = a - b, each over the vocabulary, as float64 (...). a and b (..., V):
    logits."""
    apart = a.double() - b.double()
    return rms(apart - apart.mean(-1, keepdim=True)) / rms(b.double())


def most(model: PreTrainedModel) -> float:
    """Return the largest change of logits that the model's dtype can explain, in units of the logits' root mean
    square."""
    return MOST[_unit(model)]


def step(model: PreTrainedModel) -> float:
    """Return one unit in the last place of the number 1, in the dtype of the model's products. For float64 return a
    tenth of float32's unit, since transformers computes norms in float32. For weights in `INT8_ROWS` it is at least
    that of a number of 16 bits, since a kernel multiplies them by such numbers."""
    dtype = _unit(model)
    unit = torch.finfo(torch.float32).eps / 10 if dtype == torch.float64 else torch.finfo(dtype).eps
    return max(unit, 2.0**-15) if quantisation_of(model.config) == INT8_ROWS else unit


def _unit(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype that a model's products are rounded to.

    It differs from the weights' dtype in three cases. Products of float32 may use fewer bits (TF32). 8-bit weights
    (bitsandbytes) are multiplied by 8-bit inputs, in steps of 1 / 127. With 4-bit weights, a CPU with bfloat16
    instructions multiplies single rows in bfloat16.
    """
    lowered = model.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    lowered |= bool(getattr(model, "is_loaded_in_8bit", False))
    lowered |= bool(getattr(model, "is_loaded_in_4bit", False)) and model.device.type == "cpu"
    return torch.bfloat16 if lowered else model.dtype


def _mean(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
