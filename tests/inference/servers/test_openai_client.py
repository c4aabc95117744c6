"""The client of OpenAI-compatible servers against one that looks like vLLM, and parity with a server's counters."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cotrain.cli import main
from inference import Sampling
from inference.servers.openai_client import Client, Served, stable_counters

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

    requests: list[dict[str, Any]] = []
    owner, drafting = "vllm", True

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.say(METRICS % (9 + len(self.requests)) if self.drafting else "process_open_fds 8.0\n")
        elif self.path == "/v1/models":
            self.say(json.dumps({"data": [{"id": "m", "owned_by": self.owner}]}))
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body | {"key": self.headers.get("Authorization")})
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
    monkeypatch.setattr(Lookalike, "requests", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Lookalike)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_completions_carry_the_regime_and_come_in_order(url: str) -> None:
    client = Client(f"{url}/v1/", key="secret")
    sampling = Sampling(0.5, top_k=3, logit_bias={2: -1.0}, stop=("a",), stop_ids=(4,))
    result = client.complete([[1], [2], [3]], 2, sampling, seeds=[7, 8, 9], at_once=2, ignore_eos=True)
    assert [one.ids for one in result] == [[7, 7], [8, 8], [9, 9]]
    requests = sorted(Lookalike.requests, key=lambda body: body["seed"])[0]
    assert requests["model"] == "m" and requests["prompt"] == [1] and requests["key"] == "Bearer secret"
    assert (requests["temperature"], requests["top_k"], requests["stop_token_ids"]) == (0.5, 3, [4])
    assert requests["logit_bias"] == {"2": -1.0} and requests["stop"] == ["a"]
    assert requests["ignore_eos"] is True and requests["min_tokens"] == requests["max_tokens"] == 2
    assert "min_p" not in requests  # what is at its default is not sent to a server that may not know it


def test_other_servers_get_no_request_for_ids(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookalike, "owner", "somebody")
    (result,) = Client(url).complete(["a text"], 2, Sampling(), seeds=[1])
    assert result.ids is None and result.text == "x" and "return_token_ids" not in Lookalike.requests[0]


def test_counters_are_summed_over_engines_and_ordered_by_depth(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(url)
    assert client.counted() == Served(rounds=10, drafted=40, accepted=12, by_depth=(8, 4))
    assert stable_counters(client, quiet=0.0) == client.counted()
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
    assert main(["serve_check", "draft.path=some/where"]) == 1
    assert "url=" in capsys.readouterr().err
