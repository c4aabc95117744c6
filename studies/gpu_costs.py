"""Costs of rounds with targets of 1, 8 and 32 billion random weights, measured on a device or forecast for a GPU.

    python -m studies.gpu_costs outputs/results/gpu_forecast.json

The time of a pass does not depend on the values of the weights, so Llama-shaped targets are made on the device, beside
an EAGLE-3 layer and a block draft, both with a head of 32,000 tokens. Both files, the forecast and that of part d of
`studies.gpu_day`, are read by `cotrain plan costs=FILE batches=[1,8,32,64]`, which prints the speed-up at each
acceptance.

The forecast of a pass is the longer of bytes / bandwidth and operations / rate of the chip's data sheet, see
`studies.floor`. A round adds its launches outside recorded graphs, copies, reads and Python, at the prices
and counts of `tests.gpu_counts` (Python by rows). Kernels inside a graph cost nothing beside their bytes, so the
forecast is too short for small models, and for all where a kernel reaches less than the data sheet's bandwidth.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from cotrain.planning.costs_file import speedup_table, speedups_of
from inference.drafts.atomic import write_atomic
from inference.drafts.published import fused
from inference.measure.costs import Costs, interleaved, measure_costs
from inference.measure.environment import environment
from inference.models.cache import token_bytes
from inference.models.lm import LM, store_prompts
from inference.models.pretrained import layers_of
from inference.proposers.block import Block, BlockConfig, BlockNetwork
from inference.proposers.eagle import Eagle, EagleConfig, EagleNetwork
from studies.floor import Load, Machine
from tests import gpu_counts

DTYPE, CONTEXT, HEAD = torch.bfloat16, 256, 32000  # of weights, tokens before a pass, tokens in a draft's head
ROWS, IDS = (1, 8, 32, 64), (1, 2, 4, 8, 16, 32, 64)
LONGEST = 16  # drafts a round
REPEATS, WARMUP = 5, 2
CHIPS = {"H100": Machine(3.35e12, 990e12), "H200": Machine(4.8e12, 990e12)}
COUNTS = Path(__file__).parents[1] / "outputs" / "results" / "gpu_counts.json"
SIZES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "32B": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 152064,
    },
}
TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 300,
}
KINDS: dict[str, tuple[type[EagleConfig], Any, type[Eagle]]] = {
    "eagle": (EagleConfig, EagleNetwork, Eagle),
    "block": (BlockConfig, BlockNetwork, Block),
}


def random_target(shape: dict[str, Any], device: torch.device | str, context: int = 2048) -> PreTrainedModel:
    ends: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = LlamaConfig(max_position_embeddings=context, **ends, **shape)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()


def random_draft(kind: str, target: PreTrainedModel, longest: int) -> Any:
    """The network of a draft as wide as the target, where the target is."""
    config_class, network_class, _ = KINDS[kind]
    shape = {
        name: getattr(target.config, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        )
    }
    layers = list(fused(layers_of(target.config)))
    shape["draft_vocab_size"] = min(HEAD, shape["vocab_size"] - 1)
    with torch.device(target.device):
        network = network_class(config_class(**shape, depths=longest, eagle_aux_hidden_state_layer_ids=layers))
    network = network.to(DTYPE).eval()
    if target.device.type != "meta":
        network.know(range(shape["draft_vocab_size"]))
    return network


# --- measured


def measured(
    target: PreTrainedModel, network: Any, kind: str, rows: int, longest: int, context: int = CONTEXT
) -> dict[str, Any]:
    """The costs of rounds, as `cotrain plan costs=` reads them."""
    proposer = KINDS[kind][2](network)
    lm = LM(target, rows, graphs=True)
    return asdict(measure_costs(lm, proposer, longest, context=context, repeats=REPEATS, warmup=WARMUP))


@torch.inference_mode()
def pass_seconds(
    target: PreTrainedModel, rows: int, numbers: Sequence[int], context: int = CONTEXT
) -> dict[int, float]:
    """Median seconds of a pass of the target by its ids a row."""
    lm = LM(target, rows, graphs=True)
    store_prompts(lm, 0, [[0] * context for _ in range(rows)])
    ids = torch.zeros(rows, max(numbers), dtype=torch.int64, device=target.device)

    start = [context - 1] * rows
    tasks = {n: partial(lm.forward, ids[:, :n], start) for n in numbers}
    return interleaved(tasks, REPEATS, WARMUP, lm.device)


# --- forecast


class Model(NamedTuple):
    """weights: that a pass reads. token: bytes of a token's keys and values. vocabulary: of its head."""

    weights: float
    token: float
    vocabulary: int

    def seconds(self, chip: Machine, rows: int, n: int, context: int = CONTEXT) -> float:
        """Of a pass over n ids a row, of which all logits are written and read in float32."""
        moved = 2 * self.weights + rows * self.token * (context + n) + 8 * rows * n * self.vocabulary
        return Load(moved, 2.0 * rows * n * self.weights).seconds(chip)


