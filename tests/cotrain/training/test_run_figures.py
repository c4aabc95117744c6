"""What a run keeps and exports about itself, and what it says that it will take: from the settings and figures it is
of, recomputed by hand."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.bench import random_weights
from cotrain.board import final_figures
from cotrain.commands import bench
from cotrain.config.settings import Bench
from cotrain.training import distil, durations, preflight
from cotrain.training.durations import Machine
from cotrain.training.sizes import Size
from inference import Sampling
from inference.drafts.planned_tree import PlannedTree
from inference.measure import floor
from inference.measure.costs import Costs
from inference.measure.timing import Interval
from tests.bench_stubs import Timed
from tests.cotrain.config.test_settings_reach import job_of

SETTINGS = """rollout.train_temperatures=[0.3,0.6] rollout.rounds=3 rollout.on_draft=0.25 trainer.top=4
target.adapter=adapter draft.quantisation=int8 draft.vocabulary=50 init.layers=[1]""".split()


def module_of(job: Any) -> Any:
    """A trained module whose figures all differ."""
    scores = {t: SimpleNamespace(alpha=0.5 + t / 10, alphas=(), **dict.fromkeys(("kl", "entropy", "calibration"), t),
                                 lengths=torch.tensor([3, 4]), calls=lambda k: torch.tensor([k / 4, 2.0]))
              for t in (0.3, 0.8)}  # fmt: skip
    return SimpleNamespace(
        temperature=0.8, progress=SimpleNamespace(elapsed=77.5, minutes=9.0), draft="draft",
        held_out={0.8: "held", 0.3: "other"},
        student=SimpleNamespace(known=torch.arange(60) < (job.cfg.draft.vocabulary or 60)),
        acceptance=lambda: {"alpha_T0.8/all": 0.58}, scores=lambda: scores,
        judged={0.8: {"all": scores[0.8]}, 0.3: {"all": scores[0.3]}}, profiles=lambda: {0.3: "cold", 0.8: "warm"},
        divergence=lambda decode: ("divergence", decode([5])), tau=lambda k, objective, verify: (k, objective, verify),
        on=lambda held: {"all": SimpleNamespace(alpha=0.875)},
    )  # fmt: skip


def test_what_an_export_says_of_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(*SETTINGS)
    job.cfg.data.template = {"thinking": False}
    kept = [SimpleNamespace(step=step, speedup=1.0 + step, tau=3.0 - step / 100) for step in (0, 32, 64)]
    speed: Any = SimpleNamespace(kept=kept, best=lambda: kept[1])
    found: list[Any] = []
    monkeypatch.setattr(type(job), "plan", lambda self, draft: ("plan", draft))
    monkeypatch.setattr(type(job), "chats", True)
    monkeypatch.setattr(distil, "measured", lambda *given: found.append(given) or "report")
    monkeypatch.setattr(distil, "coverage", lambda held, known: (held, int(known.sum())))
    monkeypatch.setattr(distil.profile, "line", lambda t, one: "")
    others: Any = ("held", distil.Provenance(9, 1.0, 2.0, 3.0, 0.25))
    assert distil.export(job, module_of(job), speed, others) == "report"
    ((_, plan, made, extra),) = found
    assert plan == ("plan", "draft")
    digest = made["learnt"].pop("chat_template")
    assert digest == distil._digest(job.tokenizer) and len(digest) == 64
    assert made == {
        "loss": {"first": "kl", "then": "tv", "switch": 0.4, "hardest": 0.6, "decay": 0.9},
        "temperatures": [0.3, 0.6], "steps": 64, "minutes": 9.0, "seconds": 77.5, "rounds": 3, "on_draft": 0.25,
        "top": 4, "adapter": "adapter", "draft_quantisation": "int8",
        "draft_vocabulary": {"tokens": 50, "coverage": ("held", 50)},
        "learnt": {"completions": True, "template": {"thinking": False}},
        "served": {"chat": False, "prompt_tokens": 48, "quantisation": "none", "template": {"thinking": False},
                   "verify": "block"},
        "init": {"kind": job.cfg.init.kind, "layers": [1], "cosine": 0.2},
    }  # fmt: skip
    given = {"tokens": 9, "surprise": 1.0, "entropy": 2.0, "z": 3.0, "impossible": 0.25, "alpha": 0.875}
    assert extra == {
        "held_out": {"alpha_T0.8/all": 0.58}, "exported_step": 32, "profiles": {"0.3": "cold", "0.8": "warm"},
        "checkpoints": [{"step": s, "speedup": 1.0 + s, "tau": 3.0 - s / 100} for s in (0, 32, 64)],
        "divergence": ("divergence", job.tokenizer.decode([5])), "training": made,
        "given_texts": given | {"alpha_own": 0.5 + 0.08},
    }  # fmt: skip
    job.cfg.rollout.train_temperatures, job.cfg.draft.vocabulary = [], None
    monkeypatch.setattr(type(job), "chats", False)
    distil.export(job, module_of(job), speed)
    *_, made, extra = found[-1]
    assert made["temperatures"] == [0.8] and made["draft_vocabulary"] is None and extra["given_texts"] is None
    assert made["learnt"]["chat_template"] is None and made["learnt"]["completions"] is False


def test_what_a_comparison_reads_is_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of()
    job.folder = tmp_path
    for label, then, wanted in (("mine", "tv", "mine"), (None, "tv", "kl_then_tv"), (None, None, "kl")):
        job.cfg.label, job.cfg.loss.then = label, then
        distil.keep_figures(job, module_of(job), 64)
        found = json.loads((tmp_path / "held_out.json").read_text())
        assert (found["label"], found["seed"], found["steps"]) == (wanted, 11, 64)
        assert found["tau"] == [3, "greedy", "block"]
        assert found["texts"]["0.3"] == {"alpha": 0.53, "kl": 0.3, "entropy": 0.3, "calibration": 0.3,
                                         "lengths": [3, 4], "calls": {"4": [1.0, 2.0], "8": [2.0, 2.0]}}  # fmt: skip
        assert set(found["texts"]) == {"0.3", "0.8"} and found["environment"]


def test_a_draft_folder_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, kept = job_of("draft.kind=medusa", "target.path=theirs"), list[Any]()
    job.folder = tmp_path
    tree = {"planned_shape": [-1, 0, 0], "planned_rule": "tree", "planned_likeliest": False}
    extra = {"planned_k": 2, "advice": "advice"} | tree
    report = {"environment": {"machine": 1}, "extra": extra}
    plan: Any = SimpleNamespace(int8=True, served="served")
    monkeypatch.setattr(distil, "prepare", lambda plan: kept.append(plan))
    monkeypatch.setattr(distil.measurement, "measure", lambda plan, extra: kept.append((plan, extra)) or report)
    monkeypatch.setattr(distil, "recorded", lambda plan, extra: {"recorded": extra})
    monkeypatch.setattr(distil.replay, "write", lambda *given: kept.append(given))
    monkeypatch.setattr(distil, "save", lambda *given, **settings: kept.append((given, settings)))
    assert distil.measured(job, plan, {"own": 1}, {"more": 2}) is report
    assert kept[:3] == [plan, (plan, {"more": 2}), ({"recorded": extra}, tmp_path / "replay.json")]
    ((draft, words, place, metadata, said), settings) = kept[3]
    assert (draft, words, place, said) == ("served", job.tokenizer, tmp_path / "draft", report)
    assert settings == {"replace": True} and metadata.target["name"] == "theirs"
    hashes = distil.hash_target(job.target.config, job.tokenizer)
    assert {key: metadata.target[key] for key in hashes} == hashes
    assert (metadata.k, metadata.objective, metadata.int8, metadata.kind) == (2, "greedy", True, "medusa")
    assert metadata.regime == {"temperature": 0.8, "top_k": 7, "top_p": 0.9}
    assert metadata.origin == {"environment": {"machine": 1}, "advice": "advice", "own": 1}
    assert metadata.tree == PlannedTree([-1, 0, 0], "tree", False)


def test_the_best_checkpoint_is_what_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the last step are at hand, but for those that were rounded while they were judged."""
    for step, rounding, again in ((32, "none", True), (160, "none", False), (160, "int8", True)):
        job, done = job_of(f"draft.quantisation={rounding}"), list[Any]()
        network = SimpleNamespace(state_dict=lambda: "weights")

        class Trained:
            load = staticmethod(lambda *given, done=done, network=network: (
                done.append(given), SimpleNamespace(network=network))[1])  # fmt: skip

        module: Any = SimpleNamespace(
            student=Trained(), judge=lambda done=done: done.append("judged"),
            draft=SimpleNamespace(load_state_dict=lambda state, done=done: done.append(state)),
        )  # fmt: skip
        best = SimpleNamespace(step=step, path="there")
        distil.choose_best(job, module, SimpleNamespace(best=lambda best=best: best))  # type: ignore[arg-type]
        assert done == ([("there", job.target, job.vocabulary), "weights", "judged"] if again else [])


