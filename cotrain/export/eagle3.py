"""Export of feature drafts to the format of EAGLE-3 (vLLM, SGLang, TensorRT-LLM), speculators (vLLM) or DFlash (vLLM),
and of EAGLE-3, DFlash or DSpark in a GGUF file (llama.cpp).

Draft folders of kind eagle and p_eagle already have the EAGLE-3 format: its tensor names, d2t, and no embedding, since
engines use the target's. The format of speculators has another config.json, the prefix `layers.0.`, and the embedding.
A p_eagle draft, which only vLLM loads, has the id of the mask token and the tensor mask_hidden in both formats.

Draft folders of kind block have DFlash's format, except that vLLM reads the mask token's embedding from a separate
file. SGLang, TensorRT-LLM and transformers take head and mask from the target, so they load only drafts that do so too.
transformers has DFlash under other names, as the assistant of Muse Glimmer. DSpark alone can hold a Markov head;
elsewhere it is left out.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from cotrain.errors import UserError
from cotrain.export.engines import ASSISTANT_TYPE, GGUF_FILE, MARKOV, TARGET_HEAD, TREES, drafting, is_parallel
from cotrain.export.fitting import refuse_small_head
from cotrain.export.publishing import planned_anew, without_markov
from cotrain.students.base import KINDS, student_class
from inference.drafts.atomic import new_folder
from inference.drafts.draft_folder import Metadata, load_draft, read, write
from inference.drafts.gguf_target import gguf_file
from inference.drafts.published import LAYER, LAYER_IDS, MASK_FILE, renamed
from inference.drafts.weight_files import CONFIG, WEIGHTS, read_json
from inference.models.pretrained import SPECIAL, head_of, layers_of
from inference.proposers import kind_of
from inference.proposers.block import BlockNetwork
from inference.proposers.eagle import EagleNetwork, output_layers

MASK = "pard_token"  # the key of the mask token in config.json
RAW_RESIDUAL = ("sglang", "tensorrt_llm")  # whose layers add the features themselves, by their sources
ASSISTANT = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}  # DFlash's names -> transformers'


def export(
    source: str | Path,
    output: str | Path,
    layout: str = "eagle3",
    k: int | None = None,
    *,
    engine: str = "vllm",
    target: PreTrainedModel,
    objective: str | None = None,
    name: str | None = None,
    dtype: str | None = None,
    replace: bool = False,
    card: Callable[[Metadata], str] | None = None,
) -> Path:
    """Write a draft of kind eagle, p_eagle or block to the folder `output`, in a layout that engines load. Return
    `output`.

    Args:
        source: the draft folder.
        layout: the format: "eagle3", "speculators", "dflash" or "dspark".
        k: drafts per round. None: the value in cotrain.json, or a newly planned one if the engine draws drafts in
            another way (sampled or greedy) than in the measurement of the draft.
        engine: an engine that loads `layout` (a key of `engines.FEATURES[layout]`).
        target: the model that the draft was trained for.
        objective: "sampled" or "greedy"; None for the value in cotrain.json.
        name: the target's hub id or path; None for the value in cotrain.json. llama.cpp's file gets the tokenizer of a
            GGUF target, otherwise that of the draft folder.
        dtype: how llama.cpp's file stores matrices, a key of `gguf.TYPES`; None for the draft's own.
        replace: whether a folder at `output` is replaced.
        card: a function from the metadata to the text of the README; None to write no README.

    config.json and the metadata name the target's states in two ways: as inputs of layers (for vLLM), and as outputs of
    the layers before them (for SGLang in `eagle_config`, for TensorRT-LLM in its launch command). The metadata also has
    remarks about what the layout cannot hold.

    Raises UserError for a layout that this kind cannot have, for a head of low rank, and for what the engine does not
    compute. Raises ValueError for a folder of another kind, a missing tensor, a target of other sizes, and a k that the
    draft was not trained for. A draft that drafts in one pass allows k up to the number of depths it was trained for.
    If its mask tokens attend to each other, k must equal that number. Raises FileExistsError if `output` contains files
    and `replace` is False.
    """
    folder = read(source)
    features = {kind: student_class(kind).features for kind in KINDS if student_class(kind).features}
    if folder.metadata is None or folder.kind not in features:
        raise ValueError(f"{source} is a draft of kind {folder.kind!r}, not {' or '.join(features)}: leave layout= out")
    if layout not in features[folder.kind]:
        raise UserError(
            f"layout={layout}: {folder.kind} drafts are written with layout={' or '.join(features[folder.kind])}"
        )
    refuse_small_head(source)
    network, tokenizer, _ = load_draft(source, network=kind_of(folder.kind).network_class, model=target)
    network.fits(target, str(source))
    _refuse(network, target, Path(source), engine, layout)
    metadata = folder.metadata.exported(name, k, objective)
    depths, remarks = network.config.depths, list[str]()
    if is_parallel(folder.kind) and metadata.k > depths:
        raise ValueError(f"k={metadata.k}: {source} was trained for {depths} drafts a round: set k={depths} or less")
    if isinstance(network, BlockNetwork) and not network.config.causal and metadata.k != depths:
        if k:
            raise ValueError(
                f"k={k}: an engine gives the draft k mask tokens, but those of {source} attend to each other and were "
                f"trained {depths} at a time: set k={depths}"
            )
        remarks.append(
            f"It was planned with {metadata.k} drafts a round, but an engine drafts {depths}: it gives the draft one "
            f"mask token for each draft, and these attend to each other and were trained {depths} at a time."
        )
        metadata = metadata.exported(None, depths, None)
    elif not k and not (metadata.tree and (engine, layout) in TREES):
        way, markov = drafting(engine, metadata.objective, layout), network.markov_head is None or layout == MARKOV
        metadata, remarks = planned_anew(source, folder.metadata, metadata, way, markov)
    elif not k and metadata.tree and not metadata.tree.likeliest:
        remarks.append(
            f"Its tree was planned with sampled children, but {engine} drafts the likeliest tokens: also time smaller "
            "trees, and chains (export with k=)."
        )
    if layout != MARKOV:
        served = changed(metadata, objective=drafting(engine, metadata.objective, layout))
        remarks = [*_without_markov_head(network, Path(source), served), *remarks]
    layers = list(network.config.layers)
    remarks = [*remarks, *_unserved(layers, engine)]
    numbered = {"layout": layout, "inputs_of_layers": layers, "outputs_of_layers": output_layers(layers)}
    with new_folder(Path(output), replace=replace) as new:
        if engine == "llamacpp":
            remarks += _as_gguf(new, network, tokenizer, target, str(metadata.target["name"]), dtype)
        metadata = changed(metadata, origin={**metadata.origin, "export": {**numbered, "remarks": remarks}})
        if engine != "llamacpp":
            write(network, tokenizer, new, metadata, None)
        if layout == "speculators":
            _as_speculators(new, network, metadata, target)
        elif layout == "dflash" and engine != "llamacpp":
            _as_dflash(new, network, target)
            if engine == "transformers":
                _as_assistant(new, network)
        if card:
            (new / "README.md").write_text(card(metadata), encoding="utf-8")
    return Path(output)


def _unserved(layers: list[int], engine: str) -> list[str]:
    """Return a remark if the engine cannot give the draft the target's states after these layers, else []."""
    if engine == "llamacpp" or sorted(set(layers)) == layers:  # llama.cpp gives any states in any order
        return []
    return [
        f"No engine will serve it: it reads the target's states {layers}, but engines give each state once, in "
        "ascending order: use a target of at least 7 layers."
    ]


