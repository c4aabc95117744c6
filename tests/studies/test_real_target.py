"""The study of a real target by task, on a toy target with a chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.export.hf import export
from cotrain.planning.planner import BATCH
from cotrain.training.job import models
from inference import Engine, Sampling, load
from inference.drafts.draft_folder import Metadata, save
from inference.drafts.weight_files import read_json
from inference.measure.arms import engine_arm
from inference.measure.timing import interleave
from inference.models.pretrained import load_model
from inference.policy import Fixed
from inference.proposers import Independent
from studies import real_target, real_target_beside, real_target_cells
from tests import standin
from tests.draft_folders import draft_folder
from tests.folders import network, target_folder, tokenizer, write_rows
from tests.inference.measure.test_timing import timing

TEMPLATE = "{% for one in messages %}[{{ one.content }}]{% endfor %}"
TINY = [f"--set=bench.{one}" for one in "prompt_tokens=16 new_tokens=8 depths=[1,2]".split()]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = target_folder(tmp_path / "target")
    words = tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    words.chat_template = None
    return folder


@pytest.fixture
def options(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run of seconds, on prompts of two tasks."""
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    monkeypatch.setattr("cotrain.planning.planner.SHAPE", 1)
    rows = [
        {"domain": task, "messages": [{"role": "user", "content": f"{task} {i}"}]}
        for task in ("chat", "edits")
        for i in range(7)
    ]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    return [f"--output={tmp_path / 'out.json'}", f"--target={target}", f"--prompts={prompts}", "--seconds=1", *TINY]


def cells(tmp_path: Path) -> list[dict[str, Any]]:
    report = read_json(tmp_path / "out.json")
    return [{**cell, "command": report["runs"][cell["run"]]["command"]} for cell in report["cells"]]


