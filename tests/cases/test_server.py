"""Servers that fill in what a request leaves open, and servers that answer with text alone."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from cotrain.bench.server_parity import over_http
from cotrain.cli import main
from cotrain.planning.plan import Plan
from cotrain.rollout import training_texts
from inference.servers.openai_client import Client
from tests.cases import case
from tests.cotrain.bench.test_server_parity import plan  # noqa: F401 - a fixture
from tests.cotrain.rollout.test_self_prompts import GEMMA
from tests.folders import network, tokenizer, write_rows
from tests.inference.servers.test_openai_client import Lookalike, url  # noqa: F401 - a fixture

NEUTRAL = {
    "n": 1,
    "top_k": -1,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "stop": [],
    "stop_token_ids": [],
    "skip_special_tokens": False,
}
OF_LLAMA_CPP = {
    "top_k": 0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": -1,
    "mirostat": 0,
    "dynatemp_range": 0.0,
}


def gemma_folder(path: Path) -> Path:
    """A target whose tokenizer begins texts with <bos>, and whose template ends turns with another token than texts."""
    words = copy.deepcopy(tokenizer())
    words.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    start = words.convert_tokens_to_ids("<bos>")
    words.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", start)])
    words.chat_template = GEMMA
    model = network(context=256)
    model.resize_token_embeddings(len(words))
    model.generation_config.eos_token_id = [words.eos_token_id, words.convert_tokens_to_ids("<end_of_turn>")]
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path


def rollout(address: str, tmp_path: Path, rows: list[dict], status: int = 0) -> Path:
    """Run `cotrain rollout` on rows, with the server, expect its status, and return its output."""
    target, data = gemma_folder(tmp_path / "target"), write_rows(tmp_path / "rows.jsonl", rows)
    asked = [
        f"rollout.url={address}",
        f"target.path={target}",
        f"data.path={data}",
        f"output={tmp_path / 'out'}",
        f"rollout.texts={len(rows)}",
        "rollout.rows=1",
        "rollout.new_tokens=20",
        "kind=train",
    ]
    assert main(["rollout", *asked]) == status
    return tmp_path / "out"


@case("server fills fields")
def test_a_server_has_no_field_to_fill(
    url: str,  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of `rollout.url=`, from which prompts are sampled, and of `serve_check`, which asks by `over_http`."""
    monkeypatch.setattr("cotrain.bench.server_parity.stable_counters", lambda client: client.counted())
    over_http(Client(url), plan)([[1, 2]], 1)
    (body,) = Lookalike.requests
    assert NEUTRAL.items() <= body.items() and body["ignore_eos"] is True and body["min_tokens"] == 24
    Lookalike.requests.clear()
    monkeypatch.setattr(Lookalike, "owner", "llamacpp")
    foreign = SimpleNamespace(own=False, line=lambda: "improbable")
    monkeypatch.setattr("cotrain.training.assembly.provenance", lambda *_: foreign)
    rollout(url, tmp_path, [{"text": "import os and more words"} for _ in range(3)])
    probe, *bodies = Lookalike.requests
    assert len(bodies) == 3 and all(OF_LLAMA_CPP.items() <= body.items() for body in (probe, *bodies))
    assert all(body["max_tokens"] == 20 and body["ignore_eos"] is False and "seed" in body for body in bodies)
    printed = capsys.readouterr()
    assert "samples with" in printed.out and "top_k 0" in printed.out and "min_p 0.0" in printed.out
    assert f"warning: rollout.url={url}: texts sampled at temperature 1 do not look as if" in printed.err


@case("server without ids")
def test_a_server_of_text_alone(
    url: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One start token, the end token of the turn, and no text that was cut inside a character."""
    start, *answers = (
        "model\n",
        ("Fine, thanks.", "stop"),
        ("Go\ufffd", "length"),
        ("It ends.<end_of_turn>", "stop"),
        ("Long", "length"),
    )
    monkeypatch.setattr(Lookalike, "owner", "somebody")
    choices = [{"text": text, "finish_reason": finish} for text, finish in answers]
    monkeypatch.setattr(Lookalike, "choice", property(lambda self: choices.pop(0)))
    rows = [{"messages": [{"role": "user", "content": f"How is number {i}?"}]} for i in range(4)]
    out = rollout(url, tmp_path, rows)
    assert "1 of 4 texts are left out" in capsys.readouterr().out
    words = AutoTokenizer.from_pretrained(tmp_path / "target")
    for body in Lookalike.requests:
        assert words(body["prompt"])["input_ids"].count(words.bos_token_id) == 1
    texts = training_texts.read_rows(out / "train_T1")
    shown = [words.decode(row["prompt"] + row["completion"]) for row in texts]
    assert all(text.count("<bos>") == 1 and text.startswith("<bos><start_of_turn>user\n") for text in shown)
    assert sorted(text.rpartition(start)[2] for text in shown) == [
        "Fine, thanks.<end_of_turn>",
        "It ends.<end_of_turn>",
        "Long",
    ]


def test_empty_texts_of_a_server_are_counted_and_refused_if_all_are(
    url: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And they are not read again once the server answers."""
    rows, choices = [{"text": f"import number {i} of words"} for i in range(3)], ["", "", "", "", "words", ""]
    monkeypatch.setattr(Lookalike, "owner", "somebody")
    monkeypatch.setattr(Lookalike, "choice", property(lambda _: {"text": choices.pop(0), "finish_reason": "stop"}))
    rollout(url, tmp_path, rows, status=1)
    assert "rollout.url: the server's texts are all empty (3), so there is nothing to learn" in capsys.readouterr().err
    rollout(url, tmp_path, rows)
    assert "rollout.url: the server's texts: 2 of 3 are empty" in capsys.readouterr().out
