"""The client of OpenAI-compatible servers against one that looks like vLLM, and parity with a server's counters."""

import io
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cotrain.cli import main
from inference import Sampling
from inference.servers.openai_client import LIKE_VLLM_ONLY, UNTRANSLATED, Client, Served, stable_counters

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 10.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="0"} 1.79e+09
"""


class Lookalike(BaseHTTPRequestHandler):
    """Answers with as many tokens as were asked for, all of them the seed, or with a text; keeps what it was asked."""

    requests: list[dict[str, Any]] = []
    owner, drafting, metrics = "vllm", True, "/metrics"
    choice: dict[str, Any] = {"text": "x", "finish_reason": "length"}
    most = 10**6  # tokens of a text
    bodies: dict[str, str] = {}  # by path: what is answered instead

    def do_GET(self) -> None:
        if self.path == self.metrics:
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
        if self.path == "/completion":  # llama.cpp's own
            self.say(json.dumps({"content": "x", "generation_settings": body | {"typical_p": 1.0}}))
            return
        choice = dict(self.choice)
        tokens = min(body["max_tokens"], self.most)
        if "return_token_ids" in body:
            choice |= {"token_ids": [body["seed"]] * tokens}
        self.say(json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}))

    def say(self, text: str) -> None:
        text = self.bodies.get(self.path, text)
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


def test_other_servers_get_no_request_for_ids(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookalike, "owner", "somebody")
    (result,) = Client(url).complete(["a text"], 2, Sampling(), seeds=[1])
    assert result.ids is None and result.text == "x" and "return_token_ids" not in Lookalike.requests[0]


BODIES: dict[str, dict[str, Any]] = {  # of an answer that ended, as each server writes it
    "vllm": {"index": 0, "logprobs": None, "prompt_logprobs": None, "prompt_token_ids": None},
    "sglang": {"index": 0, "logprobs": None, "hidden_states": None},
    "llamacpp": {"index": 0, "logprobs": None},
}
SAID = [{"vllm": ("stop_reason", said), "sglang": ("matched_stop", said)} for said in (9, 151643, "a", None)]


@pytest.mark.parametrize("owner", BODIES)
@pytest.mark.parametrize("said", SAID)
def test_the_token_that_ended_a_text_is_read(
    said: dict[str, tuple[str, Any]], owner: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id that is not the default end is in a field of each server's own; a stop string is none, and llama.cpp says
    nothing."""
    own = dict([said[owner]]) if owner in said else {}
    monkeypatch.setattr(Lookalike, "owner", owner)
    monkeypatch.setattr(Lookalike, "choice", BODIES[owner] | own | {"text": "x", "finish_reason": "stop"})
    (result,) = Client(url).complete(["a text"], 2, Sampling(), seeds=[1])
    (end,) = own.values() or (None,)
    assert (result.finish, result.end) == ("stop", end if isinstance(end, int) else None)


OPENAI = {*"model prompt n max_tokens temperature top_p presence_penalty frequency_penalty seed key".split()}
OTHER = {
    "temperature": 0.7,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "logit_bias": {3: -1.0},
    "banned": ((1,),),
    "min_new_tokens": 2,
    "stop": ("a",),
    "stop_ids": (5,),
    "processors": (max,),
    "banned_first": (6,),
}


@pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp", "somebody"])
def test_a_setting_changes_the_request_or_is_refused(owner: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other fields are sent as well, with neutral values. An unknown server may reject what it does not know:
    it gets OpenAI's fields, and the one that is set."""
    monkeypatch.setattr(Lookalike, "owner", owner)
    client = Client(url)
    client.complete([[1]], 2, Sampling(), seeds=[1])
    neutral, unknown = Lookalike.requests.pop(), owner == "somebody"
    refused = (*UNTRANSLATED, *(() if owner in ("vllm", "sglang") else LIKE_VLLM_ONLY))
    assert neutral.keys() == OPENAI or not unknown
    for name in (one.name for one in fields(Sampling)):
        sampling = Sampling(**{name: OTHER[name]})
        if name in refused:
            with pytest.raises(ValueError, match=f"Sampling.{name}"):
                client.complete([[1]], 2, sampling, seeds=[1])
            continue
        client.complete([[1]], 2, sampling, seeds=[1])
        other = Lookalike.requests.pop()
        assert other != neutral and not neutral.keys() - other.keys(), name
        assert other.keys() - neutral.keys() <= ({name, "repeat_penalty"} if unknown else set()), name
        assert ("samplers" in other) == (owner == "llamacpp"), name


def test_what_a_server_would_apply_otherwise_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for regime in (Sampling(top_p=0.9, min_p=0.1), Sampling(logit_bias={1: float("-inf")})):
        with pytest.raises(ValueError, match="min_p|logit_bias: token 1 has"):
            Client(url).complete([[1]], 2, regime, seeds=[1])
    assert not Lookalike.requests
    for owner in ("vllm", "somebody"):
        monkeypatch.setattr(Lookalike, "owner", owner)
        monkeypatch.setattr(Lookalike, "most", 3)  # a limit of the server, such as max_new_tokens of its config
        Client(url).complete([[1]], 3, Sampling(), seeds=[1])
        with pytest.raises(ValueError, match="ended a text after 3 of 4 tokens"):
            Client(url).complete([[1]], 4, Sampling(), seeds=[1])


def test_seeds_that_differ_in_their_high_bits_differ_in_32(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookalike, "owner", "llamacpp")
    Client(url).complete([[1], [1]], 2, Sampling(), seeds=[2**32 + 3, 2**33 + 3], at_once=1)
    first, second = (body["seed"] for body in Lookalike.requests)
    assert first != second and max(first, second) < 2**31


def test_counters_are_summed_over_engines_and_ordered_by_depth(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(url)
    assert client.counted() == Served(rounds=10, drafted=40, accepted=12, by_depth=(8, 4))
    assert stable_counters(client, quiet=0.0) == client.counted()
    assert Served(10, 40, 12, (8, 4)) - Served(4, 16, 3, (2, 1)) == Served(6, 24, 9, (6, 3))
    assert Served(6, 24, 9).tau == 2.5
    monkeypatch.setattr(Lookalike, "drafting", False)
    assert client.counted() is None
    monkeypatch.setattr(Lookalike, "metrics", "/none")  # the server answers 404
    assert client.counted() is None
    assert Client(url.removeprefix("http://") + "/v1/").root == url


def test_what_goes_wrong_is_named(url: str) -> None:
    with pytest.raises(ConnectionError, match="/v1/completions answered 400: (.|\n)*no such token"):
        Client(url).complete([[13]], 2, Sampling(), seeds=[1])
    with pytest.raises(ConnectionError, match="127.0.0.1:9/v1/models"):
        Client("http://127.0.0.1:9")
    with pytest.raises(ValueError, match="Sampling.banned"):
        Client(url).complete([[1]], 2, Sampling(banned=((1,),)), seeds=[1])


def test_the_wait_and_the_key_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def refused(request: urllib.request.Request, timeout: float) -> None:
        waits.append(timeout)
        raise urllib.error.HTTPError(request.full_url, 401, "no", Message(), io.BytesIO(b"who are you"))

    monkeypatch.setattr(urllib.request, "urlopen", refused)
    client = Client.__new__(Client)
    client.root, client.key, client.timeout = "http://server", None, 600.0
    for body in (None, {"prompt": [1]}):
        with pytest.raises(ConnectionError, match="answered 401: who are you; OPENAI_API_KEY in the environment"):
            client._read("/v1/models", str, body)
    assert waits == [30.0, 600.0]


COUNTED = 'vllm:spec_decode_num_drafts_total{engine="0"} %s\n'
WRONG = ("", "{", "<html>", "null", "[]", '"text"', "3", "{}", '{"error": "x"}')
WRONG_CHOICES = (
    {},
    {"text": None},
    {"text": 3},
    {"text": "x", "token_ids": "abc"},
    {"text": "x", "token_ids": [1.5]},
    {"text": "x", "token_ids": [None]},
    {"text": "x", "token_ids": {}},
    {"text": "x", "finish_reason": 3},
    {"message": {"content": None, "tool_calls": [{}]}},
    None,
    "x",
    [],
)
WRONG_BODIES = {
    "/v1/models": [
        *WRONG,
        *(
            json.dumps({"data": one})
            for one in (None, [], {}, "m", [None], ["m"], [[]], [{}], [{"id": None}], [{"id": 3}])
        ),
    ],
    "/v1/completions": [
        *WRONG,
        *(json.dumps({"choices": one}) for one in (None, [], {}, "x")),
        *(json.dumps({"choices": [one]}) for one in WRONG_CHOICES),
        *(json.dumps({"choices": [{"text": "x"}], "usage": one}) for one in ([], 3, "x", {"completion_tokens": "2"})),
    ],
    "/completion": [*WRONG[:-2], *(json.dumps({"generation_settings": one}) for one in ([], 3, "top_k", True))],
    "/metrics": [COUNTED % "3", COUNTED % "NaN", COUNTED % "+Inf", COUNTED % "many"],
}


@pytest.mark.parametrize("path", WRONG_BODIES)
def test_an_answer_of_another_form_is_one_sentence_with_the_address(
    path: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lookalike, "owner", "llamacpp")
    for body in WRONG_BODIES[path]:
        monkeypatch.setattr(Lookalike, "bodies", {path: body})
        with pytest.raises(ConnectionError, match=f"^{url}{path} answered in another form than .*$") as error:
            client = Client(url)
            client.counted()
            client.resolved_settings(Sampling())
            client.complete(["a text"], 2, Sampling(), seeds=[1])
        assert "\n" not in str(error.value), body
    with pytest.raises(ConnectionError, match="no host"):
        Client("no host")


def test_a_check_wants_a_server_and_a_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve_check", "draft.path=/some/where"]) == 1
    assert "url=" in capsys.readouterr().err
