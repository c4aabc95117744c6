"""What a recorder keeps is what the engine did: the same texts, and p, q and u by which each draft was judged."""

from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.bench import measurement
from cotrain.data.splits import Prompts
from cotrain.planning.plan import Plan
from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.proposers.base import Proposal
from inference.report.replay import Recorder, validate_replay
from inference.trace import trace
from inference.verify.tree import Tree
from tests.folders import tokenizer
from tests.tiny import near, tiny

TARGET = tiny(vocab=12)
DRAFT = near(TARGET)
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5], [7, 1], [2, 2, 2]]
SAMPLING = Sampling(temperature=0.8)
STOPS = (0, 3, 7, 9)


@cache
def recorded(rule: str = "token", proposer: Any = None, sampling: Sampling = SAMPLING) -> tuple[dict[str, Any], Any]:
    record = Recorder()
    engine = Engine(TARGET, proposer or Independent(DRAFT), verify=rule, policy=Fixed(3), rows=2, record=record)
    out = engine.generate(PROMPTS, max_new_tokens=14, sampling=sampling, seed=3)
    replay = record.replay()
    validate_replay(replay)
    return replay, out


def steps(replay: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for rounds in replay["rounds"] for row in rounds]


def drafts(replay: dict[str, Any]) -> list[dict[str, Any]]:
    return [draft for row in steps(replay) for draft in row["drafts"]]


def emitted(row: dict[str, Any]) -> list[int]:
    last = [row["last"]["id"]] if row["last"] else []
    return [draft["id"] for draft in row["drafts"] if draft["state"] == "accepted"] + last


@pytest.mark.parametrize("rule", ["token", "block", "match", "coupled"])
def test_the_record_is_the_text_and_recording_changes_none_of_it(rule: str) -> None:
    replay, out = recorded(rule)
    plain = Engine(TARGET, Independent(DRAFT), verify=rule, policy=Fixed(3), rows=2)
    same = plain.generate(PROMPTS, max_new_tokens=14, sampling=SAMPLING, seed=3)
    assert out.tokens == same.tokens
    texts: list[list[int]] = [[] for _ in PROMPTS]
    for row in steps(replay):
        assert row["start"] == len(texts[row["row"]])
        texts[row["row"]] += emitted(row)
    assert texts == out.tokens
    assert len(steps(replay)) == out.stats.target_calls
    kinds = {row["last"]["kind"] for row in steps(replay) if row["last"]}
    assert kinds == {"corrected", "bonus"} and replay["rule"] == rule


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_p_and_q_are_those_of_drafting_and_verification(rule: str) -> None:
    texts = [list(prompt) for prompt in PROMPTS]
    for row in steps(recorded(rule)[0]):
        text, ids = texts[row["row"]], [draft["id"] for draft in row["drafts"]]
        if ids:
            at = torch.arange(len(ids))
            with torch.no_grad():
                p, q = (
                    model(torch.tensor([text + ids])).logits[0, len(text) - 1 :].div(0.8).softmax(-1)[at, ids]
                    for model in (TARGET, DRAFT)
                )
            for name, probs in (("p", p), ("q", q), ("ratio", p / q)):
                assert [draft[name] for draft in row["drafts"]] == pytest.approx(probs.tolist(), rel=1e-9)
        text += emitted(row)


def test_u_is_what_the_token_rule_compared_with_the_ratio() -> None:
    all_drafts = drafts(recorded()[0])
    states = [draft["state"] for draft in all_drafts]
    assert min(map(states.count, ("accepted", "refused", "unread"))) > 2
    for draft in all_drafts:
        if draft["state"] != "unread":
            assert (draft["u"] < draft["ratio"]) == (draft["state"] == "accepted")
    assert all(draft["u"] is None for draft in drafts(recorded("coupled")[0]))


def test_certain_drafts_have_q_1() -> None:
    all_drafts = drafts(recorded(proposer=NGram())[0])
    assert all_drafts and all(draft["q"] == 1 and draft["ratio"] == draft["p"] for draft in all_drafts)


def test_a_row_that_ends_on_a_draft_has_no_last_token_and_no_refusal() -> None:
    replay, out = recorded(proposer=Independent(TARGET), sampling=Sampling(temperature=0.8, stop_ids=STOPS))
    ends = [row for row in steps(replay) if row["last"] is None]
    assert ends and all(out.finish[row["row"]] == "stop" for row in ends)
    assert all(emitted(row)[-1] in STOPS for row in ends)
    assert not [draft for row in ends for draft in row["drafts"] if draft["state"] == "refused"]
    assert any(draft["state"] == "unread" for row in ends for draft in row["drafts"])


def test_a_call_is_recorded_anew_up_to_so_many_rounds_and_nothing_without_a_recorder() -> None:
    record = Recorder(most=2)
    engine = Engine(TARGET, Independent(DRAFT), policy=Fixed(2), rows=2, record=record)
    for prompts in (PROMPTS, [[3, 4]]):
        engine.generate(prompts, max_new_tokens=12, sampling=SAMPLING)
        assert len(record.rounds) == 2 and record.prompts == prompts
    engine.record = None
    engine.generate(PROMPTS, max_new_tokens=4)
    assert record.prompts == [[3, 4]]


