"""What holds of every kind of draft in every layout of every engine."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cotrain.cli import main
from cotrain.export.engines import BLOCKS, ENGINES, FEATURES, FILES, MARK
from cotrain.run_folder import refuse_replaced
from inference.drafts.draft_folder import METADATA, REPORT, describe, digest, other_weights, read
from tests.cotrain.export.test_export import COSTS, HELD
from tests.cotrain.export.test_export import REPORT as MEASURED
from tests.draft_folders import draft_folder
from tests.folders import target_folder
from tests.often import often

WRITTEN = [
    *(("independent", engine, "auto") for engine in ENGINES),
    ("conditioned", "sglang", "auto"),
    ("conditioned", "llamacpp", "auto"),
    ("parallel", "vllm", "auto"),
    *(("eagle", engine, layout) for layout, engines in FEATURES.items() for engine in engines if layout not in BLOCKS),
    ("p_eagle", "vllm", "eagle3"),
    ("p_eagle", "vllm", "speculators"),
    ("block", "vllm", "dflash"),
    ("block", "llamacpp", "dflash"),
    ("medusa", "vllm", "auto"),
    ("retrieval", "vllm", "auto"),
    ("hybrid", "vllm", "auto"),
]
ONCE = {"conditioned": ["temperature=0.7"]}
# that draft the likeliest token; of a hybrid there are no figures to plan by, and what retrieval drafts is certain
GREEDY = {"sglang", "tensorrt_llm"}
SLOW = "plain decoding is faster here"
AS_MEASURED, DRAFTS = {"hybrid", "retrieval", "block"}, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a draft folder beside its target; 3 drafts a round were measured."""
    place = tmp_path_factory.mktemp("drafts")
    target_folder(place / "target")
    target_folder(place / "other", seed=1)

    def made(kind: str) -> Path:
        if not (place / kind).is_dir():
            path = draft_folder(place / kind, place / "target", kind)
            report = {**MEASURED, "extra": {"costs": asdict(COSTS), "held_out": HELD}}
            (path / REPORT).write_text(json.dumps(report), encoding="utf-8")
            metadata = read(path).metadata
            regime = {**metadata.regime, "temperature": 0.7}
            origin = {**metadata.origin, "advice": SLOW}
            describe(path, replace(metadata, k=DRAFTS, regime=regime, report=digest(path / REPORT), origin=origin))
        return place / kind

    return made


def exported(draft: Path, output: Path, engine: str, layout: str, *settings: str) -> int:
    return main(
        ["export", f"draft.path={draft}", f"output={output}", f"engine={engine}", f"layout={layout}", *settings]
    )


def assert_checked(output: Path, engine: str, capsys: pytest.CaptureFixture) -> None:
    """`check=` passes a folder as it was written, and fails it with numbers that are not finite."""
    whole = main(["export", f"check={output}"])
    said = capsys.readouterr().err
    if (output / "draft.gguf").exists():
        assert whole == 1 and "GGUF files are not checked" in said
    elif (output / "model.safetensors").exists() and (stored := load_file(output / "model.safetensors")):
        assert whole == 0, said
        name = max(stored, key=lambda one: stored[one].is_floating_point() * stored[one].numel())
        before = (output / "model.safetensors").read_bytes()
        save_file(stored | {name: stored[name] / 0}, output / "model.safetensors", {"format": "pt"})
        assert main(["export", f"check={output}"]) == 1 and name in capsys.readouterr().err
        (output / "model.safetensors").write_bytes(before)


# every engine; of the layouts for states one; what has no figures to plan by, and what is planned otherwise
OFTEN = {("eagle", "vllm"), ("p_eagle", "vllm"), ("block", "vllm"), ("medusa", "vllm"), ("retrieval", "vllm")}


@pytest.mark.parametrize(
    ("kind", "engine", "layout"),
    often(WRITTEN, lambda case: case[0] == "independent" or (case[:2] in OFTEN and case[2] != "eagle3")),
)
def test_an_export_is_planned_for_its_engine_and_names_the_target_that_was_learnt_from(
    kind: str, engine: str, layout: str, folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Whichever target is named; other weights of it are still said of the export."""
    draft, output, once = folder(kind), tmp_path / "out", ONCE.get(kind, [])
    learnt, other = str(draft.parent / "target"), str(draft.parent / "other")
    assert exported(draft, output, engine, layout, "k=4096", *once) == 1
    assert "k=4096: text and drafts share the " in capsys.readouterr().err and not output.exists()
    others = f"the weights of the target {other} are not those"
    for named in ([f"target.path={other}"], []):
        assert exported(draft, output, engine, layout, "overwrite=true", *named, *once) == 0
        refuse_replaced(output, "README.md", FILES, MARK)  # which knows all its files
        card = (output / "README.md").read_text(encoding="utf-8")
        assert re.search(rf"^(# .* for |Made for `){re.escape(learnt)}\b", card, re.M), card
        assert_checked(output, engine, capsys)
        assert f"outputs of {other}" not in card and (others in card) == (other in "".join(named))
        assert f"On the machine that measured it, {SLOW}." in card
        assert ("-np 1" in card) == (engine == "llamacpp" and kind == "eagle")  # which it serves one text at a time
        assert ("## tau by draft length" in card) == (kind not in ("medusa", "retrieval", "hybrid"))
        if (output / METADATA).is_file():
            metadata = read(output).metadata
            assert metadata is not None and other_weights(metadata, learnt) is None and other_weights(metadata, other)
        else:
            assert (engine, kind) == ("vllm", "medusa") or engine == "llamacpp"
    greedy = (engine in GREEDY or kind == "medusa") and kind not in AS_MEASURED
    greedy |= engine == "llamacpp" and kind in ("eagle", "block")  # whose masks are causal here
    numbers = r"""(?:num_speculative_tokens": |speculative-num-steps |max_draft_len": |draft-n-max |Drafts )"""
    found = {int(number) for number in re.findall(rf"{numbers}(\d+)", card)}
    assert found == {1 if greedy else DRAFTS}, card
    assert ("is planned for greedy drafting" in card) == greedy
