"""Drafts in published layouts, beside a forward pass that is written from each layout's definition."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from cotrain.export.eagle3 import export
from cotrain.export.medusa_layout import medusa_tensors
from cotrain.students.base import Seen, student_class
from inference import load
from inference.drafts.draft_folder import Metadata, load_draft, read, save
from inference.drafts.published import imported, published
from inference.proposers import kind_of
from tests.tiny import TARGET, tiny

H, HEADS, GROUPS, D, INNER, V, VD = 16, 4, 2, 8, 24, 32, 12
IDS = torch.randint(V, (1, 9), generator=torch.Generator().manual_seed(4))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PRUNED = torch.arange(VD) * 2 + 1  # the ids of the head


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny(layers=8, dtype=torch.float32)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=drawn.generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2)  # type: ignore[attr-defined]


drawn.generator = torch.Generator().manual_seed(3)  # type: ignore[attr-defined]


def layer(prefix: str, width: int, normed: bool = False) -> dict[str, Tensor]:
    """The tensors of a decoder layer. width: of its input. normed: whether queries and keys have norms."""
    sizes = {"q": (HEADS * D, width), "k": (GROUPS * D, width), "v": (GROUPS * D, width), "o": (H, HEADS * D)}
    named = {f"self_attn.{name}_proj": drawn(*size) for name, size in sizes.items()}
    named |= {"mlp.gate_proj": drawn(INNER, H), "mlp.up_proj": drawn(INNER, H), "mlp.down_proj": drawn(H, INNER)}
    named |= {"input_layernorm": 1 + drawn(H), "post_attention_layernorm": 1 + drawn(H)}
    named |= {f"self_attn.{name}_norm": 1 + drawn(D) for name in "qk" if normed}
    return {f"{prefix}{name}.weight": tensor for name, tensor in named.items()}


def eagle_tensors(prefix: str = "midlayer.") -> dict[str, Tensor]:
    named = {"fc.weight": drawn(H, 3 * H), "norm.weight": 1 + drawn(H), "lm_head.weight": drawn(VD, H)}
    used = torch.zeros(V, dtype=torch.bool)
    used[PRUNED] = True
    hidden = {f"{prefix}hidden_norm.weight": 1 + drawn(H)}
    return named | layer(prefix, 2 * H) | hidden | {"d2t": PRUNED - torch.arange(VD), "t2d": used}


SHAPE: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": D,
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EAGLE = SHAPE | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "draft_vocab_size": VD,
}


def put(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if file.endswith("safetensors"):
        save_file(tensors, path / file)
    else:
        torch.save(tensors, path / file)
    return path


def safeailab(path: Path, target: LlamaForCausalLM) -> tuple[Path, dict[str, Any]]:
    """As in the repositories of EAGLE-3's authors: pickled, no numbers of layers."""
    tensors = eagle_tensors()
    return put(path, EAGLE, tensors, "pytorch_model.bin"), {"tensors": tensors, "layers": (2, 4, 5)}


def specforge(path: Path, target: LlamaForCausalLM) -> tuple[Path, dict[str, Any]]:
    """The target's embedding, layers by their outputs, a scaled rotary embedding."""
    tensors = eagle_tensors()
    config = EAGLE | {"rope_theta": 5000.0, "rope_scaling": LLAMA3}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6], "use_aux_hidden_state": True}}
    embedding = target.get_input_embeddings().weight.detach().clone()
    put(path, config, tensors | {"embed_tokens.weight": embedding})
    return path, {"tensors": tensors, "layers": (2, 3, 7), "theta": 5000.0, "scaling": LLAMA3}


def speculators(path: Path, target: LlamaForCausalLM) -> tuple[Path, dict[str, Any]]:
    """The layer's config within another, layers by their inputs, the residual after the norm."""
    tensors = eagle_tensors("layers.0.")
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": VD,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "transformer_layer_config": SHAPE | {"model_type": "llama", "num_hidden_layers": 1},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "the-target"}},
    }
    embedding = target.get_input_embeddings().weight.detach().clone()
    put(path, config, tensors | {"embed_tokens.weight": embedding})
    return path, {"tensors": tensors, "layers": (1, 3, 6), "before": True}