def _refuse(network: Any, target: PreTrainedModel, source: Path, engine: str, layout: str) -> None:
    """Raise UserError if the layout has a Markov head and the network none, or if the engine computes another layer,
    another attention or another head."""
    if isinstance(network, BlockNetwork):
        _refuse_block(network, target, source, engine)
    if layout == MARKOV and network.markov_head is None:
        raise UserError(f"layout={layout}: {source} has no Markov head: set layout=dflash")
    if engine in RAW_RESIDUAL and network.config.norm_before_residual:
        raise UserError(
            f"engine={engine}: {source / CONFIG}: norm_before_residual is true, which it does not compute: set "
            "engine=vllm or llamacpp"
        )


def _refuse_block(network: BlockNetwork, target: PreTrainedModel, source: Path, engine: str) -> None:
    at, instead = f"engine={engine}: {source / CONFIG}:", "set engine=vllm or llamacpp"
    if engine in TARGET_HEAD and not network.config.target_head:
        raise UserError(
            f"{at} the draft has a head and a mask of its own, and this engine takes the target's: {instead}, or "
            "train with draft.head=target"
        )
    if engine in TARGET_HEAD and network.config.causal:
        raise UserError(
            f"{at} its masks attend to earlier ones alone, and in this engine to all: {instead}, or train with "
            "draft.mask=bidirectional"
        )
    if engine in TARGET_HEAD and min(network.config.layers) == 0:
        raise UserError(f"{at} it reads the target's embeddings, and this engine gives outputs of layers: {instead}")
    head: Any = target.get_output_embeddings()
    states = 1000 * torch.eye(2, network.config.hidden_size, dtype=head.weight.dtype, device=head.weight.device)
    if network.config.target_head and not torch.allclose(head_of(target)(states), states @ head.weight.T):
        raise UserError(
            f"{at} the draft learnt with the target's head, which scales, caps or shifts its logits, and this engine "
            "takes its matrix alone: train with draft.head=own"
        )