def test_final_figures_are_those_of_the_report() -> None:
    report = {"speedup": {"whole": {"value": 1.5, "low": 1.25, "high": None}, "decode": {"value": 9.0}},
              "acceptance": {"tau": {"measured": 2.5, "predicted": 2.0}}, "exactness": {"passed": False}}  # fmt: skip
    own = {"acceptance": 0.5, "tau": 3.0}
    assert final_figures.figures(0.5, 3.0, {}) == own
    timed = {"speedup": 1.5, "speedup_low": 1.25, "tau_timed": 2.5, "exact": 0.0}
    assert final_figures.figures(0.5, 3.0, report) == own | timed


# --- what a run will take


def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A target of 40 and a draft of 4 parameters a token, of 100 and 8 in all."""
    sizes = {"big": Size(100, 40), "small": Size(8, 4)}
    for module in (durations, preflight):
        monkeypatch.setattr(module, "size_of", lambda model: sizes[model.name])
        monkeypatch.setattr(module, "half", lambda place: torch.bfloat16)
    config = SimpleNamespace(hidden_size=6, num_hidden_layers=5, vocab_size=7)
    config.get_text_config = lambda: config
    return SimpleNamespace(target=SimpleNamespace(name="big", config=config), sources={},
                           draft=SimpleNamespace(name="small", config=config))  # fmt: skip


def test_durations_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three domains, two temperatures that are learnt from, four that are judged at."""
    job = job_of("rollout.train_temperatures=[0.3,0.6]", "rollout.temperatures=[0.0]", "rollout.texts=10")
    cfg, there = job.cfg, known(monkeypatch)
    cfg.rollout.held_out_texts, cfg.rollout.prompt_tokens, cfg.rollout.new_tokens, cfg.rollout.rows = 2, 5, 20, 4
    cfg.trainer.devices, cfg.trainer.nodes, cfg.data.block, cfg.trainer.minutes = 2, 1, 64, None
    cfg.bench = Bench(6, 3, 8, 9, 50, 2, 0, 0.1, [2], "auto", False, False, 0, 0)
    machine = Machine(3000.0, 50.0)  # 1,000 operations a second as whole models reach
    monkeypatch.setattr(durations, "measured", lambda: machine)
    found = durations.durations(cfg, there)
    train, held = 10 * 3 * 2, 2 * 3 * 4
    assert found.texts == train + held
    step = max(2 * 40 * 4 / 1000, 40 * 2 / 50)  # four rows: bound by reading
    assert found.sampling == pytest.approx((train + held) / 4 * 20 * step + 2 * 40 * (train + held) * 5 / 1000)
    assert found.training == pytest.approx(2 * (40 + 3 * 4) * 160 * 3 * 6 * 64 / 2 / 1000)
    judged = 2 * 44 * held * 25 / 1000 * 6
    one, many = max(2 * 40 * 2 / 1000, 1.6) / 2, max(2 * 40 * 32 / 1000, 1.6) / 32
    timed = 9 * one * (3 * 6 * 2 + 4 * 6) + many * (32 * 9 + 50)
    assert found.measuring == pytest.approx(judged + timed)
    assert found.total == pytest.approx(found.sampling + found.training + found.measuring)
    rest = found.sampling + judged / 6 * (1 + 5 + 2.5)  # before the first step, at five validations, behind the last
    for trainer, whole, seconds in ((1.0, None, 60), (None, 2 * rest / 60, rest), (1.0, 2 * rest / 60, 60),
                                    (None, 5.0, 60), (None, 1e9, found.training)):  # fmt: skip
        cfg.trainer.minutes, cfg.minutes = trainer, whole
        assert durations.durations(cfg, there).training == pytest.approx(seconds)
    cfg.measure = False
    assert durations.durations(cfg, there).measuring == pytest.approx(judged)


