"""Settings that only some kinds of draft have: who takes which, and that nobody ignores one."""

from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.config.groups import Init
from cotrain.students.base import KINDS, OPTIONAL, student_class
from cotrain.training import assembly
from tests.cotrain.config.test_settings_reach import composed
from tests.tiny import tiny

TAKES = {
    "independent": {"vocabulary", "head_rank"},
    "conditioned": {"temperatures", "vocabulary", "head_rank"},
    "eagle": {"depths", "vocabulary", "head_rank"},
    "p_eagle": {"depths", "vocabulary", "head_rank", "markov"},
    "block": {"depths", "vocabulary", "head_rank", "mask", "markov"},
    "early_exit": {"rank", "depths"},
    "parallel": {"depths", "vocabulary", "head_rank", "markov"},
    "medusa": {"depths", "markov"},
    "hydra": {"depths"},
    "retrieval": {"datastore", "shortest"},
    "hybrid": {"datastore", "shortest", "vocabulary", "head_rank"},
    "quantised": {"bits"},
    "two_levels": {"bits", "inner"},
}
VALUES = {"datastore": "/nowhere", "shortest": 3, "rank": 4, "depths": 2, "vocabulary": 9, "head_rank": 5,
          "encoder_layers": 1, "bits": 8,
          "inner": 2, "temperatures": [0.0, 1.0], "mask": "causal", "markov": 3}  # fmt: skip


def said(kind: str, init: str = "scratch", **changed: Any) -> str:
    """What a run of this kind says against its settings, "" where it begins."""
    draft = composed(f"draft={kind}").draft
    for key, value in changed.items():
        setattr(draft, key, value)
    try:
        assembly.initial(SimpleNamespace(draft=draft, init=Init(init, [0])), tiny())  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_takes_what_it_has_and_refuses_the_rest(kind: str) -> None:
    assert set(TAKES) == set(KINDS) and set(VALUES) == set(OPTIONAL)
    for key, value in VALUES.items():
        refused = f"draft.{key}={value}: {kind} drafts do not have it" in said(kind, **{key: value})
        assert refused is (key not in TAKES[kind]), key
    assert "do not have it" not in said(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_where_weights_come_from_is_said_once(kind: str) -> None:
    if not student_class(kind).trained:
        assert f"init=pretrained: {kind} drafts are not trained; set init=scratch" in said(kind, "pretrained")
        assert f"draft.quantisation=int8: {kind} drafts are not trained" in said(kind, quantisation="int8")
    else:
        assert "draft.path=/nowhere: it is read only with init=pretrained, not with init=scratch" in said(
            kind, path="/nowhere"
        )
        assert "it is read only with" not in said(kind, "pretrained", path="/nowhere")
