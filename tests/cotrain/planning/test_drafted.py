"""Acceptance by domain in a plan."""

import pytest
import torch

from cotrain.planning.drafted import by_domain, domains_of
from cotrain.planning.forecast import acceptance, mean_acceptance
from inference.source import SourcedText
from tests.cotrain.planning.test_forecast import K, figures

LENGTHS = torch.tensor([30, 21, 12, 30])


def test_each_domain_has_the_figures_of_its_texts() -> None:
    torch.manual_seed(0)
    r = torch.rand(4, 30, dtype=torch.float64)
    whole = figures(r, LENGTHS)
    found = by_domain(whole, acceptance(whole, "token", K), ["code", "prose", "code", "prose"], "token")
    assert list(found) == ["code", "prose"]
    for name, mine in (("code", [0, 2]), ("prose", [1, 3])):
        alone = figures(r[mine], LENGTHS[mine])
        calls = acceptance(alone, "token", K)
        assert found[name]["texts"] == 2 and found[name]["alpha"] == pytest.approx(mean_acceptance(alone))
        assert found[name]["tau"] == pytest.approx([calls.tau(k) for k in range(K + 1)])
        assert found[name]["conditional"] == pytest.approx(calls.by_depth["conditional"])
    assert found["code"]["alpha"] != pytest.approx(found["prose"]["alpha"], abs=1e-3)


def test_one_domain_or_none_has_no_figures_of_its_own() -> None:
    whole = figures(torch.full((4, 30), 0.5, dtype=torch.float64), LENGTHS)
    calls = acceptance(whole, "token", K)
    assert by_domain(whole, calls, ["code"] * 4, "token") == by_domain(whole, calls, [], "token") == {}


def test_a_prompt_has_the_domain_of_its_ids_or_of_its_source() -> None:
    known = {(1, 2): "code", (3,): "prose"}
    assert domains_of(known, [[3], [1, 2]]) == ["prose", "code"]
    assert domains_of(known, [SourcedText([0], (1, 2)), SourcedText([0], (3,))]) == ["code", "prose"]
    assert domains_of({}, [[3]]) == []
