"""`push_to_hub=` against a look-alike of the hub: what is written is what arrives, and refusals are one line."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from cotrain.cli import main
from tests.draft_folders import draft_folder
from tests.folders import target_folder
from tests.hub import TOKEN, Hub


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and drafts of it."""
    place = tmp_path_factory.mktemp("pushed")
    target = target_folder(place / "target")
    for kind in ("independent", "eagle", "medusa"):
        draft_folder(place / kind, target, kind)
    return place


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Answers where HF_ENDPOINT would name it; nobody is logged in on this machine."""
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a second protocol, which the look-alike lacks
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
        hub.shutdown()


def export(place: Path, output: Path, *settings: str, kind: str = "independent") -> int:
    return main(["export", f"draft.path={place / kind}", f"output={output}", *settings])


@pytest.mark.parametrize("kind", ["independent", "eagle", "medusa"])
def test_the_hub_gets_the_folder_with_a_card_that_names_it(
    kind: str, place: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ["layout=eagle3"] if kind == "eagle" else []
    assert export(place, tmp_path / "out", "push_to_hub=me/draft", *layout, kind=kind) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files == {"me/draft": written} and {"model.safetensors", "config.json"} <= set(written)
    card = written["README.md"].decode()
    assert '"me/draft"' in card and str(tmp_path) not in card
    said = capsys.readouterr()
    assert said.out.endswith(f"pushed: {hub.url}/me/draft\n")
    assert (
        f"warning: the README names a target on this machine, {place / 'target'}, which other people cannot" in said.err
    )


def test_a_second_push_replaces_the_files(place: Path, hub: Hub, tmp_path: Path) -> None:
    for k in (2, 3):
        assert export(place, tmp_path / "out", "push_to_hub=me/draft", f"k={k}", "overwrite=true") == 0
    assert b'"k": 3' in hub.files["me/draft"]["cotrain.json"]


@pytest.mark.parametrize(
    ("repo", "token", "said"),
    [
        ("draft", TOKEN, "push_to_hub=draft: it must be user/name"),
        ("me/dr aft", TOKEN, "push_to_hub=me/dr aft: Repo id must use alphanumeric chars"),
        (
            "me/draft",
            None,
            "push_to_hub=me/draft: there is no token of the hub: log in with `hf auth login`, or set HF_TOKEN",
        ),
        ("me/draft", "hf_other", "push_to_hub=me/draft: Invalid user token."),
    ],
)
def test_who_may_not_push_is_told_before_anything_is_written(
    repo: str,
    token: str | None,
    said: str,
    place: Path,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert export(place, tmp_path / "out", f"push_to_hub={repo}") == 1
    err = capsys.readouterr().err
    assert err.startswith(f"cotrain export: {said}") and err.count("\n") == 1
    assert not (tmp_path / "out").exists() and not hub.files


def test_a_hub_that_is_down_is_one_line(
    place: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert export(place, tmp_path / "out", "push_to_hub=me/draft") == 1
    err = capsys.readouterr().err
    assert err.startswith("cotrain export: push_to_hub=me/draft: ") and err.count("\n") == 1
    assert "refused" in err and not (tmp_path / "out").exists()


def test_no_rights_are_one_line_and_the_folder_stays(
    place: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(place, tmp_path / "out", "push_to_hub=others/draft") == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("cotrain export: push_to_hub=others/draft: ") and "rights" in err
    assert err.endswith(f"; {tmp_path / 'out'} is complete, and `hf upload others/draft {tmp_path / 'out'}` uploads it")
    assert (tmp_path / "out" / "README.md").is_file() and not hub.files


def test_offline_machines_are_told_why(
    place: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert export(place, tmp_path / "out", "push_to_hub=me/draft") == 1
    assert (
        capsys.readouterr().err
        == "cotrain export: push_to_hub=me/draft: HF_HUB_OFFLINE is set, so nothing is uploaded: unset HF_HUB_OFFLINE\n"
    )


def test_a_check_pushes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting in ("push_to_hub=me/draft", "engine=llamacpp", "k=3", f"draft.path={place}", "overwrite=true"):
        assert main(["export", f"check={place / 'independent'}", setting]) == 1
        assert (
            f"{setting.partition('=')[0]}= has no effect with check=, which only reads a folder"
            in capsys.readouterr().err
        )