def test_memory_and_disk_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("trainer.ema=0.9", "trainer.devices=2", "data.block=64", "rollout.rows=1")
    cfg, there = job.cfg, known(monkeypatch)
    monkeypatch.setattr(preflight, "decoding", lambda *_: 10.0)
    found = preflight.estimate(cfg, there)
    tokens = 6 * 64 // 2
    training = 8 * (16 + 4) + tokens * 6 * 5 * 4 + min(tokens, 2**21 // 7) * 7 * 4 * 8
    assert found == preflight.Need(100, 8, 100 * 2 + training, 8 * 4 * (5 + 4))
    cfg.trainer.ema, cfg.quantisation.kind = 0.0, "nf4"
    assert preflight.estimate(cfg, there).memory == 100 * 0.5 + training - 8 * 4
    monkeypatch.setattr(preflight, "decoding", lambda *_: 1e9)
    cfg.quantisation.kind = "int8"
    assert preflight.estimate(cfg, there).memory == 100 + 8 * 4 + 1e9


def test_decoding_takes_what_its_larger_batch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg: Any = job_of("rollout.rows=4", "rollout.prompt_tokens=5", "rollout.new_tokens=6", "bench.rows=2").cfg
    cfg.bench.prompt_tokens, cfg.bench.new_tokens = 7, 9
    monkeypatch.setattr(preflight, "cache_bytes", lambda config, rows, length, dtype: config * (rows * 1000 + length))
    monkeypatch.setattr(preflight, "device", lambda: "cpu")
    assert preflight.decoding(cfg, 1, 3) == 4 * 4011  # type: ignore[arg-type]
    cfg.bench.rows = 5
    assert preflight.decoding(cfg, 1, 3) == 4 * 5016  # type: ignore[arg-type]


# --- shapes alone, and what is written


def test_shapes_alone_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, made = Costs((1.0, 1.1, 1.2, 1.3), 0.1, (0.2, 0.2, 0.2, 0.2), 2, 12, first=0.05), list[Any]()
    target: Any = SimpleNamespace(device="cpu", dtype=torch.float32)
    config = SimpleNamespace(vocab_size=11)
    config.get_text_config = lambda: config
    target.config = config

    def noted(arms: Any, prompts: Any, rows: int, seed: int) -> Any:
        made.append((arms, prompts, rows, seed))
        return Timed(arms, prompts, rows, seed)

    asked: dict[str, Any] = {}
    monkeypatch.setattr(random_weights, "interleave", noted)
    monkeypatch.setattr(random_weights, "engine_arm", lambda name, engine, sampling, new: SimpleNamespace(
        name=name, engine=engine, sampling=sampling, new=new))  # fmt: skip
    monkeypatch.setattr(random_weights, "Engine", lambda target, **settings: SimpleNamespace(target=target, **settings))
    monkeypatch.setattr(random_weights, "Synthetic", lambda target, **settings: SimpleNamespace(**settings))
    monkeypatch.setattr(random_weights, "LM", lambda model, rows: (model, rows))
    monkeypatch.setattr(random_weights, "measure_machine", lambda *_: floor.Machine(2.0, 3.0))

    def loads(target: Any, draft: Any, k: int, rows: int, context: int) -> list[Any]:
        asked[str(k)] = target, draft, rows, context
        return [SimpleNamespace(seconds=lambda machine: 0.25 + k)]

    monkeypatch.setattr(random_weights, "round_loads", loads)
    monkeypatch.setattr(random_weights, "student_class", lambda kind: lambda draft, target: SimpleNamespace(
        proposer=lambda compile: ("proposer", compile)))  # fmt: skip
    monkeypatch.setattr(random_weights, "measure_costs", lambda *given, **s: asked.update(costs=(given, s)) or costs)
    size = Bench(4, 3, 8, 9, 50, 9, 0, 0.1, [2, 3], "auto", False, True, 5, 0)
    (cell,) = random_weights.measure(target, "draft", 0.8, Sampling(0.7), size, [2], lambda _: None)  # type: ignore[arg-type]
    tau = [1.0, 1.8, 2.44, 2.952]
    speedups = [1.2 * tau[k] / (costs.round(k)) for k in range(4)]
    k = max(range(4), key=speedups.__getitem__)
    assert k == 3 and cell["k"] == 3 and cell["predicted"] == pytest.approx(speedups[3])
    assert asked["costs"] == ((target, ("proposer", True), 3), {"context": 12, "sampling": Sampling(0.7)})
    assert asked["0"] == asked["3"] == ((target, 2), ("draft", 2), 2, 12)
    ((arms, prompts, rows, seed),) = made
    fast, slow = arms
    assert (fast.engine.alpha, fast.engine.policy.k, fast.engine.rows, fast.engine.compile) == (0.8, 3, 2, True)
    assert (slow.engine.rows, slow.engine.compile, rows, seed, len(prompts)) == (2, True, 2, 5, 6)
    assert {len(prompt) for prompt in prompts} == {8} and {(arm.sampling, arm.new) for arm in arms} == {
        (Sampling(0.7), 9)
    }
    timing = Timed(arms, prompts, 2, 5)
    assert cell["measured"] == timing.ratio("speculative", "plain", decode=True)._asdict()
    assert cell["tokens_per_second"] == {"speculative": 30.0, "plain": 20.0} and cell["tau"] == 1.75
    assert (cell["plain_share"], cell["round_share"]) == (0.25 / costs.round(0), 3.25 / costs.round(3))
    assert (cell["plain_seconds"], cell["round_seconds"]) == (costs.round(0), costs.round(3))
    assert cell["machine"] == asdict(floor.Machine(2.0, 3.0))
    assert (cell["rows"], cell["alpha"]) == (2, 0.8)


def test_a_written_report_is_json_whatever_one_batch_tells(tmp_path: Path) -> None:
    cell = {"speedup": Interval(1.5, math.nan, math.nan)._asdict(), "rows": [1, math.inf]}
    bench._write(tmp_path, {"extra": {"bits": [cell]}})

    def refused(name: str) -> Any:
        raise AssertionError(name)

    found = json.loads((tmp_path / "report.json").read_text(), parse_constant=refused)
    assert found == {"extra": {"bits": [{"speedup": {"value": 1.5, "low": None, "high": None}, "rows": [1, None]}]}}
