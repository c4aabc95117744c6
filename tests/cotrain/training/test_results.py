"""What a run exports about itself, recomputed by hand from its settings and figures."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cotrain.data import splits
from cotrain.data.prompt_rows import PromptRows
from cotrain.evaluation import comparison
from cotrain.training import results, run
from inference.drafts.compatibility import ADAPTER, hash_weights
from inference.drafts.draft_folder import PlannedTree
from tests.cotrain.config.test_settings_reach import job_of
from tests.folders import target_folder

SETTINGS = """rollout.train_temperatures=[0.3,0.6]
target.adapter=adapter draft.quantisation=int8 draft.vocabulary=50 init.layers=[1]""".split()


def module_of(job: Any) -> Any:
    """A trained module whose figures all differ."""
    scores = {
        t: SimpleNamespace(
            alpha=0.5 + t / 10,
            alphas=(),
            **dict.fromkeys(("kl", "entropy", "calibration"), t),
            lengths=torch.tensor([3, 4]),
            calls=lambda k: torch.tensor([k / 4, 2.0]),
        )
        for t in (0.3, 0.8)
    }
    return SimpleNamespace(
        temperature=0.8,
        progress=SimpleNamespace(elapsed=77.5, minutes=9.0),
        draft="draft",
        held_out={0.8: "held", 0.3: "other"},
        student=SimpleNamespace(known=torch.arange(60) < (job.cfg.draft.vocabulary or 60), network=None),
        acceptance=lambda: {"alpha_T0.8/all": 0.58},
        without_markov=dict,
        scores=lambda: scores,
        judged={0.8: {"all": scores[0.8]}, 0.3: {"all": scores[0.3]}},
        profiles=lambda: {0.3: "cold", 0.8: "warm"},
        divergence=lambda decode: ("divergence", decode([5])),
        tau=lambda k, objective, verify: (k, objective, verify),
        on=lambda held: {"all": SimpleNamespace(alpha=0.875)},
    )


def test_an_export_describes_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(*SETTINGS)
    job.cfg.data.template = {"thinking": False}
    checkpoints = [SimpleNamespace(step=step, speedup=1.0 + step, tau=3.0 - step / 100) for step in (0, 32, 64)]
    speed: Any = SimpleNamespace(checkpoints=checkpoints, best=lambda: checkpoints[1])
    calls: list[Any] = []
    monkeypatch.setattr(type(job), "chats", True)
    monkeypatch.setattr(type(job), "messages", True)
    monkeypatch.setattr(results, "write_measured", lambda *given: calls.append(given) or "report")
    monkeypatch.setattr(results, "coverage", lambda held, known: (held, int(known.sum())))
    monkeypatch.setattr(results.profile, "profile_line", lambda t, one: "")
    others: Any = ("held", results.Provenance(9, 1.0, 2.0, 3.0, 0.25))
    assert results.export(job, module_of(job), 64, speed, others) == "report"
    ((_, draft, training, extra),) = calls
    assert draft == "draft"
    digest = training["learnt"].pop("chat_template")
    assert digest == hashlib.sha256(b"None").hexdigest() and len(digest) == 64
    assert training == {
        "loss": {"first": "kl", "then": "tv", "switch": 0.4, "decay": 0.9},
        "temperatures": [0.3, 0.6],
        "steps": 64,
        "minutes": 9.0,
        "seconds": 77.5,
        "adapter": "adapter",
        "gguf": None,
        "moved": None,
        "draft_quantisation": "int8",
        "draft_vocabulary": {"tokens": 50, "coverage": ("held", 50)},
        "learnt": {"completions": True, "template": {"thinking": False}},
        "init": {"kind": job.cfg.init.kind, "layers": [1]},
    }
    given = {"tokens": 9, "surprise": 1.0, "entropy": 2.0, "z": 3.0, "impossible": 0.25, "alpha": 0.875}
    assert extra == {
        "held_out": {"alpha_T0.8/all": 0.58},
        "exported_step": 32,
        "profiles": {"0.3": "cold", "0.8": "warm"},
        "checkpoints": [{"step": s, "speedup": 1.0 + s, "tau": 3.0 - s / 100} for s in (0, 32, 64)],
        "divergence": ("divergence", job.tokenizer.decode([5])),
        "training": training,
        "given_texts": given | {"alpha_own": 0.5 + 0.08},
    }
    job.cfg.rollout.train_temperatures, job.cfg.draft.vocabulary = [], None
    monkeypatch.setattr(type(job), "chats", False)
    monkeypatch.setattr(type(job), "messages", False)
    results.export(job, module_of(job), 64, speed)
    *_, training, extra = calls[-1]
    assert training["temperatures"] == [0.8] and training["draft_vocabulary"] is None and extra["given_texts"] is None
    assert training["learnt"]["chat_template"] is None and training["learnt"]["completions"] is False


def test_the_figures_of_a_comparison_are_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of()
    job.folder = tmp_path
    for label, then, wanted in (("mine", "tv", "mine"), (None, "tv", "kl_then_tv"), (None, None, "kl")):
        job.cfg.label, job.cfg.loss.then = label, then
        module = module_of(job)
        module.held_out = {
            t: SimpleNamespace(
                texts=SimpleNamespace(hashes=lambda t=t: ["a", f"b{t}"], prompt_hashes=lambda t=t: ["c", f"d{t}"])
            )
            for t in (0.8, 0.3)
        }
        texts = comparison.per_text(module.scores(), module.held_out)
        results.keep_figures(job, 64, {"tau": run.ranking_tau(job, module)(), "texts": texts})
        figures = json.loads((tmp_path / "held_out.json").read_text())
        assert (figures["label"], figures["seed"], figures["steps"]) == (wanted, 11, 64)
        assert figures["tau"] == [3, "greedy", "block"]
        assert figures["texts"]["0.3"] == {
            "alpha": 0.53,
            "kl": 0.3,
            "entropy": 0.3,
            "calibration": 0.3,
            "hashes": ["a", "b0.3"],
            "prompts": ["c", "d0.3"],
            "lengths": [3, 4],
            "calls": {"4": [1.0, 2.0], "8": [2.0, 2.0]},
        }
        assert set(figures["texts"]) == {"0.3", "0.8"} and figures["environment"]


def test_a_draft_folder_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, adapter = target_folder(tmp_path / "theirs"), tmp_path / "adapter"
    adapter.mkdir()
    save_file({"a": torch.ones(3)}, adapter / ADAPTER[1])
    job, calls = job_of("draft.kind=medusa", f"target.path={theirs}", f"target.adapter={adapter}"), list[Any]()
    job.folder = tmp_path
    tree = {"planned_shape": [-1, 0, 0], "planned_rule": "tree", "planned_likeliest": False}
    extra = {"planned_k": 2, "advice": "advice"} | tree
    report = {"environment": {"machine": 1}, "extra": extra}
    plan: Any = SimpleNamespace(int8=True, served="served")
    monkeypatch.setattr(results, "prepare", lambda plan: calls.append(plan))
    monkeypatch.setattr(results.measurement, "measure", lambda plan, extra: calls.append((plan, extra)) or report)
    monkeypatch.setattr(results, "recorded", lambda plan, extra: {"recorded": extra})
    monkeypatch.setattr(results.replay, "write_replay", lambda *given: calls.append(given))
    monkeypatch.setattr(results, "save", lambda *given, **settings: calls.append((given, settings)))
    monkeypatch.setattr(type(job), "plan", lambda self, draft: plan)
    monkeypatch.setattr(results, "unmeasured", lambda *given: calls.append(given))
    assert results.write_measured(job, "draft", {"own": 1}, {"more": 2}) is report  # type: ignore[arg-type]
    assert calls.pop(0) == (job, "draft", {"own": 1})
    assert calls[:3] == [plan, (plan, {"more": 2}), ({"recorded": extra}, tmp_path / "replay.json")]
    ((draft, words, place, metadata, said), settings) = calls[3]
    assert (draft, words, place, said) == ("served", job.tokenizer, tmp_path / "draft", report)
    assert settings == {"replace": True, "prompts": ""} and metadata.target["name"] == str(theirs)
    assert metadata.target["weights"] == hash_weights(str(theirs), str(adapter)) != hash_weights(str(theirs))
    hashes = results.hash_target(job.target.config, job.tokenizer)
    assert {key: metadata.target[key] for key in hashes} == hashes
    assert (metadata.k, metadata.objective, metadata.int8, metadata.kind) == (2, "greedy", True, "medusa")
    assert metadata.regime == {"temperature": 0.8, "top_k": 7, "top_p": 0.9}
    assert metadata.origin == {"environment": {"machine": 1}, "advice": "advice", "own": 1}
    assert metadata.tree == PlannedTree([-1, 0, 0], "tree", False)


def test_a_folder_has_the_prompts_that_the_draft_did_not_learn_from() -> None:
    """Of the final split, without those that begin as a prompt of another split, that are longer than the limit, or
    that come twice; none for prompts of the user, and none if one alone remains."""
    job = job_of("rollout.prompt_tokens=3")

    def texts_of(split: str, count: int) -> list[str]:
        return [text for text in map(str, range(1000)) if splits.split_of(text) == split][:count]

    texts = texts_of("final", 6)
    every = [*texts, *texts_of("train", 60), *texts_of("held_out", 6)]
    sampled = "".join(json.dumps({"text": text}) + "\n" for text in every)

    def rows(*prompts: list[int]) -> PromptRows:
        return PromptRows([{"domain": "self", "prompt": prompt, "completion": []} for prompt in prompts])

    final = [[1, 1], [2, 2], [3, 3], [4, 4, 4, 4], [5, 5], [1, 1]]
    job.sources = {"train": rows([2, 2, 9], [8] * 9), "held_out": rows([3], [8]), "final": rows(*final)}
    assert results.unseen_prompts(job) == ""
    job.sampled_prompts = sampled
    kept = [json.loads(line)["text"] for line in results.unseen_prompts(job).splitlines()]
    assert sorted(kept) == sorted([texts[5], texts[4]])
    job.sources["final"] = rows(*final[:4], [2, 2], [1, 1])
    assert results.unseen_prompts(job) == ""
