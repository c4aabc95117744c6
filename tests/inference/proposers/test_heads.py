"""Draft heads on the target's newest state: what each computes, in numbers, and the folder that vLLM loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from cotrain.export import medusa_layout
from cotrain.export.engines import layout_of
from cotrain.students.base import LAST, Seen, student_class
from inference import Engine, load
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Metadata, load_draft, save
from inference.drafts.weight_files import read_json
from inference.policy import Fixed
from tests import kinds
from tests.tiny import tiny

HEADS = pytest.mark.parametrize("kind", ["medusa", "hydra"])


def network(kind: str, target: Any) -> Any:
    return getattr(kinds, kind)(target)


def by_hand(network: Any, newest: Tensor, tokens: Tensor, head: int) -> Tensor:
    """What the target's head reads for one state (D,); tokens (n, D): the embeddings of the anchor and drafts."""
    if network.config.model_type == "medusa":
        x = newest
        for weight, bias in zip(network.weight[head], network.bias[head], strict=True):
            x = x + silu(weight @ x + bias)
        return x
    z, K = network.state[head] @ newest + network.bias[head], network.depths
    for i, e in enumerate(tokens[: head + 1]):
        index = sum(K - earlier for earlier in range(i)) + head - i
        z = z + network.tokens[index] @ (e / (e.square().mean() + torch.finfo(e.dtype).eps).sqrt())
    return newest + network.out[head] @ silu(z)


@HEADS
def test_each_head_is_the_formula(kind: str) -> None:
    """Computed by hand for a text: the guess at position m + 1 + j comes from the state of token m."""
    target = tiny()
    heads, ids = network(kind, target), torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    states, table = torch.randn(2, 8, 16, dtype=torch.float64), target.get_input_embeddings().weight
    student = student_class(kind)(heads, target)
    for depth, guess in enumerate(student.guesses({"ids": ids}, Seen({LAST: states}))):
        for at, state in zip(guess.at.tolist(), guess.states, strict=True):
            b, m = at // 8, at % 8 - 1 - depth
            torch.testing.assert_close(state, by_hand(heads, states[b, m], table[ids[b, m + 1 :]], depth))


@HEADS
def test_rounds_of_packed_texts_keep_to_their_text(kind: str) -> None:
    target = tiny()
    student = student_class(kind)(network(kind, target), target)
    ids = torch.arange(9).unsqueeze(0)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    guesses = student.guesses({"ids": ids, "position_ids": positions}, Seen({LAST: torch.randn(1, 9, 16).double()}))
    assert [guess.at.tolist() for guess in guesses] == [[1, 2, 3, 5, 6, 7, 8], [2, 3, 6, 7, 8], [3, 7, 8]]
    assert all(len(guess.states) == len(guess.at) for guess in guesses)


@pytest.mark.filterwarnings("ignore:.*another shape")
@HEADS
def test_a_folder_is_served_as_it_was(kind: str, tmp_path: Path) -> None:
    """The folder names its kind; heads of another target's sizes raise."""
    target = tiny(dtype=torch.float32)
    metadata = Metadata({"name": "tiny", **hash_target(target.config, None)}, k=2, kind=kind)
    save(network(kind, target), None, tmp_path / "draft", metadata, None)
    engine = load(tmp_path / "draft", target)
    assert type(engine.proposer).__name__.lower() == kind and engine.policy == Fixed(2)
    ours = Engine(target, kinds.KINDS[kind].proposer(target), policy=Fixed(2))
    prompts: dict[str, Any] = {"prompts": [[1, 2, 3], [9, 8]], "max_new_tokens": 12}
    assert engine.generate(**prompts).tokens == ours.generate(**prompts).tokens
    with pytest.raises(ValueError, match="its hidden_size is 16, but the target's is 8: give the target that it"):
        load(tmp_path / "draft", tiny(hidden=8, dtype=torch.float32))
    with pytest.raises(ValueError, match=f"a draft of kind '{kind}' has weights of .*, not a causal"):
        load_draft(tmp_path / "draft")


def test_the_export_is_what_vllm_computes(tmp_path: Path) -> None:
    """Its blocks are x + silu(layer(x)), its one head has the name of the first."""
    target = tiny(dtype=torch.float32)
    target.save_pretrained(tmp_path / "target")
    heads = kinds.medusa(target)
    metadata = Metadata({"name": str(tmp_path / "target"), **hash_target(target.config, None)}, k=8, kind="medusa")
    save(heads, None, tmp_path / "draft", metadata, None)
    module = layout_of("medusa", "vllm")
    assert module is medusa_layout
    folder = module.export(tmp_path / "draft", tmp_path / "served")
    config, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    assert config["num_heads"] == 3 and config["medusa_fc_bias"] and config["original_lm_head"]
    state = torch.randn(5, 16)
    for i, wanted in enumerate(heads.states(state, 3)):
        x = state
        for j in range(config["num_hidden_layers"]):
            x = x + silu(x @ tensors[f"blocks.{i}.layers.{j}.weight"].T + tensors[f"blocks.{i}.layers.{j}.bias"])
        torch.testing.assert_close(x @ tensors["lm_heads.0.weight"].T, target.lm_head(wanted))
    assert '"num_speculative_tokens": 3' in (folder / "README.md").read_text()
    with pytest.raises(ValueError, match="k=4: .* has 3 heads"):
        medusa_layout.export(tmp_path / "draft", tmp_path / "more", 4)
