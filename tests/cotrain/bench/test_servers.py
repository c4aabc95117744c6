"""Two running servers are timed in turn, at several numbers of concurrent requests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cotrain.bench.servers import measured, trained_for
from cotrain.cli import main
from cotrain.evaluation.comparison import FIGURES
from cotrain.run_folder import MARKER
from inference import Sampling
from inference.drafts.atomic import write_json
from inference.drafts.weight_files import read_json
from inference.servers import openai_client
from inference.servers.openai_client import Client
from tests.draft_folders import draft_folder
from tests.fake_vllm import FakeVLLM, running
from tests.folders import network, target_folder

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeVLLM, FakeVLLM]]:
    """A plain server, and one that takes a third of its time and shows counters."""
    stable = openai_client.stable_counters
    monkeypatch.setattr("cotrain.bench.servers.stable_counters", lambda client: stable(client, 0.0))
    plain, drafted = (FakeVLLM(network(1), tmp_path / name, [1]) for name in ("plain", "drafted"))
    plain.pause, drafted.pause, drafted.drafts = 0.15, 0.0, True
    with running(plain), running(drafted):
        yield plain, drafted


def test_speeds_are_those_of_equal_texts_and_tau_is_the_servers(pair: tuple[FakeVLLM, FakeVLLM]) -> None:
    plain, drafted = pair
    cells = measured(Client(plain.url), Client(drafted.url), PROMPTS * 2, Sampling(), 2, [1, 2], (2.5, 2))
    assert [cell.concurrent for cell in cells] == [1, 2]
    for cell in cells:
        assert 1 < cell.speedup.low <= cell.speedup.value
        assert cell.tau == 2 and cell.tokens == 16 and cell.plain < cell.drafted
    # each number begins with a batch that is not recorded
    assert sorted(plain.asked) == sorted(drafted.asked) and len(plain.asked) == 8 + 1 + 8 + 2
    assert "1 at once: " in cells[0].line() and "tau 2.00, 2.50 on held-out texts with k=2" in cells[0].line()
    (cell,) = measured(Client(plain.url), Client(drafted.url), PROMPTS[:2], Sampling(), 2, [1], (2.5, 3))
    assert cell.predicted is None and "held-out" not in cell.line()  # the server drafts two tokens a round


def test_each_prompt_has_its_seed_on_both_servers_and_texts_do_not_end_early(pair: tuple[FakeVLLM, FakeVLLM]) -> None:
    """Equal prompts have two."""
    plain, drafted = pair
    plain.pause = 0
    given = [*PROMPTS, PROMPTS[0]]
    measured(Client(plain.url), Client(drafted.url), given, Sampling(), 5, [1, 2], None, seed=3)
    seeds = [{(*body["prompt"], body["seed"]) for body in server.requests} for server in pair]
    assert seeds[0] == seeds[1] and len({seed for *_, seed in seeds[0]}) == len(given)
    for body in plain.requests + drafted.requests:
        assert body["ignore_eos"] is True and body["min_tokens"] == body["max_tokens"] == 5
    before = len(plain.requests)
    measured(Client(plain.url), Client(drafted.url), given, Sampling(), 5, [1], None, seed=4)
    assert not {body["seed"] for body in plain.requests[before:]} & {seed for *_, seed in seeds[0]}


@pytest.mark.timeout(60)
def test_a_server_that_closes_connections_ends_the_measurement(pair: tuple[FakeVLLM, FakeVLLM]) -> None:
    plain, drafted = pair
    clients = Client(plain.url), Client(drafted.url)
    drafted.answer = lambda _: (0, {})  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match=f"{drafted.url}/v1/completions does not answer .*: start the server"):
        measured(*clients, PROMPTS, Sampling(), 4, [2], None)


def test_servers_that_are_not_what_they_are_said_to_be_are_refused(pair: tuple[FakeVLLM, FakeVLLM]) -> None:
    plain, drafted = (Client(one.url) for one in pair)
    for first, second, said in (
        (plain, plain, f"url_draft={plain.root}: this server does not draft"),
        (drafted, plain, f"url={drafted.root}: this server drafts"),
        (drafted, drafted, f"url={drafted.root}: this server drafts"),
    ):
        with pytest.raises(ValueError, match=said):
            measured(first, second, PROMPTS[:2], Sampling(), 2, [2], None)


def test_the_command_measures_on_prompts_of_the_draft(
    pair: tuple[FakeVLLM, FakeVLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, drafted = pair
    target = target_folder(tmp_path / "target", layers=1)
    folder = draft_folder(tmp_path / "run" / "draft", target, "independent")
    given = ["bench", f"draft.path={folder}", f"target.path={target}", f"output={tmp_path / 'out'}", "bench.prompts=8"]
    given += "bench.prompt_tokens=4 bench.new_tokens=2 concurrent=[2]".split()
    assert main([*given, f"url={plain.url}"]) == 1
    assert "url=, url_draft=: set both" in capsys.readouterr().err
    for wrong in (
        f"url_draft={plain.url}",
        f"url_draft={drafted.url} verify=token",
        f"url_draft={drafted.url} concurrent=[3]",
    ):
        assert main([*given, f"url={plain.url}", *wrong.split()]) == 1
    capsys.readouterr()
    regime = {"temperature": 0.5, "top_k": 0, "top_p": 1.0}
    (tmp_path / "run" / FIGURES).write_text('{"tau": 2.25}')
    marker = {"settings": {"policy": {"k": 2}, "verify": "token", "regime": regime}}
    write_json(tmp_path / "run" / MARKER, marker)
    given += [f"url={plain.url}", f"url_draft={drafted.url}", "regime.temperature=0.5", "overwrite=true"]
    seeds = []
    for seed in (3, 4):
        plain.requests.clear()
        assert main([*given, f"bench.seed={seed}"]) == 0
        assert "2 at once: " in capsys.readouterr().out
        seeds.append({body["seed"] for body in plain.requests})
        assert {body["temperature"] for body in plain.requests} == {0.5}
    assert not seeds[0] & seeds[1]
    (cell,) = read_json(tmp_path / "out" / "report.json")["cells"]
    assert cell["concurrent"] == 2 and cell["tau"] == 2 and cell["predicted"] == [2.25, 2] and cell["tokens"] == 16


def test_what_held_out_texts_foretold_is_read_from_the_run(tmp_path: Path) -> None:
    """It is of the regime and the rule that servers have."""
    regime = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert trained_for(tmp_path, regime) is None
    (tmp_path / FIGURES).write_text('{"tau": 2.25}')
    for rule in ("block", "token"):
        settings = {"policy": {"k": 4}, "regime": regime, "verify": rule}
        write_json(tmp_path / MARKER, {"settings": settings})
        assert trained_for(tmp_path, regime) == ((2.25, 4) if rule == "token" else None)
    assert trained_for(tmp_path, regime | {"temperature": 0.0}) is None
