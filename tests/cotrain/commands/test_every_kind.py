"""Commands take a draft folder of every kind that is trained here, and decode with those of other kinds."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import configuration_utils

from cotrain.bench import server_parity
from cotrain.commands import bench, generate, rollout, serve_check
from cotrain.errors import UserError
from cotrain.planning.plan import Plan
from cotrain.students.base import KINDS
from inference import Engine, Sampling, load
from inference.drafts.draft_folder import Metadata, PlannedTree, describe, load_tokenizer
from inference.drafts.weight_files import read_json
from inference.lookup.corpus import About, Datastore
from inference.proposers.base import LoadArguments
from inference.proposers.quantised import Quantised, QuantisedConfig
from inference.proposers.trees import StaticTrees
from inference.report.build import _of_engine, validate
from inference.servers.openai_client import Served
from tests.cotrain.commands.test_train import quickly as quickly  # a fixture
from tests.draft_folders import copied, draft_folder
from tests.folders import VOCABULARY, network, target_and_texts, tokenizer
from tests.often import often
from tests.settings import composed, put
from tests.tiny import TARGET

EVERY = [*KINDS, "retrieval, datastore"]
SIZES = {
    "bench": "bench.prompts=2 bench.quick_prompts=1 bench.prompt_tokens=8 bench.new_tokens=8 bench.parity_tokens=8 "
    "bench.minutes=0",
    "generate": "max_new_tokens=8 regime=t0",
    "serve_check": "url=http://none prompts=8 prompt_tokens=8 new_tokens=12",
    "rollout": "rollout.texts=2 rollout.prompt_tokens=8 rollout.new_tokens=12 regime=t0",
}
PROMPT = "0001 one, 0001 "
RUN: dict[str, Any] = {
    "bench": bench.run,
    "generate": generate.run,
    "serve_check": serve_check.run,
    "rollout": rollout.run,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a datastore and texts."""
    place = target_and_texts(tmp_path_factory.mktemp("kinds"), 60)
    texts = [json.loads(line)["text"] for line in (place / "own.jsonl").read_text(encoding="utf-8").splitlines()]
    Datastore.of([tokenizer()(text).input_ids for text in texts], About(VOCABULARY, 8)).save(place / "store")
    return place


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """Of each command, at sizes that tests can afford."""
    return {name: composed(*sizes.split(), command=name) for name, sizes in SIZES.items()}


@pytest.fixture(scope="module")
def plain(place: Path) -> list[int]:
    """What the target alone says behind the prompt."""
    return said(Engine(str(place / "target")))


def said(engine: Engine) -> list[int]:
    return engine.generate([PROMPT], max_new_tokens=8, sampling=Sampling(temperature=0)).tokens[0]


def drafted(place: Path, kind: str) -> Path:
    name, _, store = kind.partition(", ")
    settings = {"datastore": str(place / "store")} if store else {}
    return place / kind if (place / kind).is_dir() else draft_folder(place / kind, place / "target", name, **settings)


def ran(settings: dict[str, Any], command: str, path: Path | None, output: Path | None = None, **changed: Any) -> None:
    """By keys, __ for a point."""
    cfg = copy.deepcopy(settings[command])
    cfg.draft.path = path and str(path)
    for key, value in (changed | ({"output": str(output)} if output else {})).items():
        put(cfg, key.replace("__", "."), value)
    RUN[command](cfg)


