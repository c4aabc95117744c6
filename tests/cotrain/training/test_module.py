"""A step of distillation: what it changes and what it leaves, its losses and their draws."""

import copy
from collections.abc import Callable
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

from cotrain.data.texts import Learnt, Texts
from cotrain.evaluation.held_out import held_out
from cotrain.losses import divergences as losses
from cotrain.losses.names import LOSSES
from cotrain.losses.spec import LossSpec, parse
from cotrain.students import independent
from cotrain.students.block import BlockStudent
from cotrain.students.independent import IndependentStudent
from cotrain.teacher.target_model import load_target, served
from cotrain.training import optim
from cotrain.training.module import Distillation, Stage, current
from cotrain.training.optim import trapezoid
from cotrain.training.progress import Progress
from tests import kinds
from tests.cotrain.evaluation.test_held_out import judged, texts
from tests.folders import VOCABULARY, target_folder
from tests.often import often
from tests.student_kinds import STUDENTS
from tests.student_kinds import target as target_of_kinds
from tests.tiny import tiny


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny()


def test_stages_follow_one_another() -> None:
    stages = [Stage(0.25, LossSpec(losses.kl)), Stage(1.0, LossSpec(losses.tv))]
    losses_met = [current(stages, at).position for at in (0, 0.24, 0.25, 0.9, 1.0)]
    assert losses_met == [losses.kl] * 2 + [losses.tv] * 3


def module_of(
    target: LlamaForCausalLM,
    network: LlamaForCausalLM,
    stages: list[Stage],
    steps: int,
    student: Any = None,
) -> Distillation:
    some, student = texts([16, 16], [1, 1], ["a", "a"]), student or IndependentStudent(network)
    optimizer = partial(optim.adamw, lr=1e-2, weight_decay=0.0, betas=[0.9, 0.95])
    schedule = partial(trapezoid, progress=Progress(steps), warmup=1 / steps, decay=1 / steps)
    taught = stages, optimizer, schedule, {1.0: held_out(served(target, layers=student.reads)[0], some, 1.0)}
    return Distillation(student, target, *taught, remember=2**20)


def alone(module: Distillation, steps: int = 1, at: int = 0) -> Distillation:
    """Outside a trainer, at a step of so many."""
    module._trainer = SimpleNamespace(global_step=at, max_steps=steps, world_size=1)  # type: ignore[assignment]
    return module


def judge(module: Distillation) -> float:
    """Acceptance as the draft now is."""
    module.judge()
    return module.acceptance()["alpha_T1/all"]


def trainer(folder: Path, steps: int, *callbacks: lightning.Callback) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        num_sanity_val_steps=0,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **quiet,
    )


def blocks(vocabulary: int = 32) -> Texts:
    ids = torch.randint(vocabulary, (8, 16), generator=torch.Generator().manual_seed(1))
    first = torch.ones(8, dtype=torch.int64)
    return Texts(ids, first, 16 * first, ["a"] * 8)


def loader(vocabulary: int = 32) -> DataLoader:
    return DataLoader(Learnt(blocks(vocabulary)), batch_size=2)


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
    module = module_of(target, small, [Stage(1.0, LossSpec(losses.kl))], steps=16)
    module.held_out = {1.0: judged(target, blocks(VOCABULARY))}
    before = judge(module)
    theirs = copy.deepcopy(target.state_dict())  # after a pass: on a CPU the first one rounds the scales of nf4
    run = trainer(tmp_path, 16)
    run.fit(module, loader(VOCABULARY))
    assert judge(module) > before + 0.02
    assert all(torch.equal(value, theirs[name]) for name, value in target.state_dict().items())


def test_tau_without_the_markov_head_is_that_of_the_draft_without_it(target: LlamaForCausalLM, tmp_path: Path) -> None:
    network: Any = kinds.block(target, markov_rank=3)
    student, stages = BlockStudent(network, target), [Stage(1.0, LossSpec(losses.kl))]
    module = module_of(target, network, stages, steps=2, student=student)
    trainer(tmp_path, 2).fit(module, loader())
    judge(module)
    with_head, without = module.acceptance(), module.without_markov()
    assert network.markov_head is not None
    network.markov_head = None
    judge(module)
    expected = {
        key.replace("_T1", "_without_markov_T1"): value
        for key, value in module.acceptance().items()
        if key.startswith(("tau_T1/all/", "tau_greedy_draft_T1/all/"))
    }
    assert without == expected and len(without) == 6 and module.without_markov() == {}
    assert without["tau_without_markov_T1/all/3"] != with_head["tau_T1/all/3"]


