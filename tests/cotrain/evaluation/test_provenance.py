"""Texts that the target sampled, and those that it did not, told apart by its own surprise."""

import copy
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cotrain.data.texts import Texts
from cotrain.evaluation.held_out import HeldOut, held_out
from cotrain.evaluation.profile import Provenance, provenance
from cotrain.students.base import LAST
from cotrain.teacher.target_model import served
from inference import Engine, Sampling
from tests.cotrain.evaluation.test_profile import TARGET, held

PROMPTS = [[2 + i % 7, 3, 5] for i in range(40)]


@cache
def engine() -> Engine:
    return Engine(TARGET, rows=40)


def texts_of(new: list[list[int]]) -> Texts:
    """Texts that go on after the prompts."""
    ids = torch.tensor([[*prompt, *text] for prompt, text in zip(PROMPTS, new, strict=True)])
    return Texts(ids, torch.full((40,), 3), torch.full((40,), ids.shape[1]), ["a"] * 40)


@cache
def sampled(temperature: float, top_p: float = 1.0, seed: int = 0) -> Texts:
    settings = Sampling(temperature, top_p=top_p)
    new = engine().generate(PROMPTS, max_new_tokens=40, sampling=settings, ignore_eos=True, seed=seed).tokens
    return texts_of(new)


def of(texts: Texts, temperature: float, top_p: float = 1.0) -> Provenance:
    return provenance(held(temperature, top_p, texts), served(TARGET)[1])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.8), (0.0, 1.0)])
def test_own_texts_are_known(temperature: float, top_p: float) -> None:
    result = of(sampled(temperature, top_p), temperature, top_p)
    assert result.own and abs(result.z) < 4 and result.impossible == 0 and result.tokens == 1600


OTHERS = [(1.0, 1.0, 0.6, 1.0), (0.6, 1.0, 1.0, 1.0), (1.0, 1.0, 0.0, 1.0), (1.0, 1.0, 1.0, 0.5), (1.0, 0.5, 1.0, 1.0)]


@pytest.mark.parametrize(("t", "p", "other_t", "other_p"), OTHERS)
def test_texts_of_another_regime_are_not_its_own(t: float, p: float, other_t: float, other_p: float) -> None:
    assert not of(sampled(t, p), other_t, other_p).own


def test_foreign_texts_surprise_more() -> None:
    texts = copy.deepcopy(sampled(1.0))
    texts.ids[:, 3:] = torch.randint(2, 300, texts.ids[:, 3:].shape, generator=torch.Generator().manual_seed(0))
    result = of(texts, 1.0)
    assert not result.own and result.z > 6 and result.surprise > result.entropy + 0.5
    assert (
        f"{result.surprise:.2f} nats per token; for texts of the target it would be {result.entropy:.2f}"
        in result.line()
    )


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [0.05, 0.1, 0.2])
@pytest.mark.parametrize(("temperature", "own"), [(0.0, True), (0.1, False), (0.3, False)])
def test_in_bfloat16_greedy_texts_are_told_from_those_of_a_low_temperature(
    temperature: float, own: bool, scale: float
) -> None:
    """Passes of one token and of many differ by rounding, which the eight layers add up; the larger the logits, the
    nearer is the least temperature that is told."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=scale,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).bfloat16().eval()
    new = Engine(model, rows=40).generate(PROMPTS, max_new_tokens=20, sampling=Sampling(temperature)).tokens
    read, head = served(model)
    assert provenance(held_out(read, texts_of(new), 0.0), head).own is own


def test_greedy_texts_of_tied_logits_are_its_own() -> None:
    """In bfloat16 many highest logits of random weights tie: another pass may choose another of them. A token whose
    logit is lower by more than rounding is not the target's."""
    states = torch.randn(8, 10, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = torch.linspace(-4, 4, 50).expand(8, 10, 50).clone()
    logits[..., 7] = logits[..., 49] * (1 - 2**-8)  # a step of bfloat16 below the highest
    texts = Texts(torch.full((8, 10), 7), torch.full((8,), 1), torch.full((8,), 10), ["a"] * 8)

    def of_token(token: int) -> Provenance:
        texts.ids[:] = token
        return provenance(HeldOut(texts, {LAST: states}, 0.0), lambda some: logits[0, :1].expand(len(some), 50))

    assert of_token(7).own and of_token(7).impossible == 0 and of_token(49).own
    assert not of_token(40).own and of_token(40).impossible == 1
