"""Settings that only some kinds of draft have: who takes which, and that nobody ignores one."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pydantic import ValidationError

from cotrain.config.base import NEW
from cotrain.config.drafts import DRAFTS, OF_KINDS
from cotrain.config.settings import checked, refuse_unread
from cotrain.students.base import KINDS, SHAPE
from cotrain.training import assembly
from cotrain.training.fit import _rounded
from inference.models.pretrained import load_model
from tests.draft_folders import draft_folder
from tests.folders import target_folder
from tests.often import often
from tests.settings import composed
from tests.tiny import tiny

TAKES = {
    "independent": {*SHAPE, "vocabulary", "head_rank"},
    "conditioned": {*SHAPE, "temperatures", "vocabulary", "head_rank"},
    "eagle": {"intermediate", "head_dim", "kv_heads", "depths", "vocabulary", "head_rank"},
    "p_eagle": {"intermediate", "head_dim", "kv_heads", "depths", "vocabulary", "head_rank", "markov"},
    "block": {*SHAPE, "depths", "vocabulary", "head_rank", "head", "mask", "markov"} - {"width"},
    "early_exit": {"layers", "rank", "bits", "depths"},
    "parallel": {*SHAPE, "depths", "vocabulary", "head_rank", "markov"},
    "medusa": {"layers", "depths", "markov"},
    "hydra": {"layers", "depths"},
    "retrieval": {"datastore", "shortest"},
    "hybrid": {*SHAPE, "datastore", "shortest", "vocabulary", "head_rank"},
    "hybrid_exit": {"layers", "rank", "bits", "depths", "datastore", "shortest"},
    "quantised": {"bits"},
    "hybrid_quantised": {"bits", "datastore", "shortest"},
    "two_levels": {"bits", "inner"},
}
VALUES = {
    "datastore": "/nowhere",
    "shortest": 3,
    "rank": 4,
    "depths": 2,
    "vocabulary": 9,
    "head_rank": 5,
    "encoder_layers": 1,
    "bits": 4,
    "inner": 2,
    "width": 256,
    "layers": 2,
    "intermediate": 96,
    "head_dim": 32,
    "kv_heads": 2,
    "temperatures": [0.0, 1.0],
    "head": "target",
    "mask": "causal",
    "markov": 3,
}


def said(kind: str, init: str = "scratch", **changed: Any) -> str:
    """What a run of this kind says against its settings, "" where it begins."""
    values = composed(f"draft={kind}", f"init={init}", "init.layers=[0]").model_dump(by_alias=True)
    values["draft"] |= changed
    try:
        assembly.initial(checked("train", OmegaConf.create(values)), tiny())
    except (ValueError, OSError) as error:
        return str(error)
    return ""


# others have the settings of one of these, or some of them
OFTEN = {"independent", "eagle", "p_eagle", "medusa", "early_exit", "retrieval", "two_levels", "conditioned", "block"}


@pytest.mark.parametrize("kind", often(KINDS, OFTEN.__contains__))
def test_a_kind_takes_what_it_has_and_refuses_the_rest(kind: str) -> None:
    assert set(TAKES) == set(KINDS) and set(VALUES) | {"path"} == OF_KINDS
    for key, value in VALUES.items():
        try:
            DRAFTS[kind].model_validate({"kind": kind, key: value})
            refused = False
        except ValidationError as error:
            refused = error.errors()[0]["type"] == "extra_forbidden"
        if key == "encoder_layers" and not refused:  # of a target without an encoder
            refused = f"draft.{key}={value}: {kind} drafts have none with" in said(kind, **{key: value})
        assert refused is (key not in TAKES[kind]), key
    assert "do not have it" not in said(kind)
    assert "draft.inner=2: medusa drafts do not have it; they have draft." in said("medusa", inner=2)


@pytest.mark.parametrize("kind", ["independent", "eagle", "retrieval", "quantised"])
def test_where_weights_come_from_is_said_once(kind: str) -> None:
    if not DRAFTS[kind].trained:
        assert f"init=pretrained: {kind} drafts are not trained; set init=scratch" in said(kind, "pretrained")
        assert f"draft.quantisation=int8: {kind} drafts are not trained" in said(kind, quantisation="int8")
    else:
        assert "draft.path=/nowhere has no effect with init=scratch: set init=pretrained" in said(kind, path="/nowhere")
        assert "has no effect with init=" not in said(kind, "pretrained", path="/nowhere")


# another value of every setting of draft.* and init.*, each typed alone
CHANGED: dict[str, Any] = {f"draft.{key}": value for key, value in VALUES.items()} | {
    "draft.quantisation": "int8",
    "draft.bits": 4,
    "draft.path": "/nowhere",
    "init.layers": [1],
}
ONE_GUESS = ("independent", "conditioned", "hybrid")  # by test_every_student: one guess, of depth ANY
SIZES = {"width": 128, "layers": 1, "intermediate": 64, "head_dim": 64, "kv_heads": 1, "temperatures": [0.0, 0.7, 1.0]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with two heads, and a draft folder of every kind that can begin with one."""
    place = tmp_path_factory.mktemp("settings")
    target_folder(place / "target", layers=3, hidden=128)
    for kind in KINDS:
        if DRAFTS[kind].trained:
            draft_folder(place / kind, place / "target", kind)
    return place


