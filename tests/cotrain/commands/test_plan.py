"""`cotrain plan`: what it writes beside what a measurement of the same draft counts."""

import json
import shutil
from pathlib import Path

import pytest

from cotrain.cli import main
from cotrain.planning import drafted
from inference.adaptive_policy import INPUTS, Adaptive, Estimates
from inference.drafts.atomic import write_json
from inference.drafts.weight_files import read_json
from tests.cotrain.commands.test_train import job
from tests.cotrain.commands.test_train import place as place  # a fixture
from tests.cotrain.commands.test_train import quickly as quickly  # a fixture

SIZES = "bench.new_tokens=12 bench.depths=[1,2,3] bench.quick_prompts=2 texts=24 batches=[1,4] threads=1".split()

COSTS = {"target": [1.0, 1.1, 1.2, 1.3], "draft": 0.05, "rest": [0.01] * 4, "first": 0.02}


def plan(run: Path, *settings: str) -> int:
    return main(
        [
            "plan",
            f"draft.path={run / 'draft'}",
            f"data.path={run.parent / 'own.jsonl'}",
            f"output={run.parent / 'plan'}",
            "overwrite=true",
            *SIZES,
            *settings,
        ]
    )


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """The folder of a finished run."""
    assert job(place, "run", "trainer.steps=1", "trainer.validations=1", "trainer.corpus_steps=0") == 0
    return place / "run"


@pytest.fixture(scope="module")
def made(run: Path) -> Path:
    """The folder of a plan."""
    assert plan(run) == 0
    return Path(shutil.copytree(run.parent / "plan", run.parent / "made"))


