"""The report: what it must hold, what is refused, and what its table says."""

import json
import re

import pytest
import torch
from transformers import BitsAndBytesConfig, PretrainedConfig

from inference import Engine, Sampling
from inference.exactness.checks import check
from inference.exactness.verdict import CallsCheck, DepthCheck, TextCheck, Verdict
from inference.measure import environment
from inference.measure.timing import Timing, engine_arm, interleave
from inference.models.dtypes import quantisation_of
from inference.policy import Fixed
from inference.proposers import Independent
from inference.report.build import build, table, validate, write
from tests.tiny import tiny

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
def test_a_wrong_report_is_refused_by_key(report, tmp_path, path, value, message):
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


def test_an_arm_that_was_not_timed_is_refused(report):
    target = tiny(vocab=8, layers=1, hidden=8)
    timing = interleave([engine_arm("plain", Engine(target), Sampling(), 2)], [[1]], rows=1, warmup=0)
    with pytest.raises(ValueError, match="no arm 'fast'"):
        build(timing, Engine(target), "fast", "plain", sampling=Sampling(), max_new_tokens=2, target="t")


def test_the_table_says_what_the_report_holds(report):
    shown = json.loads(json.dumps(report))
    shown["arms"]["speculative"] |= {"speed": 123.4, "decode_speed": 234.5, "tau": 2.5, "rounds": 10}
    shown["arms"]["speculative"]["phases"] = {
        "prefill": 0.5,
        "draft": 0.02,
        "target": 0.03,
        "verify": 0.01,
        "other": 0.0,
    }
    shown["speedup"]["whole"] = {"value": 1.28, "low": 1.25, "high": 1.31}
    shown["speedup"]["decode"] = {"value": 1.5, "low": None, "high": None}
    shown["acceptance"] |= {
        "tau": {"measured": 2.5, "predicted": 2.4},
        "prefix": {"measured": [0.8, 0.4], "predicted": None},
        "conditional": {"measured": [0.8, None], "predicted": [0.7, 0.6]},
    }
    text = table(shown)
    assert re.search(r"^speculative +123\.4 +234\.5 +2\.500 +24 ", text, re.M)
    assert "speed-up of speculative over plain: 1.280 [1.250, 1.310] with prefill, 1.500 (one batch" in text
    assert "tau: measured 2.500, predicted 2.400" in text
    assert re.search(r"^prefix +measured +0\.800 +0\.400\nprefix +predicted +- +-\n", text, re.M)
    assert re.search(r"^conditional +measured +0\.800 +-\nconditional +predicted +0\.700 +0\.600$", text, re.M)
    assert re.search(r"^speculative +2\.000 +3\.000 +1\.000 +0\.000 +10 +500\.0$", text, re.M)
    assert "(a) coupled text equals plain text: 3 of 3 prompts" in text
    assert "tau = sum of new tokens / sum of target calls" in text


def test_a_quantised_target_is_named(report):
    dtype = report["settings"]["target_dtype"]
    assert f"({dtype}), draft" in table(report)
    assert f"(int8, {dtype}), draft" in table({**report, "extra": {"target_quantisation": "int8"}})
    made = [BitsAndBytesConfig(load_in_8bit=True), BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")]
    found = [PretrainedConfig(quantization_config=one) for one in (*made, {"quant_method": "awq"})]
    assert [quantisation_of(one) for one in (*found, PretrainedConfig())] == ["int8", "nf4", "awq", "none"]


def test_a_report_of_plain_decoding_has_a_table():
    target = tiny(vocab=8, layers=1, hidden=8)
    timing: Timing = interleave([engine_arm("plain", Engine(target), Sampling(), 2)], [[1]], rows=1, warmup=0)
    plain = build(timing, Engine(target), "plain", "plain", sampling=Sampling(), max_new_tokens=2, target="t")
    assert "exactness: not checked" in table(plain) and "draft none" in table(plain)


def test_a_verdict_fails_with_any_of_its_checks():
    text, calls = TextCheck(2, 1, 1, 0, 1e-5, 1e-6), CallsCheck(400, 100, 100.0, 5.0, 0)
    depth = DepthCheck(100, 60, 0.55, 0.02)
    assert Verdict(text, calls, depth).passed
    assert not Verdict(TextCheck(2, 1, 0, 1, 1e-5, 0.3), calls, depth).passed
    assert not Verdict(text, CallsCheck(400, 121, 100.0, 5.0, 0), depth).passed
    assert not Verdict(text, CallsCheck(400, 79, 100.0, 5.0, 0), depth).passed
    high, low = DepthCheck(100, 62, 0.55, 0.02), DepthCheck(100, 10, 0.55, 0.02)
    assert not Verdict(text, calls, high).passed and Verdict(text, calls, low).passed
    assert not CallsCheck(400, 101, 100.0, 0.0, 0).passed  # no coins: to the call
    failed = Verdict(text, calls, high).lines()
    assert failed[0] == "exactness: FAILED" and failed[3].endswith("FAILED") and failed[2].endswith("passed")


def test_environment_says_machine_versions_and_commit(monkeypatch):
    answers = {"ls-files": "environment.py", "rev-parse": "abc123", "status": " M inference/engine.py"}
    monkeypatch.setattr(environment, "_git", lambda command, *rest: answers[command])
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/cotrain", "bench", "prompt=two words"])
    found = environment.environment()
    assert (found["commit"], found["dirty"]) == ("abc123", True)
    assert found["command"] == "cotrain bench 'prompt=two words'"
    assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads()
    assert found["cores"] >= 1 and found["cpu"]
    answers["status"] = ""
    assert environment.environment()["dirty"] is False
    answers["ls-files"] = None  # installed below somebody else's checkout
    found = environment.environment()
    assert found["commit"] is None and found["dirty"] is None