def test_nodes_of_a_tree_are_rejected_before_an_accepted_sibling_and_at_the_end_of_the_path() -> None:
    #  0   1        the anchor's children
    #      2 3 4    of 1
    #        5      of 3
    parents, x = [-1, -1, 1, 1, 1, 3], torch.tensor([[10, 11, 12, 13, 14, 15]])
    proposal = Proposal(x, None, [6], Tree(parents))
    p, u = (torch.rand(1, 7, 20).softmax(-1), torch.rand(1, 6))
    states = {}
    for path, emitted in (([1, 3, 5], 4), ([1], 2), ([], 1), ([1, 3], 3)):
        record, padded = Recorder(), torch.tensor([(path + [-1] * 3)[:3]])
        row: Any = SimpleNamespace(text=[7], prompt=1, index=0, emitted=emitted)
        record.begin("tree", [row])
        traced = trace(p, proposal, u, torch.tensor([6]), padded)
        record.note([row], [0], proposal, [[len(path), 8, 3, 0, 0, *x[0, padded[0]].tolist(), *traced[0].tolist()]])
        replay = record.replay()
        validate_replay(replay)
        (one,) = steps(replay)
        states[tuple(path)] = "".join(draft["state"][0] for draft in one["drafts"]), one["last"]["kind"]
        assert [draft["parent"] for draft in one["drafts"]] == parents
        assert [draft["p"] for draft in one["drafts"]] == [float(p[0, on + 1, 10 + i]) for i, on in enumerate(parents)]
        assert [draft["u"] for draft in one["drafts"]] == [float(number) for number in u[0]]
    assert states == {
        (1, 3, 5): ("raraua", "bonus"),
        (1,): ("rarrru", "corrected"),
        (): ("rruuuu", "corrected"),
        (1, 3): ("raraur", "corrected"),
    }


def test_texts_are_pieces_of_the_whole_text() -> None:
    words = tokenizer()
    ids = words("count the values, and count them")["input_ids"]
    row: Any = SimpleNamespace(text=ids[:2], prompt=2, index=0, emitted=len(ids) - 2)
    x = torch.tensor([ids[2:-1]])
    record, proposal = Recorder(), Proposal(x, None, [len(x[0])])
    record.begin("token", [row])
    traced = trace(torch.rand(1, len(x[0]) + 1, 300), proposal, None, torch.tensor([len(x[0])]), None)
    record.note([row], [0], proposal, [[len(x[0]), ids[-1], len(x[0]), 0, 0, 0, *ids[2:-1], *traced[0].tolist()]])
    replay = record.replay(words)
    (one,) = steps(replay)
    joined = replay["rows"][0]["prompt"] + "".join(draft["text"] for draft in one["drafts"]) + one["last"]["text"]
    assert joined == words.decode(ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.update(rule=None), "replay.rule must be str"),
        (lambda one: one["rounds"][0][0].update(row=9), r"rounds\[0\]\[0\].row is 9, but there are 5 rows"),
        (lambda one: one["rounds"][0][0]["drafts"][1].update(parent=1), "parent is 1: it must be -1 or an earlier"),
        (lambda one: one["rounds"][0][0]["drafts"][0].update(state="won"), "state is 'won'"),
        (lambda one: one["rounds"][0][0]["last"].update(kind="won"), "kind is 'won'"),
        (
            lambda one: [
                draft.update(state=state)
                for draft, state in zip(one["rounds"][0][0]["drafts"], ("refused", "accepted"), strict=False)
            ],
            "is accepted, but its parent, draft 0, is refused",
        ),
    ],
)
def test_an_impossible_record_is_an_error(change: Any, message: str) -> None:
    replay = deepcopy(recorded()[0])
    change(replay)
    with pytest.raises(ValueError, match=message):
        validate_replay(replay)


@pytest.mark.parametrize("tree", [None, [-1, -1, 0]])
def test_the_recorded_texts_are_drafted_and_sampled_as_those_that_were_timed(tree: Any) -> None:
    record, request = Recorder(), dict[str, Any]()
    engine = SimpleNamespace(record=None, generate=lambda prompts, **traced: request.update(traced, prompts=prompts))
    record.begin("token", [])

    class Known(Plan):
        def engine(self, k: int, rows: int | None = None, proposer: Any = None) -> Any:
            request.update(k=k, rows=rows, tree=self.tree)
            return engine

    bench: Any = SimpleNamespace(new_tokens=40, seed=5)
    nothing: Any = None
    target: Any = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
    plan = Known(
        target,
        nothing,
        nothing,
        SAMPLING,
        "block",
        bench,
        ("target", "draft"),
        given=Prompts(((1, 2),), ((3, 4), (5, 6)), "own"),
    )
    extra = {"planned_k": 3, "planned_shape": tree, "planned_rule": "tree", "planned_likeliest": False}
    measurement.recorded(plan, extra)
    assert (request["sampling"], request["seed"], request["max_new_tokens"]) == (SAMPLING, 5, 40)
    assert [tuple(one) for one in request["prompts"]] == [(3, 4), (5, 6)] * 2  # of those that time what is exported
    assert (request["k"], request["tree"] and list(request["tree"].parents)) == (2 if tree else 3, tree)