# what follows another end than alpha
AT_OTHER_ENDS = ("greedy", "greedy_draft")


@pytest.mark.parametrize(
    "name",
    often(
        [*LOSSES, "0.1*kl + 0.9*calls", "0.5*tv+calls_block"],
        {"kl", "calls", "greedy", "0.5*tv+calls_block"}.__contains__,
    ),
)
def test_every_loss_teaches(name: str, tmp_path: Path) -> None:
    target, small = tiny(), tiny(layers=1, seed=3)
    module = module_of(target, small, [Stage(1.0, parse(name))], steps=8)
    module.held_out = {1.0: judged(target, blocks())}
    before, first = judge(module), copy.deepcopy(small.state_dict())
    trainer(tmp_path, 8).fit(module, loader())
    gained = judge(module) - before
    assert any(not torch.equal(value, first[key]) for key, value in small.state_dict().items())
    assert gained > (-0.02 if name in AT_OTHER_ENDS else 0)


def test_uniforms_depend_on_the_seed_the_step_and_the_text_alone() -> None:
    module = module_of(tiny(), tiny(layers=1), [Stage(1.0, parse("kl"))], steps=2)
    keys = torch.tensor([5, 6])
    alone(module, at=3)
    one = module._uniforms(keys, 4)
    assert torch.equal(module._uniforms(keys.flip(0), 4), one.flip(0))
    alone(module, at=4)
    assert not torch.equal(module._uniforms(keys, 4), one)
    alone(module, at=3).seed = 1
    assert not torch.isclose(module._uniforms(keys, 4), one).any()


@pytest.mark.parametrize("kind", ["independent, pruned", "eagle, pruned", "block, pruned"])
def test_a_pruned_draft_reads_the_whole_head_once_for_each_text(kind: str) -> None:
    """The losses of other batches of the same texts, at other temperatures each, are those of the whole head."""
    target = target_of_kinds()
    ids, taken = (
        torch.randint(target.config.vocab_size, (4, 12), generator=torch.Generator().manual_seed(1)),
        [list[int](), list[int]()],
    )
    values: list[list[Tensor]] = [[], []]
    for number, masses in enumerate((True, False)):
        module = module_of(target, None, [Stage(1.0, parse("kl"))], 4, STUDENTS[kind](target))  # type: ignore[arg-type]
        alone(module, 9)
        assert module.masses
        module.masses = module.masses if masses else None
        head = module.head_target
        module.head_target = lambda states, head=head, seen=taken[number]: seen.append(len(states)) or head(states)
        for keys in ([0, 1], [2, 3], [3, 0], [1, 2]):
            some = torch.tensor(keys)
            batch = {
                "ids": ids[some],
                "predicted": torch.ones(2, 11).bool(),
                "key": some,
                "temperature": 0.5 + 0.3 * some,
            }
            values[number].append(module.learn(batch).detach())
    torch.testing.assert_close(*map(torch.stack, values), rtol=1e-5, atol=1e-6)
    assert sum(taken[0]) == 4 * 11 + 4 < sum(taken[1])  # one position of each batch shows how many bytes there are


def test_all_depths_of_a_draft_learn_whatever_length_ranks_checkpoints() -> None:
    target = target_of_kinds()
    student = STUDENTS["medusa"](target)
    module = module_of(target, None, [Stage(1.0, parse("kl"))], 4, student)  # type: ignore[arg-type]
    alone(module, 9)
    module.k = 1
    ids = torch.randint(target.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    given = {"ids": ids, "predicted": torch.ones(2, 11).bool(), "key": torch.arange(2), "temperature": torch.ones(2)}
    module.learn(given).backward()
    grads = [weight.grad for weight in student.network.parameters() if weight.requires_grad]
    assert grads and all(bool(grad.flatten(1).any(1).all()) for grad in grads), "each tensor has a row for each head"
