"""Which exit drafts: known acceptances and costs have one best exit; linear exits are what their texts allow; a run
chooses, says why, and keeps its choice."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.acceptance import iid_tau
from cotrain.cli import main
from cotrain.data.splits import SPLITS
from cotrain.students.early_exit import candidate_exits
from cotrain.training import exits as exit_planner
from cotrain.training.exits import TextStates, exit_figures, line_of, moved, rated, read_states
from inference import Sampling
from inference.drafts.weight_files import read_json
from inference.measure.costs import Costs
from inference.models.passes import LAST
from inference.output import Emitted
from inference.proposers.early_exit import ExitNetwork, FourBits
from tests.bench_stubs import rates_of
from tests.cotrain.commands.test_train import SIZES
from tests.folders import VOCABULARY, network, run_paths, target_and_texts

# a plain step takes a second, as does a pass over drafts, and the rest nothing
COSTS = Costs(target=(1.0, 1.0, 1.0), draft=0.0, rest=(0.0, 0.0, 0.0))


def at(layers: int, alpha: float, draft: float, depths: tuple[int, ...] = (1, 2)) -> Any:
    rates = rates_of([iid_tau(alpha, k) for k in (1, 2)])
    return SimpleNamespace(**rated(layers, rates, replace(COSTS, draft=draft), depths))


def job_of(folder: Path, layers: int | None = None, init: str = "scratch") -> Any:
    draft = SimpleNamespace(kind="early_exit", layers=layers, bits=None)
    return SimpleNamespace(cfg=SimpleNamespace(draft=draft, init=SimpleNamespace(kind=init)), folder=folder)


def chosen(folder: Path, monkeypatch: pytest.MonkeyPatch, exits: list[Any]) -> int:
    folder.mkdir()
    job = job_of(folder)
    monkeypatch.setattr(exit_planner, "exits", lambda job: [vars(one) for one in exits])
    exit_planner.plan_exits(job)
    return int(job.cfg.draft.layers)


def test_the_exit_of_most_speed_up_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: tau(2) is 1 + a + a^2, a round takes 1 + 2c. The exit that accepts most costs too much, the cheapest
    accepts too little."""
    exits = [at(1, 0.5, 0.1), at(2, 0.8, 0.2), at(3, 0.95, 0.6)]
    assert [one.speedup for one in exits] == pytest.approx([1.75 / 1.2, 2.44 / 1.4, 2.8525 / 2.2])
    assert (exits[1].k, exits[1].tau, exits[1].cost) == (2, pytest.approx(2.44), 0.2)
    assert chosen(tmp_path / "a", monkeypatch, exits) == 2
    assert chosen(tmp_path / "b", monkeypatch, [at(4, 0.5, 0.1), at(2, 0.5, 0.1)]) == 2


def test_candidates_end_before_the_target_does() -> None:
    assert candidate_exits(2) == [1] and candidate_exits(16) == list(range(1, 16))
    assert (
        candidate_exits(32) == list(range(2, 31, 2))
        and len(candidate_exits(81)) == 15
        and max(candidate_exits(81)) < 81
    )
    with pytest.raises(ValueError, match="draft.layers=null: .* but the target has one layer: set draft.layers=1"):
        candidate_exits(1)


V, D = 6, 4


def known(texts: int, noise: bool) -> tuple[list[TextStates], Any]:
    """Texts of a target whose states are an affine map of those of an early layer, or have nothing to do with them; its
    tokens are drawn from its distributions."""
    torch.manual_seed(3)
    head, turned, result = torch.randn(D, V), torch.randn(D, D), []
    for _ in range(texts):
        f = torch.randn(40, D)
        s = torch.randn(40, D) if noise else f @ turned + 1.5
        x = (s @ head).softmax(-1).multinomial(1).squeeze(1)
        result.append(TextStates(x, {1: f, LAST: s}))
    return result, lambda states: states @ head