def test_cells_that_are_missing_are_measured(
    tmp_path: Path, target: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    small = draft_folder(tmp_path / "draft", target, "independent")
    drafts = [f"small={small}", "look-up=draft=retrieval"]
    real_target.main([*drafts, *options, "--regimes=1", "--rows=1", "--tasks=chat"])
    real_target.main([*drafts, *options, "--regimes=1,card", "--rows=1", "--tasks=chat", "--plan=stored"])
    real_target.main(
        [f"both=draft=hybrid init=pretrained draft.path={small}", *options, "--regimes=0", "--rows=2", "--tasks=edits"]
    )
    found = cells(tmp_path)
    assert [(cell["draft"], cell["kind"], cell["regime"], cell["rows"], cell["task"]) for cell in found] == [
        ("small", "independent", "1", 1, "chat"),
        ("look-up", "retrieval", "1", 1, "chat"),
        ("small", "independent", "card", 1, "chat"),
        ("look-up", "retrieval", "card", 1, "chat"),
        ("both", "hybrid", "0", 2, "edits"),
    ]
    assert all(cell["exact"] and not cell["wrong"] for cell in found)
    assert "stored" not in found[0]["command"] and "stored" in found[2]["command"] and found[2]["k"] == 2
    assert [cell["rule"] for cell in found[:3]] == [
        "block",
        "block",
        "token",
    ]  # the folder's rule if its plan is asked for
    small_cell = found[0]
    assert abs(small_cell["tau"]["z"]) < 4 and len(small_cell["acceptance"]["measured"]) == small_cell["k"]
    speed = small_cell["speedup"]
    assert 0 < speed["expected"] and speed["decode"]["low"] <= speed["decode"]["value"]
    assert small_cell["speedup"]["low"] <= small_cell["speedup"]["value"] <= small_cell["speedup"]["high"]
    capsys.readouterr()
    real_target.main([f"--output={tmp_path / 'out.json'}", "--summary"])
    said = capsys.readouterr().out
    assert "**small, 1 row**\n\n| task | T = 1 | card's settings |\n|---|---|---|\n| chat | " in said
    assert "**both, 2 rows**" in said and "NOT EXACT" not in said
    assert cells(tmp_path) == found


def test_a_draft_that_learns_nothing_is_made_on_the_device_of_the_target(target: Path) -> None:
    with standin.device():
        cfg = real_target_cells.settings(str(target), [])
        draft = real_target_cells.draft_of("new", "draft=eagle draft.depths=2", cfg, *models(cfg))
        assert draft.plan.draft.device == draft.plan.target.device == torch.device("cuda:0")


def test_prompts_that_plan_are_not_timed(target: Path) -> None:
    """And every task of the study has its own, in the chat template."""
    words = models(real_target_cells.settings(str(target), []))[1]
    by_task = real_target_cells.prompts_of(real_target.PROMPTS, load_model(str(target)), words)
    assert list(by_task) == real_target.TASKS
    texts = [json.loads(line)["messages"][0]["content"] for line in real_target.PROMPTS.read_text().splitlines()]
    assert len(set(texts)) == len(texts) >= 60
    for prompts in by_task.values():
        assert len(prompts.ranking) == real_target_cells.PLANNED_ON and len(prompts.final) >= 8
        assert words.decode(prompts.ranking[0]).startswith("[")


def test_engines_take_turns_and_what_is_left_out_is_said(
    tmp_path: Path, target: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = [f"small={draft_folder(tmp_path / 'draft', target, 'independent')}", "int8=draft=quantised draft.bits=8"]
    for rows in ("1", "1,2"):
        real_target.main([*drafts, *options, "--beside", "--regimes=1", f"--rows={rows}", "--tasks=chat"])
    report = read_json(tmp_path / "out.json")
    alone, together = report["beside"]
    assert (alone["run"], together["run"]) == (0, 1) and not report["cells"]
    assert list(alone["engines"]) == ["small", "transformers, small", "int8", "plain", "transformers"]
    assert list(together["engines"]) == ["small", "int8", "plain", "transformers"]
    assert [one.split(":")[0] for one in alone["left_out"]] == ["vLLM", "llama.cpp", "transformers assisted by int8"]
    speed = alone["engines"]["transformers"]["tokens_per_second"]
    assert speed["low"] <= speed["value"] <= speed["high"] and alone["engines"]["small"]["ours_over_it"]["value"] == 1
    capsys.readouterr()
    real_target.main([options[0], "--summary"])
    assert "**T = 1, 2 rows, chat**" in capsys.readouterr().out


class Process:
    """A process of another engine, which is this engine on one prompt after the other: vLLM if it is greedy or not,
    llama.cpp if it has no such setting. vLLM samples the first token of a text without a round. Every answer takes two
    seconds."""

    version = "1"

    def __init__(self, draft: Path, target: Path, config: dict[str, Any] | None, k: int | None) -> None:
        self.target, self.k, self.first = load_model(str(target)), k, int(config is not None)
        self.tokens = self.calls = 0
        greedy = config is None or config.get("draft_sample_method") != "probabilistic"
        self.proposer = Independent(load(draft).proposer.model, greedy) if k else None

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, begun: list[list[int]], draft: Any, new: int, temperature: float, seed: int) -> Any:
        engine = Engine(self.target, draft, verify="token", policy=Fixed(self.k or 0), rows=len(begun))
        return engine.generate(begun, max_new_tokens=new, sampling=Sampling(temperature), seed=seed, ignore_eos=True)

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        begun = [list(prompt) for prompt in prompts]
        if self.first:
            sampled = self.run(begun, None, self.first, temperature, seed + 100)
            begun = [[*prompt, *text] for prompt, text in zip(prompts, sampled.tokens, strict=True)]
        rest = self.run(begun, self.proposer, max_new_tokens - self.first, temperature, seed)
        tokens = [
            [*given[len(prompt) :], *text] for prompt, given, text in zip(prompts, begun, rest.tokens, strict=True)
        ]
        counts = rest.stats
        self.tokens, self.calls = self.tokens + sum(map(len, tokens)), self.calls + counts.target_calls
        rounds = {"drafts": counts.target_calls if self.k else 0, "rounds": counts.target_calls}
        return {
            "tokens": tokens,
            "seconds": 2.0,
            "accepted": sum(counts.accepted),
            "by_depth": counts.accepted,
            **rounds,
        }

    def ask(self, **request: Any) -> dict[str, Any]:
        return self.generate(**request)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Path) -> list[Process]:
    """Those that the study starts, in order: each drafts as it is told, with the draft of this test."""
    found: list[Process] = []

    def vllm(_: str, path: str, config: dict[str, Any] | None, *more: Any, **settings: Any) -> Process:
        assert path == str(target) and (config is None or Path(config["model"]).is_dir())
        k = config["num_speculative_tokens"] if config else None
        found.append(Process(tmp_path / "draft", target, config or {}, k))
        return found[-1]

    def worker(_: str, command: list[str], settings: dict[str, Any], *more: Any, **others: Any) -> Process:
        assert command[-1].endswith("serve.mjs") and settings["target"] == str(target)
        found.append(Process(tmp_path / "draft", target, None, settings["k"] if settings["draft"] else None))
        return found[-1]

    monkeypatch.setattr(real_target_beside, "Server", vllm)
    monkeypatch.setattr(real_target_beside, "Worker", worker)
    monkeypatch.setattr(real_target_beside, "gguf_file", Path)
    monkeypatch.setattr("studies.vllm_arm.SETTLE", 0.0)
    return found


