"""Drafts served by a real llama.cpp, from the GGUF file that `cotrain export` writes: accepted as predicted, and the
text is the target's. The target is written to GGUF in the same way.

llama.cpp drafts the likeliest tokens, samples from the target and compares. So the texts alone say which drafts were
accepted, those that are in them, and the prediction on the served texts has no variance.
"""

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from cotrain.cli import main
from cotrain.export.gguf import TOKENS, write_file
from cotrain.planning.plan import Plan
from cotrain.planning.planner import BATCH
from cotrain.teacher.target_model import load_pair
from inference import Sampling
from inference.exactness.figures import expected
from inference.exactness.side_by_side import pair_figures
from inference.exactness.ties import check_text
from inference.measure.arms import engine_arm
from inference.measure.timing import interleave
from inference.models.pretrained import cast
from inference.output import Counts, Emitted
from inference.sampling.noise import row_ids
from studies.vllm_arm import Worker
from tests.engines.conftest import OUTPUT, reported, require_same
from tests.engines.drafts import VOCABULARY, K, draft_folder, load
from tests.engines.kinds.conftest import SIZE

pytestmark = [pytest.mark.llamacpp, pytest.mark.timeout(1800)]
SERVE = Path(__file__).parent / "llamacpp" / "serve.mjs"
CONTEXT = 256
DRAFT = "four layers, greedy"
GAP = 0.05  # of logits that spread over 2 and more: llama.cpp keeps keys and values in 16 bits
TOLERANCE = 0.02  # of tau: the two likeliest tokens of a draft may tie


class LlamaCpp(Worker):
    """A process of `serve.mjs`."""

    def __init__(self, target: Path, draft: Path | None = None) -> None:
        settings = {
            "modules": str(Path(os.environ["COTRAIN_LLAMACPP"]).absolute()),
            "target": str(target),
            "draft": str(draft) if draft else None,
            "k": K,
            "context": CONTEXT,
        }
        super().__init__("llama.cpp", ["node", str(SERVE)], settings, OUTPUT / "llamacpp.log")

    def generate(self, prompts: list[list[int]], temperature: float) -> dict[str, Any]:
        """The texts of the prompts, one after the other, with `rounds`, `accepted` and `seconds`."""
        return self.ask(prompts=prompts, max_new_tokens=SIZE.new_tokens, temperature=temperature, seed=0)


