"""Conditioned drafts while they train: each text is learnt and evaluated at its own temperature."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cotrain.cli import main
from cotrain.config.groups import Init
from cotrain.config.settings import judged, learnt
from cotrain.losses import divergences as losses
from cotrain.students.conditioned import ConditionedStudent as Student
from cotrain.students.quantised import refuse_unknown
from cotrain.training import preconditions, preflight
from inference.drafts.weight_files import read_json
from inference.proposers.conditioned import TABLE
from inference.sampling import one_hot
from studies import temperatures
from studies.quantisation_table import rounded_draft
from tests.cotrain.config.test_settings_reach import job_of
from tests.cotrain.students.test_every_student import teaching, whole
from tests.draft_folders import bare, draft_folder
from tests.folders import own_texts, target_folder
from tests.inference.proposers.test_conditioned import IDS, KNOWN, logits
from tests.kinds import conditioned_near
from tests.tiny import near, tiny


@pytest.mark.parametrize("loss", ["kl", "tv"])
def test_each_text_of_a_batch_is_learnt_at_its_own_temperature(loss: str) -> None:
    """The loss is the mean of the losses of each text alone, and only the scales of these temperatures learn, also at
    temperature 0 with its one-hot target."""
    target, student = tiny(), Student(conditioned_near(tiny(), 0.3), tiny())
    heat = [0.0, 1.0, 1.0]
    value = teaching(student, loss).training_step(whole(IDS, heat), 0)
    each = []
    for text, t in zip(IDS.unsqueeze(1), heat, strict=True):
        with torch.no_grad():
            expected = target(text).logits[0, :-1]
        logp = (expected / t).log_softmax(-1) if t else one_hot(expected.argmax(-1), expected).log()
        logq = (logits(student.network, text, t)[0, :-1] / (t or 1.0)).log_softmax(-1)
        each.append(losses.kl(logp, logq).mean() if loss == "kl" else losses.tv(logp, logq).mean())
    torch.testing.assert_close(value.double(), torch.stack(each).mean(), rtol=1e-5, atol=1e-6)
    value.backward()
    slope = student.network.get_parameter(TABLE).grad
    assert bool((slope[[0, 2]].abs().sum(1) > 1e-4).all()) and not bool(slope[1].any())


def test_a_run_learns_and_evaluates_at_every_temperature_of_its_draft() -> None:
    cfg = job_of("draft.kind=conditioned", "draft.temperatures=[0.0,0.3]", "rollout.temperatures=[0.5]").cfg
    assert learnt(cfg) == [0.0, 0.3] and judged(cfg) == [0.0, 0.3, 0.5, 0.8]
    cfg.rollout.train_temperatures = [0.3, 0.6]
    assert learnt(cfg) == [0.3, 0.6] and judged(cfg) == [0.3, 0.5, 0.6, 0.8]
    with pytest.raises(
        ValueError, match=r"draft.temperatures: temperature 0 is not in rollout.train_temp.*=\[.*\]: add it there, or"
    ):
        preconditions.refuse_losses(cfg)
    cfg.rollout.train_temperatures, cfg.draft.temperatures = [], []
    assert learnt(cfg) == [0.8] and judged(cfg) == [0.5, 0.8]
    preconditions.refuse_losses(cfg)


def initial(path: Path | None, known: list[float], target: Any) -> Any:
    draft = bare("conditioned", path=path and str(path), temperatures=known)
    return Student.initial(draft, Init(kind="pretrained" if path else "target_layers", layers=[0]), target)


def test_it_begins_as_an_independent_draft_or_goes_on_with_its_scale(tmp_path: Path) -> None:
    target = tiny(dtype=torch.float32)
    plain = near(target, 0.2)
    plain.save_pretrained(tmp_path / "plain")
    network = initial(tmp_path / "plain", KNOWN, target)
    assert all(torch.equal(network.get_parameter(name), weight) for name, weight in plain.named_parameters())
    assert not bool(network.get_parameter(TABLE).any())
    own = conditioned_near(target)
    own.save_pretrained(tmp_path / "own")
    again = initial(tmp_path / "own", KNOWN, target)
    assert all(torch.equal(again.get_parameter(name), weight) for name, weight in own.named_parameters())
    with pytest.raises(ValueError, match=r"draft.temperatures: .*own has learnt \[0.0, 0.7, 1.0\]"):
        initial(tmp_path / "own", [0.5], target)
    with pytest.raises(ValueError, match="draft.temperatures: give at least one temperature"):
        initial(None, [], target)
    assert initial(None, [0.5], target).get_parameter(TABLE).shape == (1, 16)


def test_rounded_weights_keep_their_scale() -> None:
    network = conditioned_near(tiny(hidden=64, dtype=torch.float32))
    refuse_unknown(network)
    other = rounded_draft(network, "int8")
    assert torch.equal(other.get_parameter(TABLE), network.get_parameter(TABLE))
    assert not torch.equal(other.lm_head.weight, network.lm_head.weight)


def test_time_is_reckoned_for_texts_of_every_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = job_of("draft.kind=conditioned", "draft.temperatures=[0.0,0.3,1.0]", "rollout.temperatures=[0.5]").cfg
    known = SimpleNamespace(sources={}, target=tiny())
    monkeypatch.setattr(preflight, "domains", lambda *_: ["a", "b"])
    given: Any = known
    assert preflight._count(cfg, given, "train") == 3 * 2 * cfg.rollout.texts
    assert preflight._count(cfg, given, "held_out") == 5 * 2 * cfg.rollout.held_out_texts  # 0.8, the regime's, too


@pytest.mark.thorough
def test_one_run_learns_at_every_temperature_and_the_study_reads_its_draft(tmp_path: Path) -> None:
    """Every scale learns, and the study evaluates the exported draft on the run's held-out texts."""
    target, own, run = target_folder(tmp_path / "target"), own_texts(tmp_path / "own.jsonl"), tmp_path / "run"
    sizes = """data.block=64 rollout.texts=4 rollout.held_out_texts=3 rollout.prompt_tokens=8 rollout.new_tokens=16
    rollout.temperatures=[] trainer.corpus_steps=0 trainer.batch=3 trainer.validations=1 init=target_layers
    init.layers=[0] policy.k=2 draft.temperatures=[0,0.7,1]""".split()
    place = [f"target.path={target}", f"data.path={own}", f"rollout.folder={tmp_path / 'texts'}", *sizes]
    timed = """bench.prompts=2 bench.quick_prompts=1 bench.prompt_tokens=8 bench.new_tokens=8 bench.parity_tokens=100
    bench.minutes=0 bench.depths=[2] bench.draft_dtype=float32 trainer.steps=6""".split()
    assert main(["train", "draft=conditioned", f"output={run}", *timed, *place]) == 0
    held_out_json, report = (read_json(run / name) for name in ("held_out.json", "draft/report.json"))
    assert set(held_out_json["texts"]) == {"0", "0.7", "1"} and report["exactness"]["passed"]
    assert report["extra"]["training"]["temperatures"] == [0.0, 0.7, 1.0]
    table = load_file(run / "checkpoints" / "step-6" / "model.safetensors")[TABLE]
    assert table.shape == (3, 64) and bool((table.abs().sum(1) > 0).all())
    step, plain = report["extra"]["exported_step"], draft_folder(tmp_path / "plain", target, "independent")
    served = load_file(run / "draft" / "model.safetensors")
    assert torch.equal(served[TABLE], load_file(run / "checkpoints" / f"step-{step}" / "model.safetensors")[TABLE])
    settings = [part for one in place for part in ("--set", one)]
    words = [str(tmp_path / "out.json"), str(run / "draft"), f"1={plain}", f"0={plain}", "--k", "2", *settings]
    temperatures.main(words)
    study = read_json(tmp_path / "out.json")
    assert set(study) == {"environment", "commit", "command", "target", "conditioned", "k", "rows"}
    assert study["command"] == " ".join(["python -m studies.temperatures", *words])
    assert [row["temperature"] for row in study["rows"]] == [0.0, 1.0]
    for row in study["rows"]:
        assert row["low"] <= row["share"] <= row["high"] and row["texts"] == 3 and row["specialist"] > 1
        expected = report["extra"]["held_out"][f"tau_T{row['temperature']:g}/all/2"]
        assert row["conditioned"] == pytest.approx(expected, rel=1e-4)
