"""The commands that train, at tiny size through the command line: from own texts to a draft that decodes."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from cotrain.bench import measurement
from cotrain.board import tags
from cotrain.cli import main
from cotrain.data.texts import Texts
from cotrain.rollout import samplers
from cotrain.training import fit, preflight, results
from cotrain.training import run as runs
from inference import Sampling, load
from inference.drafts.weight_files import read_json
from inference.report.build import validate
from tests import standin
from tests.folders import run_paths, target_and_texts, target_folder, write_rows
from tests.pages import Parsed
from tests.settings import composed, typed

SIZES = """data.block=64 rollout.texts=8 rollout.held_out_texts=2 rollout.prompt_tokens=8 rollout.new_tokens=24
rollout.temperatures=[0.0,1.0] trainer.steps=5 trainer.corpus_steps=2 trainer.batch=2 trainer.validations=2
optimizer.warmup=0.2 optimizer.decay=0.4 bench.prompts=2 bench.quick_prompts=1 bench.prompt_tokens=8 bench.new_tokens=8
bench.parity_tokens=100 bench.minutes=0 bench.depths=[2] policy.k=2 init.layers=[0,1]""".split()
BENCH = [size for size in SIZES if size.startswith("bench.")]


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    """Speeds are not looked at: each is timed once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inference.measure.costs.MOST", 1)
        patch.setattr("cotrain.planning.planner.SHAPE", 1)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and own texts."""
    return target_and_texts(tmp_path_factory.mktemp("train"), 220)


def job(place: Path, output: str, *settings: str, target: str = "target") -> int:
    return main(["train", *run_paths(place, output, target), *SIZES, *settings])


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """The folder of a finished run."""
    assert job(place, "run", "overwrite=true") == 0
    return place / "run"


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step}" / "model.safetensors")


def extra_of(run: Path) -> Any:
    """What the report of a run's draft has beside the figures of the timing."""
    return read_json(run / "draft" / "report.json")["extra"]


def planned(run: Path) -> int:
    """The draft length that this machine's costs call for: 1, or the only other one that was asked for."""
    return int(extra_of(run)["planned_k"])


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def test_the_report_is_whole(run: Path) -> None:
    report = read_json(run / "draft" / "report.json")
    validate(report)
    extra = report["extra"]
    assert [kept["step"] for kept in extra["checkpoints"]] == [0, 2, 4, 5]
    assert extra["planned_k"] in (1, 2) and report["settings"]["policy"] == f"Fixed(k={extra['planned_k']})"
    assert report["exactness"]["passed"] and extra["parity"]["tokens"] >= 100
    assert {"alpha_T0/own", "alpha_T1/all", "tau_T1/all/2"} <= set(extra["held_out"])
    assert extra["kind"] == "independent" and 0 < extra["training"]["seconds"] < 600


def test_a_run_leaves_its_page_with_a_replay_and_where_distributions_differ(run: Path) -> None:
    page = Parsed((run / "report.html").read_text(encoding="utf-8"))
    assert {"figures", "acceptance", "speed", "costs", "training", "differences", "replay"} <= set(page.texts)
    assert "partial" not in page.texts[""]
    replay = read_json(run / "replay.json")
    assert page.blocks["replay-0-data"] == replay and len(replay["rows"]) == 4
    extra = extra_of(run)
    assert abs(extra["divergence"]["mean"] - 1 + extra["held_out"]["alpha_T1/all"]) < 1e-4


def test_the_draft_is_the_checkpoint_of_the_highest_tau(run: Path) -> None:
    extra = extra_of(run)
    best = max(extra["checkpoints"], key=lambda kept: kept["tau"])["step"]
    assert extra["exported_step"] == best
    served = {name: value.to(torch.bfloat16) for name, value in weights(run, best).items()}
    assert same(load_file(run / "draft" / "model.safetensors"), served)
    assert not same(weights(run, 0), weights(run, 5))


