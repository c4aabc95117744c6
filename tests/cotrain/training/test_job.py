"""What a target teaches and from which texts: its own distribution in its own numbers, the user's own domains and
prompts."""

import copy
import datetime
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.data.prompt_rows import PromptRows, said_of_rows
from cotrain.data.texts import Texts
from cotrain.losses import divergences as losses
from cotrain.losses.spec import LossSpec
from cotrain.students.independent import IndependentStudent
from cotrain.training import assembly
from cotrain.training import job as job_module
from cotrain.training.job import Job
from cotrain.training.module import Distillation, Stage
from tests.cotrain.losses.test_sequence import batch
from tests.cotrain.students.test_every_student import whole
from tests.cotrain.training.test_module import alone
from tests.folders import network, tokenizer
from tests.settings import composed
from tests.tiny import tiny


class Noted:
    """A loss that keeps the distributions it is asked about."""

    def __init__(self) -> None:
        self.distributions: list[torch.Tensor] = []

    def __call__(self, logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
        self.distributions += [logp.detach(), logq.detach()]
        return losses.kl(logp, logq)


def teaching(noted: Noted, student: IndependentStudent, target: Any) -> Distillation:
    optimizer: Any = None
    return alone(Distillation(student, target, [Stage(1.0, LossSpec(noted))], optimizer, optimizer, {}))


def test_padded_rows_have_no_mass_and_learn_nothing() -> None:
    noted, small = Noted(), tiny(layers=1, seed=3)
    module = teaching(noted, IndependentStudent(small, vocabulary=29), tiny())
    texts = batch([0, 1, 2, 3])
    texts["ids"] = texts["ids"] % 29
    module.training_step(texts, 0).backward()
    logp, logq = noted.distributions
    assert logp.shape[-1] == logq.shape[-1] == 29
    for probs in (logp, logq):
        torch.testing.assert_close(probs.exp().sum(-1), torch.ones_like(probs[:, 0]))
    places = texts["predicted"].nonzero()
    with torch.no_grad():
        logits = tiny()(texts["ids"]).logits[places[:, 0], places[:, 1], :29]
    torch.testing.assert_close(logp, logits.log_softmax(-1), atol=1e-6, rtol=0)
    head = small.get_output_embeddings().weight.grad
    assert not head[29:].any() and head[:29].any()


def test_a_template_writes_the_date_of_the_first_run_with_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that share rollout.folder= have one, whatever their outputs; other runs have one each."""
    words, days = copy.deepcopy(tokenizer()), iter(range(1, 29))
    words.chat_template = "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"

    class Clock(datetime.date):
        @classmethod
        def today(cls) -> Any:
            return cls(2026, 3, next(days))  # every run is on another day

    monkeypatch.setattr(job_module, "date", Clock)

    def run(output: str, folder: str | None, overwrite: bool = False) -> int:
        cfg = composed("rollout.texts=8")
        cfg.output, cfg.rollout.folder, cfg.overwrite = (
            str(tmp_path / output),
            folder and str(tmp_path / folder),
            overwrite,
        )
        texts = job_module.sampled_texts(cfg, network(), words, tmp_path / "texts")
        dates = {origin["date"] for origin in texts.source.values()}  # type: ignore[index]
        cfg.overwrite = False
        day = job_module.template_of(cfg, network(), words).day
        assert day and dates == {str(day)}
        return day.day

    assert [run("a", "shared"), run("b", "shared"), run("c", "shared", overwrite=True)] == [1, 1, 1]
    assert next(days) == 2 and run("a", None) == 3  # what is in rollout.folder is of that folder alone
    assert [run("a", None), run("b", None), run("a", "other"), run("a", None, overwrite=True)] == [3, 4, 5, 6]
    assert [run("a", None), run("b", None), run("d", "shared"), run("d", "other")] == [6, 4, 1, 5]


def test_the_vocabulary_of_a_run_excludes_padded_rows() -> None:
    target = network()
    cfg: Any = composed()
    job: Any = Job(cfg, Path(), target, tokenizer())
    assert job.vocabulary == target.config.vocab_size == 1 + max(tokenizer().get_vocab().values())
    few = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 211})
    assert Job(cfg, Path(), target, few).vocabulary == 212  # type: ignore[arg-type]
    assert job.halves[1](torch.zeros(2, 64)).shape == (2, 300)


def test_a_target_teaches_in_its_own_numbers() -> None:
    """float32 beside a draft whose step is computed in bfloat16."""
    target, noted = network(), Noted()
    ids = torch.arange(24).view(2, 12) * 7 % 300
    module = teaching(noted, IndependentStudent(network(1, seed=3)), target)
    with torch.autocast("cpu", torch.bfloat16):
        module.training_step(whole(ids), 0)
    with torch.no_grad():
        wanted = target(ids).logits[:, :-1].log_softmax(-1).flatten(0, 1)
    torch.testing.assert_close(noted.distributions[0], wanted, atol=1e-5, rtol=0)
    assert (noted.distributions[0].exp().sum(-1) - 1).abs().max() < 1e-5


def shares(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, float]:
    met: list[dict[str, float]] = []
    monkeypatch.setattr(assembly, "shared_texts", lambda texts, shares: (met.append(dict(shares)), texts)[1])
    monkeypatch.setattr(assembly, "joined_texts", lambda *_: None)
    cfg = composed(*overrides)
    texts = Texts(torch.zeros(1, 2), torch.ones(1), torch.ones(1), ["a"])
    job: Any = SimpleNamespace(cfg=cfg, texts=lambda *_: texts, chats=False)
    assembly.parts(job)
    return met[0]


def test_shares_of_embedded_domains_do_not_apply_to_own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares(monkeypatch) == {"records": 0.1}
    assert shares(monkeypatch, "+data.shares.records=0.5") == {"records": 0.5}
    assert shares(monkeypatch, "data.path=own.jsonl") == {}
    assert shares(monkeypatch, "data.path=own.jsonl", "+data.shares.records=0.2") == {"records": 0.2}


def test_prompts_that_are_left_out_are_counted() -> None:
    rows = [{"domain": "own", "prompt": [1] * n, "completion": []} for n in (3, 9, 0, 4, 12)]
    source = PromptRows(rows, remarks=("as read",))
    assert said_of_rows({"train": source, "final": source}, 8) == [
        "as read",
        *(
            f"data.path: of 5 prompts of the split {split}, 2 are longer than rollout.prompt_tokens=8 "
            "and 1 are empty; these are left out"
            for split in ("train", "final")
        ),
    ]
    assert sorted(map(len, source.several(8, 0))) == [3, 4] and PromptRows(rows[:1]).left_out(8, "train") == ""


FREED = """
import torch
from cotrain.training.job import keep_freed_memory
keep_freed_memory()
pages = lambda: int(open("/proc/self/statm").read().split()[1])
tensor = torch.ones(2**25)
held = pages()
del tensor
print(pages() >= held)
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_stays_with_the_process() -> None:
    out = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "True"
