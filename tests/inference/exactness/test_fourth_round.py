"""What a fourth round of planted bugs survived, and faults that were found on the way."""

from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.bench import measurement, quantisation_table
from cotrain.config.groups import Trainer
from cotrain.config.resume import kind
from cotrain.page.first_screen import floor
from cotrain.page.loaded_run import load
from cotrain.students import hybrid
from inference import Engine, Sampling
from inference.drafts.compatibility import hash_target
from inference.exactness.figures import Figures
from inference.exactness.forced_trees import close_ranks
from inference.lookup.corpus import About, Datastore
from inference.lookup.suffix_automaton import SuffixAutomaton
from inference.measure import gating
from inference.measure.adaptive import Wanted, until_known
from inference.measure.arms import Arm, ArmResult
from inference.measure.costs import measure_costs
from inference.measure.real_costs import RealRound
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.eagle import Eagle
from inference.proposers.gate import Gate
from inference.proposers.hybrid import Hybrid
from inference.proposers.retrieval import Retrieval
from tests import kinds, pages, standin
from tests.cotrain.bench.test_third_round import plan
from tests.inference.proposers.test_hybrid import gate, prompts
from tests.inference.test_drafting import calls  # noqa: F401 - a fixture
from tests.tiny import near, tiny

# --- engine and proposers


def test_what_look_up_drafts_is_not_taken_for_stored(calls: list[int]) -> None:  # noqa: F811
    """A draft that makes all of its tokens at once makes them for rows, too, that look-up drafts for."""
    found, target = [], tiny(seed=3)
    for compile in (False, True):
        beside = Hybrid(Independent(target, compile=compile), Retrieval(shortest=1), gate({1, 2, 3, 5}))
        engine = Engine(target, beside, rows=7, policy=Fixed(4))
        found.append(engine.generate(prompts(), max_new_tokens=80, seed=3, ignore_eos=True))
    assert calls and found[0].tokens == found[1].tokens and found[0].stats.rows == found[1].stats.rows


def test_costs_beside_look_up_are_of_as_many_drafts_as_are_asked_for(calls: list[int]) -> None:  # noqa: F811
    beside = Hybrid(Independent(near(tiny()), compile=True), Retrieval(), gate(set()))
    measure_costs(LM(tiny(), 2), beside, 3, context=20, repeats=2)
    assert set(calls) == {2, 8} and calls.count(2) > calls.count(8)


def test_a_row_whose_slot_may_hold_nan_gets_a_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a round without drafts too: those of an earlier round may be to blame."""
    engine = Engine(tiny(), policy=Fixed(0))
    wanted = engine.generate([[3, 5]], max_new_tokens=6, seed=1, ignore_eos=True).tokens
    for stained in (True, False):
        run, read, rounds = engine.begin([[3, 5]], 6, Sampling(), 1, None, True), engine.target.forward, iter(range(9))

        def once(*given: Any, read: Any = read, rounds: Any = rounds, **settings: Any) -> Any:
            found = read(*given, **settings)
            return found._replace(logits=found.logits * torch.nan) if next(rounds) == 2 else found

        monkeypatch.setattr(engine.target, "forward", once)
        run.rows[0].stained = stained
        for _ in engine.rounds(run):
            pass
        monkeypatch.undo()
        assert run.rows[0].finish == ("length" if stained else "error")
        assert run.rows[0].new == (wanted[0] if stained else wanted[0][:2])


def test_a_feature_draft_reads_all_of_a_text_that_grows() -> None:
    """Recorded rounds of few slots and of more, while the slots stay."""
    monkeys = [[i % 30 + 1 for i in range(n)] for n in (3, 9)]

    def text(device: str) -> list[list[int]]:
        target = tiny().to(device)
        engine = Engine(target, Eagle(kinds.eagle(target).to(device)), policy=Fixed(3), rows=2, compile=device != "cpu")
        return engine.generate(monkeys, max_new_tokens=50, seed=2, ignore_eos=True).tokens

    wanted = text("cpu")
    with standin.device():
        assert text("cuda") == wanted


def test_the_longer_match_is_taken_wherever_it_stood() -> None:
    """Of a text's own end of three tokens, and one of two in the datastore."""
    retrieval = Retrieval(Datastore.of([[7, 8, 30]], About(32, 8)), shortest=1)
    retrieval.rows = [SuffixAutomaton()]
    (own,) = retrieval.find([[6, 7, 8, 9, 6, 7, 8]], [2])
    assert not own.stored and own.drafts[0] == 9 and own.length == 3
    (stored,) = retrieval.find([[8, 9, 7, 8]], [2])
    assert stored.stored and stored.drafts == [30] and stored.length == 2


# --- verdict and figures


def test_a_tie_with_the_first_that_is_left_out_is_near() -> None:
    scores = torch.tensor([[5.0, 3.0, 2.99, 0.0], [5.0, 3.0, 1.0, 0.0], [5.0, 4.99, 1.0, 0.0]])
    assert close_ranks(scores, 2, 0.1).tolist() == [True, False, True]
    assert close_ranks(scores, 1, 0.1).tolist() == [False, False, True]
    assert close_ranks(scores, 4, 0.1).tolist() == [True, False, True]


