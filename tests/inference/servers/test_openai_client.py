"""The client of OpenAI-compatible servers against one that looks like vLLM, and parity with a server's counters."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.bench import server_parity
from cotrain.bench.measurement import Plan
from cotrain.cli import main
from inference import Engine, Sampling
from inference.noise import row_ids
from inference.policy import Fixed
from inference.proposers import Independent
from inference.servers.openai_client import Client, Served, settled
from tests.folders import network, tokenizer

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="0"} 1.79e+09
"""


class Lookalike(BaseHTTPRequestHandler):
    """Answers with as many tokens as were asked for, all of them the seed; keeps what it was asked."""

    asked: list[dict[str, Any]] = []
    owner, drafting = "vllm", True

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.say(METRICS % (9 + len(self.asked)) if self.drafting else "process_open_fds 8.0\n")
        elif self.path == "/v1/models":
            self.say(json.dumps({"data": [{"id": "m", "owned_by": self.owner}]}))
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"key": self.headers.get("Authorization")})
        if body["prompt"] == [13]:
            self.send_error(400, "no such token")
            return
        choice = {"text": "x", "finish_reason": "length"}
        if "return_token_ids" in body:
            choice |= {"token_ids": [body["seed"]] * body["max_tokens"]}
        self.say(json.dumps({"choices": [choice]}))

    def say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Lookalike, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Lookalike)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_completions_carry_the_regime_and_come_in_order(url: str) -> None:
    client = Client(f"{url}/v1/", key="secret")
    sampling = Sampling(0.5, top_k=3, logit_bias={2: -1.0}, stop=("a",), stop_ids=(4,))
    found = client.complete([[1], [2], [3]], 2, sampling, seeds=[7, 8, 9], at_once=2, ignore_eos=True)
    assert [one.ids for one in found] == [[7, 7], [8, 8], [9, 9]]
    asked = sorted(Lookalike.asked, key=lambda body: body["seed"])[0]
    assert asked["model"] == "m" and asked["prompt"] == [1] and asked["key"] == "Bearer secret"
    assert (asked["temperature"], asked["top_k"], asked["stop_token_ids"]) == (0.5, 3, [4])
    assert asked["logit_bias"] == {"2": -1.0} and asked["stop"] == ["a"]
    assert asked["ignore_eos"] is True and asked["min_tokens"] == asked["max_tokens"] == 2
    assert "min_p" not in asked  # what is at its default is not sent to a server that may not know it


def test_other_servers_are_not_asked_for_ids(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookalike, "owner", "somebody")
    (found,) = Client(url).complete(["a text"], 2, Sampling(), seeds=[1])
    assert found.ids is None and found.text == "x" and "return_token_ids" not in Lookalike.asked[0]


def test_counters_are_summed_over_engines_and_ordered_by_depth(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(url)
    assert client.counted() == Served(rounds=10, drafted=40, accepted=12, by_depth=(8, 4))
    assert settled(client, quiet=0.0) == client.counted()
    assert Served(10, 40, 12, (8, 4)) - Served(4, 16, 3, (2, 1)) == Served(6, 24, 9, (6, 3))
    assert Served(6, 24, 9).tau == 2.5
    monkeypatch.setattr(Lookalike, "drafting", False)
    assert client.counted() is None


def test_what_goes_wrong_is_named(url: str) -> None:
    with pytest.raises(ConnectionError, match="/v1/completions answered 400: (.|\n)*no such token"):
        Client(url).complete([[13]], 2, Sampling(), seeds=[1])
    with pytest.raises(ConnectionError, match="127.0.0.1:9/v1/models"):
        Client("http://127.0.0.1:9")
    with pytest.raises(ValueError, match="Sampling.banned"):
        Client(url).complete([[1]], 2, Sampling(banned=((1,),)), seeds=[1])


def test_a_check_wants_a_server_and_a_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve_check", "draft.path=somewhere"]) == 1
    assert "url=" in capsys.readouterr().err


@pytest.fixture(scope="module")
def plan() -> Plan:
    size = SimpleNamespace(prompts=24, prompt_tokens=8, new_tokens=24, rows=8, draft_dtype="auto", draft_int8=False,
                           compile=False, seed=0)  # fmt: skip
    target, draft = network(), network(layers=1, seed=0)
    return Plan(target, tokenizer(), draft, Sampling(), "token", size, ("t", "d"))  # type: ignore[arg-type]


def served_by(plan: Plan, greedy: bool, k: int = 2) -> server_parity.Ask:
    """A server that is this engine: one token of each text without a round, as from a prefill, then rounds."""

    def ask(prompts: list[list[int]], at_once: int) -> server_parity.Answer:
        engine = Engine(plan.target, Independent(plan.draft, greedy), policy=Fixed(k), rows=at_once)
        plain = Engine(plan.target, rows=at_once)
        first = plain.generate(prompts, max_new_tokens=1, seed=5, ignore_eos=True).tokens
        begun = [prompt + one for prompt, one in zip(prompts, first, strict=True)]
        rest = engine.generate(begun, max_new_tokens=23, seed=6, ids=row_ids(prompts), ignore_eos=True)
        tokens = [one + more for one, more in zip(first, rest.tokens, strict=True)]
        accepted = sum(rest.stats.accepted)
        return tokens, 1.0, Served(rest.stats.target_calls, sum(rest.stats.drafted), accepted)

    return ask


def test_a_server_that_is_this_engine_has_its_acceptance(plan: Plan) -> None:
    found = server_parity.parity(plan, served_by(plan, greedy=False), 2, at_once=8)
    assert found.tokens == 24 * 23 and abs(found.z) < 4
    assert found.ratio.low < 1 < found.ratio.high and found.served == pytest.approx(found.tokens / found.rounds)
    assert "served" in found.line() and json.loads(json.dumps(found.report()))["passed"] == found.passed


def test_a_texts_first_token_takes_no_round(plan: Plan) -> None:
    sure = Plan(plan.target, plan.tokenizer, plan.target, Sampling(), "token", plan.bench, ("t", "t"))
    prompts, tokens = [[1, 2]], [[3] * 19]
    rounds, sigma = server_parity.rounds_expected(sure, sure.proposer(), 2, prompts, tokens)
    assert rounds.tolist() == pytest.approx([6.0], abs=1e-3)  # 18 tokens, three a round
    assert sigma == pytest.approx(0, abs=1e-2)


def test_a_server_that_drafts_otherwise_is_told_from_it(plan: Plan) -> None:
    found = server_parity.parity(plan, served_by(plan, greedy=True), 2, at_once=8)
    assert not found.passed and abs(found.z) > 4


def test_counters_that_stand_still_are_refused(plan: Plan) -> None:
    def silent(prompts: list[list[int]], at_once: int) -> server_parity.Answer:
        return [[1] * 24 for _ in prompts], 1.0, Served(0, 0, 0)

    with pytest.raises(ValueError, match="counted no drafts"):
        server_parity.parity(plan, silent, 2, at_once=8)


def test_a_server_that_tells_no_ids_is_refused(url: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookalike, "owner", "somebody")
    monkeypatch.setattr("cotrain.bench.server_parity.settled", lambda client: client.counted())
    with pytest.raises(ValueError, match="tells no token ids"):
        server_parity.over_http(Client(url), plan)([[1, 2]], 1)
