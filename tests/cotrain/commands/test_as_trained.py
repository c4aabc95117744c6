"""Commands that open a draft folder measure and serve what it was trained for, unless another setting is typed."""

import copy
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from cotrain.commands import bench, generate, plan, serve_check
from cotrain.commands.served_pair import KNOWN, UNSAID, as_trained, stored
from cotrain.config.changes import change
from cotrain.config.drafts import EagleDraft
from cotrain.config.settings import BenchConfig, TrainConfig, flat
from cotrain.planning.policy_file import content
from cotrain.training.results import served_as
from inference import Engine, Sampling, load
from inference.adaptive_policy import INPUTS, Adaptive, Estimates
from inference.drafts.atomic import write_json
from inference.drafts.draft_folder import Metadata, PlannedTree, ServedAs, folder_identity, load_draft, read, save
from inference.drafts.weight_files import read_json
from inference.models.pretrained import quantisation_of
from tests.draft_folders import draft_folder
from tests.folders import target_folder, tokenizer
from tests.settings import composed, pick, put
from tests.tiny import TARGET

TRAINED = {
    "temperature": 0.6,
    "top_k": 7,
    "top_p": 0.8,
    "verify": "block",
    "prompt_tokens": 31,
    "quantisation": "nf4",
    "chat": True,
    "template": {"enable_thinking": False},
    "messages": True,
    "dtype": "bfloat16",
    "int8": True,
    "draft_dtype": "auto",
}
ELSE: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 3,
    "top_p": 0.5,
    "verify": "match",
    "prompt_tokens": 17,
    "quantisation": "int8",
    "chat": False,
    "template": {"enable_thinking": True},
    "messages": False,
    "dtype": "float32",
    "int8": False,
    "draft_dtype": "float16",
}
REGIME = ("temperature", "top_k", "top_p")
SERVED = {item.name for item in fields(ServedAs)}
# what both commands have and a folder does not decide: this machine, how much is measured, which texts
FREE = ("target.", "draft.", "bench.", "data.", "output", "overwrite", "minutes", "threads")


def made(**changed: Any) -> Metadata:
    served = ServedAs(**{name: value for name, value in TRAINED.items() if name in SERVED})
    return Metadata(TARGET, 3, regime={name: TRAINED[name] for name in REGIME}, int8=True, served=served, **changed)


def keys(schema: Any) -> set[str]:
    """Leaves of a command's settings."""
    return {key for key, value in flat(schema().model_dump()) if not isinstance(value, dict)}


def settings(command: str, *overrides: str) -> Any:
    return composed("draft.path=there", *overrides, command=command)


def held(command: str) -> list[str]:
    known = dict(flat(settings(command).model_dump()))
    return [key for key in KNOWN if key in known]


