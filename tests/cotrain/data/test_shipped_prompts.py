"""Shipped prompts: which of them rank drafts, and which measure them."""

import pytest

from cotrain.data import corpora as shipped_prompts
from cotrain.data.corpora import DOMAINS


def test_shipped_prompts_for_ranking_are_of_every_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"domain": DOMAINS[i % len(DOMAINS)], "text": str(i)} for i in range(90)]
    monkeypatch.setattr(shipped_prompts, "shipped", lambda _: rows)
    asked = lambda text: {"input_ids": [int(text)]}  # noqa: E731
    for prompts in shipped_prompts.shipped_ids(asked, 8):  # type: ignore[arg-type]
        each = [sum(rows[ids[0]]["domain"] == domain for ids in prompts) for domain in DOMAINS]
        assert len(set(each)) == 1 and each[0] > 0
    ranking, final = shipped_prompts.shipped_ids(asked, 8)  # type: ignore[arg-type]
    assert (len(ranking), len(final)) == (30, 60)
    domains = shipped_prompts.shipped_domains(asked, 8)  # type: ignore[arg-type]
    assert domains == {(i,): row["domain"] for i, row in enumerate(rows)}
