"""Draft folders that were served otherwise than they were measured, or not at all."""

from dataclasses import replace
from pathlib import Path

from inference import load
from inference.drafts.draft_folder import ServedAs, describe, read
from tests.cases import case
from tests.draft_folders import draft_folder
from tests.folders import target_folder


@case("folder's rule")
def test_a_folder_that_was_measured_with_block_is_served_with_it(tmp_path: Path) -> None:
    path = draft_folder(tmp_path / "draft", target_folder(tmp_path / "target"), "independent")
    metadata = read(path).metadata
    assert metadata is not None and load(path).rule.name == "token"
    describe(path, replace(metadata, served=ServedAs(verify="block")))
    assert load(path).rule.name == "block" and load(path, verify="match").rule.name == "match"
