"""Exports: the folder loads and serves, the vocabulary fits, the launch command says what was trained for."""

import contextlib
import io
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
)

from cotrain.errors import UserError
from cotrain.export import publishing
from cotrain.export.engines import ENGINES, caveats, launch
from cotrain.export.fitting import resize
from cotrain.export.hf import export, folder_problems, prepare_draft
from cotrain.export.publishing import card
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Metadata, ServedAs, load_draft, save
from inference.drafts.weight_files import read_json
from inference.measure.costs import Costs
from inference.report.table import table
from studies.pretrain.tokenizer import train_tokenizer
from tests.tiny import TARGET, tiny

TEXTS = ["def add(a, b):\n    return a + b\n", "the cat sat on the mat and the dog sat on the cat"]
VOCAB, PADDED = 300, 320


def arm(speed: float, tau: float | None) -> dict[str, Any]:
    return {
        "tokens": 100,
        "seconds": 100 / speed,
        "speed": speed,
        "decode_tokens": 96,
        "decode_seconds": 96 / speed,
        "decode_speed": speed,
        "tau": tau,
        "target_calls": 40,
        "rounds": 40,
        "phases": None,
    }


SPEEDUP = {"value": 1.62, "low": 1.55, "high": 1.7}
REPORT = {
    "format": 1,
    "environment": {
        "cpu": "some CPU",
        "cores": 2,
        "threads": 1,
        "memory_gib": 8.0,
        "accelerator": None,
        "python": "3.11",
        "torch": "2.11",
        "transformers": "5.17",
        "date": "2026-01-01",
        "commit": None,
        "dirty": None,
        "command": "cotrain bench",
    },
    "settings": {
        "target": "some/target",
        "draft": "draft",
        "proposer": None,
        "verify": "token",
        "policy": "Fixed(3)",
        "rows": 4,
        "prompts": 8,
        "max_new_tokens": 12,
        "repeats": 3,
        "target_dtype": "float32",
        "draft_dtype": "float32",
        "sampling": {"temperature": 0.7, "top_k": 0, "top_p": 1.0},
    },
    "arms": {"plain": arm(50.0, None), "draft": arm(81.0, 2.5)},
    "speedup": {"of": "draft", "over": "plain", "whole": SPEEDUP, "decode": SPEEDUP},
    "acceptance": None,
    "exactness": None,
    "extra": {},
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, VOCAB, 256)


