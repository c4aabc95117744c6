"""Changes to a draft that make it load in an engine: the target's vocabulary size, and one temperature. Heads that no
engine loads are refused.

A draft conditioned on the temperature is exported at one of them: its scale becomes part of its final norm, and the
rest is a plain causal LM, which any engine serves.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.errors import UserError
from cotrain.students.base import KINDS, student_class
from inference.drafts.causal_lm import CausalLM
from inference.drafts.draft_folder import Metadata, read
from inference.drafts.weight_files import CONFIG, read_json
from inference.models.pretrained import head_of
from inference.models.small_heads import RANK, VOCABULARY
from inference.proposers.conditioned import KNOTS, MODULE, ConditionedNetwork, Scale
from inference.proposers.early_exit import final_norm

BIAS = -1e4  # far below any logit, and finite in float16
TEXTS, LENGTH = 8, 32  # drawn from the draft, to judge rows that are added
TRIED = 8  # ids on which the plain model is compared with the scaled one


# --- vocabulary


def resize(model: PreTrainedModel, size: int, tokenizer: PreTrainedTokenizerBase) -> float:
    """Give the draft `size` rows in place; returns the chance that a draft falls on a row that was added.

    A padded id v should never be drafted: the target rejects it, so the text stays exact, but the round ends
    there. A head with a bias gets -1e4 at v: no mass at all. A head without one (Llama, and every tied
    embedding) has logit w_v . h, and no row w makes that low for every hidden state h. So w_v is a copy of
    the row of the least likely token u, which gives q(v) = q(u) in every context, low because training
    pushed it down together with h; or 0, logit 0, if that is lower still. Both are judged by their mean
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


# --- temperature


def refuse(folder: str | Path, temperature: float | None) -> None:
    """Raise UserError for a draft conditioned on the temperature without a temperature, and for another with one."""
    file = Path(folder) / CONFIG
    conditioned = KNOTS in read_json(file) if file.is_file() else False
    if conditioned and temperature is None:
        raise UserError(f"temperature: {folder} drafts differently at each temperature, and an engine loads one: give "
                        "the one that you serve at, as temperature=0.7")  # fmt: skip
    if not conditioned and temperature is not None:
        raise UserError(f"temperature={temperature:g}: {folder} drafts alike at every temperature: temperature=null")


def measured_elsewhere(metadata: Metadata | None, temperature: float) -> str | None:
    """A remark on a draft that was measured, and its length planned, at another temperature; None for others."""
    if metadata is None or metadata.report is None or (at := metadata.regime.get("temperature", 1.0)) == temperature:
        return None
    return (f"Speeds, and the draft length unless k= gives it, were measured at temperature {at:g}, not at "
            f"{temperature:g}: cotrain bench regime.temperature={temperature:g} measures there.")  # fmt: skip


def network_class(temperature: float | None) -> Any:
    """The class that loads a folder which passed `refuse`."""
    return CausalLM if temperature is None else ConditionedNetwork


# --- head


def refuse_small_head(folder: str | Path) -> None:
    """Raise UserError for a draft folder whose head no engine loads, see `small_head_problem`."""
    if problem := small_head_problem(folder):
        raise UserError(f"{problem}; or serve it with this engine (cotrain generate, cotrain bench)")


def small_head_problem(folder: str | Path) -> str | None:
    """Why no engine loads the head of a draft folder, and what to train instead; None for a head that engines load.
    They read pruned vocabularies of feature drafts (d2t), and no product of two matrices."""
    file = Path(folder) / CONFIG
    values, kind = read_json(file) if file.is_file() else {}, read(folder).kind
    if rank := values.get(RANK):
        return f"{file}: {RANK} is {rank}, and engines load no head of low rank: train with draft.head_rank=null"
    features = kind in KINDS and student_class(kind).features
    if (tokens := values.get(VOCABULARY)) and not features:
        return (f"{file}: {VOCABULARY} is {tokens}, and engines load a causal LM only with a row for each of its "
                f"{values.get('vocab_size')} tokens: train with draft.vocabulary=null, or draft=eagle, whose pruned "
                "vocabulary they load")  # fmt: skip
    return None


@torch.no_grad()
def folded(network: PreTrainedModel, temperature: float) -> PreTrainedModel:
    """The network itself, its scale at a temperature folded into the weight, and bias, of its final norm. Raises
    ValueError for a family whose head does not read that norm as it is."""
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
        raise ValueError(f"temperature: {type(network).__name__} has a final norm that takes no scale: it is served by "
                         "this engine alone")  # fmt: skip
    delattr(network, MODULE)
    delattr(network.config, KNOTS)
    return network
