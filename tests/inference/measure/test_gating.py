"""Calibration of the gate between look-up and a model."""

import pytest

from inference import Engine, Sampling
from inference.measure import gating
from inference.measure.costs import RealRound
from inference.measure.gating import gate_records
from inference.output import Counts, Output, Stats
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.retrieval import Retrieval
from tests.tiny import near, tiny


def test_a_gate_has_the_measured_cost_of_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {0: RealRound(0.0, 1.0, 0.25), 4: RealRound(0.5, 1.5, 0.375)}
    monkeypatch.setattr(gating, "of_stats", lambda _, k: spent[k])
    drafting = Engine(tiny(), Independent(near(tiny())), policy=Fixed(4))
    result = gating.calibrate(drafting, Engine(tiny()), Retrieval(), [[3, 5], [7]], sampling=Sampling(), new_tokens=8)
    assert (result.step, result.column) == pytest.approx((0.1, 0.125))  # of a plain step of 1.25 s


def test_records_of_a_gate_are_matches_and_acceptance_at_each_token() -> None:
    prompt, text, starts = [1, 2, 3, 1], [2, 3, 9, 1, 2, 3, 1, 2, 3], [0, 3, 4, 8]
    stats = Stats(rows=[Counts(), Counts(starts=starts)])
    result = gate_records(Retrieval(shortest=1), prompt, Output([[], text], None, [], stats), 1, 3)
    assert [place.accepted for place in result] == [2, None, None, 0, 3, *[None] * 4]  # rounds of full length alone
    for t, place in enumerate(result):
        right = 0
        while right < min(len(place.match.drafts), len(text) - t) and place.match.drafts[right] == text[t + right]:
            right += 1
        assert place.right == right
    assert {place.right for place in result} >= {0, 2}