@pytest.fixture(scope="module")
def found(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    yield from reported("engines_llamacpp", pytestconfig)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target as a GGUF file."""
    model, tokenizer = load_pair("bundled")
    file = tmp_path_factory.mktemp("target") / "target.gguf"
    write_file(model, tokenizer, file)
    return file


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, tokenizer = load_pair("bundled")
    network, metadata = load(DRAFT)
    return Plan(model, tokenizer, network, Sampling(), "token", SIZE, ("bundled", DRAFT), "greedy", kind=metadata.kind)


@pytest.fixture(scope="module")
def plain(target: Path, plan: Plan, found: dict[str, Any]) -> list[list[int]]:
    """Greedy texts of llama.cpp without a draft."""
    with LlamaCpp(target) as server:
        answer = server.generate(plan.final(0, SIZE.prompts), 0.0)
    found["llama.cpp"] = server.version
    found["plain"] = {"tokens_per_second": sum(map(len, answer["tokens"])) / answer["seconds"]}
    return answer["tokens"]


def text_check(plan: Plan, wanted: list[list[int]], texts: list[list[int]]) -> Any:
    """Greedy texts of the first prompts beside others: equal ones, ties, and unexplained differences."""
    prompts = plan.final(0, len(texts))
    model = cast(copy.deepcopy(plan.target), torch.bfloat16)
    keys = (row_ids(prompts), 0)
    return check_text(model, prompts, wanted[: len(texts)], texts, keys, Sampling(temperature=0), 4096, K)


def predicted(plan: Plan, prompts: list[list[int]], tokens: list[list[int]]) -> Any:
    """The expected target calls of the texts."""
    texts = Emitted(prompts, row_ids(prompts), tokens, [Counts() for _ in tokens])
    proposer = plan.proposer()
    engine = plan.engine(K, BATCH, proposer=proposer)
    return expected(pair_figures(engine, proposer, texts, plan.sampling, SIZE.new_tokens, 0.0), "token")


def test_the_target_says_what_it_says_here(plan: Plan, plain: list[list[int]], found: dict[str, Any]) -> None:
    """Rope, norms, vocabulary and end of the written file, in greedy texts."""
    arm = engine_arm("plain", plan.plain(BATCH), Sampling(temperature=0), SIZE.new_tokens)
    ours = interleave([arm], plan.final(0, SIZE.prompts), BATCH, warmup=0).texts("plain").tokens
    require_same(text_check(plan, ours, plain), found["plain"])


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES: dict[str, Any] = {
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 64}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_read_as_transformers_reads_it(shape: str, plan: Plan, tmp_path: Path) -> None:
    """Random weights: greedy texts of 96 tokens, beyond the length from which the rope of Llama 3 is stretched."""
    config, changes = SHAPES[shape]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=None,
            **changes,
        )
    ).eval()
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim == 1:  # biases and norms
                values.add_(torch.randn_like(values) * 0.2)
    write_file(model, plan.tokenizer, tmp_path / "model.gguf")
    prompts = plan.final(0, 4)
    with LlamaCpp(tmp_path / "model.gguf") as server:
        texts = server.generate(prompts, 0.0)["tokens"]
    ours = [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=SIZE.new_tokens)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]
    text = check_text(model, prompts, ours, texts, (row_ids(prompts), 0), Sampling(temperature=0), 4096, K)
    print(f"\nllama.cpp, {shape}, beside transformers: {text.equal} of {len(prompts)} texts equal, gap {text.gap:.2g}")
    assert text.gap < GAP


@pytest.mark.parametrize("dtype", ["auto", "q8_0"])
def test_a_draft_is_accepted_as_predicted(
    dtype: str, target: Path, plan: Plan, plain: list[list[int]], found: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "served"
    settings = [f"draft.path={draft_folder(DRAFT)}", f"target.path={target}", f"output={folder}", f"dtype={dtype}"]
    assert main(["export", "engine=llamacpp", *settings]) == 0
    figures = found[f"{DRAFT}, {dtype}"] = {}
    with LlamaCpp(target, folder / "draft.gguf") as server:
        for temperature in (1.0, 0.0):
            regime = replace(plan, sampling=Sampling(temperature=temperature))
            prompts = plan.final(0, SIZE.prompts if temperature else SIZE.prompts // 2)
            answer = server.generate(prompts, temperature)
            forecast = predicted(regime, prompts, answer["tokens"])
            tokens, rounds = sum(map(len, answer["tokens"])), answer["rounds"]
            arm = engine_arm(
                "own", regime.engine(K, BATCH, proposer=regime.proposer()), regime.sampling, SIZE.new_tokens
            )
            ours = interleave([arm], prompts, BATCH, warmup=0).stats("own")
            assert ours is not None
            figures[f"temperature {temperature:g}"] = one = {
                "tokens": tokens,
                "rounds": rounds,
                "served": tokens / rounds,
                "predicted": tokens / forecast.calls,
                "ours": ours.tau,
                "tokens_per_second": tokens / answer["seconds"],
            }
            print(f"\nllama.cpp, {DRAFT}, {dtype}, temperature {temperature:g}: {one}")
            assert one["served"] > 1.1 and abs(one["served"] / one["predicted"] - 1) < TOLERANCE
    require_same(text_check(plan, plain, answer["tokens"]), figures)


def test_both_files_have_one_vocabulary(target: Path, tmp_path: Path) -> None:
    """Copied from the target's file, and written from the draft's own tokenizer."""
    files = []
    for name, path in (("copied", str(target)), ("written", "bundled")):
        settings = [f"draft.path={draft_folder(DRAFT)}", f"target.path={path}", f"output={tmp_path / name}"]
        assert main(["export", "engine=llamacpp", *settings]) == 0
        files.append(tmp_path / name / "draft.gguf")
    wanted, *others = (words(file) for file in (target, *files))
    assert TOKENS in wanted and all(other == wanted for other in others)


def words(file: Path) -> dict[str, Any]:
    fields = GGUFReader(file).fields.items()
    return {name: field.contents() for name, field in fields if name.startswith("tokenizer.")}