def test_a_draft_that_rounding_could_turn_counts_once() -> None:
    """Whatever the depths that it is near at."""
    nothing, close = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, 2, dtype=torch.bool)
    close[0, 1] = True
    depths, lengths = torch.full((1, 3), 2), torch.tensor([3])
    whole = Figures(nothing, nothing.unsqueeze(2), nothing.unsqueeze(2), nothing > 0, close, depths, lengths)
    assert whole.near == 1 and replace(whole, near_q=close[..., 0]).near == 1


def test_prompts_that_come_again_have_other_noise() -> None:
    met: list[tuple[int, int]] = []

    def run(prompts: Any, ids: Any, seed: int) -> ArmResult:
        met.append((prompts[0][0], seed))
        return ArmResult([[0]], 1.0, 1.0)

    until_known([Arm("a", run)], [[1], [2], [3]], 1, ("a", "a"), Wanted(7), seed=5, clock=lambda: 0.0)
    warm, *timed = met
    assert warm == (1, 5) and timed == [(1, 5), (2, 5), (3, 5), (1, 6), (2, 6), (3, 6), (1, 7)]


def test_parity_says_one_difference_in_words_and_figures() -> None:
    found = measurement.parity(plan(), 2)
    assert found and found["relative"] and f" {found['relative']:+.2%};" in found["line"]


def test_a_gate_knows_what_one_column_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {0: RealRound(0.0, 1.0, 0.25), 4: RealRound(0.5, 1.5, 0.375)}
    monkeypatch.setattr(gating, "of_stats", lambda _, k: spent[k])
    drafting = Engine(tiny(), Independent(near(tiny())), policy=Fixed(4))
    found = gating.calibrate(
        drafting, Engine(tiny()), Retrieval(), [[3, 5], [7]], sampling=Sampling(), new_tokens=8
    )  # fmt: skip
    assert (found.step, found.column) == pytest.approx((0.1, 0.125))  # of a plain step of 1.25 s


def test_a_gate_on_a_gpu_is_of_rounds_as_they_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed there, where single launches take several times as long."""
    met: list[Any] = []
    monkeypatch.setattr(hybrid, "calibrate", lambda *engines, **_: met.extend(engines[:2]) or Gate.uncalibrated())
    for device in ("cpu", "cuda"):
        with standin.device() if device == "cuda" else nullcontext():
            asked = plan("hybrid")
            for model in (asked.target, asked.draft):
                torch.nn.Module.to(model, device)
            asked.draft.config.lookup = {"datastore": None, "shortest": 2}
            hybrid.prepare(asked)
            drafting, plain = met[-2:]
            assert {drafting.target.compiled, plain.target.compiled, drafting.proposer.compile} == {device == "cuda"}


def test_acceptance_in_the_table_of_weights_is_of_one_draft() -> None:
    """Of a draft with a distribution a depth, not the sum over its depths."""
    asked = plan("parallel")
    asked = replace(asked, draft=asked.target)
    asked.draft.config.pard_depths = 3
    held = quantisation_table._with(asked, "none")
    assert quantisation_table._cell(held, quantisation_table._texts(held), 3)["alpha"] == pytest.approx(1, abs=1e-4)


# --- runs, folders and the page


def test_whatever_a_trainer_is_told_makes_another_run_but_where_it_only_keeps_or_looks() -> None:
    free = {"validations", "patience", "remember_mb", "checkpoint_minutes", "cache", "threads", "accelerator", "logger"}
    longer = {"steps", "minutes"}
    others = {field.name for field in fields(Trainer)} - free - longer
    assert {kind(f"trainer.{name}", 1, 2) for name in free} == {"free"}
    assert {kind(f"trainer.{name}", 1, 2) for name in longer} == {"longer"}
    assert {name for name in others if kind(f"trainer.{name}", 1, 2) != "other"} == set() and "precision" in others


@pytest.mark.parametrize("change", [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"hidden_act": "gelu"},
    {"max_position_embeddings": 128}, {"tie_word_embeddings": True}, {"num_key_value_heads": 2},
])  # fmt: skip
def test_a_target_that_computes_otherwise_is_another(change: dict[str, Any]) -> None:
    """With the very tensors that the draft was made for: whoever serves it there is warned, or refused."""
    config, other = tiny().config, tiny().config
    for key, value in change.items():
        setattr(other, key, value)
    assert hash_target(config, None) == hash_target(tiny().config, None) != hash_target(other, None)


def test_the_floor_is_of_the_batch_that_was_timed(tmp_path: Path) -> None:
    report = pages.full_report()
    cell = report["extra"]["matrix"][0]
    temperature, rows = report["settings"]["sampling"]["temperature"], report["settings"]["rows"]
    shares = {rows + 1: 0.25, rows: 0.5}
    report["extra"]["matrix"] = [
        cell | {"temperature": temperature, "rows": at, "floor": cell["floor"] | {"round_share": share}}
        for at, share in shares.items()
    ]
    (run,) = load([pages.folder(tmp_path / "run", report)])
    assert floor(run).value == 0.5
