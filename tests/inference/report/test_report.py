"""The report: what it must hold, what is refused, and what its table says."""

import json
import subprocess
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, PretrainedConfig

from inference import Engine, Sampling
from inference.exactness.verdict import check
from inference.measure import environment
from inference.measure.arms import engine_arm
from inference.measure.timing import Timing, interleave
from inference.models.pretrained import quantisation_of
from inference.output import PHASES
from inference.policy import Fixed
from inference.proposers import Independent
from inference.report.build import build, validate, write
from inference.report.table import _speedup, _words, table
from tests.inference.exactness.test_verdict_figures import CALLS, VERDICT
from tests.inference.measure.test_timing_figures import timing
from tests.tiny import near, tiny

SAMPLING = Sampling(temperature=0.9, logit_bias={3: 0.5})


@pytest.fixture(scope="module")
def report():
    """Of a real run of a tiny pair."""
    target, draft = tiny(vocab=8, layers=1, hidden=8), tiny(vocab=8, layers=1, hidden=8, seed=1, dtype=torch.float32)
    engine = Engine(target, Independent(draft), policy=Fixed(2), rows=2)
    arms = [engine_arm("speculative", engine, SAMPLING, 8), engine_arm("plain", Engine(target, rows=2), SAMPLING, 8)]
    timing = interleave(arms, [[1, 2], [3], [4, 5]], rows=2, warmup=0)
    verdict = check(engine, timing.texts("speculative"), SAMPLING, 8)
    return build(
        timing,
        engine,
        "speculative",
        "plain",
        sampling=SAMPLING,
        max_new_tokens=8,
        target="tiny",
        draft="small",
        verdict=verdict,
        extra={"note": float("nan")},
    )


def test_a_report_holds_what_was_measured_and_how(report, tmp_path):
    write(report, tmp_path / "deep" / "report.json")
    assert json.loads((tmp_path / "deep" / "report.json").read_text()) == report
    settings, arms = report["settings"], report["arms"]
    assert (settings["verify"], settings["policy"], settings["rows"], settings["prompts"]) == (
        "token",
        "Fixed(k=2)",
        2,
        3,
    )
    assert (settings["target_dtype"], settings["draft_dtype"]) == ("float64", "float32")
    assert settings["sampling"]["temperature"] == 0.9 and settings["sampling"]["logit_bias"] == {"3": 0.5}
    assert arms["plain"]["tokens"] == arms["speculative"]["tokens"] == 24
    assert arms["plain"]["tau"] == 1 and arms["plain"]["rounds"] == 16  # two batches of eight rounds
    assert arms["speculative"]["target_calls"] / 24 == pytest.approx(1 / report["acceptance"]["tau"]["measured"])
    assert report["exactness"]["passed"] == report["exactness"]["figures"]["passed"]
    assert report["extra"] == {"note": None}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["settings", "rows"], None, "report.settings.rows must be a whole number"),
        (["settings", "rows"], True, "report.settings.rows must be a whole number"),
        (["arms", "plain", "speed"], float("nan"), "report.arms.plain.speed must be a finite number"),
        (["acceptance", "prefix", "measured"], [0.5, "x"], r"report.acceptance.prefix.measured\[1\]"),
        (["environment", "colour"], "red", "report.environment.colour is not known"),
        (["format"], 2, "report.format is 2"),
        (["speedup", "whole", "low"], None, None),
    ],
)
def test_a_wrong_report_is_rejected_by_key(report, tmp_path, path, value, message):
    changed = json.loads(json.dumps(report))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if message is None:
        validate(changed)
        return
    with pytest.raises(ValueError, match=message):
        write(changed, tmp_path / "report.json")
    assert not (tmp_path / "report.json").exists()


def test_a_missing_key_is_named(report):
    without = {key: value for key, value in report.items() if key != "exactness"}
    with pytest.raises(ValueError, match="report.exactness is missing"):
        validate(without)


