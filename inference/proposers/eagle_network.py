"""The network of a feature draft in the EAGLE-3 manner (Li et al. 2025, 2503.01840), as it is trained and served.

Its text is pairs: pair s is the target's features of token s beside the embedding of token s + 1, and what one decoder
layer makes of pairs 0 .. s predicts token s + 2. Features are states of three layers, joined by `fc`; where the target
has not read a token yet, the layer's own output at the pair before stands in for them. Names and shapes are those that
engines load (`LlamaForCausalLMEagle3`); the embedding is the target's own and no part of it.

H width of the target's states and of the draft, Vd tokens that the draft knows, V of the target, A rows, n pairs a row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from inference.drafts.compatibility import same_sizes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries (A, n, heads, D), keys, values -> (A, n, heads D)

ARCHITECTURES = ["LlamaForCausalLMEagle3"]


def fused(layers: int) -> tuple[int, int, int]:
    """Which states a draft of a target of so many layers reads: low, middle and high ones, by the numbers of
    `models.passes`. 2, L // 2 and L - 3 (EAGLE-3), nearer to each other where there are few."""
    return min(2, layers // 3), layers // 2, max(layers - 3, layers // 2)


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def behind(layers: Sequence[int]) -> list[int]:
    """Inputs of layers -> the layers whose outputs they are; the embeddings are that of -1."""
    return [layer - 1 for layer in layers]


class EagleConfig(PretrainedConfig):
    """Of a folder in the EAGLE-3 format. depths: how many drafts of a round it was trained for.

    eagle_aux_hidden_state_layer_ids: the layers whose inputs `fc` joins, which vLLM reads first. `eagle_config` holds
    the same states as outputs of the layers before, which SGLang reads; given alone, its numbers are inputs, as vLLM
    takes them and as folders of cotrain were written before. Always written both ways.
    """

    model_type = "llama"

    def __init__(
        self,
        hidden_size: int = 16,
        intermediate_size: int = 32,
        num_attention_heads: int = 2,
        num_key_value_heads: int = 1,
        head_dim: int = 8,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 10000.0,
        max_position_embeddings: int = 256,
        vocab_size: int = 32,
        draft_vocab_size: int | None = None,
        eagle_config: Mapping[str, Any] | None = None,
        eagle_aux_hidden_state_layer_ids: Sequence[int] | None = None,
        depths: int = 4,
        initializer_range: float = 0.02,
        **other: Any,
    ) -> None:
        self.hidden_size, self.intermediate_size, self.head_dim = hidden_size, intermediate_size, head_dim
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.rms_norm_eps, self.rope_theta = rms_norm_eps, rope_theta
        self.rope_parameters = {"rope_type": "default", "rope_theta": rope_theta}
        self.max_position_embeddings, self.vocab_size = max_position_embeddings, vocab_size
        self.draft_vocab_size = draft_vocab_size or vocab_size
        self.num_hidden_layers, self.hidden_act, self.attention_bias, self.mlp_bias = 1, "silu", False, False
        layers = eagle_aux_hidden_state_layer_ids or (eagle_config or {}).get(LAYER_IDS) or ()
        self.eagle_aux_hidden_state_layer_ids = list(layers)
        self.eagle_config = {"use_aux_hidden_state": True, **(eagle_config or {}), LAYER_IDS: behind(layers)}
        self.depths, self.initializer_range = depths, initializer_range
        known = ("rope_parameters", "num_hidden_layers", "hidden_act", "attention_bias", "mlp_bias",
                 "tie_word_embeddings", "architectures")  # fmt: skip
        rest = {name: value for name, value in other.items() if name not in known}
        named: dict[str, Any] = {"tie_word_embeddings": False, "architectures": ARCHITECTURES}
        super().__init__(**named, **rest)

    @property
    def layers(self) -> tuple[int, ...]:
        """The states of the target that `fc` joins, in its order, by the numbers of `models.passes`."""
        return tuple(self.eagle_aux_hidden_state_layer_ids)


class EagleNetwork(PreTrainedModel):
    """One decoder layer over pairs, a norm and a head."""

    config_class: Any = EagleConfig
    base_model_prefix = ""
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        width, size = config.hidden_size, config.head_dim
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        self.midlayer = _Layer(config)
        self.norm = Norm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.scale = size**-0.5
        self.pruned = config.draft_vocab_size < config.vocab_size
        if self.pruned:  # token i of the draft is the target's i + d2t[i]
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """None: it reads the target's."""
        return None

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:  # type: ignore[override]
        """Under the name that engines know."""
        super().save_pretrained(save_directory, **options)
        self.config.architectures = ARCHITECTURES
        self.config.save_pretrained(save_directory)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def fits(self, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError, beginning with `where`, for a target of other sizes than this was made for."""
        same_sizes(self.config, target, where)
        layers = target.config.get_text_config().num_hidden_layers
        if max(self.config.layers) >= layers:
            raise ValueError(f"{where}: it reads layers {list(self.config.layers)}, the target has {layers}")

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """The target's states (..., H) by layer -> features (..., H)."""
        joined = torch.cat([states[layer].to(self.fc.weight.dtype) for layer in self.config.layers], -1)
        found: Tensor = self.fc(joined)
        return found

    def layer(self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Embeddings and features of pairs (A, n, H) -> (A, n, H), which `head` reads behind `norm`, and which stand
        for the features of the next pair. cos, sin (A or 1, n, 1, D): of the pairs' positions, see `angles`."""
        w = self.midlayer
        x = torch.cat((w.input_layernorm(embedded), w.hidden_norm(features)), -1)
        size = self.config.head_dim
        q, k, v = (part.unflatten(-1, (-1, size)) for part in w.self_attn(x))
        x = features + w.self_attn.o_proj(attend(rotated(q, cos, sin), rotated(k, cos, sin), v))
        made: Tensor = x + w.mlp(w.post_attention_layernorm(x))
        return made

    def head(self, states: Tensor, vocabulary: int) -> Tensor:
        """States (..., H) behind `norm` -> logits (..., vocabulary), -inf of tokens that the draft does not know."""
        logits: Tensor = self.lm_head(states)
        if not self.pruned:
            return logits[..., :vocabulary]
        size = max(vocabulary, self.config.vocab_size)  # it may know rows of the target that no token has
        found = logits.new_full((*logits.shape[:-1], size), -torch.inf).index_copy(-1, self.known, logits)
        return found[..., :vocabulary]

    @property
    def known(self) -> Tensor:
        """The target's ids (Vd,) of the tokens that the draft knows."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def know(self, ids: Sequence[int], rows: Tensor | None = None) -> None:
        """The draft knows these target ids, Vd in ascending order; rows (V, H): of a head, to begin with."""
        chosen = torch.tensor(list(ids), device=self.lm_head.weight.device)
        self.d2t.copy_(chosen - torch.arange(len(chosen), device=chosen.device))
        self.t2d.zero_()[chosen] = True
        if rows is not None:
            self.lm_head.weight.copy_(rows[chosen.to(rows.device)])

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (..., 1, D) at positions (...); the sign of the rotation is in sin."""
        size = self.config.head_dim
        steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float64) / size
        turns = positions.double().unsqueeze(-1) * self.config.rope_theta**-steps
        cos, sin = (part.to(self.fc.weight.dtype).unsqueeze(-2) for part in (turns.cos(), turns.sin()))
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class Norm(nn.RMSNorm):
    """In the precision of its weight: of a step in mixed precision, float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class _Layer(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = Norm(width, eps), Norm(width, eps)
        self.self_attn = _Projections(config)
        self.post_attention_layernorm = Norm(width, eps)
        self.mlp = _Gated(width, config.intermediate_size)


class _Projections(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        heads, groups = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = nn.Linear(2 * width, heads, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(2 * width, groups, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class _Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(A, n, heads, D) turned by the angles of its positions."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