EAGLES = [safeailab, specforge, speculators]


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: Tensor, positions: Tensor, theta: float, scaling: dict[str, float] | None = None) -> Tensor:
    """x (n, heads, D), rotated: number i of a half and number i of the other are a pair."""
    frequencies = theta ** -(torch.arange(0, D, 2) / D)
    if scaling:
        waves, old = 2 * torch.pi / frequencies, scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = ((old / waves - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(1)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q (n, heads, D), k and v (m, groups, D), mask (n, m) -> (n, heads * D)."""
    k, v = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * D**-0.5
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", shares, v).flatten(1)


def gated(x: Tensor, named: Callable[[str], Tensor]) -> Tensor:
    return (F.silu(x @ named("mlp.gate_proj").T) * (x @ named("mlp.up_proj").T)) @ named("mlp.down_proj").T


def eagle_chain(facts: dict[str, Any], states: Tensor, embedded: Tensor, depths: int) -> list[Tensor]:
    """The logits (Vd,) of each draft of a round: states (n, 3H) of the tokens read, embedded (n + depths - 1, H) of the
    tokens that follow each of them and of the drafts."""
    tensors, theta = facts["tensors"], facts.get("theta", 10000.0)
    prefix = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."
    features, logits = states @ tensors["fc.weight"].T, []

    def named(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    for _ in range(depths):
        n = len(features)
        normed = rms(features, named("hidden_norm"))
        x = torch.cat((rms(embedded[:n], named("input_layernorm")), normed), -1)
        q, k, v = ((x @ named(f"self_attn.{part}_proj").T).unflatten(-1, (-1, D)) for part in "qkv")
        q, k = (turned(part, torch.arange(n), theta, facts.get("scaling")) for part in (q, k))
        mixed = attended(q, k, v, torch.ones(n, n, dtype=torch.bool).tril()) @ named("self_attn.o_proj").T
        x = (normed if facts.get("before") else features) + mixed
        x = x + gated(rms(x, named("post_attention_layernorm")), named)
        logits.append(rms(x[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T)
        features = torch.cat((features, x[-1:]))
    return logits


def network_of(path: Path, kind: str, target: LlamaForCausalLM) -> Any:
    return load_draft(path, network=kind_of(kind).network_class, model=target)[0]


def states_of(target: LlamaForCausalLM, layers: Any) -> dict[int, Tensor]:
    """By layer, the input of that layer, by transformers."""
    found = target(IDS, output_hidden_states=True).hidden_states
    return {layer: found[layer].detach() for layer in layers}


@pytest.mark.parametrize("layout", EAGLES)
def test_eagle_logits_are_those_of_the_layout(layout: Any, tmp_path: Path, target: LlamaForCausalLM) -> None:
    path, facts = layout(tmp_path / "draft", target)
    network = network_of(path, "eagle", target)
    assert read(path).kind == "eagle" and network.config.layers == facts["layers"]
    student, states = student_class("eagle")(network, target), states_of(target, {*facts["layers"]})
    network.config.depths = 3
    with torch.no_grad():
        guesses = student.guesses({"ids": IDS}, Seen(states))[:3]
        joined = torch.cat([states[layer] for layer in facts["layers"]], -1)[0]
        embedded = target.get_input_embeddings()(IDS)[0]
        for depth, guess in enumerate(guesses):
            logits = guess.head(guess.states)
            for at, own in zip(guess.at.tolist(), logits, strict=True):
                m = at - 1 - depth  # the newest token that the target has read
                wanted = eagle_chain(facts, joined[: m + 1], embedded[1 : at + 1], depth + 1)[-1]
                torch.testing.assert_close(own[PRUNED], wanted, atol=1e-5, rtol=1e-5)
                assert bool(own[~torch.isin(torch.arange(V), PRUNED)].isneginf().all())


@pytest.mark.parametrize("layout", EAGLES)
def test_an_eagle_draft_serves_and_its_export_has_the_same_tensors(
    layout: Any, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    """Imported, saved, exported to the layout of speculators, imported again: equal tensors, drafts and acceptance."""
    path, facts = layout(tmp_path / "draft", target)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    before = load(path, target).generate(prompts, max_new_tokens=12, seed=3)
    assert sum(before.stats.drafted) > 0
    network = network_of(path, "eagle", target)
    about = Metadata(TARGET, 3, kind="eagle")
    saved = save(network, None, tmp_path / "saved", about, None)
    for form in ("eagle3", "speculators"):
        out = export(saved, tmp_path / form, form, k=4, target=target)
        (out / "cotrain.json").unlink()
        stored = load_file(out / "model.safetensors")
        for name, tensor in facts["tensors"].items():
            theirs = name.replace("midlayer.", "layers.0.") if form == "speculators" else name
            ours = theirs if form == "speculators" else name.replace("layers.0.", "midlayer.")
            torch.testing.assert_close(stored[ours], tensor, rtol=0, atol=0)
    again = load(out, target).generate(prompts, max_new_tokens=12, seed=3)
    assert again.tokens == before.tokens and again.stats.accepted == before.stats.accepted


def changed(path: Path, tensors: Any = None, **keys: Any) -> Path:
    """A published EAGLE-3 draft with other keys of config.json, and with tensors changed by the function."""
    made = eagle_tensors()
    return put(path, EAGLE | keys, tensors(made) if tensors else made)


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def test_what_a_file_lacks_comes_from_the_target_and_is_said(tmp_path: Path, target: LlamaForCausalLM) -> None:
    network, line = imported(published(changed(tmp_path / "draft", without("lm_head.weight", "t2d"))), target)
    assert line.endswith(
        "is an EAGLE-3 draft, read as a draft of kind eagle; the target gives the layers to read, 2, 4, 5, lm_head"
    )
    assert torch.equal(network.state_dict()["lm_head.weight"], target.lm_head.weight[PRUNED])
    assert network.state_dict()["t2d"].nonzero()[:, 0].tolist() == PRUNED.tolist()
    network, _ = imported(published(changed(tmp_path / "table", without("d2t"))), target)
    assert network.state_dict()["d2t"].tolist() == (PRUNED - torch.arange(VD)).tolist()
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": SHAPE | {"num_hidden_layers": 1}}
    network, _ = imported(published(changed(tmp_path / "default", **nested)), target)
    assert network.config.norm_before_residual  # as in vLLM
    whole = changed(tmp_path / "whole", without("lm_head.weight", "d2t", "t2d"), draft_vocab_size=None)
    network, _ = imported(published(whole), target)
    assert torch.equal(network.state_dict()["lm_head.weight"], target.lm_head.weight)


FULL = {"lm_head.weight": torch.ones(V, H), "d2t": torch.ones(V, dtype=torch.int64), "t2d": torch.ones(V).bool()}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, .* only computed with 1"),
        ({"norm_before_fc": True}, "norm_before_fc is True"),
        ({"norm_output": True}, "norm_output is True"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling is 'dynamic'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mask_token_id": 3}, "the mask token of P-EAGLE"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"tensors": without("d2t", "t2d")}, "neither tensor d2t nor t2d says which"),
        ({"tensors": without("midlayer.hidden_norm.weight")}, "tensor midlayer.hidden_norm.weight is missing"),
        (
            {"tensors": lambda t: t | {"midlayer.self_attn.q_norm.weight": torch.ones(D)}},
            "q_norm.weight does not belong",
        ),
        (
            {"tensors": lambda t: t | {"embed_tokens.weight": torch.ones(V, H)}},
            "embed_tokens.weight is not the target's embed",
        ),
        ({"intermediate_size": 32}, r"has shape \(24, 16\), config.json says \(32, 16\)"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]}, r"tensor fc.weight has shape"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 4, 5]}, "layer_ids must be a whole number of at least 0, not -1"),
        ({"eagle_aux_hidden_state_layer_ids": ["2", "4", "5"]}, "layer_ids must be .*, not '2'"),
        ({"eagle_config": [1]}, r"config.json: an EAGLE-3 draft cannot be read from it"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is {'quant_method': 'awq'}"),
        ({"tensors": lambda t: t | {"d2t": t["d2t"].float()}}, "tensor d2t must hold whole numbers"),
        (
            {"draft_vocab_size": V, "tensors": lambda t: t | FULL},
            "its head has all 32 tokens, but tensor d2t moves some of them",
        ),
    ],
)
def test_what_our_network_cannot_compute_is_refused_by_name(
    keys: dict[str, Any], message: str, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    path = changed(tmp_path / "draft", **keys)
    with pytest.raises(ValueError, match=message):
        load(path, target)


def test_other_layouts_and_code_in_pickles_are_refused(tmp_path: Path, target: LlamaForCausalLM) -> None:
    for number, config in enumerate(
        [
            EAGLE | {"architectures": ["EagleLlamaForCausalLM"]},
            {"speculators_model_type": "mtp", "architectures": ["MtpSpeculator"]},
        ]
    ):
        with pytest.raises(ValueError, match="which is not read here: give one of EAGLE-3"):
            load(put(tmp_path / f"other {number}", config, eagle_tensors()), target)
    path = put(tmp_path / "code", EAGLE, {}, "pytorch_model.bin")
    torch.save({"fc.weight": Path("somewhere")}, path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read as tensors"):
        load(path, target)
    with pytest.raises(ValueError, match="does not name its target: set target.path="):
        load_draft(safeailab(tmp_path / "draft", target)[0], network=kind_of("eagle").network_class)
    with pytest.raises(ValueError, match="kind 'eagle' has weights of EagleNetwork, not a causal language model"):
        load_draft(tmp_path / "draft")


MASK, IDS_OF_LAYERS, SIZE = 5, [0, 3, 5], 4
BLOCK = SHAPE | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 8,
    "block_size": SIZE,
    "rope_theta": 8000.0,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": IDS_OF_LAYERS},
}


def block_tensors() -> dict[str, Tensor]:
    layers = layer("layers.0.", H, normed=True) | layer("layers.1.", H, normed=True)
    return {"fc.weight": drawn(H, 3 * H), "hidden_norm.weight": 1 + drawn(H), "norm.weight": 1 + drawn(H)} | layers


def dflash(path: Path) -> tuple[Path, dict[str, Any]]:
    """As its authors publish it: no head, no embedding, and the embedding of the mask token is the target's."""
    tensors = block_tensors()
    return put(path, BLOCK, tensors), {"tensors": tensors, "causal": False}


def causal(path: Path) -> tuple[Path, dict[str, Any]]:
    """Of fewer tokens, with an embedding of the mask in a file of vLLM's."""
    tensors, mask, table = block_tensors() | {"lm_head.weight": drawn(VD, H)}, drawn(H), PRUNED - torch.arange(VD)
    config = BLOCK | {"draft_vocab_size": VD, "dflash_config": BLOCK["dflash_config"] | {"causal": True}}
    put(path, config, tensors | {"d2t": table})
    torch.save({"mask_token_id": MASK, "embedding": mask}, path / "mask_embedding.pt")
    return path, {"tensors": tensors, "causal": True, "mask": mask}


def dspark(path: Path) -> tuple[Path, dict[str, Any]]:
    """With a Markov head and a confidence head, which nothing here reads."""
    markov = {"markov_head.markov_w1.weight": drawn(V, 3), "markov_head.markov_w2.weight": drawn(V, 3)}
    tensors, unused = block_tensors() | markov, {"confidence_head.proj.weight": drawn(1, H)}
    facts = BLOCK["dflash_config"] | {"projector_type": "dspark", "markov_rank": 3, "sample_from_anchor": False}
    put(path, BLOCK | {"architectures": ["DSparkDraftModel"], "dflash_config": facts}, tensors | unused)
    return path, {"tensors": tensors, "causal": False}


BLOCKS = [dflash, causal, dspark]


def block_logits(facts: dict[str, Any], target: LlamaForCausalLM, states: Tensor, ids: Tensor) -> Tensor:
    """The logits of a block: states (n, 3H) of the tokens read, ids (T,), of which number n is the anchor."""
    tensors, n = facts["tensors"], len(states)
    embedding = target.get_input_embeddings().weight
    context = rms(states @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    x = torch.stack([embedding[ids[n]], *[facts.get("mask", embedding[MASK])] * (SIZE - 1)])
    places, theta = torch.arange(n + SIZE), BLOCK["rope_theta"]
    mask = torch.ones(SIZE, n + SIZE, dtype=torch.bool)
    if facts["causal"]:
        mask = mask.tril(n)
    for number in range(2):

        def named(name: str, number: int = number) -> Tensor:
            return tensors[f"layers.{number}.{name}.weight"]

        read = rms(x, named("input_layernorm"))
        both = torch.cat((context, read))
        q = rms((read @ named("self_attn.q_proj").T).unflatten(-1, (-1, D)), named("self_attn.q_norm"))
        k = rms((both @ named("self_attn.k_proj").T).unflatten(-1, (-1, D)), named("self_attn.k_norm"))
        v = (both @ named("self_attn.v_proj").T).unflatten(-1, (-1, D))
        mixed = attended(turned(q, places[n:], theta), turned(k, places, theta), v, mask)
        x = x + mixed @ named("self_attn.o_proj").T
        x = x + gated(rms(x, named("post_attention_layernorm")), named)
    head = tensors.get("lm_head.weight", target.lm_head.weight)
    logits = rms(x[1:], tensors["norm.weight"]) @ head.T
    if "markov_head.markov_w1.weight" in tensors:
        before = ids[n : n + SIZE - 1]
        rows = tensors["markov_head.markov_w1.weight"][before] @ tensors["markov_head.markov_w2.weight"].T
        logits[: len(rows)] += rows
    return logits


@pytest.mark.parametrize("layout", BLOCKS)
@torch.no_grad()
def test_block_logits_are_those_of_the_layout(layout: Any, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Layers are numbered by their outputs; a block of four tokens drafts three."""
    path, facts = layout(tmp_path / "draft")
    network = network_of(path, "block", target)
    layers = [number + 1 for number in IDS_OF_LAYERS]
    assert read(path).kind == "block" and network.config.depths == SIZE - 1 and [*network.config.layers] == layers
    shared = not {"lm_head.weight", "mask_embedding"} & network.state_dict().keys()
    assert shared == network.config.target_head == (layout is not causal)  # it is not copied
    student, states = student_class("block")(network, target), states_of(target, layers)
    joined = torch.cat([states[layer] for layer in layers], -1)[0]
    guesses = student.guesses({"ids": IDS}, Seen(states))
    assert len(guesses) == SIZE - 1
    for depth, guess in enumerate(guesses):
        logits = guess.head(guess.states)
        for at, own in zip(guess.at.tolist(), logits, strict=True):
            wanted = block_logits(facts, target, joined[: at - depth], IDS[0])[depth]
            known = PRUNED if len(wanted) == VD else torch.arange(V)
            torch.testing.assert_close(own[known], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", BLOCKS)
def test_a_block_draft_serves_and_its_export_has_the_same_tensors(
    layout: Any, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    path, facts = layout(tmp_path / "draft")
    before = load(path, target).generate([[1, 2, 3], [4, 5, 6, 7]], max_new_tokens=12, seed=3)
    assert sum(before.stats.drafted) > 0
    network = network_of(path, "block", target)
    about = Metadata(TARGET, 3, kind="block")
    saved = save(network, None, tmp_path / "saved", about, None)
    after = load(saved, target).generate([[1, 2, 3], [4, 5, 6, 7]], max_new_tokens=12, seed=3)
    assert after.tokens == before.tokens and after.stats.accepted == before.stats.accepted
    out = export(saved, tmp_path / "out", "dflash", k=3, target=target)
    stored = load_file(out / "model.safetensors")
    for name, tensor in facts["tensors"].items():
        assert name.startswith("markov_head.") or torch.equal(stored[name], tensor)
    assert json.loads((out / "config.json").read_text())["dflash_config"]["target_layer_ids"] == IDS_OF_LAYERS


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "sample_from_anchor is True"),
        ({"block_size": None}, "it has no block_size, which a DFlash draft needs"),
        ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": IDS_OF_LAYERS}}, "mask_token_id is 99"),
        ({"dflash_config": BLOCK["dflash_config"] | {"projector_type": "domino"}}, "projector_type is 'domino'"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "layer_types is 'sliding_attention'"),
        ({"num_hidden_layers": 3}, "tensor layers.2.input_layernorm.weight is missing"),
        (
            {"dflash_config": {"mask_token_id": -1, "target_layer_ids": IDS_OF_LAYERS}},
            "mask_token_id must be .*, not -1",
        ),
        (
            {"dflash_config": {"mask_token_id": "x", "target_layer_ids": IDS_OF_LAYERS}},
            "mask_token_id must be .*, not 'x'",
        ),
        (
            {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [-2, 3, 4]}},
            "target_layer_ids must be .*, not -2",
        ),
        (
            {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": ["1", "3", "4"]}},
            "target_layer_ids must be .*, not '1'",
        ),
        ({"dflash_config": "x"}, "config.json"),
        ({"block_size": 1}, "block_size must be a whole number of at least 2, not 1"),
        ({"block_size": 0}, "block_size must be .*, not 0"),
    ],
)
def test_blocks_that_our_network_cannot_compute_are_refused_by_name(
    keys: dict[str, Any], message: str, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    with pytest.raises(ValueError, match=message):
        load(put(tmp_path / "draft", BLOCK | keys, block_tensors()), target)


def vllm_medusa(path: Path, target: LlamaForCausalLM, tensors: dict[str, Tensor]) -> Path:
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2}
    config |= {"hidden_size": H, "vocab_size": V, "truncated_vocab_size": V, "medusa_fc_bias": True}
    named = {f"blocks.{i}.layers.{j}.{part}": tensor for (i, j, part), tensor in tensors.items()}  # type: ignore[misc]
    return put(path, config, named | {"lm_heads.0.weight": target.lm_head.weight.detach().clone()})


def first_medusa(path: Path, target: LlamaForCausalLM, tensors: dict[str, Tensor]) -> Path:
    config = {"base_model_name_or_path": "the-target", "medusa_num_heads": 3, "medusa_num_layers": 2, "version": "2"}
    named = {f"{i}.{j}.linear.{part}": tensor for (i, j, part), tensor in tensors.items()}  # type: ignore[misc]
    return put(path, config, named, "medusa_lm_head.safetensors")


def first_pickled(path: Path, target: LlamaForCausalLM, tensors: dict[str, Tensor]) -> Path:
    """With heads of its own, which still are the target's."""
    path = first_medusa(path, target, tensors)
    named = load_file(path / "medusa_lm_head.safetensors")
    (path / "medusa_lm_head.safetensors").unlink()
    own = {f"{i}.2.weight": target.lm_head.weight.detach().clone() for i in range(3)}
    torch.save(named | own, path / "medusa_lm_head.pt")
    return path


@pytest.mark.parametrize("layout", [vllm_medusa, first_medusa, first_pickled])
@torch.no_grad()
def test_medusa_heads_are_those_of_the_layout(layout: Any, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Head j reads the target's last state at a token, and predicts the token j + 2 positions after it."""
    parts = {"weight": (H, H), "bias": (H,)}
    tensors = {(i, j, part): drawn(*size) for i in range(3) for j in range(2) for part, size in parts.items()}
    path = layout(tmp_path / "draft", target, tensors)
    assert read(path).kind == "medusa"
    network = network_of(path, "medusa", target)
    states = target(IDS, output_hidden_states=True).hidden_states[-1]
    guesses = student_class("medusa")(network, target, V).guesses({"ids": IDS}, Seen({-1: states}))
    assert len(guesses) == 3
    for i, guess in enumerate(guesses):
        for at, own in zip(guess.at.tolist(), guess.head(guess.states), strict=True):
            x = states[0, at - 1 - i]
            for j in range(2):
                x = x + F.silu(tensors[i, j, "weight"] @ x + tensors[i, j, "bias"])
            torch.testing.assert_close(own, target.lm_head.weight @ x, atol=1e-5, rtol=1e-5)
    assert load(path, target).generate([[1, 2, 3]], max_new_tokens=9, seed=3).stats.tokens == 9
    named = medusa_tensors(network, target)
    for (i, j, part), tensor in tensors.items():
        assert torch.equal(named[f"blocks.{i}.layers.{j}.{part}"], tensor)


def test_medusa_heads_with_an_output_head_of_their_own_are_refused(tmp_path: Path, target: LlamaForCausalLM) -> None:
    tensors: Any = {(i, j, "weight"): drawn(H, H) for i in range(3) for j in range(2)}
    path = vllm_medusa(tmp_path / "draft", target, tensors)
    stored = load_file(path / "model.safetensors")
    assert not imported(published(path), target)[0].state_dict()["bias"].any()  # none in the file
    save_file(stored | {"lm_heads.0.weight": drawn(V, H)}, path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_heads.0.weight is not the target's output head"):
        load(path, target)
    cut = put(tmp_path / "cut", json.loads((path / "config.json").read_text()) | {"truncated_vocab_size": 8}, stored)
    with pytest.raises(ValueError, match="truncated_vocab_size is 8"):
        load(cut, target)
    del stored["blocks.2.layers.1.weight"]
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ValueError, match="tensor blocks.2.layers.1.weight is missing"):
        load(path, target)


@pytest.mark.parametrize("content", [b"", b"words", [1], {"embedding": 3}, {"mask_token_id": MASK}])
def test_a_broken_embedding_of_the_mask_is_named(content: Any, tmp_path: Path, target: LlamaForCausalLM) -> None:
    path, _ = causal(tmp_path / "draft")
    file = path / "mask_embedding.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(ValueError, match=f"^{file} (cannot be read as tensors|has no tensor named embedding)"):
        network_of(path, "block", target)


def test_the_dtype_is_that_of_the_tensors_that_are_read(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Not of a head that is dropped; a given one is the network's. Attention of either name of the key is causal."""
    named = {name: tensor.bfloat16() for name, tensor in block_tensors().items()}
    path = put(
        tmp_path / "draft", BLOCK | {"is_causal": True}, {"confidence_head.proj.weight": torch.ones(1, H)} | named
    )
    layout = published(path)
    for asked, wanted in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        network = imported(layout, target, asked)[0]
        assert {tensor.dtype for name, tensor in network.state_dict().items() if tensor.is_floating_point()} == {wanted}
        assert network.config.causal


def test_an_index_of_weights_is_read_before_a_pickled_file(tmp_path: Path, target: LlamaForCausalLM) -> None:
    path = put(tmp_path / "draft", BLOCK, block_tensors())
    names = [*load_file(path / "model.safetensors")]
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "pytorch_model.bin").write_bytes(b"other")
    assert published(path).files() == [path / "model-1.safetensors"]
    assert load(path, target).generate([[1, 2, 3]], max_new_tokens=4).stats.tokens == 4
