"""What a run needs and how long it takes: from the settings, recomputed by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.cli import main
from cotrain.config.drafts import EagleDraft, EarlyExitDraft, QuantisedDraft
from cotrain.config.settings import Bench
from cotrain.training import preflight
from cotrain.training.preconditions import Size, size_of
from cotrain.training.preflight import MachineSpeed
from tests.cotrain.config.test_settings_reach import job_of
from tests.cotrain.training.test_preconditions import command
from tests.folders import network, target_folder
from tests.settings import composed


def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A target of 40 and a draft of 4 parameters a token, of 100 and 8 in all."""
    sizes = {"big": Size(100, 40), "small": Size(8, 4)}
    monkeypatch.setattr(preflight, "size_of", lambda model: sizes[model.name])
    monkeypatch.setattr(preflight, "half", lambda device: torch.bfloat16)
    config = SimpleNamespace(hidden_size=6, num_hidden_layers=5, vocab_size=7, is_encoder_decoder=False)
    config.get_text_config, config.to_dict = lambda: config, dict
    return SimpleNamespace(
        target=SimpleNamespace(name="big", config=config),
        sources={},
        draft=SimpleNamespace(name="small", config=config),
    )


def test_durations_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three domains, two temperatures that are learnt from, four that are judged at."""
    job = job_of("rollout.train_temperatures=[0.3,0.6]", "rollout.temperatures=[0.0]", "rollout.texts=10")
    cfg, there = job.cfg, known(monkeypatch)
    cfg.rollout.held_out_texts, cfg.rollout.prompt_tokens, cfg.rollout.new_tokens, cfg.rollout.rows = 2, 5, 20, 4
    cfg.trainer.devices, cfg.trainer.nodes, cfg.data.block, cfg.trainer.minutes = 2, 1, 64, None
    cfg.bench = Bench(
        prompts=6,
        quick_prompts=3,
        prompt_tokens=8,
        new_tokens=9,
        parity_tokens=50,
        rows=2,
        minutes=0,
        depths=[2],
        draft_dtype="auto",
        draft_int8=False,
    )
    machine = MachineSpeed(3000.0, 50.0)  # 1,000 operations a second as whole models reach
    monkeypatch.setattr(preflight, "machine_speed", lambda: machine)
    estimated = preflight.durations(cfg, there)
    train, held = 10 * 3 * 2, 2 * 3 * 4
    assert estimated.texts == train + held
    step = max(2 * 40 * 4 / 1000, 40 * 2 / 50)  # four rows: bound by reading
    assert estimated.sampling == pytest.approx((train + held) / 4 * 20 * step + 2 * 40 * (train + held) * 5 / 1000)
    read = 20 * 64 + (160 - 20) * 25  # of a row: blocks of the user's texts, then sampled texts
    assert estimated.training == pytest.approx(2 * (40 + 3 * 4) * read * 3 * 6 / 2 / 1000)
    judged = 2 * 44 * held * 25 / 1000 * 6
    one, many = max(2 * 40 * 2 / 1000, 1.6) / 2, max(2 * 40 * 32 / 1000, 1.6) / 32
    timed = 9 * one * (3 * 6 * 2 + 4 * 6) + many * (32 * 9 + 50)
    assert estimated.measuring == pytest.approx(judged + timed)
    assert estimated.total == pytest.approx(estimated.sampling + estimated.training + estimated.measuring)
    # before the first step, at five validations, and twice after the last
    rest = estimated.sampling + judged / 6 * (1 + 5 + 2)
    for trainer, whole, seconds in (
        (1.0, None, 60),
        (None, 3 * rest / 60, 2 * rest),
        (1.0, 3 * rest / 60, 60),
        (None, 5.0, 45),
        (None, 1e9, estimated.training),
    ):
        cfg.trainer.minutes, cfg.minutes = trainer, whole
        assert preflight.durations(cfg, there).training == pytest.approx(seconds)
    cfg.measure = False
    assert preflight.durations(cfg, there).measuring == pytest.approx(judged)


def test_memory_and_disk_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("trainer.devices=2", "data.block=64", "rollout.rows=1")
    cfg, there = job.cfg, known(monkeypatch)
    monkeypatch.setattr(preflight, "decoding", lambda *_: 10.0)
    cfg.rollout.prompt_tokens, cfg.rollout.new_tokens = 50, 30
    need = preflight.estimate_need(cfg, there)
    tokens = 6 * 80 // 2
    training = 8 * 16 + tokens * 6 * 5 * 4 + min(tokens, 2**21 // 7) * 7 * 4 * 8
    assert need == preflight.Need(100, 8, 100 * 2 + training, 8 * 4 * (5 + 4))
    cfg.quantisation.kind = "nf4"
    assert preflight.estimate_need(cfg, there).memory == 100 * 0.5 + training
    cfg.rollout.new_tokens = 1  # shorter than blocks
    assert preflight.estimate_need(cfg, there).memory == 100 * 0.5 + training - 16 * 3 * (6 * 5 * 4 + 7 * 4 * 8)
    monkeypatch.setattr(preflight, "decoding", lambda *_: 1e9)
    cfg.quantisation.kind = "int8"
    assert preflight.estimate_need(cfg, there).memory == 100 + 8 * 4 + 1e9
    cfg.quantisation.kind, cfg.draft = "none", QuantisedDraft()  # and its copy of the target
    assert preflight.estimate_need(cfg, there).memory == 100 * 2 + 8 * 4 + 1e9 + 100
    cfg.draft.bits = 4  # which no kernel reads, as on a GPU
    assert preflight.estimate_need(cfg, there).memory == 100 * 2 + 8 * 4 + 1e9 + 200
    cfg.draft.bits = 8
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "device", lambda: "cuda")
        assert preflight.estimate_need(cfg, there).memory == 100 * 2 + 8 * 4 + 1e9 + 200
    cfg.draft = EarlyExitDraft(bits=4)
    assert preflight.estimate_need(cfg, there).memory == 100 * 2 + 8 * 4 + 1e9 + 8 * 2
    monkeypatch.setattr(preflight, "decoding", lambda *_: 10.0)
    plain, cfg.draft.bits = preflight.estimate_need(cfg, there).memory, None
    assert plain == preflight.estimate_need(cfg, there).memory + 8 * 10
    cfg.draft, cfg.mode, cfg.trainer.batch = EagleDraft(), "joint", 2
    monkeypatch.setattr(preflight, "size_of", lambda model: Size(10**6 if model.name == "big" else 8, 4))
    for method, size in (("awq", 0.5), ("fp8", 1.0)):  # of the checkpoint; three targets, to certify one
        there.target.config.to_dict = lambda name=method: {"quantization_config": {"quant_method": name}}
        assert preflight.estimate_need(cfg, there).memory == 3 * 10**6 * size


def test_decoding_takes_what_its_larger_batch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg: Any = job_of("rollout.rows=4", "rollout.prompt_tokens=5", "rollout.new_tokens=6", "bench.rows=2").cfg
    cfg.bench.prompt_tokens, cfg.bench.new_tokens = 7, 9
    monkeypatch.setattr(preflight, "cache_bytes", lambda config, rows, length, dtype: config * (rows * 1000 + length))
    monkeypatch.setattr(preflight, "device", lambda: "cpu")
    assert preflight.decoding(cfg, 1, 3) == 4 * 4011  # type: ignore[arg-type]
    cfg.bench.rows = 5
    assert preflight.decoding(cfg, 1, 3) == 4 * 5016  # type: ignore[arg-type]


def test_check_prints_sizes_a_prompt_and_durations(mistakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target_folder(mistakes / "small", layers=1)
    assert main(command(mistakes, "init=pretrained", f"draft.path={mistakes / 'small'}", "check=true")) == 0
    said, warned = capsys.readouterr()
    assert "speeds are not" not in warned
    small, target = (size_of(network(layers=layers)).parameters for layers in (1, 2))
    assert f"{small / 1e6:.2f} M parameters, init pretrained" in said and f"{target / 1e6:.1f} M parameters" in said
    assert all(f"  {phase}" in said for phase in ("sampling", "training", "measuring"))
    assert "prompt        of 8 tokens, as the target reads it: '" in said and "10 texts" in said


def test_check_names_the_sampling_of_the_target_if_it_is_another(
    mistakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a server takes it for what a request leaves out."""
    own = {"temperature": 0.6, "top_p": 0.95, "do_sample": True}
    file = mistakes / "target" / "generation_config.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    for stored, regime, shown in (
        (own, [], True),
        (own, ["regime.temperature=0.6", "regime.top_p=0.95"], False),
        ({}, [], False),
    ):
        file.write_text(json.dumps(before | stored))
        assert main(command(mistakes, "init.layers=[0]", "check=true", *regime)) == 0
        said = capsys.readouterr().out
        assert ("says regime.temperature=0.6 regime.top_p=0.95" in said) == shown == ("sampling      " in said)
    file.write_text(json.dumps(before))


def test_memory_is_of_the_pretrained_draft_not_of_the_target(mistakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cotrain.config.overrides import quote
    from cotrain.training.preconditions import require

    target_folder(mistakes / "tiny", layers=1)
    pretrained = ["trainer.batch=256", "init=pretrained", f"draft.path={mistakes / 'tiny'}"]
    copied = ["trainer.batch=256", "init.layers=[0,1]"]
    ways = [composed(*quote(command(mistakes, *setting)[1:])) for setting in (pretrained, copied)]
    one, whole = (preflight.estimate_need(cfg, require(cfg)) for cfg in ways)
    parameters = [size_of(network(layers=layers)).parameters for layers in (1, 2)]
    assert [one.draft, whole.draft] == parameters
    assert whole.memory - one.memory == (parameters[1] - parameters[0]) * preflight.TRAINED_BYTES
