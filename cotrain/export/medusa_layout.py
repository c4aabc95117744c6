"""Export of Medusa heads for vLLM up to 0.32; later versions do not serve them. vLLM drafts the most probable token of
each head."""

import shutil
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.export.engines import MARK, place, serve_vllm
from cotrain.export.publishing import planned_anew, said_of, without_markov
from inference.drafts.atomic import new_folder, write_json
from inference.drafts.bundled_target import resolve
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import REPORT, load_draft, load_tokenizer
from inference.drafts.published import MEDUSA
from inference.drafts.weight_files import CONFIG, WEIGHTS
from inference.models.pretrained import load_model
from inference.proposers.heads import MedusaNetwork

SCALES = ("final_logit_softcapping", "logit_scale")  # keys of configs that change logits after the head
VERSIONS = "vllm>=0.28,<=0.32"
NOTE = (
    "vLLM drafts the likeliest token of each head: acceptance is p(argmax q), less than measured with sampled "
    "drafts. Train with objective=greedy_draft for it."
)


def export(
    source: str | Path,
    output: str | Path,
    k: int | None = None,
    *,
    target: str | None = None,
    replace: bool = False,
    name: str | None = None,
) -> Path:
    """Write the Medusa heads in the folder `source` to the folder `output`, as vLLM loads them. The target's output
    head, which all Medusa heads use, is written too, and a README that has the launch command. Return `output`.

    k: drafts per round, at most the number of heads. target: hub id or path. If k or target is None, its value is read
    from cotrain.json. replace: whether a folder at `output` is replaced. name: the folder's name in the README; None
    for its path.

    Raises ValueError, which names the key or file to change, and FileExistsError if `output` is not empty and `replace`
    is False.
    """
    network, _, metadata = load_draft(source, network=MedusaNetwork)
    served = target or (metadata.target["name"] if metadata else None)
    if served is None:
        raise ValueError(f"draft.path={source} does not name its target: set target.path= to this model")
    planned, remarks = metadata, list[str]()
    if metadata and not k:
        planned, remarks = planned_anew(source, metadata, metadata, "greedy", network.markov_head is None)
    k = k or min(planned.k if planned else network.depths, network.depths)
    if k > network.depths:
        raise ValueError(
            f"k={k}: {source} has {network.depths} heads, each of which drafts one token of a round: set "
            f"k={network.depths} or less"
        )
    folder = resolve(str(served))
    model = load_model(folder)
    network.fits(model, str(source))
    if metadata:  # a target of the same sizes may be another model, with other states
        _check_target(Path(source), metadata.target, hash_target(model.config, load_tokenizer(Path(folder))))
    with new_folder(Path(output), replace=replace) as new:
        write_json(new / CONFIG, config(network), 2)
        save_file(medusa_tensors(network, model), new / WEIGHTS, metadata={"format": "pt"})
        if (Path(source) / REPORT).is_file():
            shutil.copy(Path(source) / REPORT, new / REPORT)
        if network.markov_head is not None and metadata:
            remarks.append(without_markov(Path(source), changed(metadata, k=k, objective="greedy")))
        written = metadata and metadata.exported(str(served), None, None)
        notes = [*(said_of(written) if written else []), NOTE, *remarks]
        learnt = written.learnt_from if written else str(served)
        command = serve_vllm(place(str(served)), speculative(name or str(Path(output).absolute()), k))
        head = f"# Medusa heads for {learnt}\n\n{VERSIONS}; {k} drafts a round.\n\n```sh\n{command}\n```"
        (new / "README.md").write_text("\n\n".join([head, *notes, MARK]) + "\n", encoding="utf-8")
    return Path(output)


def speculative(draft: str, k: int) -> dict[str, Any]:
    """Return vLLM's speculative_config. draft: the exported folder. k: drafts per round."""
    return {"method": "medusa", "model": draft, "num_speculative_tokens": k}


def config(network: PreTrainedModel) -> dict[str, Any]:
    """Return the content of config.json for vLLM. Its entry original_lm_head says that all heads share one output head.
    Its entry medusa_fc_bias makes vLLM read the biases; without it, vLLM would ignore them silently."""
    ours = network.config
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": ours.hidden_size,
        "vocab_size": ours.vocab_size,
        "truncated_vocab_size": ours.vocab_size,
        "num_heads": ours.num_heads,
        "num_hidden_layers": ours.num_hidden_layers,
        "max_paths": 64,
        "topk": 10,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "dtype": str(network.dtype).removeprefix("torch."),
    }


def medusa_tensors(network: Any, target: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors for vLLM by name: the blocks of each head and layer, and the target's output head under the
    name of head 0. Raises ValueError if the target's output head has a bias, a cap or a scale."""
    head: Any = target.get_output_embeddings()
    named = {"lm_heads.0.weight": head.weight.detach().to(network.dtype).clone()}
    for name in ("weight", "bias"):
        for i, blocks in enumerate(getattr(network, name).detach()):
            named |= {MEDUSA.format(i, j, name): block.clone() for j, block in enumerate(blocks)}
    theirs = target.config.get_text_config()
    if head.bias is not None or any(getattr(theirs, key, None) not in (None, 0, 1.0) for key in SCALES):
        raise ValueError(
            f"{type(target).__name__}: vLLM's Medusa supports no bias, cap or scale of its head: use cotrain generate"
        )
    return named


def _check_target(source: Path, trained_for: Any, served: Any) -> None:
    for part in ("config", "tokenizer"):
        if trained_for[part] and trained_for[part] != served[part]:
            raise ValueError(
                f"{source}: its heads were made for {trained_for['name']}, but target.path= has another {part}: set "
                "target.path= to the target that they were made for"
            )
