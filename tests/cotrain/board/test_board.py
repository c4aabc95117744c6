"""What TensorBoard gets beside a run: how often, for how much time, and text that it shows as it stands."""

import html
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.plugin_util import markdown_to_safe_html

from cotrain.bench.measurement import sample_text
from cotrain.board import curves, tags
from cotrain.board.tags import escaped_markdown
from cotrain.data.texts import Texts
from cotrain.evaluation.held_out import HeldOut, Scores
from cotrain.students.base import LAST
from cotrain.training import callbacks
from cotrain.training.callbacks import HeldOutPoints, Learning, depths, gradient_norm, part_of, whole
from cotrain.training.module import alpha_of
from cotrain.training.progress import Clock, Progress
from inference import Event
from inference.output import pieces
from tests.folders import tokenizer

STEPS = 2300


def held(texts: int = 40, domains: int = 2, tokens: int = 10) -> HeldOut:
    """Texts of 10 sampled tokens behind a prompt of two."""
    ids, length = torch.arange(texts).unsqueeze(1).expand(texts, tokens + 2), torch.full((texts,), tokens + 2)
    names = [f"d{i * domains // texts}" for i in range(texts)]
    states = {LAST: ids.unsqueeze(2).float()}
    return HeldOut(Texts(ids, torch.full((texts,), 2), length, names), states, 1.0)


def scores(alpha: float = 0.5) -> Scores:
    l = torch.tensor([[0.0, math.log(0.5), math.log(0.25), 0.0]], dtype=torch.float64)
    return Scores(l, l.exp(), l.exp(), torch.tensor([4]), alpha, alpha, 0.1, 0.2)


def trained(
    monkeypatch: pytest.MonkeyPatch, seconds: float, validations: int = 2
) -> tuple[list[int], HeldOutPoints, Clock]:
    """The steps of a run of ordinary length at which a draft that takes so many seconds a point is judged; a step takes
    a tenth of one."""
    clock = Clock(Progress(STEPS), validations)
    points = HeldOutPoints(held(), clock, [], k=4)
    time, result = [0.0], list[int]()
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: time[0])

    def on(_: HeldOut) -> dict[str, Scores]:
        time[0] += seconds
        return {"all": scores()}

    draft = torch.nn.Linear(1, 1)
    module: Any = SimpleNamespace(draft=draft, on=on, judged={1.0: {"all": scores()}}, temperature=1.0)
    judged = list[int]()
    logger = SimpleNamespace(log_metrics=lambda values, step: (result if tags.TAU in values else judged).append(step))
    strategy, every = SimpleNamespace(broadcast=lambda value: value), STEPS // validations
    trainer: Any = SimpleNamespace(
        loggers=[logger],
        global_step=0,
        should_stop=False,
        val_check_batch=every,
        strategy=strategy,
        world_size=1,
        lr_scheduler_configs=[],
    )
    points.on_validation_epoch_end(trainer, module)
    clock.on_train_start(trainer, module)
    points.on_train_start(trainer, module)
    for step in range(1, STEPS + 1):
        time[0] += 0.1
        trainer.global_step = step
        trainer.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=step - 1))
        clock.on_train_batch_end(trainer, module, None, {}, 0)
        points.on_train_batch_end(trainer, module, None, {}, 0)
        if step % every == 0:
            points.on_validation_epoch_end(trainer, module)
            points.on_validation_end(trainer, module)
            clock.on_validation_end()
    assert judged == [every * (i + 1) for i in range(validations)]
    assert clock.progress.elapsed == pytest.approx(0.1 * STEPS)  # points are no training
    return result, points, clock


def test_a_run_of_ordinary_length_has_twenty_points_and_no_step_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    result, points, _ = trained(monkeypatch, 0.1)
    assert len(result) >= 20 and result == sorted(set(result)) and result[0] == 0 and result[-1] == STEPS
    assert max(b - a for a, b in zip(result, result[1:], strict=False)) <= STEPS / 20
    assert f"{points.count} points of 40 texts, {0.1 * points.count:.1f} s" in points.line()