def test_a_quantised_target_is_named(report):
    dtype = report["settings"]["target_dtype"]
    assert f"({dtype}), draft" in table(report)
    assert f"(int8, {dtype}), draft" in table({**report, "extra": {"target_quantisation": "int8"}})
    configs = [BitsAndBytesConfig(load_in_8bit=True), BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")]
    built = [PretrainedConfig(quantization_config=one) for one in (*configs, {"quant_method": "awq"})]
    assert [quantisation_of(one) for one in (*built, PretrainedConfig())] == ["int8", "nf4", "awq", "none"]


def test_a_report_of_plain_decoding_has_a_table():
    target = tiny(vocab=8, layers=1, hidden=8)
    timing: Timing = interleave([engine_arm("plain", Engine(target), Sampling(), 2)], [[1]], rows=1, warmup=0)
    plain = build(timing, Engine(target), "plain", "plain", sampling=Sampling(), max_new_tokens=2, target="t")
    assert "exactness: not checked" in table(plain) and "draft none" in table(plain)


def test_environment_has_machine_versions_and_commit(monkeypatch):
    answers = {"ls-files": "environment.py", "rev-parse": "abc123", "status": " M inference/engine.py"}
    monkeypatch.setattr(environment, "_git", lambda command, *rest: answers[command])
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/cotrain", "bench", "prompt=two words"])
    built = environment.environment()
    assert (built["commit"], built["dirty"]) == ("abc123", True)
    assert built["command"] == "cotrain bench 'prompt=two words'"
    assert built["torch"] == torch.__version__ and built["threads"] == torch.get_num_threads()
    assert built["cores"] >= 1 and built["cpu"]
    answers["status"] = ""
    assert environment.environment()["dirty"] is False
    answers["ls-files"] = None  # installed below somebody else's checkout
    built = environment.environment()
    assert built["commit"] is None and built["dirty"] is None


def test_a_changed_report_does_not_make_a_checkout_dirty(tmp_path, monkeypatch):
    code, report = tmp_path / "inference" / "measure" / "environment.py", tmp_path / "outputs" / "results" / "a.json"
    for file in (code, report):
        file.parent.mkdir(parents=True)
        file.write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(environment, "CODE", code)
    report.write_text("2")
    assert environment.environment()["dirty"] is False
    code.write_text("2")
    assert environment.environment()["dirty"] is True


def test_figures_of_a_report_are_those_of_the_timing() -> None:
    timed, target = timing(), tiny()
    engine = Engine(target, Independent(near(tiny(dtype=torch.float32))), policy=Fixed(2), rows=2)
    built = build(timed, engine, "ours", "plain", sampling=Sampling(0.5), max_new_tokens=5, target="t", verdict=VERDICT)
    paid: dict[str, Any] = {}
    for name in ("ours", "plain"):
        results = [run[name] for batch in timed.runs for run in batch]
        tokens, seconds = sum(len(text) for one in results for text in one.tokens), sum(one.seconds for one in results)
        fewer, decode = sum(one.decode_tokens or 0 for one in results), sum(one.decode_seconds for one in results)
        counted = [one.stats for one in results if one.stats]
        emitted, calls = sum(one.tokens for one in counted), sum(one.target_calls for one in counted)
        wanted = {
            "tokens": tokens,
            "seconds": seconds,
            "speed": tokens / seconds,
            "decode_tokens": fewer,
            "decode_seconds": decode,
            "decode_speed": fewer / decode,
            "tau": emitted / calls,
            "target_calls": calls,
            "rounds": sum(one.times["target"] for one in counted),
        }
        arm = built["arms"][name]
        assert {key: arm[key] for key in wanted} == pytest.approx(wanted)
        for phase in PHASES:
            assert arm["phases"][phase] == sum(one.seconds[phase] for one in counted)
        paid[name] = tokens / seconds, fewer / decode
    ratios = [a / b for a, b in zip(paid["ours"], paid["plain"], strict=True)]
    assert [built["speedup"][part]["value"] for part in ("whole", "decode")] == pytest.approx(ratios)
    settings = built["settings"]
    assert (settings["prompts"], settings["target_dtype"], settings["draft_dtype"]) == (3, "float64", "float32")
    assert [settings[name] for name in ("repeats", "max_new_tokens", "rows", "verify")] == [1, 5, 2, "token"]
    ours, acceptance = timed.stats("ours"), built["acceptance"]
    assert (acceptance["drafted"], acceptance["accepted"]) == (ours.drafted, ours.accepted)
    for name, below in (("prefix", ours.drafted), ("conditional", ours.tried)):
        assert acceptance[name]["measured"] == [a / b for a, b in zip(ours.accepted, below, strict=True)]
        assert acceptance[name]["predicted"] == getattr(CALLS, name)
    assert acceptance["tau"] == {"measured": built["arms"]["ours"]["tau"], "predicted": pytest.approx(400 / 99)}
    rows = {line.split()[0]: line.split() for line in table(built).splitlines() if line}
    for name in ("ours", "plain"):
        arm = built["arms"][name]
        lines = [line.split() for line in table(built).splitlines() if line.startswith(name)]
        assert lines[0][1:3] == [f"{arm['speed']:.1f}", f"{arm['decode_speed']:.1f}"]
        assert lines[0][3:] == [f"{arm['tau']:.3f}", str(arm["tokens"]), f"{arm['seconds']:.2f}"]
        spent = [f"{1000 * arm['phases'][phase] / arm['rounds']:.3f}" for phase in PHASES if phase != "prefill"]
        assert lines[1][1:] == [*spent, str(arm["rounds"]), f"{1000 * arm['phases']['prefill']:.1f}"]
    assert rows["tau:"][2:] == [f"{acceptance['tau']['measured']:.3f},", "predicted", f"{400 / 99:.3f}"]


@pytest.mark.parametrize(
    ("low", "high", "words_expected"), [(1.1, 1.3, ""), (0.9, 1.3, "no speed-up is shown"), (0.7, 0.9, "a slow-down")]
)
def test_the_table_puts_an_interval_in_words(low: float, high: float, words_expected: str) -> None:
    whole = {"value": (low + high) / 2, "low": low, "high": high}
    assert _words({"of": "a", "over": "b", "whole": {"value": 0.8, "low": None, "high": None}}) == []
    decode = {"value": 3.25, "low": 3.0, "high": 3.5}
    line, *words = _speedup({"speedup": {"of": "a", "over": "b", "whole": whole, "decode": decode}, "extra": {}}).split(
        "\n"
    )
    assert f"{whole['value']:.3f} [{low:.3f}, {high:.3f}] with prefill, 3.250 [3.000, 3.500] decode only" in line
    assert [word[: len(words_expected)] for word in words] == ([words_expected] if words_expected else [])
