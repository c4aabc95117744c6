"""Texts packed into one block are read, learnt and evaluated as if each were alone."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from cotrain.data.sources import restarted
from cotrain.data.texts import Texts
from cotrain.evaluation.held_out import evaluate, held_out
from cotrain.losses import divergences as losses
from cotrain.losses.spec import LossSpec, parse
from cotrain.students.independent import IndependentStudent
from cotrain.teacher.target_model import keeps_apart, served, split
from cotrain.training.module import Stage
from tests.cotrain.losses.test_sequence import learnt
from tests.cotrain.students.test_every_student import whole
from tests.cotrain.training.test_module import alone, module_of
from tests.tiny import tiny

END, LENGTHS = 3, (7, 4, 5)
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, END, 4, 5, 6, END, 20, 21, 22, 23]])
POSITIONS = torch.tensor([[*range(7), *range(4), *range(5)]])


def gemma() -> PreTrainedModel:
    """Sliding windows of 4 in every other layer."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        max_position_embeddings=64,
        initializer_range=0.6,
    )
    return Gemma2ForCausalLM(config).double().eval()


def test_positions_restart_after_end_tokens() -> None:
    rows = torch.cat([IDS, IDS.flip(1)])
    assert torch.equal(restarted(rows, END)[:1].long(), POSITIONS)
    assert restarted(rows, END)[1].tolist() == [0, 1, 2, 3, *range(4), *range(8)]
    assert restarted(rows, 31).tolist() == [list(range(16))] * 2


@pytest.mark.parametrize("model", [tiny, gemma])
def test_hidden_states_are_those_of_each_text_alone(model: Any) -> None:
    network = model()
    read, _ = split(network)
    alone = torch.cat([read(part) for part in IDS.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(read(IDS, POSITIONS), alone, rtol=0, atol=1e-5)
    assert (read(IDS) - alone).abs().max() > 1e-2 and keeps_apart(network, read)


def test_threads_read_their_own_texts() -> None:
    """transformers is told by a variable of the thread which rows are packed."""
    network, both = tiny(), Barrier(2, timeout=60)
    read, _ = split(network)
    alone = [read(IDS, places) for places in (POSITIONS, None)]

    def wait(*_: Any) -> None:
        both.wait()

    network.model.embed_tokens.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda places: read(IDS, places), (POSITIONS, None)))
    torch.testing.assert_close(together, alone)


def test_a_model_that_reads_across_texts_is_detected() -> None:
    network = tiny()
    read, _ = split(network)
    assert not keeps_apart(network, lambda ids, places=None: read(ids))


def test_rounding_is_not_reading_across_texts() -> None:
    """Two ways of reading differ in bfloat16, on some CPUs by nothing; here by 3 % of every number."""
    network, drawn = tiny(), torch.Generator().manual_seed(0)
    read, _ = split(network)

    def rough(ids: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        states = read(ids, places)
        return states * (1 + 0.03 * torch.randn(states.shape, generator=drawn))

    assert keeps_apart(network, rough) and not keeps_apart(network, lambda ids, places=None: rough(ids))


def batch(ids: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """The keys are of texts of this length alone."""
    return whole(ids) | {"key": torch.arange(len(ids)) + 10 * ids.shape[1]} | more


def test_a_step_on_a_block_is_a_step_on_its_texts() -> None:
    """Except the prediction after each text's end, which only a block has."""
    target, small = tiny(), tiny(layers=1, seed=3)
    module = alone(module_of(target, small, [Stage(1.0, LossSpec(losses.kl))], steps=1))
    inside = torch.ones(1, 15, dtype=torch.bool)
    inside[:, [6, 10]] = False
    value, slope = learnt(module, batch(IDS, position_ids=POSITIONS, predicted=inside))
    each = [(len(part[0]) - 1, *learnt(module, batch(part))) for part in IDS.split(LENGTHS, 1)]
    count = sum(n for n, _, _ in each)
    assert value == pytest.approx(sum(n * part for n, part, _ in each) / count, rel=1e-6)
    torch.testing.assert_close(slope, sum(n * part for n, _, part in each) / count, rtol=0, atol=1e-6)


def test_blocks_are_evaluated_text_by_text() -> None:
    target, small = tiny(), tiny(layers=1, seed=3)
    one = Texts(IDS, torch.tensor([1]), torch.tensor([16]), ["a"], POSITIONS)
    figures = evaluate(held_out(served(target)[0], one, 1.0), IndependentStudent(small), split(target)[1])["all"]
    each = [torch.cat([model(part).logits[0] for part in IDS.split(LENGTHS, 1)]) for model in (target, small)]
    p, q = (logits.log_softmax(-1) for logits in each)
    assert figures.alpha == pytest.approx(losses.alpha(p, q)[:15].mean().item(), abs=1e-6)
    many = Texts(IDS.expand(6, 16), torch.ones(6), torch.full((6,), 16), ["a"] * 6, POSITIONS.expand(6, 16))
    assert torch.equal(many.spread(3).position_ids, POSITIONS.expand(3, 16))


@pytest.mark.parametrize("name", ["0.5*calls_block+kl", "calls_tv"])
def test_the_mean_gradient_of_two_processes_is_that_of_one(name: str) -> None:
    """Texts of unlike lengths in two halves of a batch: the mean of both losses is the loss of the whole."""
    target, small = tiny(), tiny(layers=1, seed=3)
    ids = torch.randint(32, (4, 12), generator=torch.Generator().manual_seed(0))
    inside = torch.arange(11) < torch.tensor([11, 9, 4, 2])[:, None]
    together = batch(ids, predicted=inside)
    module = module_of(target, small, [Stage(1.0, parse(name))], steps=1)

    def slope_of(one: dict[str, torch.Tensor], world: int, counts: list[torch.Tensor] | None = None) -> torch.Tensor:
        reduced = iter(counts or [])
        seen: list[torch.Tensor] = []

        def reduce(count: torch.Tensor, reduce_op: str) -> torch.Tensor:
            seen.append(count)
            return next(reduced, count)

        strategy = SimpleNamespace(reduce=reduce)
        module._trainer = SimpleNamespace(global_step=0, max_steps=1, world_size=world, strategy=strategy)  # type: ignore
        small.zero_grad()
        module.training_step(one, 0).backward()
        noted.append(seen)
        return torch.cat([p.grad.flatten() for p in small.parameters() if p.grad is not None])

    noted: list[list[torch.Tensor]] = []
    expected = slope_of(together, 1)
    halves = [{key: value[rows] for key, value in together.items()} for rows in (slice(2), slice(2, 4))]
    for half in halves:
        slope_of(half, 2)  # what each process counts
    means = [torch.stack(counts).mean(0) for counts in zip(noted[1], noted[2], strict=True)]
    averaged = torch.stack([slope_of(half, 2, means) for half in halves]).mean(0)
    torch.testing.assert_close(averaged, expected, rtol=0, atol=1e-6)
