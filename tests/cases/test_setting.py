"""Settings that failed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    JambaConfig,
    Lfm2Config,
    MambaConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from cotrain.cli import main
from cotrain.errors import UserError
from cotrain.training.callbacks import FIRST, StandingWeights
from cotrain.training.optim import HALVES, precision
from tests.cases import case
from tests.cotrain.training.conftest import mistakes as mistakes  # a fixture: a folder with a target and texts
from tests.cotrain.training.test_preconditions import command
from tests.folders import CONTEXT, VOCABULARY, own_texts, run_paths, target_folder, tokenizer


@case("bf16 weights that stand still")
@pytest.mark.parametrize("name", ["bf16-true", "16-true", "transformer-engine", "transformer-engine-float16"])
def test_weights_in_half_precision_are_refused_with_the_precision_to_take(name: str) -> None:
    with pytest.raises(UserError, match=rf"^pretraining.precision={name}: .*=auto or {HALVES[name]}, .* float32$"):
        precision(name, key="pretraining.precision")
    assert precision(HALVES[name]) == HALVES[name]


@pytest.mark.parametrize(
    ("dtype", "rate", "shown", "first"),
    [(torch.bfloat16, 1e-5, "1.0e-05", 0), (torch.float32, 1e-9, "1.0e-09", 500), (torch.float32, 1e-5, "", 3)],
)
def test_weights_that_stand_still_are_said_whatever_the_precision(
    dtype: torch.dtype, rate: float, shown: str, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """After 20 steps, of a run that begins or is resumed. Embeddings of tokens that no text has do not count: here nine
    in ten."""
    torch.manual_seed(0)
    draft = nn.Embedding(100, 64, dtype=dtype)
    optimizer = torch.optim.AdamW(draft.parameters(), rate, weight_decay=0.0)
    strategy = SimpleNamespace(reduce=lambda counts, reduce_op: counts)
    trainer: Any = SimpleNamespace(global_step=first, strategy=strategy, optimizers=[optimizer])
    module: Any = SimpleNamespace(draft=draft, device=torch.device("cpu"))
    movement = StandingWeights()
    movement.on_train_start(trainer, module)
    said = ""
    for step in range(2 * FIRST):
        optimizer.zero_grad()
        draft(torch.arange(10)).square().sum().backward()
        movement.on_before_optimizer_step(trainer, module, optimizer)
        optimizer.step()
        movement.on_train_batch_end(trainer, module)  # of a batch whose gradients are accumulated
        trainer.global_step += 1
        movement.on_train_batch_end(trainer, module)
        said += capsys.readouterr().err
        assert bool(said) == (bool(shown) and step >= FIRST - 1)
    assert said.count("\n") == bool(shown)
    if shown:
        where = f"at the learning rate {shown}"
        assert said.startswith(f"after 20 steps only 0% of the draft's weights have moved: {where}")


@pytest.mark.parametrize("moving", ["large", "small"])
def test_weights_that_stand_still_are_counted_by_the_sizes_of_tensors(
    moving: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a tensor of 9,000 weights, and of nine of 100 weights each."""
    sizes = {"large": [9_000], "small": [100] * 9}
    draft = nn.ModuleDict(
        {name: nn.ParameterList(map(torch.ones, some)) for name, some in sizes.items()}  # type: ignore[arg-type]
    )
    strategy = SimpleNamespace(reduce=lambda counts, reduce_op: counts)
    optimizers = [SimpleNamespace(param_groups=[{"lr": 1e-4}])]
    trainer: Any = SimpleNamespace(global_step=0, strategy=strategy, optimizers=optimizers)
    module: Any = SimpleNamespace(draft=draft, device=torch.device("cpu"))
    movement = StandingWeights()
    movement.on_train_start(trainer, module)
    for weight in draft.parameters():
        weight.grad = torch.ones_like(weight)
    movement.on_before_optimizer_step(trainer, module, optimizers[0])
    with torch.no_grad():
        for weight in draft[moving].parameters():
            weight += 1
    trainer.global_step = FIRST
    movement.on_train_batch_end(trainer, module)
    assert ("only 9% of the draft's weights have moved" in capsys.readouterr().err) == (moving == "small")


def test_a_run_says_that_weights_stand_still(
    mistakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cotrain.training.callbacks.FIRST", 3)
    settings = "measure=false trainer.steps=3 trainer.validations=1 optimizer.lr=1e-12"
    assert main(command(mistakes, *settings.split())) == 0
    assert capsys.readouterr().err.count("of the draft's weights have moved") == 1


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": CONTEXT}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
RECURRENT = {
    "MambaForCausalLM": MambaConfig(**SMALL, state_size=4),
    "Qwen3NextForCausalLM": Qwen3NextConfig(
        **SMALL,
        **ATTENTION,
        **EXPERTS,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "JambaForCausalLM": JambaConfig(
        **SMALL,
        **EXPERTS,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "RecurrentGemmaForCausalLM": RecurrentGemmaConfig(
        **SMALL,
        num_attention_heads=2,
        lru_width=64,
        attention_window_size=16,
        block_types=["recurrent", "attention"],
    ),
    "Lfm2ForCausalLM": Lfm2Config(
        **SMALL,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        layer_types=["conv", "full_attention"],
    ),
    "RwkvForCausalLM": RwkvConfig(
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        hidden_size=64,
        num_hidden_layers=2,
        attention_hidden_size=64,
        intermediate_size=64,
    ),
}


@pytest.mark.parametrize("name", RECURRENT)
@case("recurrent targets")
def test_a_recurrent_target_is_refused_by_check(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: PretrainedConfig = RECURRENT[name]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    own_texts(tmp_path / "own.jsonl", 60)
    paths = run_paths(tmp_path, "out")
    assert main(["train", *paths, "draft=independent", "init=target_layers", "init.layers=[0]", "check=true"])
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"cotrain train: target.path: {name}: ")


@case("layers of an eagle")
def test_layers_of_an_eagle_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = target_folder(tmp_path / "target")
    capsys.readouterr()  # progress of writing it
    for kind in ("eagle", "p_eagle"):
        typed = [f"target.path={target}", f"draft={kind}", "draft.layers=5", f"output={tmp_path / 'out'}"]
        assert main(["train", *typed]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"cotrain train: draft.layers=5: {kind} drafts do not have it; they have draft.")
    assert not (tmp_path / "out").exists()