@pytest.mark.parametrize("command", ["bench", "generate", "serve_check"])
def test_what_is_left_open_is_as_the_folder_says(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = settings(command)
    as_trained(cfg, made())
    assert {key: pick(cfg, key) for key in held(command)} == {key: TRAINED[KNOWN[key][0]] for key in held(command)}
    assert not capsys.readouterr().err
    cfg = settings(command)
    as_trained(cfg, None)
    assert all(pick(cfg, key) == UNSAID[KNOWN[key][0]] for key in held(command))


@pytest.mark.parametrize("command", ["bench", "generate", "serve_check"])
def test_what_is_typed_stands_and_is_said(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for key in held(command):
        name = KNOWN[key][0]
        cfg = settings(command)
        put(cfg, key, ELSE[name])
        as_trained(cfg, made())
        assert pick(cfg, key) == ELSE[name]
        assert f"{key}={ELSE[name]} ({TRAINED[name]})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("k", "tree", "said"),
    [
        (None, None, ""),
        (3, None, ""),
        (2, None, "policy.k=2 (draft length 3)"),
        (3, PlannedTree([-1, -1], "tree"), "policy.k=3 (a tree of 2 nodes)"),
    ],
)
def test_another_draft_length_is_said(
    k: int | None, tree: PlannedTree | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = settings("generate")
    cfg.policy.k = k
    as_trained(cfg, made(tree=tree))
    assert said in (err := capsys.readouterr().err) and bool(err) == bool(said) and cfg.policy.k == k


def test_a_folder_says_all_that_training_and_measuring_have_in_common() -> None:
    shared = {key for key in keys(TrainConfig) & keys(BenchConfig) if not key.startswith(FREE)}
    known = {key for key in KNOWN if not key.startswith(("bench.", "data.", "prompt_tokens", "chat", "target."))}
    assert shared == known
    cfg = composed(
        *"""verify=block bench.prompt_tokens=31 quantisation=nf4 data.chat=true target.dtype=bfloat16
        +data.template.enable_thinking=false""".split()
    )
    assert served_as(cfg, True) == made().served
    assert {name for name, _ in KNOWN.values()} == set(TRAINED) == set(UNSAID)
    assert stored(made()) == TRAINED


def test_what_older_runs_had_by_default_is_no_other_run() -> None:
    assert change("data.column", "text", None) == change("init.cosine", 4.0, None) == "same"
    assert change("draft.width", 256, None, draft=EagleDraft) == "same"
    assert {
        change("data.column", "prompt", None),
        change("data.chat", True, None),
        change("draft.width", 256, None),
        change("draft.width", 256, 128),
    } == {"other"}


# --- a folder of odd values, in every command

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'AB' if think else 'CD' }}"
# what commands do not take from a folder, and why
UNUSED: dict[str, dict[str, str]] = {
    "load": dict.fromkeys(("regime", "prompt_tokens", "messages", "chat"), "each call says"),
    "generate": dict.fromkeys(("prompt_tokens", "chat"), "of rows of data"),
    "bench": {"messages": "the rows of data say"},
    "plan": {"messages": "as bench", "tree": "it forecasts chains, and says so"},
    "serve_check": {"messages": "as bench", "int8": "servers have the folder's weights"}
    | dict.fromkeys(("verify", "tree"), "servers draft chains and have the token rule"),
}
RUN: dict[str, Any] = {"bench": bench.run, "plan": plan.run, "serve_check": serve_check.run, "generate": generate.run}
TYPED = {
    "bench": "bench.new_tokens=8",
    "plan": "bench.new_tokens=8",
    "generate": "prompt=x",
    "serve_check": "url=http://none new_tokens=8",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "chain": {"objective": "greedy", "int8": True, "dtype": "float32", "quantisation": "none"},
    "tree": {"tree": PlannedTree((-1, -1, 0), "traversal", True)},
}
ABOUT = {item.name for item in fields(Metadata)} - {"target", "origin", "kind", "report", "format", "served"}


class Reached(Exception):
    """A command is about to decode."""


def reach(*arguments: Any, **settings: Any) -> Any:
    raise Reached(*arguments, settings)


@pytest.fixture(scope="module", params=VARIANTS)
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft folder whose values are others than the defaults."""
    place, words = tmp_path_factory.mktemp("odd"), copy.deepcopy(tokenizer())
    words.chat_template = CHAT
    words.save_pretrained(target_folder(place / "target"))
    network, _, metadata = load_draft(draft_folder(place / "plain", place / "target", "independent"))
    values = TRAINED | {"k": 9, "int8": False, "quantisation": "int8_rows", "template": {"think": True}}
    values |= {"regime": {name: TRAINED[name] for name in REGIME}} | VARIANTS[request.param]
    about = replace(
        metadata,
        served=ServedAs(**{name: values[name] for name in SERVED}),
        **{name: value for name, value in values.items() if name in ABOUT},
    )
    return save(network if about.tree else network.bfloat16(), words, place / "draft", about, None)


@pytest.mark.parametrize("command", UNUSED)
def test_every_command_decodes_as_the_folder_says(
    command: str, odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.models.pretrained.emulated", lambda dtype: False)
    about = read(odd).metadata
    tree = None if "tree" in UNUSED[command] else about.tree
    said = {**asdict(about.served), **{name: getattr(about, name) for name in ABOUT}}
    said |= {"verify": tree.rule if tree else about.served.verify, "tree": tree and tree.parents}
    said |= {"k": tree.depth if tree else about.k, "regime": Sampling(**about.regime)}
    said |= {"objective": "greedy" if tree and tree.likeliest else about.objective}
    found = of_engine(load(odd)) if command == "load" else decoded(command, odd, tmp_path / "out", monkeypatch)
    assert {name: found[name] for name in set(said) - set(UNUSED[command])} == {
        name: value for name, value in said.items() if name not in UNUSED[command]
    }
    assert found["weights"] == ("int8" if found["int8"] else "float32" if about.tree else "bfloat16")


def decoded(command: str, path: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The values by which a command decodes."""
    for name in ("bench.measurement.measure", "bench.server_parity.server_parity"):
        monkeypatch.setattr(f"cotrain.{name}", reach)
    monkeypatch.setattr(Engine, "generate", reach)
    monkeypatch.setattr("cotrain.commands.plan.drafted", lambda cfg, given, texts: reach(given, cfg))
    monkeypatch.setattr("cotrain.commands.serve_check.server", lambda *_: None)
    cfg: Any = composed(f"draft.path={path}", *TYPED[command].split(), command=command)
    if command != "generate":
        cfg.output = str(output)
    with pytest.raises(Reached) as reached:
        RUN[command](cfg)
    given, *others = reached.value.args
    if command == "generate":
        (prompts, settings), words = others, tokenizer()
        ids = words("xAB", add_special_tokens=False)["input_ids"]
        return of_engine(given) | {"regime": settings["sampling"], "messages": prompts == [ids]}
    cfg = others[0] if command == "plan" else cfg
    tokens = cfg.prompt_tokens if command == "serve_check" else given.bench.prompt_tokens
    return of_engine(given.engine(given.tree.depth if given.tree else given.depths[-1])) | {
        "regime": given.sampling,
        "prompt_tokens": tokens,
        "chat": cfg.data.chat,
        "template": cfg.data.template,
    }


