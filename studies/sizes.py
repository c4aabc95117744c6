"""Memory and time of a training for targets of 1, 8, 32 and 70 billion parameters and every kind of draft, estimated.

    python -m studies.sizes outputs/results/sizes.json

Each row is what `cotrain train check=true` computes (`cotrain.training.preflight`), for a GPU of the data sheet: the
estimate reads no weight, so the targets are a config.json and files of weights without storage. Times are those of
1,000 texts that are sampled and of 1,000 steps, since both grow in proportion.
"""

import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen3Config

from cotrain.errors import UserError
from cotrain.students.base import KINDS
from cotrain.training import preflight
from cotrain.training.preconditions import RunOutline, require
from inference.drafts.atomic import write_atomic
from inference.drafts.bundled_target import resolve
from inference.drafts.weight_files import WEIGHTS
from inference.measure.environment import environment
from tests.settings import composed

H100 = preflight.MachineSpeed(990e12, 3.35e12)  # bfloat16 operations and bytes a second, by its data sheet
LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 131072}
QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def llama(width: int, inner: int, layers: int, heads: int, **more: Any) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **LLAMA3 | ENDS | more,
    )


def qwen3(width: int, inner: int, layers: int, heads: int) -> PretrainedConfig:
    return Qwen3Config(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=False,
        **QWEN3 | ENDS,
    )


TARGETS = {  # shapes as published
    "1B (Llama 3.2)": llama(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True),
    "8B (Qwen3)": qwen3(4096, 12288, 36, 32),
    "32B (Qwen3)": qwen3(5120, 25600, 64, 64),
    "70B (Llama 3.1)": llama(8192, 28672, 80, 64, head_dim=128, tie_word_embeddings=False),
}
HEAD = "draft.vocabulary=32000"  # where a kind has a head of its own, as the README's command
SETTINGS: dict[str, list[str]] = {
    **{kind: [] for kind in KINDS},
    "eagle": [HEAD],
    "p_eagle": [HEAD],
    "block": [HEAD],
}
LEFT_OUT = {"two_levels": "reads a trained draft: that of quantised, and its own"}


def folder_of(config: PretrainedConfig, folder: Path) -> Path:
    """A target whose files of weights name every tensor and have no storage on the disk."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve("bundled")).save_pretrained(folder)  # the estimate reads no text with it
    named: dict[str, str] = {}
    tensors = {id(tensor): (name, tensor) for name, tensor in model.state_dict().items()}  # tied ones once
    for number, (name, tensor) in enumerate(tensors.values()):
        named[name] = f"model-{number}.safetensors"
        told = json.dumps({name: {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [0, tensor.nbytes]}})
        with (folder / named[name]).open("wb") as file:
            file.write(struct.pack("<Q", len(told)) + told.encode())
            file.truncate(8 + len(told) + tensor.nbytes)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": named}), encoding="utf-8")
    return folder


def row(folder: Path, kind: str) -> dict[str, Any]:
    """The estimate for one kind. memory: GiB. sampling: GPU hours of 1,000 texts. training: of 1,000 steps."""
    start = [] if kind in ("quantised", "retrieval") else SETTINGS[kind]
    cfg = composed(f"target.path={folder}", f"draft={kind}", "trainer=gpu", *start)
    cfg.trainer.accelerator, cfg.output = "auto", str(folder / "run")  # there is no GPU here
    try:
        known: RunOutline = require(cfg)
    except (UserError, ValueError) as error:
        return {"refused": str(error).replace(str(folder), "the target")}
    with patch.object(preflight, "device", lambda: "cuda"), patch.object(preflight, "machine_speed", lambda: H100):
        need, seconds = preflight.estimate_need(cfg, known), preflight.durations(cfg, known)
        cfg.quantisation.kind = "nf4"
        rounded = preflight.estimate_need(cfg, known)
    return {
        "target": need.target,
        "draft": need.draft,
        "memory": need.memory / preflight.GIB,
        "memory_nf4": rounded.memory / preflight.GIB,
        "disk": need.disk / preflight.GIB,
        "sampling": seconds.sampling / seconds.texts * 1000 / 3600,
        "training": seconds.training / cfg.trainer.steps * 1000 / 3600,
        "tokens_a_step": cfg.trainer.batch * (cfg.rollout.prompt_tokens + cfg.rollout.new_tokens),
    }


def main(file: Path) -> None:
    rows: dict[str, dict[str, Any]] = {}
    for name, config in TARGETS.items():
        with tempfile.TemporaryDirectory() as place:
            folder = folder_of(config, Path(place))
            rows[name] = {kind: row(folder, kind) for kind in KINDS if kind not in LEFT_OUT}
        print(name, json.dumps(rows[name], indent=1), flush=True)
    report = {"environment": environment(), "estimated_for": "an H100 by its data sheet", "left_out": LEFT_OUT}
    write_atomic(file, json.dumps(report | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
