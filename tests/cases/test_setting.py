"""Cases of settings."""

from pathlib import Path

import pytest
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
from tests.cases import case
from tests.folders import CONTEXT, VOCABULARY, own_texts, tokenizer

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": CONTEXT}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
RECURRENT = {
    "MambaForCausalLM": MambaConfig(**SMALL, state_size=4),
    "Qwen3NextForCausalLM": Qwen3NextConfig(
        **SMALL, **ATTENTION, **EXPERTS, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "JambaForCausalLM": JambaConfig(
        **SMALL, **EXPERTS, num_attention_heads=2, num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "RecurrentGemmaForCausalLM": RecurrentGemmaConfig(
        **SMALL, num_attention_heads=2, lru_width=64, attention_window_size=16,
        block_types=["recurrent", "attention"],
    ),
    "Lfm2ForCausalLM": Lfm2Config(**SMALL, num_attention_heads=2, num_key_value_heads=1,
                                  max_position_embeddings=CONTEXT, layer_types=["conv", "full_attention"]),
    "RwkvForCausalLM": RwkvConfig(vocab_size=VOCABULARY, context_length=CONTEXT, hidden_size=64, num_hidden_layers=2,
                                  attention_hidden_size=64, intermediate_size=64),
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENT)
@case("recurrent targets")
def test_a_recurrent_target_is_refused_by_check(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: PretrainedConfig = RECURRENT[name]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    own_texts(tmp_path / "own.jsonl", 60)
    paths = [f"target.path={tmp_path / 'target'}", f"data.path={tmp_path / 'own.jsonl'}", f"output={tmp_path / 'out'}"]
    assert main(["train", *paths, "draft=independent", "init=target_layers", "init.layers=[0]", "check=true"])
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"cotrain train: target.path: {name}: ")