def events_of(run: Path) -> EventAccumulator:
    events = EventAccumulator(str(run / "tensorboard" / run.name), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def test_figures_are_logged_at_the_steps_that_they_are_of(run: Path) -> None:
    events = events_of(run)
    extra = extra_of(run)
    for name in (tags.SPEEDUP, tags.SHARE, "4_held_out/acceptance_T1", "4_held_out/acceptance_T0"):
        assert [event.step for event in events.Scalars(name)] == [0, 2, 4, 5]
    for name in (tags.ACCEPTANCE, tags.TAU, "3_depth/acceptance_1"):
        assert {0, 2, 4, 5} <= {event.step for event in events.Scalars(name)}
    judged = {event.step: event.value for event in events.Scalars("4_held_out/acceptance_T1")}
    assert judged[extra["exported_step"]] == pytest.approx(extra["held_out"]["alpha_T1/all"], abs=1e-6)
    speeds = [event.value for event in events.Scalars(tags.SPEEDUP)]
    assert speeds == pytest.approx([kept["speedup"] for kept in extra["checkpoints"]], rel=1e-6)
    lr = read_json(run / "run.json")["settings"]["optimizer"]["lr"]
    (rate,) = events.Scalars(tags.RATE)  # of step 5, with four fifths of the training done and a decay over two
    assert (rate.step, rate.value) == (5, pytest.approx(lr / 2))
    assert all(events.Scalars(name)[0].value > 0 for name in (tags.LOSS, tags.NORM, tags.TOKENS_PER_SECOND))


def test_tensorboard_answers_in_few_groups_and_one_run(run: Path) -> None:
    events = events_of(run)
    names = events.Tags()["scalars"]
    groups = sorted({name.partition("/")[0] for name in names})
    assert groups[:2] == [tags.SERVING, tags.TRAINING] and len(groups) <= 8 and len(names) <= 40
    assert not [name for name in names if name.startswith(tags.DOMAINS)]  # there is one
    assert {path.parent for path in run.rglob("*tfevents*")} == {run / "tensorboard" / run.name}
    report = read_json(run / "draft" / "report.json")
    (final,) = events.Scalars("8_final/speedup")
    assert (final.step, final.value) == (5, pytest.approx(report["speedup"]["whole"]["value"]))
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert "custom_scalars__config__" in events.summary_metadata
    texts = events.Tensors("7_text/fixed_prompt/text_summary")
    assert [event.step for event in texts] == [0, 2, 4, 5]
    assert all(b"target calls" in event.tensor_proto.string_val[0] for event in texts)


def test_the_draft_folder_decodes(run: Path, place: Path) -> None:
    engine = load(run / "draft")
    out = engine.generate(['{"order": '], max_new_tokens=12, sampling=Sampling(0.0))
    assert engine.policy.k == planned(run) and out.stats.drafted and out.text is not None and len(out.tokens[0]) <= 12
    plain = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float32)
    ids = torch.tensor([engine.tokenizer.encode('{"order": ')])
    wanted = plain.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    assert out.tokens[0] == wanted


def test_a_draft_of_an_adapted_target_does_not_load_the_bare_one(run: Path, place: Path) -> None:
    folder = shutil.copytree(run / "draft", place / "adapted")
    file = folder / "cotrain.json"
    found = read_json(file)
    file.write_text(json.dumps(found | {"made": found["made"] | {"adapter": "/some/lora"}}))
    with pytest.raises(ValueError, match="with the adapter /some/lora; give target="):
        load(folder)
    assert load(folder, str(place / "target")).policy.k == planned(run)


def test_a_finished_run_prints_its_table_again(
    run: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "models", lambda *_: 1 / 0)
    assert job(place, "run") == 0
    printed = capsys.readouterr().out
    assert "exactness: passed" in printed and f"draft: {run / 'draft'}" in printed
    assert printed.index("\nverdict: ") < printed.index("\ntarget ")
    assert printed.endswith(f"page: {run / 'report.html'}\ncurves: tensorboard --logdir {run / 'tensorboard'}\n")
    assert job(place, "run", "trainer.seed=1") == 1
    assert "trainer.seed=0 (now 1)" in capsys.readouterr().err