def acceptance(texts: int, noise: bool) -> float:
    reads, head = known(texts, noise)
    plan: Any = SimpleNamespace(sampling=Sampling(), objective="sampled", depths=[2])
    result = exit_figures(1, reads, head, plan)
    assert result.logp.shape == result.logq.shape == (texts // 2, 40)
    return float(result.alpha.sum() / result.lengths.sum())


def test_a_linear_exit_finds_the_map_that_there_is() -> None:
    assert acceptance(40, noise=False) > 0.97


def test_few_tokens_change_little() -> None:
    """The ridge keeps to the target's own norm and head where nothing says otherwise; many tokens move it."""
    f = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    s = f + torch.randn(8, generator=torch.Generator().manual_seed(2))
    assert (moved(f, line_of(f, s)) - f).norm() < (s - f).norm()
    many = torch.randn(4000, 8)
    torch.testing.assert_close(moved(many, line_of(many, many + 2)), many + 2, rtol=0, atol=0.05)


def test_what_is_read_is_what_makes_each_token() -> None:
    """Of every token of a text, not of its prompt: the states before it, with the target's norm behind a layer."""
    target = network(layers=3)
    prompts, texts = [[5, 6, 7], [8]], [[9, 10], [11, 12, 13]]
    result, head = read_states(Emitted(prompts, [0, 1], texts, []), target, VOCABULARY, [1, 2])
    for one, prompt, text in zip(result, prompts, texts, strict=True):
        with torch.no_grad():
            built = target(torch.tensor([prompt + text]), output_hidden_states=True)
        before = slice(len(prompt) - 1, len(prompt) + len(text) - 1)
        assert one.x.tolist() == text and set(one.states) == {1, 2, LAST}
        with torch.inference_mode():
            torch.testing.assert_close(head(one.states[LAST]), built.logits[0, before])
        for layer in (1, 2):
            with torch.no_grad():
                wanted = target.model.norm(built.hidden_states[layer])[0, before]
            torch.testing.assert_close(one.states[layer], wanted)


@pytest.mark.parametrize("objective", ["sampled", "greedy"])
def test_figures_are_those_of_both_distributions(objective: str) -> None:
    """A greedy draft is the likeliest token for certain; sampled, its distribution at the temperature that is
    served."""
    reads, head = known(6, noise=True)
    plan: Any = SimpleNamespace(sampling=Sampling(temperature=0.7), objective=objective, depths=[2])
    result = exit_figures(1, reads, head, plan)
    f, s = (torch.cat([one.states[part] for one in reads[0::2]]) for part in (1, LAST))
    w = line_of(f, s)
    for row, one in enumerate(reads[1::2]):
        q = (head(moved(one.states[1], w)) / 0.7).softmax(-1)
        q = torch.nn.functional.one_hot(q.argmax(-1), V).float() if objective == "greedy" else q
        p, at_x = (head(one.states[LAST]) / 0.7).softmax(-1), torch.arange(len(one.x))
        torch.testing.assert_close(result.alpha[row].float(), torch.minimum(p, q).sum(-1))
        torch.testing.assert_close(result.logp[row].exp().float(), p[at_x, one.x])
        torch.testing.assert_close(result.logq[row].exp().float(), q[at_x, one.x])


def test_every_exit_costs_what_its_share_of_the_way_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target of 32 layers the first exit that is considered lies behind 2 and the last behind 30: a layer more is
    two dearer, whatever the first one cost."""
    plans = {at: SimpleNamespace(at=at, verify="token", depths=[2]) for at in (2, 30)}
    monkeypatch.setattr(exit_planner, "decoder_layers", lambda target: range(32))
    monkeypatch.setattr(exit_planner, "exit_plan", lambda job, at: plans[at])
    monkeypatch.setattr(exit_planner, "costs_of", lambda plan: replace(COSTS, draft=5.0 + 2.0 * plan.at))
    monkeypatch.setattr(exit_planner, "plain_texts", lambda plan: None)
    monkeypatch.setattr(exit_planner, "read_states", lambda *of: ([], None))
    monkeypatch.setattr(exit_planner, "exit_figures", lambda *of: None)
    monkeypatch.setattr(exit_planner, "acceptance", lambda *of: rates_of((2.0, 3.0)))
    job: Any = SimpleNamespace(target=None, vocabulary=V)
    assert [(one["layers"], one["cost"]) for one in exit_planner.exits(job)] == [
        (layers, pytest.approx(5.0 + 2.0 * layers)) for layers in range(2, 31, 2)
    ]


def test_exits_are_rated_on_prompts_that_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the split that ranks, which is neither learnt from nor timed; the run's own prompts would sample its texts."""
    given: list[Any] = []
    monkeypatch.setattr(exit_planner, "replace", lambda plan, **changes: plan)
    rows = {split: [[number] * 4] for number, split in enumerate(SPLITS)}
    source = SimpleNamespace(several=lambda tokens, seed: rows[source.split])

    def of(split: str) -> Any:
        source.split = split
        return source

    cfg = SimpleNamespace(
        draft=SimpleNamespace(depths=2),
        data=SimpleNamespace(path="own"),
        rollout=SimpleNamespace(prompt_tokens=4, seed=0),
    )
    job: Any = SimpleNamespace(
        cfg=cfg, target=network(), source=of, plan_with=lambda net, prompts: given.append(prompts)
    )
    exit_planner.exit_plan(job, 1)
    assert (given[0].ranking, given[0].final) == (rows[SPLITS[1]], rows[SPLITS[2]])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["early_exit", "hybrid_exit"])