def test_a_plan_says_what_held_out_texts_say(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of each domain, and its policy is fitted to rounds of all temperatures."""
    rows = [json.loads(row) for row in (run.parent / "own.jsonl").read_text().splitlines()]
    named = [json.dumps(row | {"domain": "even" if i % 2 else "odd"}) for i, row in enumerate(rows)]
    (tmp_path / "two.jsonl").write_text("\n".join(named), encoding="utf-8")
    seen, fitted = list[list[object]](), list[object]()
    observed, policy_of = drafted.observed, drafted.policy_of
    monkeypatch.setattr(drafted, "observed", lambda *given: seen.append(observed(*given)) or seen[-1])
    monkeypatch.setattr(
        drafted,
        "policy_of",
        lambda costs, fit, rounds, *rest: fitted.extend(rounds) or policy_of(costs, fit, rounds, *rest),
    )
    assert plan(run, "temperatures=[0,1.0]", f"data.path={tmp_path / 'two.jsonl'}") == 0
    assert len(seen) == 2 and fitted == [*seen[0], *seen[1]]
    found = read_json(run.parent / "plan" / "plan.json")
    assert [(cell["temperature"], cell["rows"]) for cell in found["cells"]] == [(0, 1), (0, 4), (1.0, 1), (1.0, 4)]
    report = read_json(run / "draft" / "report.json")
    cell = found["cells"][2]
    for k in (1, 2):
        tau = report["extra"]["held_out"][f"tau_T1/all/{k}"]  # on other texts
        assert abs(cell["tau"][k] - tau) <= 4 * cell["tau_errors"][k] + 0.05 * tau
    tokens = found["settings"]["tokens"]
    greedy, sampled = (tokens[t] / found["cells"][at]["tau"][1] for t, at in (("0", 0), ("1", 2)))  # target calls
    assert greedy == pytest.approx(round(greedy), abs=1e-6)  # at temperature 0 a draft is accepted or it is not
    assert abs(sampled - round(sampled)) > 1e-6 and found["settings"]["bench"]["prompt_tokens"] > 0
    assert cell["tau"][0] == 1 and cell["tau"] == sorted(cell["tau"]) and cell["speedups"][0] == 1
    one, four = (found["cells"][i] for i in (2, 3))
    assert one["tau"] == four["tau"] and one["seconds_per_round"] != four["seconds_per_round"]
    said = capsys.readouterr().out
    assert "break-even" in said and "perfect draft" in said
    (profile,) = (by_temperature["1"] for by_temperature in found["acceptance"].values())
    domains = profile["domains"]
    assert list(domains) == ["even", "odd"]
    assert sum(one["texts"] for one in domains.values()) == found["settings"]["texts"]["1"]
    assert f"temperature 1: acceptance by domain: even {domains['even']['alpha']:.2f}, odd " in said


def test_a_plan_for_another_machine_has_its_costs(run: Path, tmp_path: Path) -> None:
    four = COSTS | {"target": [2.0, 4.0, 6.0, 8.0]}
    write_json(tmp_path / "costs.json", {"1": COSTS, "4": four})
    assert plan(run, f"costs={tmp_path / 'costs.json'}") == 0
    one, many = read_json(run.parent / "plan" / "plan.json")["cells"]
    assert one["seconds_per_round"] == pytest.approx([1.01, 1.1 + 0.07 + 0.01, 1.2 + 0.12 + 0.01, 1.3 + 0.17 + 0.01])
    assert many["seconds_per_round"][3] == pytest.approx(8.18)
    policy = read_json(run.parent / "plan" / "policy.json")
    assert policy["seconds"]["1"] == pytest.approx(one["seconds_per_round"])


def test_costs_without_a_draft_give_the_speedup_at_each_acceptance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "costs.json", {"1": COSTS})
    settings = [f"costs={tmp_path / 'costs.json'}", f"output={tmp_path / 'plan'}", "batches=[1]"]
    assert main(["plan", *settings, "bench.depths=[1,2,3]"]) == 0
    (found,) = read_json(tmp_path / "plan" / "plan.json")["speedups"]
    assert found["speedups"]["0.5"] == [pytest.approx(1.75 * 1.01 / 1.33), 2]
    assert f"{1.75 * 1.01 / 1.33:.2f}x (2)" in capsys.readouterr().out
    assert main(["plan", *settings]) != 0 and "costs.json: 1 rows: target and rest" in capsys.readouterr().err
    assert main(["plan", f"output={tmp_path / 'none'}"]) != 0 and "name a draft folder" in capsys.readouterr().err


def test_files_for_other_programs_follow_from_the_plan(made: Path) -> None:
    found, schedule, profile = (
        read_json(made / f"{name}.json") for name in ("plan", "schedule", "speculation_profile")
    )
    lengths = {str(cell["rows"]): cell["k"] for cell in found["cells"]}
    assert schedule["temperature"] == 1
    covered = [rows for first, last, _ in schedule["ranges"] for rows in range(first, last + 1)]
    assert covered == [1, 2, 3, 4] and schedule["ranges"][-1][2] == lengths["4"]
    marginal, conditional = profile["marginal_accept_rates"], profile["conditional_accept_rates"]
    assert marginal[1] == pytest.approx(marginal[0] * conditional[1], rel=0.05)
    assert profile["mean_accept_length"] == pytest.approx(found["cells"][0]["tau"][3])
    assert all(check["passed"] for check in profile["validation"].values())
    page = (made / "plan.html").read_text()
    assert repr(found["cells"][0]["tau"][found["cells"][0]["k"]]) in page


@pytest.mark.thorough
def test_a_tree_is_forecast_beside_the_chain(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(run, "bench.trees=4", "batches=[1]") == 0
    (cell,) = read_json(run.parent / "plan" / "plan.json")["cells"]
    tree = cell["tree"]
    assert 2 <= len(tree["tree"]["parents"]) <= 4 and 1 < tree["tau"] and tree["seconds"] > 0
    assert tree["speedup"] == pytest.approx((1 + tree["gain"]) * cell["speedups"][cell["k"]], rel=0.02)
    assert "a tree of" in capsys.readouterr().out


@pytest.mark.thorough
def test_several_drafts_are_planned_on_the_same_texts(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "draft", tmp_path / "copy")
    assert plan(run, f"drafts=[{tmp_path / 'copy'}]") == 0
    found = read_json(run.parent / "plan" / "plan.json")
    by = {cell["draft"]: cell["tau"] for cell in found["cells"] if cell["rows"] == 1}
    assert len(by) == 2 and len({tuple(tau) for tau in by.values()}) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["texts=2"], "texts=2: it must be at least 16"),
        (["batches=[]"], "batches=[]: it must be a list of one or more"),
        (["batches=[0]"], "batches"),
        (["temperatures=[-1]"], "temperatures"),
        (["drafts=[nowhere]"], "nowhere"),
        (["bench.depths=[]"], "bench.depths"),
        (["costs=other.json", "measure=true"], "costs=other.json: "),
        (["costs=other.json"], "costs=other.json: "),
    ],
)
def test_wrong_settings_are_named(
    run: Path, settings: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(run, *settings) != 0
    assert says in capsys.readouterr().err


@pytest.mark.thorough
def test_the_recommendation_is_timed_beside_its_neighbours_and_the_adaptive_policy(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(run, "measure=true", "bench.minutes=0", "bench.prompts=4", "batches=[2]") == 0
    made = read_json(run.parent / "plan" / "plan.json")
    (cell,) = made["measured"]
    full = cell["full_batches"]
    best = cell["k"] or full["k"]  # where plain decoding is the fastest, the best of all lengths is timed
    near = {f"k = {k}" for k in (best - 1, best, best + 1) if 0 < k <= 3}
    assert {"plain", "adaptive"} | near == set(cell["arms"]) and cell["rows"] == 2
    assert cell["arms"]["plain"]["speedup"]["value"] == 1
    for name in ("adaptive", f"k = {best}"):
        assert cell["arms"][name]["speedup"]["value"] > 0 and cell["arms"][name]["tau"] >= 1
    (forecast,) = made["cells"]
    assert cell["arms"][f"k = {best}"]["predicted"] == forecast["speedups_alone"][best] != forecast["speedups"][best]
    assert full["k"] == best and full["speedup"]["value"] > 0 and full["predicted"] == forecast["speedups"][best]
    assert "adaptive" in capsys.readouterr().out


def test_the_policy_serves(run: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = made / "policy.json"
    draft = f"draft.path={run / 'draft'}"
    assert main(["generate", draft, "prompt=def add", f"policy.file={file}", "max_new_tokens=8"]) == 0
    assert main(["generate", draft, "prompt=def add", f"policy.file={file}", "policy.k=2"]) != 0
    assert main(["generate", draft, "prompt=def add", f"policy.file={run / 'draft' / 'config.json'}"]) != 0
    says = capsys.readouterr().err
    assert (
        "policy.k= " in says and "is no policy file: " in says and "give a policy.json that cotrain plan wrote" in says
    )


def test_drafts_of_another_quantisation_are_planned_one_by_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "draft", tmp_path / "other")
    file = tmp_path / "other" / "cotrain.json"
    metadata = read_json(file)
    metadata["served"]["quantisation"] = "int8"
    write_json(file, metadata)
    assert plan(run, f"drafts=[{tmp_path / 'other'}]") != 0
    assert "quantisation.kind" in capsys.readouterr().err


def test_a_servers_counters_are_compared_with_the_plan(
    run: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_json(made / "plan.json")
    (profile,) = found["acceptance"][str(run / "draft")].values()
    log = tmp_path / "log.json"
    write_json(log, {"rounds": 1000, "accepted_by_depth": [int(1000 * share) for share in profile["prefix"]]})
    capsys.readouterr()
    assert main(["plan", f"log={log}", f"output={made}"]) == 0
    assert "as forecast" in capsys.readouterr().out
    assert main(["plan", f"log={log}", f"output={tmp_path / 'nowhere'}"]) != 0
    assert "make one with cotrain plan draft.path=" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_adaptive_policy_is_what_is_timed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never drafts emits one token per call."""
    never = Adaptive({1: (1.0, 99.0, 99.0, 99.0)}, Estimates(0.1, (0.0,) * INPUTS, (0.0,) * INPUTS))
    monkeypatch.setattr(drafted, "policy_of", lambda *given: never)
    assert plan(run, "measure=true", "bench.minutes=0", "bench.prompts=2", "batches=[1]") == 0
    (cell,) = read_json(run.parent / "plan" / "plan.json")["measured"]
    assert cell["arms"]["adaptive"]["tau"] == 1.0


def test_drafts_with_other_prompts_set_aside_need_prompts_of_neither(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "draft", tmp_path / "other")
    (tmp_path / "other" / "prompts.jsonl").write_text('{"text": "def add"}\n')
    paths = f"draft.path={run / 'draft'}", f"drafts=[{tmp_path / 'other'}]", f"output={tmp_path / 'plan'}"
    assert main(["plan", *paths, *SIZES]) != 0
    assert "have different prompts to measure on" in capsys.readouterr().err
