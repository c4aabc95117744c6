"""The manifest of a stored set of texts."""

from pathlib import Path

import pytest

from cotrain.rollout import training_texts


def test_a_set_stopped_before_its_manifest_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of the set that it replaces would describe other rows."""
    rows = [{"domain": "a", "prompt": [1], "completion": [2]}]
    training_texts.save_rows(rows, tmp_path / "train_T1", {"seed": 0})
    assert (training_texts.read_manifest(tmp_path / "train_T1") or {})["seed"] == 0

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training_texts, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        training_texts.save_rows(2 * rows, tmp_path / "train_T1", {"seed": 1})
    assert training_texts.read_manifest(tmp_path / "train_T1") is None
