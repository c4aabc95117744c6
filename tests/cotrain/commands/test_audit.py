"""`cotrain audit`: texts of a file or a server that are the target's, and texts that are not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from cotrain.cli import main
from cotrain.commands import audit as command
from cotrain.config.settings import AuditConfig
from inference.drafts.weight_files import read_json
from inference.servers.openai_client import Client
from tests.cotrain.students.test_initial_settings import target as target  # a fixture
from tests.draft_folders import draft_folder
from tests.fake_vllm import FakeVLLM, running
from tests.folders import own_texts, write_rows


@pytest.fixture(scope="module")
def server(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeVLLM]:
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    with running(FakeVLLM(model, tmp_path_factory.mktemp("states"), [1])) as fake:
        yield fake


def audited(target: Path, output: Path, *settings: str) -> tuple[int, dict]:
    status = main(["audit", f"target.path={target}", f"output={output}", "overwrite=true", *settings])
    return status, read_json(output / "report.json")["audit"]


def test_texts_of_a_rollout_pass_and_not_at_another_temperature(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own_texts(tmp_path / "own.jsonl")
    texts = ["rollout.texts=60", "rollout.prompt_tokens=6", "rollout.new_tokens=60", f"output={tmp_path / 'texts'}"]
    assert main(["rollout", f"target.path={target}", f"data.path={tmp_path / 'own.jsonl'}", *texts]) == 0
    given = f"texts={tmp_path / 'texts' / 'train_T1.parquet'}"
    status, found = audited(target, tmp_path / "out", given)
    assert status == 0 and found["passed"] and found["tokens"] > 2000 and "ranks by id, mean" in found["scores"]
    status, found = audited(target, tmp_path / "out", given, "regime.temperature=0.6")
    assert status == 3 and found["passed"] is False and abs(found["scores"]["likelihood"]) > found["limit"]
    said = capfd.readouterr()
    assert "the texts are NOT the target's" in said.out and "are NOT the target's (likelihood" in said.err
    page = (tmp_path / "out" / "report.html").read_text()
    assert "NOT the target" in page and "likelihood" in page


def test_settings_and_a_draft_belong_to_the_audit(target: Path, tmp_path: Path) -> None:
    """Texts with cuts pass under them alone; a draft adds its scores."""
    own_texts(tmp_path / "own.jsonl")
    draft = draft_folder(tmp_path / "draft", target, "independent")
    size = ["rollout.texts=40", "rollout.prompt_tokens=6", "rollout.new_tokens=60", f"output={tmp_path / 'texts'}"]
    cuts = ["regime.top_k=40", "regime.top_p=0.8"]
    assert main(["rollout", f"target.path={target}", f"data.path={tmp_path / 'own.jsonl'}", *size, *cuts]) == 0
    (file,) = (tmp_path / "texts").glob("*.parquet")
    status, found = audited(target, tmp_path / "out", f"texts={file}", *cuts, f"draft.path={draft}")
    assert status == 0 and {"favoured by the draft", "ranks by q / p, mean"} <= found["scores"].keys()
    assert audited(target, tmp_path / "out", f"texts={file}")[0] == 3
    assert audited(target, tmp_path / "out", f"texts={file}", "regime.top_k=5")[1]["impossible"] > 100


def test_a_servers_texts_pass_and_hotter_ones_do_not(server: FakeVLLM, target: Path, tmp_path: Path) -> None:
    size = f"url={server.url} prompt_tokens=6 prompts=6 new_tokens=40".split()
    few = audited(target, tmp_path / "out", *size, "new_tokens=3")
    assert few[0] == 4 and few[1]["passed"] is None and few[1]["texts"] == 12 and few[1]["tokens"] == 36
    status, found = audited(target, tmp_path / "out", *size, "prompts=16")
    assert status == 0 and found["texts"] == 32 and "equal prompts" in found["scores"]
    server.heat = 3.0
    status, hot = audited(target, tmp_path / "out", *size)
    of_server = audited(target, tmp_path / "out", *size, "p=server")
    server.heat = 1.0
    assert status == 3 and hot["scores"]["ranks by p, mean"] < -hot["limit"]
    assert of_server[0] == 3 and abs(of_server[1]["scores"]["ranks by p, mean"]) > hot["limit"]
    status, found = audited(target, tmp_path / "out", *size, "p=server")
    assert (
        status == 4
        and found["shift"] > 0.1
        and found["scored"] > 300
        and "ranks by p, mean" in found["scores"]
        and "ranks by id, mean" not in found["scores"]
    )


def test_prompts_of_the_user_are_asked_whatever_their_length(server: FakeVLLM, target: Path, tmp_path: Path) -> None:
    """All of 66 to 98 tokens; those of a limit are left out."""
    rows = [{"prompt": f"{i} " + "of all the words " * (4 + i % 3)} for i in range(40)]
    size = [f"url={server.url}", f"data.path={write_rows(tmp_path / 'own.jsonl', rows)}", "prompts=4", "new_tokens=20"]
    assert audited(target, tmp_path / "out", *size)[1]["texts"] == 8
    assert main(["audit", f"target.path={target}", f"output={tmp_path / 'no'}", *size, "prompt_tokens=60"]) == 1


def test_greedy_texts_pass_and_sampled_ones_do_not(server: FakeVLLM, target: Path, tmp_path: Path) -> None:
    rows = [{"prompt": [3, 4, 5 + i], "completion": [7] * 30} for i in range(4)]
    file = write_rows(tmp_path / "texts.jsonl", rows)
    size = f"url={server.url} prompts=4 prompt_tokens=6 new_tokens=40 regime.temperature=0".split()
    assert audited(target, tmp_path / "out", *size)[0] == 0
    assert audited(target, tmp_path / "out", *size, "new_tokens=20")[0] == 4
    assert audited(target, tmp_path / "out", f"texts={file}", "regime.temperature=0")[0] == 3


def test_counters_are_compared_with_the_texts(
    server: FakeVLLM, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server counts 9 or 10 rounds of two drafts for a text of 20 tokens; the first comes without a round. With the
    target as draft all are accepted: 6 or 7 rounds a text."""
    monkeypatch.setattr("cotrain.commands.audit.stable_counters", lambda client: client.counted())
    draft, size = draft_folder(tmp_path / "draft", target, "independent"), ["prompts=4", "prompt_tokens=6"]
    for kind, name in ((target, "target_is_the_draft"), (draft, "another")):
        server.drafts = True
        output, asked = tmp_path / name, [f"url={server.url}", f"draft.path={kind}", "new_tokens=20", *size]
        audited(target, output, *asked)
        server.drafts = False
        calls = read_json(output / "report.json")["audit"]["calls"]
        assert calls["counted"] == 80
        assert (calls["expected"] == pytest.approx(8 * 19 / 3, abs=8)) == (kind == target)
    assert audited(target, tmp_path / "none", *asked)[1]["calls"] is None  # of a server without counters
    server.drafts = True

    sampled = command._sampled

    def tokenized_here(cfg: AuditConfig, client: Client, *more: Any) -> command.Sample:
        sample = sampled(cfg, client, *more)
        client.sends_ids = False  # so they may be other tokens than the server counted
        return sample

    monkeypatch.setattr(command, "_sampled", tokenized_here)
    assert audited(target, tmp_path / "none", *asked)[1]["calls"] is None
    server.drafts = False