@pytest.mark.parametrize("seconds", [0.5, 60.0])
def test_points_never_take_more_than_their_share_of_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    result, points, clock = trained(monkeypatch, seconds)
    assert points.seconds <= 0.05 * clock.progress.elapsed
    assert {0, STEPS // 2, STEPS} <= set(result) and points.count < 24


def test_a_resumed_run_counts_the_points_before(monkeypatch: pytest.MonkeyPatch) -> None:
    _, points, clock = trained(monkeypatch, 0.1)
    other = HeldOutPoints(held(), clock, [], k=4)
    other.load_state_dict(points.state_dict())
    assert other.line() == points.line()


@pytest.mark.parametrize(("tokens", "count"), [(0, 1), (24 * 10 * 100, 10), (10**9, 40)])
def test_the_part_is_as_large_as_the_training_allows(tokens: float, count: int) -> None:
    whole_set = held()
    part = part_of(whole_set, tokens)
    assert len(part.texts) == count == len(part.states[LAST])
    assert torch.equal(part.states[LAST][:, 0, 0].long(), part.texts.ids[:, 0])
    if count > 1:
        assert set(part.texts.domain) == {"d0", "d1"}


def test_acceptance_is_of_the_drafting_mode() -> None:
    result = Scores(*vars(scores(0.5)).values())
    object.__setattr__(result, "alpha_greedy", 0.25)
    judged = {1.0: {"all": result, "a": result, "b": result}}
    for objective, alpha in (("sampled", 0.5), ("greedy", 0.25)):
        said = whole(judged, 1.0, objective)
        assert alpha_of(result, objective) == alpha == said["4_held_out/acceptance_T1"]
        assert said["5_domains/acceptance_b"] == alpha
    assert depths(result, 3) and not depths(result, 3, "greedy")


def test_ends_that_one_batch_cannot_tell_are_left_out() -> None:
    result = tags.speed({"speedup": 1.5, "low": math.nan, "high": math.nan, "tau": 2.0})
    assert result == {tags.SPEEDUP: 1.5, "6_timed/tau": 2.0}


def test_ends_of_an_interval_keep_their_names() -> None:
    result = tags.speed({"speedup": 1.5, "low": 1.2, "high": 1.9})
    assert result == {f"1_serving/speedup{end}": value for end, value in (("", 1.5), ("_low", 1.2), ("_high", 1.9))}
    report = {
        "speedup": {"whole": {"value": 1.5, "low": 1.2, "high": 1.9}},
        "acceptance": {"tau": {"measured": 2.5}},
        "exactness": {"passed": False},
    }
    wanted = {"acceptance": 0.5, "tau": 2.0, "speedup": 1.5, "speedup_low": 1.2, "speedup_high": 1.9, "tau_timed": 2.5}
    assert curves.final_figures(0.5, 2.0, report) == wanted | {"exact": 0.0}
    assert curves.final_figures(0.5, 2.0, {}) == {"acceptance": 0.5, "tau": 2.0}


def test_marks_are_those_that_the_legend_shows() -> None:
    ids, kinds = tokenizer().encode("abc", add_special_tokens=False), ["drafted", "corrected", "bonus"]
    ids = [ids[0]] * 3
    engine = SimpleNamespace(stream=lambda *_, **__: [Event(0, ids[:2], kinds[:2]), Event(0, ids[2:], kinds[2:])])
    plan: Any = SimpleNamespace(
        tokenizer=tokenizer(),
        ranking=lambda *_: [ids],
        engine=lambda *_: engine,
        sampling=None,
        bench=SimpleNamespace(new_tokens=3, seed=0),
    )
    shown = markdown_to_safe_html(sample_text(plan, 1))
    legend = dict(re.findall(r"<(\w+)>(accepted|corrected|bonus)", shown))
    built = re.findall(r"<(strong|em|code)>", shown.partition("target calls")[2])
    assert [legend[tag] for tag in built] == ["accepted", "corrected", "bonus"]
    assert "3 new tokens in 2 target calls" in shown


def test_training_is_logged_at_the_steps_done_with_their_rate() -> None:
    learning, logged = Learning(Progress(20)), list[tuple[int, dict[str, float]]]()
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append((step, values)))
    trainer: Any = SimpleNamespace(loggers=[logger], global_step=0, world_size=2)
    draft = torch.nn.Linear(1, 1)
    draft.weight.grad = torch.full((1, 1), 3.0)
    module: Any = SimpleNamespace(draft=draft, device=torch.device("cpu"), found={}, watched=False)
    learning.on_train_start(trainer, module)
    for step in range(10):
        module.watched, module.step_figures = step % 5 == 4, {"loss": float(step)} if step % 5 == 4 else {}
        optimizer = SimpleNamespace(param_groups=[{"lr": 0.1 * step}])
        for index in range(2):  # of a step
            if index:
                learning.on_before_optimizer_step(trainer, module, optimizer)
                trainer.global_step += 1
            learning.progress.elapsed += 0.5
            batch = {"predicted": torch.tensor([[True, True, False]] * 2), "group": (index, 2)}
            learning.on_train_batch_end(trainer, module, None, batch, 0)
    assert [step for step, _ in logged] == [5, 10]
    wanted = {tags.LOSS: 9.0, tags.RATE: pytest.approx(0.9), tags.NORM: 3.0, tags.TOKENS_PER_SECOND: 2 * 8.0}
    assert logged[1][1] == wanted


def test_the_gradient_norm_is_of_all_weights_together() -> None:
    draft = torch.nn.Linear(2, 1)
    draft.weight.grad, draft.bias.grad = torch.tensor([[2.0, 3.0]]), torch.tensor([6.0])
    assert gradient_norm(draft) == pytest.approx(7.0)


TEXTS = ["<script>alert(1)</script>", "# a *b* _c_ `d` [e](f)", "- 1\n\n    code &amp; <br>", "ü|é"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_shown_as_it_stands(text: str) -> None:
    shown = markdown_to_safe_html(f"<strong>{escaped_markdown(text)}</strong>")
    assert "<script" not in shown and shown.startswith("<p><strong>") and shown.endswith("</strong></p>")
    inner = shown.removeprefix("<p><strong>").removesuffix("</strong></p>")
    plain = html.unescape(inner.replace("<br>", "")).replace("\u21b5", "\n")
    assert "<" not in inner.replace("<br>", "")
    assert plain == text


def test_pieces_of_a_text_wait_for_whole_characters() -> None:
    ids = tokenizer().encode("a ü", add_special_tokens=False)
    events = [Event(0, ids[:-1], ["drafted"] * (len(ids) - 1)), Event(0, ids[-1:], ["corrected"])]
    result = list(pieces(events, tokenizer().decode))
    assert "".join(text for _, text in result) == "a ü" and result[-1] == ("corrected", "ü")
    cut = list(pieces(events[:1], tokenizer().decode))
    assert cut[-1] == ("drafted", "\ufffd")
