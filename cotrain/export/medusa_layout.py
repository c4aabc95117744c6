"""The layout of Medusa heads that vLLM loads, up to 0.32: 0.33 has none. It drafts each head's likeliest token."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.export.engines import MARK, place
from inference.drafts.atomic import new_folder
from inference.drafts.bundled_target import resolve
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import REPORT, load_draft, load_tokenizer
from inference.drafts.weight_files import CONFIG, WEIGHTS
from inference.models.pretrained import load_model
from inference.proposers.heads import MedusaNetwork

SCALES = ("final_logit_softcapping", "logit_scale")  # of logits
VERSIONS = "vllm>=0.28,<=0.32"
NOTE = ("vLLM drafts the likeliest token of each head: acceptance is p(argmax q), less than measured with sampled "
        "drafts. Train with objective=greedy_draft for it.")  # fmt: skip


def export(
    source: str | Path,
    output: str | Path,
    k: int | None = None,
    *,
    target: str | None = None,
    replace: bool = False,
    name: str | None = None,
) -> Path:
    """Copy a folder of Medusa heads to one that vLLM serves, with the target's head, which they share, and a README
    with the launch command. k: drafts a round, at most as many as there are heads; None: as planned. target: hub id or
    path; None: the one that the folder names. name: what the README calls the folder, by default its path.

    Raises ValueError naming the key or file to change, FileExistsError for a folder that is not empty without replace.
    """
    network, _, metadata = load_draft(source, network=MedusaNetwork)
    served = target or (metadata.target["name"] if metadata else None)
    if served is None:
        raise ValueError(f"{source} does not name its target: give target.path=")
    k = k or min(metadata.k if metadata else network.depths, network.depths)
    if k > network.depths:
        raise ValueError(f"k={k}: {source} holds {network.depths} heads, each for one draft of a round")
    folder = resolve(str(served))
    model = load_model(folder)
    network.fits(model, str(source))
    if metadata:  # another target of these sizes has other states
        _check_target(Path(source), metadata.target, hash_target(model.config, load_tokenizer(Path(folder))))
    with new_folder(Path(output), replace=replace) as new:
        (new / CONFIG).write_text(json.dumps(config(network), indent=2) + "\n", encoding="utf-8")
        save_file(tensors(network, model), new / WEIGHTS, metadata={"format": "pt"})
        if (Path(source) / REPORT).is_file():
            shutil.copy(Path(source) / REPORT, new / REPORT)
        card = _card(name or str(Path(output).absolute()), str(served), k)
        (new / "README.md").write_text(card, encoding="utf-8")
    return Path(output)


def launch(draft: str, target: str, k: int) -> str:
    """The command that serves, for a POSIX shell."""
    return shlex.join(["vllm", "serve", place(target), "--speculative-config", json.dumps(speculative(draft, k))])


def speculative(draft: str, k: int) -> dict[str, Any]:
    """vLLM's speculative_config."""
    return {"method": "medusa", "model": draft, "num_speculative_tokens": k}


def config(network: PreTrainedModel) -> dict[str, Any]:
    """config.json. Biases are dropped in silence without medusa_fc_bias; original_lm_head: all heads share one."""
    ours = network.config
    return {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": ours.hidden_size,
        "vocab_size": ours.vocab_size, "truncated_vocab_size": ours.vocab_size, "num_heads": ours.num_heads,
        "num_hidden_layers": ours.num_hidden_layers, "max_paths": 64, "topk": 10, "medusa_fc_bias": True,
        "original_lm_head": True, "dtype": str(network.dtype).removeprefix("torch."),
    }  # fmt: skip


def tensors(network: Any, target: PreTrainedModel) -> dict[str, Tensor]:
    """Blocks by head and layer, and the target's head under the first head's name, which vLLM reads."""
    head: Any = target.get_output_embeddings()
    named = {"lm_heads.0.weight": head.weight.detach().to(network.dtype).clone()}
    for name in ("weight", "bias"):
        for i, blocks in enumerate(getattr(network, name).detach()):
            named |= {f"blocks.{i}.layers.{j}.{name}": block.clone() for j, block in enumerate(blocks)}
    if head.bias is not None or any(_scaled(target, key) for key in SCALES):
        raise ValueError(f"{type(target).__name__}: its head has a bias, a cap or a scale, which this layout has not")
    return named


def _scaled(target: PreTrainedModel, key: str) -> bool:
    return getattr(target.config.get_text_config(), key, None) not in (None, 0, 1.0)


def _check_target(source: Path, trained_for: Any, served: Any) -> None:
    for part in ("config", "tokenizer"):
        if trained_for[part] and trained_for[part] != served[part]:
            raise ValueError(
                f"{source}: its heads were made for {trained_for['name']}, the {part} of target.path= is another"
            )


def _card(folder: str, target: str, k: int) -> str:
    command = f"```sh\n{launch(folder, target, k)}\n```"
    return f"# Medusa heads for {target}\n\n{VERSIONS}; {k} drafts a round.\n\n{command}\n\n{NOTE}\n\n{MARK}\n"
