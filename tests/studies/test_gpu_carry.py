"""What travels to a machine with a GPU: without one package the whole of its time is lost."""

from pathlib import Path

from studies.gpu_carry import lacking


def test_every_imported_package_is_carried_or_there() -> None:
    assert not lacking(Path(__file__).parents[2])


def test_a_new_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "cotrain").mkdir()
    (tmp_path / "cotrain" / "new.py").write_text("import json\nimport torch.nn\nfrom unheard_of.inner import one\n")
    assert lacking(tmp_path) == {"unheard_of"}