def exported(tmp_path: Path, target: Path, **settings: Any) -> tuple[str, str]:
    """An argument that names a draft like the target, of two drafts a round, and that of its export for vLLM."""
    near, about = network(), Metadata({"name": str(target), "config": None, "tokenizer": None}, 2)
    with torch.no_grad():
        for weight in near.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    small = save(near.to(torch.bfloat16), tokenizer(), tmp_path / "draft", about, None)
    export(small, tmp_path / "exported", "vllm", **settings)
    return f"small={small}", f"--vllm-draft={tmp_path / 'exported'}"


@pytest.mark.parametrize(("engine", "objective"), [("vllm", "sampled"), ("vllm", "greedy"), ("llama.cpp", "greedy")])
def test_what_another_engine_accepted_is_compared_with_the_prediction(
    engine: str,
    objective: str,
    tmp_path: Path,
    target: Path,
    options: list[str],
    processes: list[Process],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other engine is this one. Texts of greedy drafting say exactly which drafts were accepted."""
    sampling = Sampling(temperature=0.3)
    monkeypatch.setitem(real_target_cells.REGIMES, "0.7", sampling)  # the likeliest tokens of this target are unlikely
    draft, vllm = exported(tmp_path, target, objective=objective)
    given = ["--vllm=python", vllm] if engine == "vllm" else ["--llamacpp=modules", "--llamacpp-draft=gguf"]
    asked = [draft, *options, "--set=bench.new_tokens=24", "--regimes=0.7", "--rows=1", "--tasks=chat,edits"]
    real_target.main([*asked, "--acceptance", *given, "--llamacpp-k=2"])
    found, first = read_json(tmp_path / "out.json")["acceptance"], int(engine == "vllm")
    assert [(one["task"], one["engine"], one["prompts"]) for one in found] == [
        (task, {"vllm": "vllm, bfloat16"}.get(engine, engine), 3) for task in ("chat", "edits")
    ]
    here = Engine(processes[0].target, processes[0].proposer, verify="token", policy=Fixed(2), rows=BATCH)
    prompts = real_target_cells.prompts_of(
        tmp_path / "prompts.jsonl", processes[0].target, models(real_target_cells.settings(str(target), []))[1]
    )
    for one in found:
        tau, depths, begun = one["tau"], one["acceptance"], one["first_draft"]
        assert (one["drafting"], one["k"]) == (objective, 2)
        assert one["tokens"] == 3 * (24 - first) and one["tokens_per_second"] == 3 * 24 / 2
        assert tau["measured"] == one["tokens"] / one["rounds"]
        if objective == "greedy":
            assert tau["measured"] == pytest.approx(tau["predicted"], rel=1e-6)
        else:
            assert abs(tau["z"]) < 4 and abs(tau["relative"]) < 5 * tau["standard_error"]
            assert all(0 < spread < 0.2 for spread in depths["standard_error"])
        for measured, expected, spread in zip(
            *(depths[name] for name in ("measured", "predicted", "standard_error")), strict=True
        ):
            assert abs(measured - expected) < max(5 * spread, 0.05)  # last rounds have fewer drafts here
        assert abs(begun["measured"] - begun["predicted"]) < 5 * begun["standard_error"] < 1
        assert depths["measured"][0] > 0.05
        arm = engine_arm("here", here, sampling, 24)  # by the token rule, which other engines have
        stats = interleave([arm], prompts[one["task"]].final, BATCH, warmup=0).stats("here")
        assert stats and (tau["this_engine"], depths["this_engine"]) == (stats.tau, stats.prefix)
    assert f"small in {found[0]['engine']}, T 0.7, edits, " in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"Sampling.top_p"):
        real_target.main([*asked, "--acceptance", *given, "--regimes=card"])
    with pytest.raises(ValueError, match="--acceptance: name one draft"):
        real_target.main([*asked, "--acceptance"])


def test_a_speed_has_an_interval_of_its_own() -> None:
    speed = real_target_cells.speed_interval(timing([1, 2, 4, 1], [1] * 4), "a")
    assert speed.value == pytest.approx(4) and 2 <= speed.low < speed.value < speed.high <= 8
    assert real_target_cells.speed_interval(timing([2] * 4, [1] * 4), "a") == pytest.approx((4, 4, 4))