def test_reused_seeds_are_seen(server: FakeVLLM, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain.commands.audit.row_ids", lambda prompts: [1] * len(prompts))
    size = f"url={server.url} prompts=10 prompt_tokens=6 new_tokens=30".split()
    status, found = audited(target, tmp_path / "out", *size)
    assert status == 3 and found["scores"]["equal prompts"] > found["limit"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "set url= to the server, or texts="),
        (["url=http://127.0.0.1:1", "texts=x"], "set url= to the server, or texts="),
        (["texts={tmp}/none.jsonl"], "none.jsonl: there is no such file"),
        (["texts={tmp}/half.jsonl"], "half.jsonl, line 4 needs prompt"),
        (["texts={tmp}/empty.jsonl"], "there is no text to audit"),
        (["texts={tmp}/beyond.jsonl"], "beyond.jsonl, line 3 has 100000, which is no token id"),
        (["texts={tmp}/nothing.jsonl"], "has None, which is no token id"),
        (["texts={tmp}/messages.jsonl"], "which is no token id"),
        (["texts={tmp}/no_prompt.jsonl"], "line 1 has an empty prompt"),
        (["texts={tmp}/long.jsonl"], "line 1 has 131 tokens, the target reads 128"),
        (["texts={tmp}/half.jsonl", "p=server"], "set url="),
        (
            ["url=http://127.0.0.1:1", "p=server", "regime.temperature=0.5"],
            "p=server: servers say log-probabilities before",
        ),
        (["url=http://127.0.0.1:1", "p=server", "draft.path={tmp}/draft"], "p=server: servers say log-prob"),
        (["url=http://127.0.0.1:1"], "no OpenAI-compatible server"),
        (["texts={tmp}/deep.jsonl"], "deep.jsonl, line 2: maximum recursion depth"),
        (["texts={tmp}/half_of_a_pair.jsonl"], "half_of_a_pair.jsonl, line 1: the text is no valid Unicode"),
        (["texts={tmp}/latin.jsonl"], "latin.jsonl, line 1: "),
    ],
)
def test_what_cannot_be_audited_is_said(
    settings: list[str], words: str, target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if "draft.path={tmp}/draft" in settings:
        draft_folder(tmp_path / "draft", target, "independent")
    separated = '{"prompt": "a\u2028b", "text": "c\x85d"}\n\n\n'  # lines end at \\n alone
    (tmp_path / "half.jsonl").write_text(separated + '{"prompt": "a", "text": [3]}\n')
    (tmp_path / "deep.jsonl").write_text('{"prompt": [1], "text": [3]}\n' + "[" * 200_000)
    (tmp_path / "half_of_a_pair.jsonl").write_text('{"prompt": "\\ud800", "text": "a"}')
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9", "text": "a"}')
    (tmp_path / "empty.jsonl").write_text("")
    for name, row in {
        "beyond": {"prompt": [1], "text": [100000]},
        "nothing": {"prompt": [None], "text": [3]},
        "messages": {"prompt": [{"role": "user"}], "text": [3]},
        "no_prompt": {"prompt": [], "text": [3]},
        "long": {"prompt": [1], "text": [3] * 130},
    }.items():
        first = '{"prompt": [1], "text": [3]}\n\n' if name == "beyond" else ""
        (tmp_path / f"{name}.jsonl").write_text(first + json.dumps(row))
    asked = [one.format(tmp=tmp_path) for one in settings]
    assert main(["audit", f"target.path={target}", f"output={tmp_path / 'out'}", *asked]) == 1
    assert words in capfd.readouterr().err


def test_texts_are_tokenized_here_if_there_are_no_ids(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [("def f", "(x): return x"), ("i", "t is"), ("a", "me")]  # the target has tokens " it", " is" and "am"
    file = write_rows(tmp_path / "texts.jsonl", ({"prompt": one, "completion": two} for one, two in rows))
    assert audited(target, tmp_path / "out", f"texts={file}")[1]["texts"] == 1
    assert "3 texts are tokenized here, 2 are left out" in capfd.readouterr().out