def weights_of(module: torch.nn.Module) -> float:
    return float(sum(weight.numel() for weight in module.parameters()))


def model_of(target: PreTrainedModel) -> Model:
    table = target.get_input_embeddings()
    skipped = 0.0 if target.config.tie_word_embeddings else weights_of(table)
    return Model(weights_of(target) - skipped, token_bytes(target.config, DTYPE), target.config.vocab_size)


def overhead(kind: str, rows: int) -> float:
    """Seconds of a round outside its passes."""
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))["after"]["plain" if kind == "plain" else f"{kind}, token"]
    return gpu_counts.milliseconds(counts["sm90"]) / 1e3 + gpu_counts.HOST / 1e6 * max(1.0, rows / gpu_counts.ROWS)


def forecast(target: Model, kind: str, draft: Any, chip: Machine, rows: int, longest: int = LONGEST) -> Costs:
    """The costs of rounds. `fc` of a draft reads the target's states once a round. The rest of an eagle runs for each
    draft, that of a block draft once."""
    head, fc = draft.config.draft_vocab_size, weights_of(draft.fc)
    logits, whole = 8 * rows / chip.bandwidth, weights_of(draft)  # seconds for each token of a head
    first, step = Model(fc, 0, 0).seconds(chip, rows, 1), Model(whole - fc, 0, head).seconds(chip, rows, 1)
    if kind == "block":
        first, step = Model(whole, 0, 0).seconds(chip, rows, longest), logits * head
    rest = [
        overhead("plain" if k == 0 else kind, rows) + logits * (k + 1) * target.vocabulary for k in range(longest + 1)
    ]
    passes = tuple(target.seconds(chip, rows, n) for n in range(1, longest + 2))
    return Costs(passes, step, tuple(rest), rows, CONTEXT, "bfloat16", "bfloat16", first)


def forecasts() -> Iterator[tuple[str, dict[str, Any]]]:
    """The costs of every chip, target and draft by number of rows."""
    for name, shape in SIZES.items():
        target = random_target(shape, "meta")
        for kind in KINDS:
            draft, model = random_draft(kind, target, LONGEST), model_of(target)
            for chip, machine in CHIPS.items():
                costs = {str(rows): asdict(forecast(model, kind, draft, machine, rows)) for rows in ROWS}
                yield f"{chip}, {name}, {kind}", costs


def main(file: Path) -> None:
    report: dict[str, Any] = {
        "about": "a forecast by arithmetic, not a measurement: see studies/gpu_costs.py",
        "environment": environment(),
        "chips": {name: asdict(chip) for name, chip in CHIPS.items()},
        "costs": dict(forecasts()),
    }
    write_atomic(file, json.dumps(report, indent=1) + "\n")
    found = speedups_of(str(file), ROWS, LONGEST)
    report["speedups"] = [{name: value for name, value in one.items() if name != "costs"} for one in found]
    write_atomic(file, json.dumps(report, indent=1) + "\n")
    print(speedup_table(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