@pytest.mark.parametrize("kind", EVERY)
def test_a_folder_decodes(
    kind: str, place: Path, plain: list[int], settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = drafted(place, kind)
    ran(settings, "generate", path, prompt=PROMPT)
    assert capsys.readouterr().out == f"{tokenizer().decode(plain)}\n"
    engine = load(path)
    assert said(engine) == plain and engine.policy.k == 2


# one that reads states, and one whose drafts are certain
@pytest.mark.parametrize("kind", often(EVERY, {"eagle", "retrieval, datastore"}.__contains__))
def test_a_folder_is_measured(kind: str, place: Path, settings: dict[str, Any]) -> None:
    path, output = drafted(place, kind), place / f"bench of {kind}"
    ran(settings, "bench", path, output)
    report = read_json(output / "report.json")
    validate(report)
    assert report["exactness"]["passed"], report["exactness"]["lines"]
    assert report["extra"]["kind"] == kind.partition(",")[0] and report["settings"]["draft"] == str(path)
    engine = load(path)
    assert _of_engine(engine) == {name: report["settings"][name] for name in _of_engine(engine)} | {"rows": 8}


def test_a_rounded_target_is_loaded_with_the_tree_that_was_planned(tmp_path: Path) -> None:
    path = foreign(tmp_path / "draft", tmp_path / "target", "quantised")
    made = Metadata(TARGET, 2, tree=PlannedTree((-1, -1, 0), "tree"))
    found = Quantised.load(path, LoadArguments(network(), {}, made))
    assert isinstance(found.branching, StaticTrees) and found.branching.parents == (-1, -1, 0)


def foreign(path: Path, target: Path, kind: str) -> Path:
    """A folder of a kind that nothing here writes."""
    QuantisedConfig(bits="int8").save_pretrained(path)
    about = Metadata(TARGET | {"name": str(target)}, 2, kind=kind)
    describe(path, about)
    return path


def test_a_kind_that_is_not_trained_decodes_and_is_not_measured(
    place: Path, plain: list[int], settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "ngram"
    path = foreign(place / kind, place / "target", kind)
    ran(settings, "generate", path, prompt=PROMPT)
    assert capsys.readouterr().out == f"{tokenizer().decode(plain)}\n"
    assert said(load(path)) == said(load(path, kind=kind)) == plain
    with pytest.raises(ValueError, match="kind: other_tokenizer is no longer supported; give a draft"):
        load(path, kind="other_tokenizer")
    with pytest.raises(
        UserError,
        match=f"draft.path=.* is a draft of kind '{kind}', which cannot be measured: name one of kind independent, ",
    ):
        ran(settings, "bench", path, place / "none")


@pytest.mark.parametrize("kind", ["retrieval, datastore"])
def test_texts_are_sampled_faster_with_any_kind(kind: str, place: Path, settings: dict[str, Any]) -> None:
    made, paths = [], {"target__path": str(place / "target"), "data__path": str(place / "own.jsonl")}
    for path in (drafted(place, kind), None):
        output = place / f"texts of {kind if path else 'none'}"
        ran(settings, "rollout", path, output, **paths)
        made.append(Dataset.from_parquet(str(output / "train_T0.parquet"))["completion"])
    assert list(made[0]) == list(made[1])


@pytest.mark.parametrize("kind", often(["eagle", "retrieval"], {"eagle"}.__contains__))
def test_a_server_of_any_kind_is_compared(
    kind: str,
    place: Path,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that is this engine, but for the first token of a text, which its prefill gives."""

    def over_http(_: None, plan: Plan) -> server_parity.Ask:
        def ask(prompts: list[list[int]], at_once: int) -> server_parity.Answer:
            first = plan.plain(at_once).generate(prompts, max_new_tokens=1, seed=5, ignore_eos=True).tokens
            begun = [prompt + one for prompt, one in zip(prompts, first, strict=True)]
            rest = plan.engine(2, at_once).generate(begun, max_new_tokens=11, seed=6, ignore_eos=True)
            counts = Served(rest.stats.target_calls, sum(rest.stats.drafted), sum(rest.stats.accepted))
            return [one + more for one, more in zip(first, rest.tokens, strict=True)], 1.0, counts

        return ask

    monkeypatch.setattr("cotrain.commands.serve_check.server", lambda *_: None)
    monkeypatch.setattr(server_parity, "over_http", over_http)
    monkeypatch.setattr(server_parity.Parity, "passed", property(lambda parity: abs(parity.z) < 4))
    output = place / f"server of {kind}"
    ran(settings, "serve_check", drafted(place, kind), output)
    report = read_json(output / "report.json")
    assert (report["kind"], report["k"], report["parity"]["tokens"]) == (kind, 2, 8 * 11)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (
            "medusa",
            {"hidden_size": 32},
            "draft.path=PATH: its hidden_size is 32, but the target's is 64: give the target that ",
        ),
        ("eagle", {"vocab_size": 301}, "draft.path=PATH: its vocab_size is 301, but the target's is 300"),
        ("early_exit", {"num_hidden_layers": 3}, "draft.path=PATH: it exits after 3 layers, but the target has only 2"),
        (
            "hybrid_exit",
            {"num_hidden_layers": 3},
            "draft.path=PATH: it exits after 3 layers, but the target has only 2",
        ),
        (
            "early_exit",
            {"projections": {"mlp.up_proj": [64, 32]}},
            "draft.path=PATH: its mlp.up_proj has the size .64, 32., ",
        ),
        (
            "eagle",
            {"max_position_embeddings": 15},
            "bench.prompt_tokens, bench.new_tokens, bench.depths: .* exceed 15 tokens",
        ),
        (
            "retrieval",
            {"lookup": {"datastore": "/none"}},
            r"lookup.datastore in its config.json names a folder that is missing \(/none is no ",
        ),
        ("retrieval", {"lookup": {"datastore": "WORDS"}}, "draft.path=PATH: the datastore has token ids of another"),
        ("hybrid", {"lookup": {"datastore": "STORE"}}, "draft.path=PATH: its datastore was made for 999 ids, but the "),
        ("hydra", {"num_heads": 4}, "tensor state has shape .3, 64, 64., config.json says .4, 64"),
    ],
    ids=[
        "width",
        "vocabulary",
        "layers",
        "layers too",
        "projections",
        "positions",
        "no store",
        "words",
        "other store",
        "heads",
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(
    kind: str, values: dict[str, Any], message: str, place: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    Datastore.of([[1, 2, 3]], About(999, 8)).save(tmp_path / "store")
    Datastore.of([[1, 2, 3]], About(VOCABULARY, 8, tokenizer="another")).save(tmp_path / "words")
    for name in ("store", "words"):
        values = json.loads(json.dumps(values).replace(name.upper(), str(tmp_path / name)))
    path = copied(tmp_path / "draft", drafted(place, kind), **values)
    with pytest.raises(ValueError, match=message.replace("PATH", str(path))):
        ran(settings, "bench", path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_read_as_what_it_says(place: Path) -> None:
    """A tensor that it lacks is not made up."""
    path = drafted(place, "eagle")
    with pytest.raises(ValueError, match="a draft of kind 'eagle' has weights of EagleNetwork, not a causal"):
        load(path, kind="independent")
    lacking = copied(place / "lacking", path, lambda tensors: tensors.pop("fc.weight"))
    with pytest.raises(ValueError, match="tensor fc.weight is missing"):
        load(lacking)


def test_a_tokenizer_is_read_beside_any_network(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warning of a model that transformers does not know."""
    said: list[str] = []
    monkeypatch.setattr(configuration_utils.logger, "warning", said.append)
    for kind in ("medusa", "retrieval"):
        assert load_tokenizer(drafted(place, kind)).get_vocab() == tokenizer().get_vocab()
    assert not said
