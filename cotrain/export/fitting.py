"""Changes to a draft so that engines can load it: its vocabulary is resized to the target's, or its temperature is
fixed. Heads that no engine loads are refused.

A draft conditioned on the temperature is exported for one temperature: its scale is multiplied into its final norm. The
result is a plain causal LM, which any engine serves.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.errors import UserError
from cotrain.students.base import KINDS, student_class
from inference.drafts.draft_folder import Metadata, read
from inference.drafts.weight_files import CONFIG, json_if_any
from inference.models.pretrained import head_of
from inference.models.small_heads import RANK, VOCABULARY
from inference.proposers.conditioned import KNOTS, MODULE, Scale
from inference.proposers.early_exit import final_norm

BIAS = -1e4  # far below any logit, and finite in float16
TEXTS, LENGTH = 8, 32  # number and length of the draft's texts on which added rows are rated
TRIED = 8  # number of ids on which the exported model is compared with the conditioned one


# --- vocabulary


def resize(model: PreTrainedModel, size: int, tokenizer: PreTrainedTokenizerBase) -> float:
    """Resize the draft's vocabulary to `size` rows in place. Return the mean probability of all added rows together; 0
    if none was added.

    An added id v should never be drafted: the target rejects it, so the text stays exact, but the round ends there. If
    the head has a bias, it is -1e4 at v, so q(v) = 0. Otherwise (Llama, and every tied embedding) the logit is w_v . h,
    and no row w_v makes it low for every hidden state h. Then w_v is one of two rows, whichever has the lower mean
    probability: a copy of the row of the least likely token u, so q(v) = q(u) in every context, or 0, whose logit is
    always 0. Means are over texts sampled from the draft.

    Rows past `size` are removed, since no target id refers to them. tokenizer: the draft's. Raises ValueError if the
    tokenizer has more than `size` ids.
    """
    old, used = model.config.vocab_size, max(tokenizer.get_vocab().values()) + 1
    if size < used:
        raise ValueError(
            f"vocab_size={size}: the draft's tokenizer has {used} ids: put the target's tokenizer into the draft folder"
        )
    if size <= old:
        model.resize_token_embeddings(size)
        return 0.0
    texts = _own_texts(model, used)
    least = _least_likely(_logits(model, texts)[..., :used])
    model.resize_token_embeddings(size, mean_resizing=False)
    _fill(model, old, least)
    return float(_logits(model, texts).softmax(-1)[..., old:].sum(-1).mean())


def _least_likely(logits: Tensor) -> int | None:
    """Return the id with the lowest mean probability, or None if a logit of 0 would have a lower one. logits (B, T,
    V)."""
    norm = logits.logsumexp(-1, keepdim=True)
    masses = (logits - norm).exp().mean((0, 1))
    return None if (-norm).exp().mean() < masses.min() else int(masses.argmin())


@torch.no_grad()
def _fill(model: PreTrainedModel, old: int, least: int | None) -> None:
    """Fill the rows from `old` on, in the embedding and in the head, with copies of the row `least`, or with 0 if
    `least` is None."""
    head = model.get_output_embeddings()
    tables: tuple[Any, ...] = (model.get_input_embeddings(), head)
    for table in tables:
        table.weight[old:] = 0 if least is None else table.weight[least]
    if head.bias is not None:
        head.bias[old:] = BIAS


def _own_texts(model: PreTrainedModel, used: int) -> Tensor:
    """Return ids (TEXTS, LENGTH), all below `used`, sampled from the draft at temperature 1 with a fixed seed."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(used, (TEXTS, 1), generator=random)
    while ids.shape[1] < LENGTH:
        probs = _logits(model, ids)[:, -1, :used].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=random)], 1)
    return ids


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return logits (B, T, V) for ids (B, T), as float32 on the CPU."""
    return model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()


# --- temperature


def refuse_temperature(folder: str | Path, temperature: float | None) -> None:
    """Raise UserError in two cases: the draft in `folder` is conditioned on the temperature and no temperature is
    given, or the draft is not conditioned and one is given."""
    conditioned = KNOTS in json_if_any(Path(folder) / CONFIG)
    if conditioned and temperature is None:
        raise UserError(
            f"temperature=null: the draft {folder} depends on the temperature, and an export is for a single one: "
            "set the one that you serve at, for example temperature=0.7"
        )
    if not conditioned and temperature is not None:
        raise UserError(
            f"temperature={temperature:g}: the draft {folder} does not depend on the temperature: leave temperature= "
            "out"
        )


def measured_elsewhere(metadata: Metadata | None, temperature: float) -> str | None:
    """Return a remark if the draft was measured at another temperature than `temperature`, otherwise None. metadata:
    the draft folder's, or None without cotrain.json."""
    if metadata is None or metadata.report is None or (at := metadata.regime.get("temperature", 1.0)) == temperature:
        return None
    return (
        f"Speeds, and the draft length unless k= gives it, were measured at temperature {at:g}, not at "
        f"{temperature:g}: cotrain bench regime.temperature={temperature:g} measures there."
    )


# --- head


def refuse_small_head(folder: str | Path) -> None:
    """Raise UserError if the draft folder has a head that no engine loads, such as one of low rank. The message says
    how to train instead."""
    if problem := small_head_problem(folder):
        raise UserError(f"{problem}; or serve this draft with cotrain's engine (cotrain generate, cotrain bench)")


def small_head_problem(folder: str | Path) -> str | None:
    """Return why no engine loads the head in a draft folder, and how to train instead; None if engines load it. Engines
    read the pruned vocabulary of a feature draft (the tensor d2t), but no head that is a product of two matrices."""
    file = Path(folder) / CONFIG
    values, kind = json_if_any(file), read(folder).kind
    if rank := values.get(RANK):
        return f"{file}: {RANK} is {rank}, and engines load no head of low rank: train with draft.head_rank=null"
    features = kind in KINDS and student_class(kind).features
    if (tokens := values.get(VOCABULARY)) and not features:
        return (
            f"{file}: {VOCABULARY} is {tokens}, and engines load a causal LM only with a row for each of its "
            f"{values.get('vocab_size')} tokens: train with draft.vocabulary=null, or draft=eagle, whose pruned "
            "vocabulary they load"
        )
    return None


@torch.no_grad()
def fold_conditioning(network: PreTrainedModel, temperature: float) -> PreTrainedModel:
    """Return the network without its conditioning. The weight and bias of its final norm are multiplied, in place, by
    its scale at `temperature`.

    Raises ValueError if the logits then differ, which happens if the model family changes the norm's output before the
    head.
    """
    ids = torch.arange(min(TRIED, network.config.get_text_config().vocab_size), device=network.device).unsqueeze(0)
    scale = Scale(network).at(torch.tensor(float(temperature)))
    states = network.base_model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = head_of(network)(states * scale.to(states)).float()
    norm = final_norm(network)
    for part in (norm.weight, getattr(norm, "bias", None)):
        if part is not None:
            part.copy_(part.to(scale.dtype) * scale)
    logits = network(input_ids=ids, use_cache=False).logits.float()[..., : wanted.shape[-1]]
    close = 0.05 if network.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not torch.allclose(logits, wanted, rtol=close, atol=close * float(wanted.abs().max())):
        raise ValueError(
            f"temperature: the final norm of {type(network).__name__} cannot be scaled, so this draft can "
            "only be served by cotrain's engine"
        )
    delattr(network, MODULE)
    delattr(network.config, KNOTS)
    return network