def of_engine(engine: Any) -> dict[str, Any]:
    draft, model = engine.proposer, engine.target.model
    return {
        "verify": engine.rule.name,
        "k": engine.policy.k,
        "tree": draft.branching and draft.branching.parents,
        "objective": "greedy" if draft.greedy else "sampled",
        "int8": draft.int8,
        "weights": draft.weights,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantisation": quantisation_of(model.config),
        "template": engine.template,
    }


def test_load_renders_messages_with_the_arguments_that_were_measured(odd: Path) -> None:
    engine = load(odd)
    (ids,) = engine.reader.texts([[{"role": "user", "content": "x"}]])
    assert tokenizer().decode(ids).endswith("xAB")


def test_a_folder_of_before_says_its_rule_in_made_or_in_its_report(odd: Path, tmp_path: Path) -> None:
    path = shutil.copytree(odd, tmp_path / "draft")
    values = read_json(path / "cotrain.json")
    served = values.pop("served")
    for said, wanted in (
        (served, ServedAs(**served)),
        ({"verify": "match"}, ServedAs("match")),
        (None, ServedAs("coupled")),
        ({"chat": False, "messages": True}, ServedAs("coupled", messages=True)),
        ({"chat": False, "messages": False}, ServedAs("coupled", chat=False)),
    ):
        values["made"], values["tree"] = {"served": said}, None
        write_json(path / "cotrain.json", values)
        write_json(path / "report.json", {"settings": {"verify": "coupled"}})
        assert read(path).metadata.served == wanted


# --- the policy of generate


def generated(path: Path | None, *settings: str) -> None:
    typed = ["prompt=x", "max_new_tokens=2", *([f"draft.path={path}"] if path else []), *settings]
    generate.run(composed(*typed, command="generate"))


def test_a_named_target_generates_and_not_that_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learnt, other = (target_folder(tmp_path / name, seed=seed) for seed, name in enumerate(("learnt", "other")))
    path, texts = draft_folder(tmp_path / "draft", learnt, "medusa"), []
    for draft, target in ((path, other), (None, other), (None, learnt)):
        generated(draft, f"target.path={target}", "max_new_tokens=8", "regime.temperature=0")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_policy_is_used_or_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_folder(tmp_path / "target")
    mine, other = (draft_folder(tmp_path / name, target, kind) for name, kind in (("a", "medusa"), ("b", "hydra")))
    fitted = Adaptive({1: (1.0, 1.1)}, Estimates(0.5, (0.0,) * INPUTS, (0.0,) * INPUTS), {}, folder_identity(mine))
    file = tmp_path / "policy.json"
    write_json(file, content(fitted))
    assert Adaptive.load(file) == fitted == load(mine, policy=fitted).policy
    generated(mine, f"policy.file={file}")
    for k in (1, 2, 3):  # up to the depths of the draft
        generated(mine, "policy=fixed", f"policy.k={k}")
    for path, settings, message in (
        (other, [f"policy.file={file}"], f"policy: it was fitted to another draft than {other}: give"),
        (mine, [f"policy.file={file}", "policy.k=2"], "set policy.k= .* or policy.file= .* not both"),
        (mine, ["policy.k=4"], f"policy.k=4: {mine} drafts at most 3 speculative tokens a round"),
        (None, [f"target.path={target}", "policy.k=4"], "policy.k=4: it has no effect without a draft"),
        (
            None,
            [f"target.path={target}", f"policy.file={file}"],
            f"policy.file={file}: it has no effect without a draft",
        ),
        (None, [f"target.path={target}", "verify=block"], "verify=block: it has no effect without a draft"),
    ):
        with pytest.raises(ValueError, match=message):
            generated(path, *settings)
