"""Parity of drafts in a report."""

from cotrain.bench import measurement
from tests.cotrain.bench.test_measurement import plan
from tests.inference.test_drafting import calls  # noqa: F401 - a fixture


def test_parity_has_one_difference_in_words_and_figures() -> None:
    result = measurement.parity(plan(), 2)
    assert result and result["relative"] and f" {result['relative']:+.2%};" in result["line"]
