"""(d) of the verdict: logits of an engine's own passes against transformers' forward of whole texts.

What rounding may change is taken from transformers' forward alone, never from the passes that are judged: from its
logits after every embedding was moved by one unit in the last place. That follows the model: one whose routing or
deep layers amplify rounding has more of it. The dtype bounds it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.exactness.teacher_forced import rms, teacher_forced
from inference.exactness.tree_passes import Parents, depth_of
from inference.exactness.verdict import LogitsCheck
from inference.models.lm import LM
from inference.models.output_head import own_logits
from inference.sampling import Sampling

# the most that rounding may change logits, of their own root mean square, over the tokens of a text
MOST = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
TOKEN = 6  # times that at any one token
LEAST = 4  # units in the last place, where the embeddings' rounding is not amplified: the layers round as well
MARGIN = 4
GAP = 8  # times that: no gap of two logits moves further
FEW = 4  # texts that are compared
POSITIONS, LAST = 128, 32  # of whose tokens these many, the last ones among them: a head's logits need memory


def most(model: PreTrainedModel) -> float:
    """The largest change of logits that a model's dtype excuses."""
    return MOST[_unit(model)]


def step(model: PreTrainedModel) -> float:
    """One unit in the last place of 1; of float64 a tenth of float32's, in which transformers computes norms."""
    dtype = _unit(model)
    return torch.finfo(torch.float32).eps / 10 if dtype == torch.float64 else torch.finfo(dtype).eps


def _unit(model: PreTrainedModel) -> torch.dtype:
    """The dtype whose rounding a model's products have: float32 may be multiplied in fewer bits, and where weights are
    in 8 bits (bitsandbytes) so are what they are multiplied with, in steps of 1 / 127; in 4 bits a CPU with bfloat16
    products multiplies one row in those."""
    lowered = model.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    lowered |= bool(getattr(model, "is_loaded_in_8bit", False))
    lowered |= bool(getattr(model, "is_loaded_in_4bit", False)) and model.device.type == "cpu"
    return torch.bfloat16 if lowered else model.dtype


@torch.inference_mode()
def check_logits(
    lm: LM, prompts: Sequence[list[int]], texts: Sequence[list[int]], width: int, tree: Parents | None = None
) -> LogitsCheck:
    """Passes of one id and of `width` ids, or over trees of a shape, over the first texts, as many as `lm` has rows and
    at least three, beside model(input_ids) of up to four of them: whole texts, at `spread` of their tokens.

    lm: the one that runs, of the engine in question; its slots are overwritten.
    """
    chosen = range(min(max(lm.rows, FEW - 1), len(texts)))
    prompts, texts = [prompts[i] for i in chosen], [texts[i] for i in chosen]
    compared = sorted({round(i * (len(texts) - 1) / max(FEW - 1, 1)) for i in range(FEW)})
    at = {i: spread(len(texts[i])) for i in compared}
    known = {i: _forward(lm.model, prompts[i], texts[i], at[i])[:, : lm.vocabulary] for i in compared}
    moved = {i: _forward(lm.model, prompts[i], texts[i], at[i], moved=True)[:, : lm.vocabulary] for i in compared}
    own = torch.cat([difference(moved[i], known[i]) for i in compared])
    block = width if tree is None else 1 + depth_of(tree)
    one = _passes(lm, prompts, texts, at, known, block, 1)
    many = _passes(lm, prompts, texts, at, known, block, width, tree)
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


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square over the vocabulary of a - b, but for what all logits have in common, over that of b: (..., V)
    -> (...) float64."""
    apart = a.double() - b.double()
    return rms(apart - apart.mean(-1, keepdim=True)) / rms(b.double())


def spread(length: int) -> list[int]:
    """Which tokens of a text of that length are compared: all of up to POSITIONS, else so many, the LAST ones and
    others at equal distances from the first on. The passes run over all tokens whatever is compared."""
    if length <= POSITIONS:
        return list(range(length))
    before, many = length - LAST, POSITIONS - LAST
    return [i * before // many for i in range(many)] + list(range(before, length))


def _passes(
    lm: LM, prompts: list[list[int]], texts: list[list[int]], at: dict[int, list[int]], known: dict[int, Tensor],
    block: int, width: int, tree: Parents | None = None,
) -> Tensor:  # fmt: skip
    """Differences of the known logits, those of the tokens `at` of a text, in passes of `width` ids or over trees."""
    parts = []
    for part in teacher_forced(lm, prompts, texts, Sampling(), block=block, width=width, tree=tree):
        for a, i in enumerate(part.rows):
            inside = [j for j, token in enumerate(at.get(i, ())) if 0 <= token - part.start < part.x.shape[1]]
            if inside:
                right = known[i][inside]
                columns = [at[i][j] - part.start for j in inside]
                parts.append(difference(part.logits[a, columns, : right.shape[-1]], right))
    return torch.cat(parts)


def _forward(model: PreTrainedModel, prompt: list[int], text: list[int], at: list[int], moved: bool = False) -> Tensor:
    """Logits (n, V) of the tokens `at` of the text by transformers' own forward of the whole text, without a cache;
    moved: each number of the embeddings by one unit in its last place, up or down."""
    ids = torch.tensor([prompt + text[:-1]], device=model.device)
    if not moved:
        return own_logits(model, at=[len(prompt) - 1 + token for token in at], input_ids=ids)
    embeddings = model.get_input_embeddings()(ids)
    signs = torch.randint(2, embeddings.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    shifted = embeddings * (1 + step(model) * signs.to(embeddings))
    return own_logits(model, at=[len(prompt) - 1 + token for token in at], inputs_embeds=shifted)


def _mean(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