@pytest.fixture(scope="module")
def target(folders: Path) -> Any:
    return load_model(str(folders / "target"))


def begun(kind: str, init: str, folders: Path) -> Any:
    """Settings of a run of this kind that can begin."""
    cfg = composed(f"draft={kind}")
    for key in SIZES.keys() & DRAFTS[kind].model_fields.keys():
        setattr(cfg.draft, key, SIZES[key])
    if kind == "two_levels" or (init == "pretrained" and DRAFTS[kind].trained):
        cfg.draft.path = str(folders / ("independent" if kind == "two_levels" else kind))
    cfg.init.kind, cfg.init.layers = init, [0] if init == "target_layers" else []
    return cfg


def made(cfg: Any, target: Any, key: str = "label", value: Any = "typed") -> str:
    """What a run says against a setting that is typed, or else the draft that it makes and how it learns."""
    group, _, name = key.rpartition(".")
    if key.startswith("draft.") and name not in type(cfg.draft).model_fields:
        return f"refused: {key}={value}"
    of = getattr(cfg, group) if group else cfg
    before = copy.deepcopy(getattr(of, name))
    setattr(of, name, value)
    torch.manual_seed(0)
    try:
        refuse_unread(cfg, [f"{key}={value}"])
        network = assembly.initial(cfg, target)
    except (ValueError, OSError) as error:
        return f"refused: {error}"
    finally:
        rounded = [one.kind for one in _rounded(SimpleNamespace(cfg=cfg))]  # type: ignore[arg-type]
        setattr(of, name, before)
    weights = {name: (tuple(one.shape), float(one.double().norm())) for name, one in network.state_dict().items()}
    return f"{network.config.to_json_string(use_diff=False)} {weights} {rounded}"


@pytest.mark.parametrize(
    ("kind", "init"),
    often(
        # hybrids, p_eagle and hydra as others
        [
            (kind, init)
            for kind in KINDS
            if kind not in ("hybrid", "hybrid_exit", "p_eagle", "hydra")
            for init in (*NEW.inits, "pretrained")
        ],
        lambda case: case[1] == "scratch" or case[0] in ("independent", "retrieval"),
    ),
)
def test_every_setting_of_a_draft_changes_it_or_is_refused(
    kind: str, init: str, folders: Path, target: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = begun(kind, init, folders)
    before = made(cfg, target)
    if init == "pretrained" and not DRAFTS[kind].trained:
        assert "are not trained; set init=scratch" in before
        return
    assert not before.startswith("refused")
    for key, value in CHANGED.items():
        after = made(cfg, target, key, value)
        if key == "init.layers" and after == before:  # a line, since a sweep over kinds gives it to all
            assert f"{key}={value}: the setting has no effect here: {kind} drafts" in capsys.readouterr().err
            continue
        assert after != before, key
        assert not after.startswith("refused") or f"{key}={value}" in after or f"{key}:" in after, after


@pytest.mark.parametrize("kind", [kind for kind in KINDS if DRAFTS[kind].trained])
def test_the_weights_of_depths_are_refused_where_one_distribution_serves_all(kind: str) -> None:
    cfg, said = composed(f"draft={kind}"), ""
    try:
        refuse_unread(cfg, ["loss.decay=0.5"])
    except ValueError as error:
        said = str(error)
    assert said.startswith("loss.decay=0.5: the setting has no effect here") == (kind in ONE_GUESS)
    if kind.endswith("_exit"):
        cfg.draft.rank = 0
        for key in ("loss.decay=0.5", "draft.depths=2"):
            with pytest.raises(ValueError, match=f"{key}: the setting has no effect here"):
                refuse_unread(cfg, [key])


@pytest.mark.parametrize("kind", KINDS)
def test_two_ways_to_begin_differ_or_are_said_to_be_one(
    kind: str, folders: Path, target: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = [made(begun(kind, init, folders), target) for init in NEW.inits]
    made(begun(kind, "scratch", folders), target, "init.kind", "scratch")
    line = f"init.kind=scratch: the setting has no effect here: {kind} drafts begin in one way"
    assert (line in capsys.readouterr().err) == (ways[0] == ways[1])
