"""Distillation: what is predicted from held-out text, what a step changes and leaves alone, the optimisers."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from cotrain import losses
from cotrain.data.sources import Blocks
from cotrain.data.texts import Learnt, Texts, of_blocks
from cotrain.evaluation.held_out import HeldOut, calibration_error, evaluate, held_out
from cotrain.evaluation.held_out import figures as named
from cotrain.losses.spec import NAMES, LossSpec, parse
from cotrain.students import independent
from cotrain.students.base import LAST
from cotrain.students.independent import Independent
from cotrain.teacher.memory_cache import Remembering
from cotrain.teacher.target_distributions import Record
from cotrain.teacher.target_model import load_target, served, split
from cotrain.training import optim
from cotrain.training.callbacks import Kept, MeasureSpeed
from cotrain.training.module import Distillation
from cotrain.training.progress import Progress, trapezoid
from cotrain.training.stages import Stage, current
from inference.verify import prediction
from tests.folders import VOCABULARY, network, target_folder
from tests.tiny import tiny


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny()


def texts(lengths: list[int], prompts: list[int], domains: list[str]) -> Texts:
    ids = torch.randint(32, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    for row, length in zip(ids, lengths, strict=True):
        row[length:] = 0
    return Texts(ids, torch.tensor(prompts), torch.tensor(lengths), domains)


def judged(target: LlamaForCausalLM, found: Texts, temperature: float = 1.0) -> HeldOut:
    return held_out(served(target)[0], found, temperature, batch=2)


def distributions(model: LlamaForCausalLM, ids: Tensor, temperature: float) -> Tensor:
    """(T, V): the distribution of the token at each place, row 0 of no use."""
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    return torch.cat([torch.full_like(logits[:1], float("nan")), (logits[:-1] / temperature).softmax(-1)])


def test_figures_are_those_of_passes_made_by_hand(target: LlamaForCausalLM) -> None:
    small, temperature = tiny(layers=1, hidden=8, seed=3), 0.7
    found = texts([9, 14, 11], [2, 5, 1], ["b", "a", "b"])
    figures = named(evaluate(judged(target, found, temperature), Independent(small), split(target)[1]))
    r, alphas, lengths = torch.zeros(3, 10, dtype=torch.float64), [], []
    for b in range(3):
        ids = found.ids[b, : found.length[b]]
        p, q = (distributions(model, ids, temperature)[found.prompt[b] :] for model in (target, small))
        x = ids[found.prompt[b] :, None]
        r[b, : len(x)] = (q.gather(1, x) / p.gather(1, x)).clamp(max=1)[:, 0]
        alphas.append(torch.minimum(p, q).sum(-1))
        lengths.append(len(x))
    for domain, rows in {"a": [1], "b": [0, 2], "all": [0, 1, 2]}.items():
        size = torch.tensor(lengths)[rows]
        alpha = torch.cat([alphas[b] for b in rows]).mean().item()
        assert figures[f"alpha/{domain}"] == pytest.approx(alpha, abs=1e-6)
        assert figures[f"tau/{domain}/3"] == pytest.approx(prediction.tau(r[rows], 3, size).item(), rel=1e-6)
        depths = prediction.prefix(r[rows], 8, size)
        assert figures[f"prefix/{domain}/2"] == pytest.approx(depths[1].item(), rel=1e-6)
    assert figures["kl/all"] > 0.1 and figures["alpha/worst"] == min(figures["alpha/a"], figures["alpha/b"])


def test_what_stands_in_the_prompt_or_the_padding_does_not_count(target: LlamaForCausalLM) -> None:
    small, found = tiny(layers=1, seed=3), texts([8, 12], [3, 4], ["a", "a"])
    heads = (Independent(small), split(target)[1])
    scores = evaluate(judged(target, found), *heads)["all"]
    assert scores.lengths.tolist() == [5, 8] and scores.r[0, 5:].eq(0).all() and scores.r[0, :5].gt(0).all()
    found.ids[0, 8:] = 7
    again = evaluate(judged(target, found), *heads)["all"]
    assert torch.equal(again.r, scores.r) and again.alpha == scores.alpha


def test_the_target_as_its_own_draft_is_always_accepted(target: LlamaForCausalLM) -> None:
    found = texts([14, 26], [2, 2], ["a", "b"])
    figures = named(evaluate(judged(target, found), Independent(target), split(target)[1]))
    assert figures["alpha/all"] == pytest.approx(1)
    assert [figures[f"tau/all/{k}"] for k in (1, 2, 3, 5)] == pytest.approx([2, 3, 4, 6])
    assert figures["kl/all"] == pytest.approx(0, abs=1e-9)


def test_greedy_drafts_are_accepted_where_the_argmax_agrees(target: LlamaForCausalLM) -> None:
    small, found = tiny(layers=1, seed=3), texts([20], [1], ["a"])
    p, q = (distributions(model, found.ids[0], 1.0)[1:] for model in (target, small))
    found.ids[0, 1:] = p.argmax(-1)  # not what the target would say next, but what r is asked of
    p, q = (distributions(model, found.ids[0], 1.0)[1:] for model in (target, small))
    figures = named(evaluate(judged(target, found, 0.0), Independent(small), split(target)[1]))
    agree = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert figures["alpha/a"] == pytest.approx(agree) and figures["alpha_greedy_draft/a"] == pytest.approx(agree)


def test_calibration_is_judged_bin_by_bin() -> None:
    """Half of what is said with confidence .5 is right, and a tenth less than what is said with .9."""
    sure, hit = torch.tensor([0.5] * 4 + [0.9] * 10), torch.tensor([1.0, 0, 1, 0] + [1.0] * 8 + [0, 0])
    assert calibration_error(sure, hit) == pytest.approx(10 / 14 * 0.1)
    assert calibration_error(torch.ones(3), torch.ones(3)) == 0 == calibration_error(torch.ones(0), torch.ones(0))


def test_stages_follow_one_another() -> None:
    stages = [Stage(0.25, LossSpec(losses.kl)), Stage(1.0, LossSpec(losses.tv))]
    found = [current(stages, at).position for at in (0, 0.24, 0.25, 0.9, 1.0)]
    assert found == [losses.kl] * 2 + [losses.tv] * 3


def module_of(
    target: LlamaForCausalLM,
    network: LlamaForCausalLM,
    stages: list[Stage],
    steps: int,
    cosine: float = 0.0,
    top: int = 0,
) -> Distillation:
    found = texts([16, 16], [1, 1], ["a", "a"])
    optimizer = partial(optim.adamw, lr=1e-2, weight_decay=0.0, betas=[0.9, 0.95])
    schedule = partial(trapezoid, progress=Progress(steps), warmup=1 / steps, decay=1 / steps)
    taught = stages, optimizer, schedule, {1.0: judged(target, found)}
    return Distillation(Independent(network), target, *taught, cosine=cosine, remember=2**20, top=top)


def judge(module: Distillation) -> float:
    """Acceptance as the draft now is."""
    module.judge()
    return module.acceptance()["alpha_T1/all"]


def trainer(folder: Path, steps: int, *callbacks: lightning.Callback) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, num_sanity_val_steps=0, val_check_interval=2,
        check_val_every_n_epoch=None, enable_checkpointing=False, default_root_dir=folder, callbacks=list(callbacks),
        **quiet,
    )  # fmt: skip


def loader(vocabulary: int = 32) -> DataLoader:
    ids = torch.randint(vocabulary, (8, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return DataLoader(Learnt(of_blocks(Blocks(ids, torch.zeros(8, dtype=torch.int64), ["a"]))), batch_size=2)


def test_training_moves_the_draft_and_nothing_else(target: LlamaForCausalLM, tmp_path: Path) -> None:
    used: list[str] = []

    def noted(name: str) -> Callable[..., Tensor]:
        def loss(logp: Tensor, logq: Tensor) -> Tensor:
            used.append(name)
            return losses.kl(logp, logq)

        return loss

    small, theirs = tiny(layers=1, seed=3), copy.deepcopy(target.state_dict())
    before = copy.deepcopy(small.state_dict())
    module = module_of(
        target, small, [Stage(0.5, LossSpec(noted("first"))), Stage(1.0, LossSpec(noted("then")))], steps=4
    )
    run = trainer(tmp_path, 4)
    run.validate(module, DataLoader([0]), verbose=False)
    start = module.acceptance()
    assert start["alpha_T1/all"] == pytest.approx(judge(module))
    run.fit(module, loader())
    assert used == ["first"] * 2 + ["then"] * 2  # one chunk a step: nothing is computed again
    assert all(not torch.equal(value, before[name]) for name, value in small.state_dict().items())
    assert all(torch.equal(value, theirs[name]) for name, value in target.state_dict().items())
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(name.startswith("draft.") for name in module.state_dict())
    assert judge(module) != start["alpha_T1/all"]
    run.save_checkpoint(tmp_path / "c.ckpt")
    assert len(torch.load(tmp_path / "c.ckpt", weights_only=True)["state_dict"]) == len(before)


@pytest.mark.parametrize("quantisation", ["int8", "nf4"])
def test_a_draft_learns_from_a_quantised_target(quantisation: str, tmp_path: Path) -> None:
    target = load_target(str(target_folder(tmp_path / "target")), quantisation)
    small = independent.from_layers(target, [0])
    ids = torch.randint(VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(1))
    blocks = Texts(ids, torch.ones(8, dtype=torch.int64), torch.full((8,), 16), ["a"] * 8)
    module = module_of(target, small, [Stage(1.0, LossSpec(losses.kl))], steps=16)
    module.held_out = {1.0: judged(target, blocks)}
    before = judge(module)
    theirs = copy.deepcopy(target.state_dict())  # after a pass: on a CPU the first one rounds the scales of nf4
    run = trainer(tmp_path, 16)
    run.fit(module, loader(VOCABULARY))
    assert judge(module) > before + 0.02
    assert all(torch.equal(value, theirs[name]) for name, value in target.state_dict().items())


def test_speed_is_measured_at_validations_and_survives_a_checkpoint(tmp_path: Path) -> None:
    speeds, taus = iter([1.2, 1.4]), iter([2.0, 1.8])
    found = MeasureSpeed(
        lambda draft: {"speedup": next(speeds) + torch.is_inference_mode_enabled()},
        lambda: next(taus),
        tmp_path / "one",
    )
    with pytest.raises(ValueError, match="trainer.steps"):
        found.best()
    small = tiny(layers=1, seed=3)
    module = module_of(tiny(), small, [Stage(1.0, LossSpec(losses.kl))], steps=2)
    run = trainer(tmp_path, 2, found)
    run.validate(module, DataLoader([0]), verbose=False)
    run.fit(module, loader(), DataLoader([0]))
    assert found.best() == Kept(0, tmp_path / "one" / "step-0", 1.2, 2.0)  # a clock on few prompts does not rank
    kept = LlamaForCausalLM.from_pretrained(found.kept[1].path)
    assert all(torch.equal(value, small.state_dict()[name]) for name, value in kept.state_dict().items())
    other = MeasureSpeed(lambda draft: {}, lambda: 0.0, tmp_path / "moved")
    other.load_state_dict(found.state_dict())
    moved = tmp_path / "moved"
    assert other.kept == [Kept(0, moved / "step-0", 1.2, 2.0), Kept(2, moved / "step-2", 1.4, 1.8)]


def test_training_ends_when_tau_no_longer_rises(tmp_path: Path) -> None:
    taus = [2.0, 2.5, 2.4, 2.6, 2.6, 2.5]
    found = MeasureSpeed(lambda draft: {"speedup": 1.0}, lambda: taus[len(found.kept)], tmp_path, patience=2)
    alone = SimpleNamespace(barrier=lambda: None)
    run: Any = SimpleNamespace(
        logger=None, loggers=[], global_step=0, should_stop=False, is_global_zero=True, strategy=alone
    )
    ends = []
    for run.global_step in range(6):
        found.on_validation_end(run, SimpleNamespace(assembled=lambda: nullcontext(tiny(layers=1))))
        ends.append(run.should_stop)
    assert ends == [False] * 5 + [True] and found.best().step == 3


def stepped(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def test_muon_moves_every_parameter_and_resumes_exactly() -> None:
    def fresh() -> tuple[LlamaForCausalLM, optim.MuonAdamW]:
        model = network()
        return model, optim.MuonAdamW(model, lr=1e-2, embedding_lr=1e-3, weight_decay=0.1)

    model, optimizer = fresh()
    before = copy.deepcopy(model.state_dict())
    stepped(model, optimizer, 0)
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again, resumed = fresh()
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(model, optimizer, 1)
    stepped(again, resumed, 1)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_muon_takes_the_matrices_of_the_layers_and_one_schedule_drives_both() -> None:
    model = network()
    optimizer = optim.MuonAdamW(model, lr=1e-2, embedding_lr=1e-3, weight_decay=0.1)
    muon, rest = (group["params"] for group in optimizer.param_groups)
    assert len(muon) == 2 * 7 and {p.ndim for p in muon} == {2}
    assert any(p is model.model.embed_tokens.weight for p in rest) and len(rest) == 2 * 2 + 2
    schedule = trapezoid(optimizer, Progress(10), warmup=0.2, decay=0.4)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 5e-4]
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.parts[0].param_groups + optimizer.parts[1].param_groups] == [1e-2, 1e-3]


def test_adamw_decays_matrices_only() -> None:
    groups = optim.adamw(network(), 1e-3, 0.1, [0.9, 0.95]).param_groups
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups] == [(0.1, {2}), (0.0, {1})]


def test_the_trapezoid_rises_stays_and_falls_to_zero() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule, rates = trapezoid(optimizer, Progress(10), warmup=0.4, decay=0.3), []
    for _ in range(11):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0])


def test_hidden_states_are_remembered_by_text_until_the_room_is_full() -> None:
    asked: list[list[int]] = []

    def read(ids: Tensor, _: object = None) -> Record:
        asked.append(ids[:, 0].tolist())
        return {LAST: ids.unsqueeze(-1).float().expand(-1, -1, 4)}

    texts, keys = torch.arange(3)[:, None].repeat(1, 5), torch.tensor([10, 11, 12])
    teacher = Remembering(read, limit=2 * 5 * 4 * 4)  # two texts' worth of bytes
    for at in ([0, 1], [1, 0], [1], [2], [0, 2], [2]):
        assert torch.equal(teacher(texts[at], keys[at])[LAST], read(texts[at])[LAST])
        asked.pop()
    assert asked == [[0, 1], [2], [0, 2], [2]]


def test_a_draft_as_wide_as_the_target_is_led_by_its_hidden_states(target: LlamaForCausalLM, tmp_path: Path) -> None:
    def zero(logp: Tensor, logq: Tensor) -> Tensor:
        return 0 * losses.kl(logp, logq)

    small = tiny(layers=1, seed=3)
    module = module_of(target, small, [Stage(1.0, LossSpec(zero))], steps=30, cosine=1.0)
    ids = next(iter(loader()))["ids"]
    states = [split(model)[0] for model in (small, target)]

    def apart() -> float:
        return 1 - torch.cosine_similarity(*(read(ids) for read in states), dim=-1).mean().item()

    before = apart()
    trainer(tmp_path, 30).fit(module, loader())
    assert apart() < before - 0.1
    with pytest.raises(ValueError, match="init.cosine: the draft's hidden states are 8 wide, the target's 16"):
        module_of(target, tiny(layers=1, hidden=8), [Stage(1.0, LossSpec(losses.kl))], steps=1, cosine=1.0)


def test_texts_read_ahead_are_not_read_again() -> None:
    asked: list[int] = []

    def read(ids: Tensor, _: object = None) -> Record:
        asked.append(len(ids))
        return {LAST: ids.unsqueeze(-1).float()}

    texts, keys = torch.arange(5)[:, None].repeat(1, 4), torch.arange(5) + 3
    teacher = Remembering(read, limit=10**6)
    teacher.fill(texts, keys, batch=2)
    assert asked == [2, 2, 1]
    assert torch.equal(teacher(texts[[4, 0]], keys[[4, 0]])[LAST], read(texts[[4, 0]])[LAST])
    assert asked == [2, 2, 1, 2]
    small = Remembering(read, limit=2 * 4 * 4)
    small.fill(texts, keys, batch=2)
    assert len(small.kept) == 2 and asked[4:] == [2, 2]  # full: what is left is read when it comes


# what follows another end than alpha, or a sampled gradient that needs more steps
AT_OTHER_ENDS = ("greedy", "greedy_draft", "match", "rkl", "ce", "mix", "tvpp", "0.5*tvpp+length")


@pytest.mark.parametrize("name", [*NAMES, "0.1*kl + 0.9*calls", "0.5*tvpp+length"])
def test_every_loss_teaches(name: str, tmp_path: Path) -> None:
    target, small = tiny(), tiny(layers=1, seed=3)
    ids = torch.randint(32, (8, 16), generator=torch.Generator().manual_seed(1))
    blocks = Texts(ids, torch.ones(8, dtype=torch.int64), torch.full((8,), 16), ["a"] * 8)
    module = module_of(target, small, [Stage(1.0, parse(name))], steps=24)
    module.held_out = {1.0: judged(target, blocks)}
    before, first = judge(module), copy.deepcopy(small.state_dict())
    trainer(tmp_path, 24).fit(module, loader())
    gained = judge(module) - before
    assert any(not torch.equal(value, first[key]) for key, value in small.state_dict().items())
    assert gained > (-0.02 if name in AT_OTHER_ENDS else 0)


def test_drawn_tokens_depend_on_the_step_and_the_text_alone() -> None:
    module = module_of(tiny(), tiny(layers=1), [Stage(1.0, parse("tvpp"))], steps=2)
    keys = torch.tensor([5, 6])
    module._trainer = SimpleNamespace(global_step=3)  # type: ignore[assignment]
    one = module._uniforms(keys, 4)
    assert torch.equal(module._uniforms(keys.flip(0), 4), one.flip(0))
    module._trainer = SimpleNamespace(global_step=4)  # type: ignore[assignment]
    assert not torch.equal(module._uniforms(keys, 4), one)


def test_texts_are_learnt_at_their_own_temperature() -> None:
    met: list[torch.Tensor] = []

    def noted(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
        met.append(losses.entropy(logp))
        return losses.kl(logp, logq)

    module = module_of(tiny(), tiny(layers=1), [Stage(1.0, LossSpec(noted))], steps=1)
    module._trainer = SimpleNamespace(global_step=0, max_steps=1, world_size=1)  # type: ignore[assignment]
    ids = torch.randint(32, (1, 9), generator=torch.Generator().manual_seed(1)).expand(2, 9)
    batch = {"ids": ids, "predicted": torch.ones(2, 8, dtype=torch.bool), "key": torch.tensor([0, 1]),
             "temperature": torch.tensor([1.0, 0.0])}  # fmt: skip
    module.training_step(batch, 0)
    warm, cold = met[0].view(2, 8)
    assert (warm > 0.1).all() and (cold == 0).all()


def test_texts_that_are_padded_to_another_width_are_read_anew() -> None:
    """As those of the first round are once a longer text came in the second."""
    asked: list[tuple[int, ...]] = []

    def read(ids: torch.Tensor, _: object = None) -> Record:
        asked.append(tuple(ids.shape))
        return {LAST: ids[..., None].float()}

    short, keys = torch.arange(8).view(4, 2), torch.arange(4)
    teacher = Remembering(read, limit=4 * 3 * 4 + 2 * 3 * 4)  # bytes of six texts of three tokens
    teacher.fill(short, keys, batch=2)
    long = torch.nn.functional.pad(torch.arange(12).view(6, 2), (0, 1))
    teacher.fill(long[:2], keys[:2], batch=2)
    teacher.fill(long, torch.arange(6), batch=2)  # the first batch is known: the others are read all the same
    assert asked == [(2, 2), (2, 2), (2, 3), (2, 3), (2, 3)]
    assert torch.equal(teacher(long, torch.arange(6))[LAST][..., 0], long.float()) and len(asked) == 5