def _as_gguf(
    folder: Path, network: Any, tokenizer: Any, target: PreTrainedModel, name: str, dtype: str | None
) -> list[str]:
    """Write the GGUF file into `folder`, and return remarks. name: the target's. The other arguments are those of
    `export` and the draft folder's tokenizer."""
    from gguf import GGUFReader

    from cotrain.export.gguf_features import write_features

    if (file := gguf_file(name)) is not None:
        return write_features(network, target, GGUFReader(file), folder / GGUF_FILE, dtype)
    if tokenizer is None:
        raise UserError(
            "engine=llamacpp: the draft folder has no tokenizer, and the file needs one: copy the target's tokenizer "
            "files into it, or set target.path= to the target's GGUF file"
        )
    remarks = write_features(network, target, tokenizer, folder / GGUF_FILE, dtype)
    return [f"TARGET.gguf is {name} in this format: llama.cpp's convert_hf_to_gguf.py writes it.", *remarks]


def _without_markov_head(network: Any, source: Path, metadata: Metadata) -> list[str]:
    """Remove the Markov head from a network, in place. Return a list with a remark about it, or [] if there was none.
    source: the draft folder, whose report tells what the head gains. metadata: the export's."""
    config, remarks = network.config, []
    if network.markov_head is not None:
        network.markov_head, config.markov_rank = None, 0
        remarks.append(without_markov(source, metadata))
    return remarks


def _as_dflash(folder: Path, network: BlockNetwork, target: PreTrainedModel) -> None:
    """Add to the files in `folder` what engines read of a block draft: the size of a block, with its anchor, the number
    of the target's layers, and the mask of a draft that has one of its own."""
    sizes = {"block_size": network.config.depths + 1, "num_target_layers": layers_of(target.config)}
    _replace_config(folder, read_json(folder / CONFIG) | sizes)
    if network.mask_embedding is not None:
        mask = {
            "mask_token_id": network.config.dflash_config["mask_token_id"],
            "embedding": network.mask_embedding.detach().cpu().clone(),
        }
        torch.save(mask, folder / MASK_FILE)


def _as_assistant(folder: Path, network: BlockNetwork) -> None:
    """Convert the files in `folder` from the DFlash format to transformers' one architecture for it, in place."""
    save_file(renamed(load_file(folder / WEIGHTS), ASSISTANT), folder / WEIGHTS, metadata={"format": "pt"})
    ours = read_json(folder / CONFIG)
    changes = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": ASSISTANT_TYPE,
        "layer_types": ["full_attention"] * network.config.num_hidden_layers,
        "mask_token_id": ours["dflash_config"]["mask_token_id"],
        "target_layer_ids": ours["dflash_config"]["target_layer_ids"],
    }
    # transformers' DFlash gives the special ids defaults
    _replace_config(folder, dict.fromkeys(SPECIAL) | ours | changes)


def _replace_config(folder: Path, values: Mapping[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _as_speculators(folder: Path, network: EagleNetwork, metadata: Metadata, target: PreTrainedModel) -> None:
    """Convert the files in `folder` from the EAGLE-3 format to the format of speculators, in place."""
    embedding: Any = target.get_input_embeddings()
    save_file(
        renamed(load_file(folder / WEIGHTS), LAYER) | {"embed_tokens.weight": embedding.weight.detach().cpu().clone()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    _replace_config(folder, speculators_config(read_json(folder / CONFIG), metadata, type(target).__name__))


def speculators_config(ours: Mapping[str, Any], metadata: Metadata, architecture: str) -> dict[str, Any]:
    """Return the content of config.json in the format of speculators. ours: the content of an EAGLE-3 folder's
    config.json. metadata: the export's, which names the target. architecture: the target's class name."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": metadata.k,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    apart = (
        "architectures",
        "draft_vocab_size",
        "eagle_config",
        LAYER_IDS,
        "depths",
        "norm_before_residual",
        "transformers_version",
        MASK,
    )
    mask = ours.get(MASK)  # of p_eagle
    algorithm = "eagle3" if mask is None else "peagle"
    return {
        "architectures": ["Eagle3Speculator" if mask is None else "PEagleDraftModel"],
        "speculators_model_type": algorithm,
        "draft_vocab_size": ours["draft_vocab_size"],
        "norm_before_residual": ours["norm_before_residual"],
        "target_hidden_size": ours["hidden_size"],
        LAYER_IDS: ours[LAYER_IDS],
        "transformer_layer_config": {name: value for name, value in ours.items() if name not in apart},
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": metadata.target["name"], "architectures": [architecture]},
        },
        "tie_word_embeddings": False,
        "dtype": ours["dtype"],
    } | ({} if mask is None else {"mask_token_id": mask})
