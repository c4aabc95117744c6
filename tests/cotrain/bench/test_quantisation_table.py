"""The table of quantised weights."""

from dataclasses import replace

import pytest

from cotrain.bench import quantisation_table
from tests.cotrain.bench.test_measurement import plan
from tests.inference.test_drafting import calls  # noqa: F401 - a fixture


def test_acceptance_in_the_table_of_weights_is_of_one_draft() -> None:
    """Of a draft with a distribution a depth, not the sum over its depths."""
    one_plan = plan("parallel")
    one_plan = replace(one_plan, draft=one_plan.target)
    one_plan.draft.config.pard_depths = 3
    held = quantisation_table._with(one_plan, "none")
    assert quantisation_table._cell(held, quantisation_table._texts(held), 3)["alpha"] == pytest.approx(1, abs=1e-4)
