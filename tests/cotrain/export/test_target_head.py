"""Block drafts with the target's head, as transformers, SGLang and TensorRT-LLM load them.

transformers is run. Of the others, facts read from their sources: SGLang (`models/dflash.py`,
`speculative/dflash_utils.py`, `speculative/dflash_worker.py`), TensorRT-LLM (`_torch/models/modeling_speculative.py`,
`_torch/speculative/dflash.py`).
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, LlamaForCausalLM

from cotrain.errors import UserError
from cotrain.export.eagle3 import export
from cotrain.export.engines import TARGET_HEAD, captured, launch, usual_layout
from cotrain.export.hf import folder_problems
from cotrain.students.block import BlockStudent
from inference import Engine, Sampling
from inference.drafts.draft_folder import Metadata, read, save
from inference.drafts.weight_files import read_json
from inference.exactness.figures import expected
from inference.exactness.side_by_side import pair_figures
from inference.measure.arms import transformers_arm
from inference.output import Counts, Emitted
from inference.policy import Fixed
from inference.proposers.block import Block, BlockNetwork
from inference.sampling.noise import row_ids
from studies.assisted import assisted_arm
from tests import kinds
from tests.cotrain.students.test_p_eagle import states_of
from tests.tiny import TARGET, tiny

LAYERS, DEPTHS, MASK, PROMPT = [2, 4, 5], 3, 30, [3, 1, 4, 1, 5, 9, 2]
PARTS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    "input_layernorm",
    "post_attention_layernorm",
)
NAMES = {f"{name}.weight" for name in ("fc", "hidden_norm", "norm")}
NAMES |= {f"layers.{i}.{part}.weight" for i in range(2) for part in PARTS}


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny(layers=8)


def built(target: LlamaForCausalLM, folder: Path, **settings: Any) -> BlockNetwork:
    """Save a draft of two layers and three drafts a round; return its network."""
    settings = {"target_head": True, "eagle_aux_hidden_state_layer_ids": LAYERS} | settings
    network = kinds.block(target, **settings)
    save(network, None, folder, Metadata(TARGET, 3, kind="block"), None)
    return network


@pytest.fixture(scope="module")
def pair(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[BlockNetwork, Any]:
    """A draft, and the assistant that transformers loads from its export. Every tensor of the one is of the other."""
    place = tmp_path_factory.mktemp("drafts")
    network = built(target, place / "draft")
    folder = export(place / "draft", place / "out", "dflash", engine="transformers", target=target)
    assert folder_problems(folder) == []
    assistant, found = AutoModel.from_pretrained(folder, dtype=target.dtype, output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return network, assistant.eval()


@torch.no_grad()
@pytest.mark.parametrize("anchor", [1, 4, 6])
def test_transformers_computes_the_distributions_that_were_trained(
    anchor: int, target: LlamaForCausalLM, pair: tuple[BlockNetwork, Any]
) -> None:
    """Of a block after any part of the prompt: the anchor and its masks are embedded by the target, in this order."""
    network, assistant = pair
    ids = torch.tensor([PROMPT])
    states = target(ids[:, :anchor], output_hidden_states=True).hidden_states
    context = torch.cat([states[number + 1] for number in assistant.config.target_layer_ids], -1)
    block = torch.tensor([[PROMPT[anchor], *[assistant.config.mask_token_id] * (assistant.config.block_size - 1)]])
    output = assistant(noise_embeds=target.get_input_embeddings()(block), context_hidden_states=context)
    theirs = target.lm_head(output.last_hidden_state)[0, 1:].log_softmax(-1)
    assert assistant.config.layer_types == ["full_attention"] * 2
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # not those of another model
        assert getattr(assistant.config, name) == getattr(network.config, name, None)
    student = BlockStudent(network, target)
    guesses = student.guesses({"ids": ids}, states_of(student, ids))
    assert len(guesses) == len(theirs) == DEPTHS and assistant.config.mask_token_id == MASK
    for depth, guess in enumerate(guesses):
        ours = guess.head(guess.states).log_softmax(-1)[guess.at == anchor + depth]
        torch.testing.assert_close(theirs[depth : depth + 1][: len(ours)], ours, atol=1e-5, rtol=1e-5)


def texts(target: LlamaForCausalLM, assistant: Any, prompts: list[list[int]], sampling: Sampling, n: int) -> Any:
    """The texts of transformers' assisted generation, and the target's calls but the first of each prompt, which reads
    the prompt and drafts nothing."""
    arm = assisted_arm("dflash", target, sampling, n, assistant, DEPTHS, speculation_type="dflash")
    result = arm.run(prompts, row_ids(prompts), 0)
    return result.tokens, result.stats.target_calls - len(prompts)


def test_greedy_texts_of_transformers_are_the_targets_in_as_many_calls_as_here(
    target: LlamaForCausalLM, pair: tuple[BlockNetwork, Any]
) -> None:
    network, assistant = pair
    prompts, greedy = [PROMPT, [7, 7, 3], [11, 2, 29, 30, 5]], Sampling(temperature=0.0)
    tokens, calls = texts(target, assistant, prompts, greedy, 16)
    plain = transformers_arm("plain", target, greedy, 16)
    assert tokens == [plain.run([prompt], [0], 0).tokens[0] for prompt in prompts]
    engine = Engine(target, Block(network), policy=Fixed(DEPTHS), rows=3)
    begun = [[*prompt, text[0]] for prompt, text in zip(prompts, tokens, strict=True)]
    ours = engine.generate(begun, max_new_tokens=15, sampling=greedy, ignore_eos=True)
    assert ours.tokens == [text[1:] for text in tokens]
    assert calls == ours.stats.target_calls < 3 * 15


@pytest.mark.thorough
def test_sampled_drafts_are_accepted_by_transformers_as_predicted(
    target: LlamaForCausalLM, pair: tuple[BlockNetwork, Any]
) -> None:
    network, assistant = pair
    sampling, prompts = Sampling(temperature=0.7), [[5 * i % 29, i % 31, 3 + i % 7] for i in range(60)]
    tokens, calls = texts(target, assistant, prompts, sampling, 17)
    begun = [[*prompt, text[0]] for prompt, text in zip(prompts, tokens, strict=True)]
    rest, ids = [text[1:] for text in tokens], row_ids(begun)
    emitted = Emitted(begun, ids, rest, [Counts() for _ in ids])
    engine = Engine(target, Block(network), policy=Fixed(DEPTHS), rows=12)
    predicted = expected(pair_figures(engine, Block(network), emitted, sampling, 16, 0.0), "token")
    assert predicted is not None and calls < 60 * 16
    assert abs(calls - predicted.calls) < 4 * predicted.variance**0.5


@pytest.mark.parametrize("engine", ["sglang", "tensorrt_llm"])
def test_folders_have_what_other_loaders_ask_for(engine: str, target: LlamaForCausalLM, tmp_path: Path) -> None:
    """Both add the prefix `model.` where they need it, and take the embedding and the head from the target. SGLang
    refuses layers that are not below num_target_layers, for which it takes the draft's own number if there is none, and
    drafts 16 tokens a block if no size is named. TensorRT-LLM finds the class of the layers by model_type."""
    network = built(target, tmp_path / "draft", markov_rank=3)
    folder = export(tmp_path / "draft", tmp_path / "out", "dflash", engine=engine, target=target)
    tensors, config = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    assert tensors.keys() == NAMES and not (folder / "mask_embedding.pt").exists()
    assert all(torch.equal(tensor, network.state_dict()[name]) for name, tensor in tensors.items())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["block_size"] == DEPTHS + 1 and config["num_target_layers"] == 8 and config["num_hidden_layers"] == 2
    told = config["dflash_config"]
    assert told["mask_token_id"] == MASK < config["vocab_size"] and told["target_layer_ids"] == [1, 3, 4]
    assert not config.get("layer_types") and config["attention_bias"] is False and config["hidden_act"] == "silu"
    metadata = read(folder).metadata
    assert "The Markov head" in metadata.origin["export"]["remarks"][0]
    words = shlex.split(launch(engine, "d", "t", 3, "sampled", "dflash", "block", layers=captured(metadata.origin)))
    if engine == "sglang":
        flags = dict(zip(words[3::2], words[4::2], strict=True))
        assert flags == {
            "--model-path": "t",
            "--speculative-algorithm": "DFLASH",
            "--speculative-draft-model-path": "d",
            "--speculative-num-draft-tokens": str(config["block_size"]),
        }
    else:
        wanted = {
            "decoding_type": "DFlash",
            "max_draft_len": 3,
            "speculative_model": "d",
            "target_layer_ids": [1, 3, 4],
        }
        assert json.loads(words[2])["speculative_config"] == wanted


@pytest.mark.parametrize("engine", TARGET_HEAD)
def test_what_these_engines_compute_otherwise_is_refused(engine: str, target: LlamaForCausalLM, tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "has a head and a mask of its own, .* train with draft.head=target": {"target_head": False},
        "masks attend to earlier ones alone, .* train with draft.mask=bidirectional": {"causal": True},
        "reads the target's embeddings": {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]},
    }
    assert usual_layout("block", engine, True) == "dflash"
    for number, (said, settings) in enumerate(cases.items()):
        built(target, tmp_path / f"{number}", **settings)
        with pytest.raises(UserError, match=f"^engine={engine}: .*config.json: .*{said}"):
            export(tmp_path / f"{number}", tmp_path / "out", "dflash", engine=engine, target=target)
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_more_than_its_matrix_stays_here(tmp_path: Path) -> None:
    """Engines multiply by the matrix alone, so a draft of a target that scales its logits would be another one."""
    target: Any = tiny(layers=8)
    built(target, tmp_path / "draft")
    export(tmp_path / "draft", tmp_path / "out", "dflash", target=target)
    target.lm_head.weight.data *= 0.02 / target.lm_head.weight.std()  # as small as many targets have it
    target.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="^engine=vllm: .*caps or shifts its logits.* train with draft.head=own"):
        export(tmp_path / "draft", tmp_path / "capped", "dflash", target=target)


def test_the_call_on_the_card_is_that_of_blocks() -> None:
    program, flag, code = shlex.split(launch("transformers", "d d", "t", 3, "sampled", "dflash", "block"))
    compile(code, "card", "exec")
    assert (program, flag) == ("python", "-c") and "AutoModel.from_pretrained(draft, dtype=target.dtype)" in code
    assert 'speculation_type="dflash", do_sample=True' in code and "'d d'" in code
