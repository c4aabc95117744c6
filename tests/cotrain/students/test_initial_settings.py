"""A draft that goes on from a folder keeps what the folder says of its settings, or is refused: no setting is lost."""

from pathlib import Path
from typing import Any

import pytest

from cotrain.config.drafts import DRAFTS, OF_KINDS
from cotrain.config.groups import Init
from cotrain.students.base import KINDS, SHAPE, student_class
from inference.models.pretrained import load_model
from tests.draft_folders import BARE, draft_folder
from tests.folders import VOCABULARY, target_folder
from tests.often import EACH_WAY, often

# what each setting of a kind may be, other than its default; "datastore" names files and is tested with look-up
OTHER: dict[str, Any] = {
    "mask": ["bidirectional", "causal"],
    "markov": [3, 5],
    "depths": [2, 5],
    "rank": [1, 3],
    "vocabulary": [20, 40],
    "head_rank": [2, 5],
    "temperatures": [[0.0, 0.5], [0.3, 0.9]],
}
TRAINED = [kind for kind in KINDS if DRAFTS[kind].trained]
# these begin as another kind does, whose settings stand for theirs
AS = {
    "conditioned": "independent",
    "hybrid": "independent",
    "hybrid_exit": "early_exit",
    "p_eagle": "eagle",
    "hydra": "medusa",
}
CASES = [
    (kind, key)
    for kind in TRAINED
    for key in DRAFTS[kind].model_fields
    if key in OTHER and (kind not in AS or key not in DRAFTS[AS[kind]].model_fields)
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target") / "target")


def test_every_setting_of_a_kind_is_here() -> None:
    assert OF_KINDS - {"path"} - set(OTHER) - set(SHAPE) == {
        "datastore",
        "head",
        "shortest",
        "bits",
        "inner",
        "encoder_layers",
    }  # of look-up, of block, always given, of kinds without training, and of encoder-decoders


def stated(network: Any) -> dict[str, Any]:
    """What the folder of a network says of its drafts."""
    config = network.config.to_dict()
    names = (
        "depths",
        "pard_depths",
        "num_heads",
        "rank",
        "draft_vocab_size",
        "head_rank",
        "draft_temperatures",
        "causal",
        "markov_rank",
    )
    return {name: config[name] for name in names if name in config}


@pytest.mark.parametrize(
    ("kind", "key"),
    often(CASES, lambda case: case[0] in EACH_WAY or case[1] == "temperatures"),
    ids=lambda one: str(one),
)
def test_no_setting_of_the_folder_is_lost(kind: str, key: str, target: Path, tmp_path: Path) -> None:
    model, folders = load_model(str(target)), []
    for number, value in enumerate(OTHER[key]):
        folder = draft_folder(tmp_path / str(number), target, kind, **{key: value})
        folders.append(stated(student_class(kind).load(folder, model, VOCABULARY).network))
        known = {**BARE, "layers": None}
        draft = DRAFTS[kind](
            path=str(folder), **{key: known[key] for key in DRAFTS[kind].model_fields.keys() & known.keys() - {"path"}}
        )
        try:
            again = student_class(kind).initial(draft, Init(kind="pretrained", layers=[0]), model)
        except ValueError as error:
            assert any(f"draft.{one}" in str(error) for one in DRAFTS[kind].model_fields)
            continue
        assert stated(again) == folders[-1]
    assert folders[0] != folders[1]  # else `stated` does not see this setting