def test_a_run_chooses_says_why_and_keeps_its_choice(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target_and_texts(tmp_path)
    run = tmp_path / "run"
    asked = [
        "train",
        *run_paths(tmp_path, "run"),
        *SIZES,
        f"draft={kind}",
        "draft.rank=0",
        "trainer.steps=1",
        "trainer.corpus_steps=0",
    ]
    assert main([*asked, "check=true"]) == 0 and not run.exists()
    capsys.readouterr()
    assert main(asked) == 0
    said, plan = capsys.readouterr().out, read_json(run / exit_planner.FILE)
    report = read_json(run / "draft" / "report.json")
    config = read_json(run / "draft" / "config.json")
    assert report["extra"]["exit_plan"] == plan and config["num_hidden_layers"] == plan["layers"]
    assert [one["layers"] for one in plan["exits"]] == candidate_exits(2)
    assert f"draft.layers={plan['layers']}: " in said and "expected at k = " in said
    (only,) = plan["exits"]
    assert 0 < only["alpha"] < 1 and only["cost"] > 0 and 1 < only["tau"] < 1 + only["k"] and only["speedup"] > 0


def test_a_written_choice_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on has the exit that it began with; layers that are given are not looked at."""
    rows = [vars(at(1, 0.5, 0.1)), vars(at(2, 0.8, 0.2))]
    built: list[int] = []
    monkeypatch.setattr(exit_planner, "exits", lambda job: built.append(1) or rows)
    first, again, given = job_of(tmp_path), job_of(tmp_path), job_of(tmp_path, 3)
    plans = [exit_planner.plan_exits(one) for one in (first, again, given)]
    assert plans[0] == plans[1] and plans[0] and plans[0]["layers"] == 2 and plans[2] is None and built == [1]
    assert (first.cfg.draft.layers, again.cfg.draft.layers, given.cfg.draft.layers) == (2, 2, 3)
    loaded = job_of(tmp_path / "other", init="pretrained")  # the exit is the folder's
    assert exit_planner.plan_exits(loaded) is None and loaded.cfg.draft.layers is None and built == [1]


def test_all_layers_in_four_bits_learn_and_are_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From one command: layers are not chosen, weights are fitted once, and the folder has those that were measured."""
    target_and_texts(tmp_path)
    bits = "draft=early_exit draft.bits=4 draft.depths=1 trainer.steps=2 trainer.corpus_steps=0".split()
    asked = ["train", *run_paths(tmp_path, "run"), *SIZES, *bits]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert said.count("draft.bits: rounding the target's weights on training texts") == 1
    assert "linear exit" not in said
    draft = tmp_path / "run" / "draft"
    config, network = read_json(draft / "config.json"), ExitNetwork.from_pretrained(draft)
    assert (config["bits"], config["num_hidden_layers"], config["rank"]) == (4, 2, 0)
    parts = [part for part in network.modules() if isinstance(part, FourBits)]
    assert len(parts) == 14 and all(torch.equal(part.numbers, part.numbers.round()) for part in parts)
    assert not any(part.gain.any() for part in parts)
    assert read_json(draft / "report.json")["exactness"]["passed"]
    assert main([*asked, "trainer.steps=3"]) == 0  # goes on from what it learnt
    assert "draft.bits: rounding" not in capsys.readouterr().out