@pytest.fixture(scope="module")
def target(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Its vocabulary is padded, past the tokenizer's and past the draft's."""
    return tiny(PADDED, layers=2, dtype=torch.float32)


def tied(vocab: int = VOCAB, seed: int = 1) -> LlamaForCausalLM:
    model = tiny(vocab, layers=1, seed=seed, dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def draft(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    model = tied()
    model.config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    metadata = Metadata(
        {"name": "some/target", **hash_target(target.config, tokenizer)}, 3, regime={"temperature": 0.7}
    )
    return save(model, tokenizer, tmp_path_factory.mktemp("source") / "draft", metadata, REPORT)


@pytest.fixture(scope="module")
def served(
    draft: Path,
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    output = tmp_path_factory.mktemp("served") / "draft"
    return export(draft, output, "vllm", target_config=target.config, target_tokenizer=tokenizer)


@pytest.fixture
def folder(served: Path, tmp_path: Path) -> Path:
    """A copy of the export, to be damaged."""
    return Path(shutil.copytree(served, tmp_path / "draft"))


def test_transformers_serves_the_export_and_the_text_is_the_targets(
    served: Path, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assistant = AutoModelForCausalLM.from_pretrained(served)
    calls: list[int] = []
    assistant.register_forward_hook(lambda *_: calls.append(1))
    prompt = torch.tensor([tokenizer.encode("def add(a, b):")])
    arguments = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    plain = target.generate(prompt, **arguments)
    assisted = target.generate(prompt, assistant_model=assistant, **arguments)
    assert plain.shape == (1, prompt.shape[1] + 12)
    assert torch.equal(assisted, plain)
    assert calls


def test_export_keeps_the_draft_and_pads_it(served: Path, draft: Path) -> None:
    ids = torch.arange(20).view(2, 10)
    old, new = load_draft(draft)[0], load_draft(served)[0]
    with torch.no_grad():
        before, after = old(ids).logits, new(ids).logits
    assert after.shape[-1] == PADDED
    assert torch.equal(after[..., :VOCAB], before)
    config, retained = (read_json(path / "config.json") for path in (served, draft))
    for key in ("rope_parameters", "max_position_embeddings", "tie_word_embeddings", "dtype"):
        assert config[key] == retained[key], key
    assert config["rope_parameters"]["rope_type"] == "llama3"
    assert "lm_head.weight" not in load_file(served / "model.safetensors")


def test_export_casts_the_weights(draft: Path, tmp_path: Path) -> None:
    output = export(draft, tmp_path / "half", "vllm", dtype=torch.bfloat16)
    assert load_file(output / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(output).dtype == torch.bfloat16
    assert folder_problems(output) == []


def test_the_card_says_how_to_serve_and_what_was_measured(served: Path) -> None:
    text = (served / "README.md").read_text()
    assert launch("vllm", str(served), "some/target", 3, "sampled") in text
    for line in (table(REPORT), "- temperature: 0.7", "- objective: sampled", "licence"):
        assert line in text
    assert f"padded from {VOCAB} to {PADDED}" in text
    assert "1.62" in text


def test_the_card_predicts_either_way_of_drafting() -> None:
    metadata = Metadata(TARGET, 3, regime={"temperature": 0.7})
    held = {
        "alpha_T0.7/all": 0.81,
        "tau_T0.7/all/3": 2.9,
        "alpha_greedy_draft_T0.7/all": 0.5,
        "tau_greedy_draft_T0.7/all/3": 1.8,
        "alpha_T1/all": 0.7,
    }
    text = card(metadata, "vllm", "d", {**REPORT, "extra": {"held_out": held}}, [])
    assert "| sampled | 0.810 | 2.90 |" in text and "| greedy | 0.500 | 1.80 |" in text and "tau at 3 drafts" in text
    assert "Predicted" not in card(metadata, "vllm", "d", {**REPORT, "extra": {"held_out": {}}}, [])
    held |= {f"{name}_without_markov_T0.7/all/3": tau for name, tau in (("tau", 2.4), ("tau_greedy_draft", 1.5))}
    cut = replace(metadata, origin={"export": {"markov": False}})  # the draft's Markov head is left out
    text = card(cut, "vllm", "d", {**REPORT, "extra": {"held_out": held}}, [])
    assert "| sampled | 2.40 |" in text and "| greedy | 1.50 |" in text and "2.90" not in text and "0.810" not in text


COSTS = Costs((2.0, 2.1, 2.2, 2.3, 2.4), 0.2, (0.0,) * 5)  # rounds of 2, 2.3, 2.6, 2.9 and 3.2 seconds
TAUS = {"tau": (1.8, 2.4, 2.9, 3.1), "tau_greedy_draft": (1.5, 1.6, 1.62, 1.63)}  # fastest at 3, and at 1
GAINS = "1.30x with k = 1, 1.02x with k = 4"
HELD = {f"{name}_T0.7/all/{k}": tau for name, taus in TAUS.items() for k, tau in enumerate(taus, 1)}


@pytest.fixture(scope="module")
def planned(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A draft folder whose 4 drafts a round were planned by costs and figures."""

    def made(figures: bool = True, **changes: Any) -> Path:
        network, words, metadata = load_draft(draft)
        extra = {"costs": asdict(COSTS), "held_out": HELD} if figures else {}
        about = replace(metadata, k=4, **changes)
        return save(network, words, tmp_path_factory.mktemp("planned") / "draft", about, {**REPORT, "extra": extra})

    return made


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_draft_length_is_planned_for_the_drafting_of_the_engine(engine: str, planned: Callable[..., Path]) -> None:
    greedily = "sampled" not in ENGINES[engine].drafts
    by_block, by_token = planned(served=ServedAs("block")), planned()
    lengths = {
        "token": prepare_draft(by_token, engine).metadata.k,
        "block": prepare_draft(by_block, engine).metadata.k,
        "typed": prepare_draft(by_block, engine, 2).metadata.k,
        "greedy": prepare_draft(planned(objective="greedy", served=ServedAs("block")), engine).metadata.k,
        "at temperature 0": prepare_draft(
            planned(served=ServedAs("block"), regime={"temperature": 0.0}), engine
        ).metadata.k,
    }
    assert lengths == {
        "token": 1 if greedily else 4,
        "block": 1 if greedily else 3,
        "typed": 2,
        "greedy": 4,
        "at temperature 0": 4,
    }
    if greedily:
        (said,) = (one for one in prepare_draft(by_token, engine).remarks if "planned" in one)
        assert said.startswith("k = 1 is planned for greedy drafting") and GAINS in said
        assert said.endswith("The folder's k = 4 was planned for sampled drafting and the rule token.")
        unknown = prepare_draft(planned(figures=False), engine)
        assert unknown.metadata.k == 4 and "no figures for greedy drafting" in unknown.remarks[0]


def test_k_and_objective_are_the_users_to_change(draft: Path, tmp_path: Path) -> None:
    output = export(draft, tmp_path / "out", "vllm", 5, target="other/target", objective="greedy")
    values = read_json(output / "cotrain.json")
    assert (values["k"], values["objective"], values["target"]["name"]) == (5, "greedy", "other/target")
    assert read_json(output / "generation_config.json")["num_assistant_tokens"] == 5
    text = (output / "README.md").read_text()
    assert launch("vllm", str(output), "other/target", 5, "greedy") in text


def test_the_bundled_target_is_served_by_its_folder(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain.export.publishing.resolve", lambda name: f"/models/{name}")
    output = export(draft, tmp_path / "out", "vllm", target="bundled")
    assert "vllm serve /models/bundled --spec" in (output / "README.md").read_text()


def test_a_foreign_draft_is_exported_with_k_and_target(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    source = tmp_path / "plain"
    tied().save_pretrained(source)
    with pytest.raises(ValueError, match="plain: it has no tokenizer"):
        export(source, tmp_path / "out", "vllm", 4, target="some/target")
    tokenizer.save_pretrained(source)
    with pytest.raises(ValueError, match=r"k=null: set k="):
        export(source, tmp_path / "out", "vllm", target="some/target")
    with pytest.raises(ValueError, match=r"target\.path=null: set target\.path="):
        export(source, tmp_path / "out", "vllm", 4)
    assert folder_problems(export(source, tmp_path / "out", "vllm", 4, target="some/target")) == []


def test_a_draft_that_cannot_serve_is_an_error_and_nothing_is_written(
    draft: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"^engine=llama\.cpp: there is no such engine: set engine= to one of vllm"):
        export(draft, tmp_path / "out", "llama.cpp")
    other = train_tokenizer(["zyx wvu zyx wvu tsr tsr"], VOCAB, 256)
    with pytest.raises(ValueError, match="vocabularies differ, first at token"):
        export(draft, tmp_path / "out", "vllm", target_config=tiny(PADDED).config, target_tokenizer=other)
    with pytest.raises(ValueError, match="vocab_size=200: the draft's tokenizer has .* ids: put the target's"):
        export(draft, tmp_path / "out", "vllm", target_config=tiny(200).config)
    changed = Path(shutil.copytree(draft, tmp_path / "changed"))
    (changed / "report.json").write_text('{"tau": 9}')
    with pytest.raises(
        ValueError, match=r"report\.json is missing, or is not the file that cotrain\.json was written with"
    ):
        export(changed, tmp_path / "out", "vllm")
    model, words, metadata = load_draft(draft)
    odd = save(model, words, tmp_path / "odd", metadata, {"tau": 9})
    with pytest.raises(ValueError, match=r"report\.json: .*report"):
        export(odd, tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()


def probs(model: nn.Module) -> torch.Tensor:
    """Distributions in contexts that `resize` does not look at."""
    ids = torch.randint(290, (4, 16), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(ids).logits.flatten(0, 1).softmax(-1)


@pytest.mark.parametrize("seen", [False, True], ids=["a token never seen", "every token likely"])
def test_padded_rows_have_next_to_no_mass(seen: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    """Hidden states lie along axis 0; training has turned the row of a token it never saw the other way."""
    model = tied()
    with torch.no_grad():
        model.lm_head.weight[:, 0] = 40.0  # what the layers add is small beside it
        model.lm_head.weight[7, 0] = 40.0 if seen else -40.0
        model.model.norm.weight.fill_(0.1)
    mass = resize(model, PADDED, tokenizer)
    rows = model.lm_head.weight[VOCAB:]
    wanted = torch.zeros(16) if seen else model.lm_head.weight[7]
    assert torch.equal(rows, wanted.expand_as(rows))
    assert torch.equal(model.model.embed_tokens.weight, model.lm_head.weight)
    assert mass < 1e-3
    assert probs(model)[:, VOCAB:].sum(-1).mean() < 1e-3


def test_a_head_with_a_bias_gives_padded_rows_no_mass(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = PhiForCausalLM(config).eval()
    before = probs(model)
    assert resize(model, PADDED, tokenizer) == 0.0
    after = probs(model)
    assert float(after[:, VOCAB:].sum()) == 0.0
    assert torch.allclose(after[:, :VOCAB], before)


def test_rows_that_no_target_id_reaches_are_dropped(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tied(PADDED)
    head = model.lm_head.weight[:VOCAB].clone()
    assert resize(model, VOCAB, tokenizer) == 0.0
    assert torch.equal(model.lm_head.weight, head)
    assert model.config.vocab_size == VOCAB


HARD = 'it\'s a "draft" $HOME; `x`'


@pytest.mark.parametrize("engine", ENGINES)
def test_launch_commands_survive_the_shell(engine: str) -> None:
    command = launch(engine, HARD, "target", 4, "sampled")
    forms = (HARD, repr(HARD), json.dumps(HARD))
    assert any(form in word for word in shlex.split(command) for form in forms)


def test_engines_draft_as_the_draft_was_trained() -> None:
    def options(engine: str, objective: str) -> list[str]:
        return shlex.split(launch(engine, "draft/", "target", 4, objective))

    config = {"method": "draft_model", "model": "draft/", "num_speculative_tokens": 4}
    for objective, sampled in (("sampled", "probabilistic"), ("greedy", "greedy")):
        *words, own = options("vllm", objective)[:5]
        assert words == ["vllm", "serve", "target", "--speculative-config"]
        assert json.loads(own) == config | {"draft_sample_method": sampled}
    words = options("sglang", "greedy")  # the anchor is one of its draft tokens
    wanted = {
        "num-steps": "4",
        "num-draft-tokens": "5",
        "eagle-topk": "1",
        "algorithm": "STANDALONE",
    }  # with the anchor
    assert {f"--speculative-{name}": value for name, value in wanted.items()}.items() <= dict(
        zip(words[3::2], words[4::2], strict=True)
    ).items()
    printf, form, text, *rest = options("tensorrt_llm", "greedy")
    config = {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "draft/"}
    assert (printf, form, json.loads(text)["speculative_config"]) == ("printf", "%s\\n", config)
    assert rest[:4] == [">", "speculative.yaml", "&&", "trtllm-serve"]


def test_the_transformers_command_runs(
    served: Path, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    target.save_pretrained(tmp_path / "the target")
    tokenizer.save_pretrained(tmp_path / "the target")
    command = launch("transformers", str(served), str(tmp_path / "the target"), 3, "sampled")
    python, flag, code = shlex.split(command)
    assert (python, flag) == ("python", "-c")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().startswith("The")


def test_an_engine_that_cannot_draft_as_trained_is_said() -> None:
    assert len(caveats("vllm", "sampled")) == 1
    assert "sampled drafting, which sglang does not do" in caveats("sglang", "sampled")[1]
    with pytest.raises(ValueError, match=r"objective=best: it must be one of sampled"):
        launch("vllm", "draft", "target", 4, "best")
    with pytest.raises(ValueError, match=r"k=0: it must be at least 1"):
        launch("vllm", "draft", "target", 0, "sampled")


def edit(file: str, **changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = read_json(folder / file) | changes
        retained = {key: value for key, value in values.items() if value is not None}
        (folder / file).write_text(json.dumps(retained))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")

    return apply


NORM = "model.norm.weight"
GENERATION = "generation_config.json"
DAMAGE = {
    "no generation config": (
        lambda folder: (folder / "generation_config.json").unlink(),
        "generation_config.json is missing",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "no report": (lambda folder: (folder / "report.json").unlink(), "report.json is missing, or is not the file"),
    "another report": (edit("report.json", tau=9), "report.json is missing, or is not the file"),
    "no architecture": (edit("config.json", architectures=None), "config.json: key architectures is missing"),
    "no draft length": (edit(GENERATION, num_assistant_tokens=None), "num_assistant_tokens must"),
    "schedule": (edit(GENERATION, num_assistant_tokens_schedule="heuristic"), "must be 'constant'"),
    "threshold": (edit(GENERATION, assistant_confidence_threshold=0.4), "must be 0"),
    "missing tensor": (
        tensors(lambda w: {name: value for name, value in w.items() if name != NORM}),
        f"{NORM} is missing",
    ),
    "extra tensor": (tensors(lambda w: w | {"extra.weight": w[NORM] + 1}), "extra.weight is not in the model"),
    "shape": (tensors(lambda w: w | {NORM: torch.ones(8)}), f"{NORM} has shape (8,)"),
    "dtype": (tensors(lambda w: w | {NORM: w[NORM].half()}), f"{NORM} is F16, config.json says float32"),
    "NaN": (tensors(lambda w: w | {NORM: w[NORM] * torch.nan}), f"{NORM} holds NaN"),
    "broken": (lambda folder: (folder / "config.json").write_text("{"), "config.json is broken"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_check_names_the_file(name: str, folder: Path) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    problems = folder_problems(folder)
    assert len(problems) == 1, problems
    assert problems[0].startswith(str(folder))
    assert message in problems[0]


def test_check_lists_every_problem(folder: Path) -> None:
    for damage in ("no report", "NaN", "schedule"):
        DAMAGE[damage][0](folder)
    assert len(folder_problems(folder)) == 3
    tied(200).save_pretrained(folder)
    assert any("vocab_size 200 is below the tokenizer's" in problem for problem in folder_problems(folder))
    assert folder_problems(folder / "none") == [f"there is no folder {folder / 'none'}"]


def test_llamacpp_reads_the_file_that_a_target_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "gguf_file", lambda name: Path("/models/target.gguf"))
    assert publishing.served_from("bundled", "llamacpp") == "/models/target.gguf"
    assert not publishing.served_from("bundled", "vllm").endswith(".gguf")