def test_an_interrupted_run_ends_as_if_it_had_not_been(
    run: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def quick(plan: object, k: int) -> dict[str, float]:
        calls.append(k)
        if len(calls) == 3:
            raise OSError("the machine went down at step 4")
        return {"speedup": 1.0 + len(calls)}

    monkeypatch.setattr(measurement, "quick", quick)
    monkeypatch.setattr(
        results, "export", lambda job, module, steps, speed, _: exported.extend(speed.checkpoints) or {}
    )
    exported: list = []
    assert job(place, "resumed", "measure=true") == 1 and "went down" in capsys.readouterr().err
    assert not exported
    job(place, "resumed")
    assert [kept.step for kept in exported] == [0, 2, 4, 5] and exported[1].speedup == 3.0
    assert all(same(weights(place / "resumed", step), weights(run, step)) for step in (2, 4, 5))
    events = events_of(place / "resumed")
    assert [event.step for event in events.Scalars("4_held_out/acceptance_T1")] == [0, 2, 4, 5]
    points = [event.step for event in events.Scalars(tags.ACCEPTANCE)]  # that of step 4 was written twice
    assert points == sorted(set(points)) and {0, 2, 4, 5} <= set(points)


def went_down(*_: object) -> None:
    raise OSError("the machine went down while measuring")


@pytest.mark.thorough
def test_a_run_that_lost_its_patience_stays_ended(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurement, "quick", lambda plan, k: {"speedup": 1.0})
    monkeypatch.setattr(runs.Distillation, "tau", lambda *_: 2.0)  # it never rises
    monkeypatch.setattr(results, "export", went_down)
    settings = "trainer.patience=1 trainer.steps=6 trainer.validations=3 rollout.temperatures=[1.0]".split()
    assert job(place, "patience", *settings) == 1
    kept: list = []
    monkeypatch.setattr(results, "export", lambda job, module, steps, speed, _: kept.extend(speed.checkpoints) or {})
    job(place, "patience", *settings)
    assert [one.step for one in kept] == [0, 2] and not (place / "patience" / "checkpoints" / "step-4").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("settings", ["", "draft.quantisation=int8", "trainer.patience=1"])
def test_a_run_that_stopped_after_its_last_step_still_reports_its_acceptance(
    settings: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the weights that are judged: rounded ones, of a run that its patience ended too."""
    monkeypatch.setattr(measurement, "quick", lambda plan, k: {"speedup": 1.0})
    monkeypatch.setattr(results, "export", went_down)
    if "patience" in settings:
        monkeypatch.setattr(runs.Distillation, "tau", lambda *_: 2.0)  # it never rises
    # of four steps the last is a validation's: nothing else is left to do when the run goes on
    asked, name = ("trainer.steps=4", *settings.split()), f"late {settings}"
    assert job(place, name, *asked) == 1 and "went down" in capsys.readouterr().err
    figures = place / name / "held_out.json"
    first = read_json(figures)["texts"]
    figures.unlink()
    monkeypatch.setattr(results, "export", lambda job, module, steps, speed, _: found.update(module.acceptance()) or {})
    found: dict[str, float] = {}
    job(place, name, *asked)
    assert {"alpha_T0/own", "alpha_T1/all"} <= set(found)
    assert first and read_json(figures)["texts"] == first


def test_a_training_that_begins_with_a_draft_says_what_it_gained(
    place: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a target whose weights were tuned. Its start is judged on the texts of its end, and is the draft that it was
    given; beside it stands what the draft's report has."""
    tuned = load_file(shutil.copytree(place / "target", place / "tuned") / "model.safetensors")
    tuned = {name: value + 0.02 * torch.randn_like(value) for name, value in tuned.items()}
    save_file(tuned, place / "tuned" / "model.safetensors", {"format": "pt"})
    given = "rollout.temperatures=[1.0] trainer.steps=2 trainer.corpus_steps=0 measure=false".split()
    again = ("init=pretrained", f"draft.path={run / 'draft'}", "optimizer.lr=0.5", "trainer.clip=0")
    assert job(place, "again", *given, *again, target="tuned") == 0
    out, err = capsys.readouterr()
    assert f"the weights of the target {place / 'tuned'} are not those that the draft was trained for" in err
    own = r"\((\S+) on texts of the target that the draft was trained for\)"
    said = re.search(rf"since the start, T=1: acceptance (\S+) -> (\S+) {own}, tau at k=4 .* on 2 texts", out)
    report = extra_of(run)["held_out"]["alpha_T1/all"]
    assert float(said[3]) == pytest.approx(report, abs=5e-4)
    assert re.findall(rf"at the start, T=1: acceptance (\S+) {own}\n", out) == [(said[1], said[3])]
    start, end = (read_json(place / "again" / name) for name in ("start.json", "held_out.json"))
    assert (start["1"]["alpha"], end["texts"]["1"]["alpha"]) == pytest.approx(
        (float(said[1]), float(said[2])), abs=5e-4
    )
    assert job(place, "no step", *given, *again, "optimizer.lr=1e-12", target="tuned") == 0
    still = read_json(place / "no step" / "held_out.json")["texts"]["1"]["alpha"]
    assert abs(still - start["1"]["alpha"]) < 1e-4 < abs(end["texts"]["1"]["alpha"] - start["1"]["alpha"])


@pytest.mark.thorough
@pytest.mark.parametrize("setting", ["draft.quantisation=int8"])
def test_a_run_without_measurement_exports_its_draft_and_is_measured_later(
    setting: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = f"rollout.temperatures=[1.0] trainer.steps=2 trainer.corpus_steps=0 {setting}".split()
    draft = place / setting / "draft"
    assert job(place, setting, *settings, "measure=false") == 0
    said = capsys.readouterr().out
    assert f"draft: {draft} (not measured): to measure it, cotrain bench draft.path={draft}" in said
    trained = load_file(draft / "model.safetensors")
    assert load(draft).policy.k == 2 and not (draft / "report.json").exists()
    made = read_json(draft / "cotrain.json")["made"]
    assert made["steps"] == 2 and "environment" in made
    assert job(place, setting, *settings) == 0 and "exactness: passed" in capsys.readouterr().out
    report = read_json(draft / "report.json")
    assert [kept["step"] for kept in report["extra"]["checkpoints"]] == [2]
    assert same(load_file(draft / "model.safetensors"), trained)
    assert job(place, setting, *settings, "measure=false") == 0  # it is finished, and measured
    said = capsys.readouterr().out
    assert "exactness: passed" in said and "had no effect" not in said


def test_texts_that_a_server_did_not_sample_from_the_target_are_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(self: object, prompts: list[list[int]], *_: object) -> list[list[int]]:
        return [torch.randint(2, 300, (24,)).tolist() for _ in prompts]

    monkeypatch.setattr(samplers.Own, "__call__", wrong)
    settings = "measure=false rollout.temperatures=[1.0] trainer.steps=1 trainer.corpus_steps=0".split()
    assert job(place, "wrong", *settings) == 0
    assert (
        "warning: texts sampled at temperature 1 do not look as if this target sampled them" in capsys.readouterr().err
    )


@pytest.mark.thorough
def test_a_sweep_ends_in_one_table(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        "measure=false",
        "rollout.temperatures=[1.0]",
        "trainer.steps=2",
        f"rollout.folder={place / 'swept texts'}",
    )
    assert job(place, "swept", *settings, "-m", "loss=kl,tv", "regime=t1,t05") == 0
    said = capsys.readouterr().out
    assert "over loss=kl,regime=t1 [95 % interval]" in said
    rows = [line.split() for line in said.splitlines() if line.strip().startswith(("1 ", "0.5 "))]
    assert {row[2] for row in rows if row[0] == "1"} == {
        f"loss={a},regime={b}" for a in ("kl", "tv") for b in ("t1", "t05")
    }
    assert {row[0] for row in rows} == {"1"}  # the first run was not judged at 0.5
    events = events_of(place / "swept" / "loss=tv,regime=t1")
    assert events.Scalars("8_final/tau")[0].value > 1 and "8_final/speedup" not in events.Tags()["scalars"]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_runs_share_texts_and_what_the_target_says_of_them(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = (
        "measure=false",
        "rollout.temperatures=[1.0]",
        "trainer.steps=4",
        "trainer.validations=1",
        "trainer.corpus_steps=0",
        f"rollout.folder={place / 'shared texts'}",
        f"trainer.cache={place / 'shared states'}",
    )
    assert job(place, "one", *shared, "loss=kl") == 0
    texts, states = (sorted((place / name).rglob("*.*")) for name in ("shared texts", "shared states"))
    made = [path.stat().st_mtime_ns for path in (*texts, *states)]
    assert "GiB for" in capsys.readouterr().out and len(texts) > 2 and len(states) > 2
    assert job(place, "two", *shared, "loss=tv") == 0
    assert [path.stat().st_mtime_ns for path in (*texts, *states)] == made
    assert not (place / "one" / "rollouts").exists()
    assert sorted((place / "shared states").rglob("*.*")) == states
    assert read_json(place / "one" / "held_out.json")["label"] == "kl"


def no_number(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def no_config(folder: Path) -> None:
    (folder / "config.json").write_text("{oops")


@pytest.mark.parametrize(
    ("change", "message"),
    [(no_number, "NaN or infinite weights"), (no_config, "config.json")],
)
def test_a_bad_target_is_one_line_and_leaves_nothing(
    place: Path, change: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"bad {change.__name__}"
    change(Path(shutil.copytree(place / "target", place / name)))
    assert job(place, "spoilt", target=name) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cotrain train: ")]
    assert len(said) == 1 and "target.path: " in said[0] and message in said[0]
    assert not (place / "spoilt").exists() or list((place / "spoilt").iterdir()) == []


def test_a_draft_that_cannot_be_trained_is_refused_before_texts_are_sampled(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise ValueError("draft: its head does more than project")

    monkeypatch.setattr("cotrain.students.independent.IndependentStudent.refuse", refuse)
    monkeypatch.setattr(runs, "held_out_texts", lambda _: 1 / 0)
    assert job(place, "untrainable") == 1
    assert "draft: its head does more than project" in capsys.readouterr().err


def test_bench_measures_a_draft_made_elsewhere(run: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain Hugging Face files: a causal LM and its tokenizer, nothing of this project. The answer is JSON."""
    foreign = place / "foreign"
    shutil.copytree(run / "draft", foreign)
    for name in ("cotrain.json", "report.json"):
        (foreign / name).unlink()
    paths = [f"target.path={place / 'target'}", f"draft.path={foreign}", f"output={place / 'foreign bench'}"]
    assert main(["bench", *paths, *BENCH, "verify=coupled", "json=true"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["verdict"].startswith("verdict: ") and "bench: draft length" in said.err
    report = read_json(place / "foreign bench" / "report.json")
    validate(report)
    assert report["exactness"]["passed"] and report["settings"]["draft"] == str(foreign)
    assert report["extra"]["parity"] is None
    assert main(["bench", f"output={place / 'none'}"]) == 1
    assert "draft.path=" in capsys.readouterr().err and not (place / "none").exists()


def test_rollout_writes_a_set(place: Path) -> None:
    sizes = [one for one in SIZES if one.startswith("rollout.") and "temperatures" not in one]
    assert main(["rollout", "kind=held_out", "regime=t05", *run_paths(place, "texts"), *sizes]) == 0
    made = read_json(place / "texts" / "held_out_T0.5.json")
    assert (made["rows"], made["prompt_tokens"], made["kind"]) == (2, 8, "held_out")
    assert (place / "texts" / "held_out_T0.5.parquet").is_file()


def test_check_says_what_a_run_needs_and_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "init=scratch draft.width=32 draft.head_dim=16 draft.intermediate=64".split()
    assert job(place, "checked", "check=true", *sizes) == 0
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert {"target", "draft", "vocabulary", "memory", "disk", "steps", "duration"} <= set(said)
    assert "tokenizer 300, model 300" in said["vocabulary"] and "init scratch" in said["draft"]
    assert "5 of 2 x at most 64 tokens" in said["steps"]
    assert not (place / "checked").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("_memory", 1.0, "not enough memory: lower trainer.batch"), ("shutil", 1, "not enough disk at output=")],
)
def test_check_refuses_what_does_not_fit(
    place: Path,
    name: str,
    value: float,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name == "shutil":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 0, 1))
    else:
        monkeypatch.setattr(preflight, name, lambda _: value)
    assert job(place, "checked", "check=true") == 1
    assert message in capsys.readouterr().err and not (place / "checked").exists()


def test_memory_is_what_is_available_not_what_is_unused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(preflight, "MEMINFO", tmp_path / "meminfo")
    whole = preflight._memory(typed(composed()))
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemFree:  1 kB\nMemAvailable:    5 kB\n")
    assert preflight._memory(typed(composed("target.device_map=auto"))) == 5 * 1024 < whole


def test_memory_of_a_target_on_several_devices_is_theirs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_main_memory", lambda: 100.0)
    cases = {"": 2.0**33, "target.device_map=auto": 100 + 3 * 2.0**33}
    cases["target.device_map=auto trainer.devices=2"] = 2.0**33
    with standin.device(devices=3):
        assert {given: preflight._memory(typed(composed(*given.split()))) for given in cases} == cases


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


ONE_STEP = """rollout.prompt_tokens=60 rollout.temperatures=[1.0] trainer.corpus_steps=0 trainer.steps=1
trainer.validations=1""".split()


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a chat template, and logs that it did not write."""
    place = tmp_path_factory.mktemp("chats")
    target_folder(place / "target")
    tokenizer = AutoTokenizer.from_pretrained(place / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place / "target")
    turns = [("user", "number {}"), ("assistant", "it is {}"), ("user", "{}?"), ("assistant", "yes, {} it is")]
    rows = [{"messages": [{"role": role, "content": text.format(i)} for role, text in turns]} for i in range(160)]
    write_rows(place / "own.jsonl", rows)
    return place


def test_conversations_are_prompts_and_only_completions_are_learnt(
    chatting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt_from: list[Texts] = []
    parts = fit.parts
    monkeypatch.setattr(fit, "parts", lambda job: (learnt_from.extend(parts(job)), tuple(learnt_from))[1])
    assert job(chatting, "run", "overwrite=true", "measure=false", *ONE_STEP) == 0
    learnt = read_json(chatting / "run" / "draft" / "cotrain.json")["made"]["learnt"]
    assert learnt["completions"] and len(learnt["chat_template"]) == 64 and learnt["template"] == {}
    sampled = datasets.Dataset.from_parquet(str(chatting / "run" / "rollouts" / "train_T1.parquet"))
    tokenizer = AutoTokenizer.from_pretrained(chatting / "target")
    assert all(
        text.startswith("<user>number") and text.endswith("<assistant>")
        for text in map(tokenizer.decode, sampled["prompt"])
    )
    first, predicted = sampled[0], learnt_from[1].predicted[0]
    assert int(predicted.sum()) == len(first["completion"]) and not predicted[: len(first["prompt"]) - 1].any()


def test_logs_that_are_not_the_targets_are_told_with_what_they_bias(
    chatting: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(chatting, "logs", "overwrite=true", "data.on_target=true", *ONE_STEP) == 0
    said = capsys.readouterr()
    assert "data.on_target=true, but the texts of data.path were not sampled from this target" in said.err
    found = extra_of(chatting / "logs")["given_texts"]
    assert found["z"] > 6 and found["surprise"] > found["entropy"] and 0 < found["alpha"] <= 1
    assert f"acceptance is {found['alpha']:.3f} on the training texts that the target did not sample" in said.out
    assert f"and {found['alpha_own']:.3f} on texts that it sampled" in said.out
    assert not (chatting / "logs" / "rollouts").exists()  # nothing was sampled
