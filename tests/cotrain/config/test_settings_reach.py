"""Each setting of a training run reaches what it names, and no other: parts are made from settings that all differ."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from cotrain.config.changes import change
from cotrain.config.groups import Data, Regime, Rollout
from cotrain.config.settings import flat
from cotrain.data.texts import Texts
from cotrain.evaluation.held_out import DEPTHS
from cotrain.students.independent import IndependentStudent
from cotrain.training import assembly, fit
from cotrain.training import job as jobs
from cotrain.training.interrupts import Keeper
from cotrain.training.job import Job
from cotrain.training.progress import Progress
from tests.folders import network, tokenizer
from tests.settings import composed, pick, put, typed

ODD = """regime.temperature=0.8 regime.top_k=7 regime.top_p=0.9 objective=greedy_draft verify=block policy.k=3
optimizer.lr=0.003 optimizer.weight_decay=0.04 optimizer.betas=[0.85,0.97] optimizer.warmup=0.25 optimizer.decay=0.3125
trainer.steps=160 trainer.minutes=9 trainer.batch=6 trainer.accumulate=3 trainer.remember_mb=5 trainer.seed=11
trainer.clip=0.7 trainer.validations=5 trainer.checkpoint_minutes=4 trainer.corpus_steps=20 loss=kl_then_tv
loss.switch=0.4 loss.decay=0.9 rollout.seed=5 rollout.rows=9 bench.rows=3""".split()


def job_of(*overrides: str) -> Job:
    """Of settings that all differ from the defaults; overrides: more of them, key=value."""
    return Job(typed(composed(*ODD), *overrides), Path("place"), network(), tokenizer())


def test_a_module_is_made_as_the_settings_say() -> None:
    job = job_of()
    cfg = job.cfg
    stages = assembly.stages(cfg.loss)
    assert [stage.until for stage in stages] == [0.4, 1.0]
    assert [stage.loss.terms[0].name for stage in stages] == [cfg.loss.first, cfg.loss.then] == ["kl", "tv"]
    judged: Any = {0.8: "held"}
    module = assembly.trained_by(job, IndependentStudent(network(1)), judged)
    assert (module.held_out, module.temperature) == (judged, 0.8)
    assert (module.teacher.room, module.k) == (5 * 2**20, 3)
    assert (module.seed, module.decay) == (11, 0.9)
    assert module.progress == Progress(160, 9)
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    assert 0 < int(module.truncate(logits).isfinite().sum()) <= 7
    found = module.configure_optimizers()
    groups = found["optimizer"].param_groups
    assert [group["weight_decay"] for group in groups] == [0.04, 0.0]
    assert all(group["initial_lr"] == 0.003 and group["betas"] == (0.85, 0.97) for group in groups)
    (factor,) = {*found["lr_scheduler"]["scheduler"].lr_lambdas}
    assert factor(0) == pytest.approx(1 / 160 / 0.25) and factor(19) == pytest.approx(20 / 160 / 0.25)
    assert factor(80) == 1 and factor(135) == pytest.approx(25 / 160 / 0.3125)
    assert found["lr_scheduler"]["interval"] == "step"


def test_a_module_of_defaults_judges_as_deep_as_figures_go() -> None:
    job = job_of("policy.k=null", "loss.then=null")
    module = assembly.trained_by(job, IndependentStudent(network(1)), {})
    assert module.stages[0].until == 1 and module.k == DEPTHS


def test_texts_are_judged_at_every_temperature_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job, met = job_of("rollout.temperatures=[0.0]", "rollout.train_temperatures=[0.3]"), list[Any]()
    monkeypatch.setattr(Job, "texts", lambda self, *asked: asked)
    monkeypatch.setattr(assembly, "held_out", lambda *asked: met.append(asked) or asked[2])
    monkeypatch.setattr(assembly, "warn_of_other_target", lambda *_: None)
    assert assembly.held_out_texts(job) == {0.0: 0.0, 0.3: 0.3, 0.8: 0.8}
    assert [(texts, t) for _, texts, t, _ in met] == [(("held_out", t), t) for t in (0.0, 0.3, 0.8)]
    logits = torch.arange(30.0)[None]
    assert all(read == job.read and int(cut(logits).isfinite().sum()) <= 7 for read, *_, cut in met)


def test_what_is_learnt_from_is_of_every_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("rollout.train_temperatures=[0.3,0.6]", "trainer.corpus_steps=1")
    first = torch.ones(2, dtype=torch.int64)
    given, met = Texts(torch.arange(6).view(2, 3), first, 3 * first, ["a"] * 2), list[Any]()
    monkeypatch.setattr(Job, "chats", False)
    monkeypatch.setattr(Job, "given", lambda self, kind: met.append(kind) or given)
    monkeypatch.setattr(Job, "texts", lambda self, *asked: met.append(asked) or given)
    corpus, sampled = assembly.parts(job)
    assert met == ["train", ("train", 0.3), ("train", 0.6)]
    assert float(corpus.temperature) == pytest.approx(0.8) and not corpus.whole and sampled.whole
    torch.testing.assert_close(sampled.temperature, torch.tensor([0.3, 0.3, 0.6, 0.6]))
    monkeypatch.setattr(Job, "chats", True)
    job.cfg.trainer.corpus_steps, job.cfg.rollout.train_temperatures = 0, []
    met.clear()
    corpus, sampled = assembly.parts(job)
    assert met == [("train", 0.8)] and not len(corpus) and not sampled.whole
    torch.testing.assert_close(sampled.temperature, torch.full((2,), 0.8))


def test_the_trainer_is_made_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(fit.lightning, "Trainer", lambda **settings: made.update(settings))
    job = job_of("trainer.minutes=null", "trainer.precision=16-mixed", "trainer.devices=2", "trainer.nodes=3")
    extra: Any = [object()]
    job.loggers = extra
    fit._trainer(job, extra, 11, Progress(160), 20)
    assert (made["devices"], made["num_nodes"], made["strategy"]) == (2, 3, "auto")
    assert (made["accelerator"], made["precision"], made["inference_mode"]) == ("cpu", "16-mixed", True)
    assert (made["accumulate_grad_batches"], made["gradient_clip_val"]) == (3, 0.7)
    assert (made["max_steps"], made["max_epochs"], made["val_check_interval"]) == (160, -1, 33)
    assert made["check_val_every_n_epoch"] is None and not made["use_distributed_sampler"]
    board, *others = made["logger"]
    assert others == extra and board._kwargs["purge_step"] == 21
    (keeper,) = (one for one in made["callbacks"] if isinstance(one, Keeper))
    assert keeper.seconds == 240 and keeper.path == Path("place") / fit.CHECKPOINT and keeper.signals is job.signals
    assert made["callbacks"][0] is extra[0] and isinstance(made["callbacks"][-1], ModelCheckpoint)
    assert made["callbacks"].index(keeper) == len(made["callbacks"]) - 2  # behind all whose state is kept
    job.cfg.trainer.minutes = 2
    fit._trainer(job, extra, 11, Progress(160), 0)
    assert made["val_check_interval"] == fit.NEVER and made["logger"][0]._kwargs["purge_step"] is None


def test_a_ranking_speaks_of_what_will_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from cotrain.training import run

    job, met = job_of("trainer.patience=4"), list[Any]()
    module: Any = SimpleNamespace(tau=lambda *asked: met.append(asked) or 2.5)
    monkeypatch.setattr(Job, "plan", lambda self, draft: draft)
    monkeypatch.setattr(run.measurement, "quick", lambda plan, k: {"speedup": (plan, k)})
    monkeypatch.setattr(run, "sample_text", lambda plan, k: (plan, k))
    speed = run.ranking(job, module)
    assert speed.tau() == 2.5 and met == [(3, "greedy", "block")]
    draft: Any = object()
    assert speed.measure(draft) == {"speedup": (draft, 3)} and speed.show and speed.show(draft) == (draft, 3)
    assert speed.folder == Path("place") / "checkpoints" and speed.patience == 4
    job.cfg.policy.k = None
    assert run.ranking_tau(job, module)() == 2.5 and met[-1] == (DEPTHS, "greedy", "block")


# --- what made kept texts, and whether a run goes on

OTHERS: dict[type, Any] = {int: 977, float: 0.37, bool: True, str: "other", type(None): "other"}
OPEN = {"chat": True}  # may be null, and is no text
FREE_DATA = {"from_target", "block", "on_target", "shares", "embedded_shares", "take"}  # take: without a stream
FREE_ROLLOUT = {"rows", "temperatures", "train_temperatures", "folder", "held_out_texts"}


def other(value: Any) -> Any:
    """Another value of the kind."""
    if isinstance(value, dict):
        return {**value, "code": 977}
    if isinstance(value, list):
        return [*value, 0.37]
    return (not value) if isinstance(value, bool) else OTHERS[type(value)]


def manifest(cfg: Any, target: Any, kind: str = "train") -> dict[str, Any]:
    found = jobs.sampled_texts(cfg, target, tokenizer(), Path("texts"))
    object.__setattr__(found, "identity", {"target": "this"})
    return dict(found._manifest(kind, jobs.sampling(cfg.regime)))


@pytest.mark.parametrize("own", [False, True])
def test_whatever_makes_texts_is_in_what_is_kept_beside_them(own: bool, tmp_path: Path) -> None:
    """Every setting of texts is changed alone: sets are told apart, but for what changes no text."""
    (tmp_path / "own.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "other.jsonl").write_text('{"text": "b"}\n')
    target = network()
    free = set[str]()
    for group, of in (("data", Data), ("rollout", Rollout), ("regime", Regime)):
        for name in of.model_fields:
            cfg = composed()
            cfg.data.path = str(tmp_path / "own.jsonl") if own else None
            before = manifest(cfg, target)
            value = (
                str(tmp_path / "other.jsonl")
                if name == "path"
                else OPEN.get(name) or other(pick(cfg, f"{group}.{name}"))
            )
            put(cfg, f"{group}.{name}", value)
            if manifest(cfg, target) == before:
                free.add(name)
    embedded = {"column", "split", "template", "config", "chat", "streaming", "held_out_bytes"}
    assert free == FREE_DATA | FREE_ROLLOUT | ({"bytes", "held_out_bytes"} if own else embedded)
    for kind_, key in (("train", "bytes"), ("held_out", "held_out_bytes")):
        cfg = composed()
        before = manifest(cfg, target, kind_)
        pick(cfg, f"data.{key}")["code"] = 977
        assert (manifest(cfg, target, kind_) != before) and before["kind"] == kind_
    cfg = composed()
    cfg.rollout.held_out_texts, cfg.rollout.texts = 7, 9
    assert [manifest(cfg, target, kind_)["texts"] for kind_ in ("train", "held_out")] == [9, 7]


FREE = {
    "label",
    "teacher.url",
    "rollout.temperatures",
    "rollout.folder",
    "trainer.validations",
    "trainer.patience",
    "trainer.checkpoint_minutes",
    "trainer.threads",
    "trainer.remember_mb",
    "trainer.cache",
    "trainer.accelerator",
    "trainer.logger",
    "joint.uncertified",
}


def test_a_run_goes_on_under_other_settings_only_where_they_change_no_weight() -> None:
    """Of all settings that there are: a run is another one, but for these."""
    keys = {key for key, value in flat(composed().model_dump()) if not isinstance(value, dict)}
    free = {key for key in keys if change(key, 1, 2) == "free"}
    assert {key for key in free if not key.startswith("bench.")} == FREE
    assert {key for key in keys if key.startswith("bench.")} <= free
    longer = {"trainer.steps", "trainer.minutes", "minutes", "measure"}
    assert {key for key in keys if change(key, 1, 2) == "longer"} == longer
    assert [change("measure", *pair) for pair in ((False, True), (True, False))] == ["longer", "free"]
