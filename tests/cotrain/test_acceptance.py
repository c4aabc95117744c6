"""Predicted speed-ups against published ones."""

import pytest

from cotrain.acceptance import iid_tau
from cotrain.planning.forecast import forecast
from inference.measure.costs import Costs
from tests.bench_stubs import rates_of

# task, K, alpha, c, predicted speed-up: Leviathan et al. 2023 (2211.17192), T5-XXL 11B
PUBLISHED = """
ende small 0: 7 .75 .02 3.2 | ende base 0: 7 .80 .04 3.3 | ende large 0: 7 .82 .11 2.5
ende small 1: 7 .62 .02 2.3 | ende base 1: 5 .68 .04 2.4 | ende large 1: 3 .71 .11 2.0
cnn small 0: 5 .65 .02 2.4 | cnn base 0: 5 .73 .04 2.6 | cnn large 0: 3 .74 .11 2.0
cnn small 1: 5 .53 .02 1.9 | cnn base 1: 3 .55 .04 1.8 | cnn large 1: 3 .56 .11 1.6
"""


@pytest.mark.parametrize("row", [r.strip() for r in PUBLISHED.replace("\n", "|").split("|") if r.strip()])
def test_published_table(row):
    K, alpha, cost, published = map(float, row.split(":")[1].split())
    costs = Costs(target=(1.0,) * (int(K) + 1), draft=cost, rest=(0.0,) * (int(K) + 1))
    chains = forecast(rates_of([iid_tau(alpha, k) for k in range(1, int(K) + 1)]), costs)
    assert chains.speedups[int(K)] == pytest.approx(published, abs=0.07)
