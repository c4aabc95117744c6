"""Commands take a draft folder of every kind that is trained here."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cotrain.bench import server_parity
from cotrain.bench.measurement import Plan
from cotrain.cli import main
from cotrain.students.base import KINDS
from inference import Engine, Sampling, load
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Metadata
from inference.lookup.corpus import About, Datastore
from inference.servers.openai_client import Served
from tests.draft_folders import draft_folder
from tests.folders import VOCABULARY, network, own_texts, target_folder, tokenizer

EVERY = [*KINDS, "retrieval, datastore"]
TIMED = """bench.prompts=2 bench.quick_prompts=1 bench.prompt_tokens=8 bench.new_tokens=8 bench.parity_tokens=8
bench.minutes=0 bench.depths=[2]""".split()
PROMPT = "0001 one, 0001 "


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a datastore and texts."""
    place = tmp_path_factory.mktemp("kinds")
    target_folder(place / "target")
    own_texts(place / "own.jsonl", 60)
    texts = [json.loads(line)["text"] for line in (place / "own.jsonl").read_text(encoding="utf-8").splitlines()]
    Datastore.of([tokenizer()(text).input_ids for text in texts], About(VOCABULARY, 8)).save(place / "store")
    return place


@pytest.fixture(scope="module")
def plain(place: Path) -> str:
    """What the target alone says behind the prompt."""
    engine = Engine(str(place / "target"))
    return str(engine.generate([PROMPT], max_new_tokens=8, sampling=Sampling(temperature=0)).text[0])


def drafted(place: Path, kind: str) -> Path:
    name, _, store = kind.partition(", ")
    settings = {"datastore": str(place / "store")} if store else {}
    return place / kind if (place / kind).is_dir() else draft_folder(place / kind, place / "target", name, **settings)


def generated(folder: Path, capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    capsys.readouterr()
    assert main(["generate", f"draft.path={folder}", f"prompt={PROMPT}", "max_new_tokens=8", "regime=t0", *settings]) == 0
    return capsys.readouterr().out.removesuffix("\n")


@pytest.mark.parametrize("kind", EVERY)
def test_a_folder_is_measured_and_decodes(
    kind: str, place: Path, plain: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = drafted(place, kind), place / f"bench of {kind}"
    assert main(["bench", f"draft.path={folder}", f"output={output}", *TIMED]) == 0
    report = json.loads((output / "report.json").read_text())
    assert report["exactness"]["passed"], report["exactness"]["lines"]
    assert report["extra"]["kind"] == kind.partition(",")[0] and report["settings"]["draft"] == str(folder)
    assert generated(folder, capsys) == plain
