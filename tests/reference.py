"""An independent reference of sampling settings, written with transformers' processors and a few lines, and rows of
settings each of which changes the outcome of each other."""

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from inference import Sampling
from inference.sampling.noise import gumbel

NEUTRAL = Sampling()


def shifted(ids: Tensor, logits: Tensor) -> Tensor:
    """A processor that reads the text."""
    return logits + 2 * torch.nn.functional.one_hot(ids.sum(-1) % 5, logits.shape[-1])


def halved(ids: Tensor, logits: Tensor) -> Tensor:
    """A processor that does not commute with `shifted`."""
    return logits / 2 + 1.5 * torch.nn.functional.one_hot((ids[:, -1] + 1) % 5, logits.shape[-1])


# what a row may ask for; biases and penalties have few binary digits, so they are the same in every dtype
CHOICES: dict[str, Sequence[Any]] = {
    "temperature": (1.0, 0.75, 0.5, 1.5, 1.25, 0.0),
    "top_k": (0, 3, 4, 6),
    "top_p": (1.0, 0.7, 0.8, 0.9),
    "min_p": (0.0, 0.35, 0.2, 0.1),
    "repetition_penalty": (1.0, 2.0, 0.5),
    "presence_penalty": (0.0, 1.5, -0.75),
    "frequency_penalty": (0.0, 0.75, -0.5),
    "logit_bias": (None, {1: 2.5, 3: -2.5, 7: 1.5, 9: 2.0}, {0: 2.0, 2: 2.5, 5: -3.0, 8: 1.5}),
    "banned": ((), ((3,), (1, 2), (0, 6), (5, 5)), ((0,), (4, 0, 1), (2, 2), (1, 3, 1))),
    "banned_first": ((), (2, 5, 8), (1, 4, 7)),
    "min_new_tokens": (0, 3, 5),
    "stop_ids": ((), (7,), (2, 9)),
    "processors": ((), (shifted, halved), (halved, shifted), (halved,)),
}


def grid(count: int, seed: int = 0, active: float = 0.75) -> list[Sampling]:
    """Settings of rows: each field has one of its choices, and is not neutral with probability `active`."""
    chance = random.Random(seed)
    return [
        Sampling(
            **{name: chance.choice(some[1:]) if chance.random() < active else some[0] for name, some in CHOICES.items()}
        )
        for _ in range(count)
    ]


def without(sampling: Sampling, name: str) -> Sampling:
    """The same settings, but with a neutral value of one field."""
    return replace(sampling, **{name: getattr(NEUTRAL, name)})


Step = tuple[str, Callable[[Sampling, Tensor, Tensor, int, Sequence[int]], Tensor]]


def _counted(ids: Tensor, prompt: int, scores: Tensor) -> Tensor:
    return torch.bincount(ids[0, prompt:], minlength=scores.shape[-1]).to(scores.dtype)


# name, and a function of settings, ids (1, T), scores (1, V), length of the prompt, end tokens; in their order
STEPS: list[Step] = [
    (
        "logit_bias",
        lambda s, ids, x, prompt, ends: hf.SequenceBiasLogitsProcessor(
            [[[token], bias] for token, bias in s.logit_bias.items()]
        )(ids, x),
    ),
    (
        "repetition_penalty",
        lambda s, ids, x, prompt, ends: hf.RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(ids, x),
    ),
    ("presence_penalty", lambda s, ids, x, prompt, ends: x - s.presence_penalty * (_counted(ids, prompt, x) > 0)),
    ("frequency_penalty", lambda s, ids, x, prompt, ends: x - s.frequency_penalty * _counted(ids, prompt, x)),
    ("banned", lambda s, ids, x, prompt, ends: hf.NoBadWordsLogitsProcessor(list(map(list, s.banned)))(ids, x)),
    (
        "banned_first",
        lambda s, ids, x, prompt, ends: hf.SuppressTokensAtBeginLogitsProcessor(list(s.banned_first), prompt)(ids, x),
    ),
    (
        "min_new_tokens",
        lambda s, ids, x, prompt, ends: hf.MinNewTokensLengthLogitsProcessor(
            prompt, s.min_new_tokens, [*ends, *s.stop_ids]
        )(ids, x),
    ),
    ("processors", lambda s, ids, x, prompt, ends: hf.LogitsProcessorList(s.processors)(ids, x)),
    ("temperature", lambda s, ids, x, prompt, ends: hf.TemperatureLogitsWarper(s.temperature)(ids, x)),
    ("top_k", lambda s, ids, x, prompt, ends: hf.TopKLogitsWarper(s.top_k)(ids, x)),
    ("top_p", lambda s, ids, x, prompt, ends: hf.TopPLogitsWarper(s.top_p)(ids, x)),
    ("min_p", lambda s, ids, x, prompt, ends: hf.MinPLogitsWarper(s.min_p)(ids, x)),
]
assert {name for name, _ in STEPS} | {"stop", "stop_ids"} == {one.name for one in fields(Sampling)}


def reference(
    logits: Tensor,
    text: Sequence[int],
    prompt: int,
    sampling: Sampling,
    ends: Sequence[int] = (),
    steps: Sequence[Step] = STEPS,
) -> Tensor:
    """The distribution (V,) of the token after a text whose first `prompt` ids are given, from logits (V,)."""
    ids, scores = torch.tensor([text]), logits.unsqueeze(0).clone()
    greedy = sampling.temperature == 0
    for name, step in steps:
        cut = name in ("temperature", "top_k", "top_p", "min_p")
        if getattr(sampling, name) != getattr(NEUTRAL, name) and not (greedy and cut):
            scores = step(sampling, ids, scores, prompt, sorted(ends))
    if greedy:
        return torch.nn.functional.one_hot(scores[0].argmax(), len(logits)).to(logits.dtype)
    return scores[0].softmax(-1)


def spoken(
    model: Any,
    text: Sequence[int],
    sampling: Sampling,
    id: int,
    seed: int,
    limit: int,
    ends: Sequence[int],
    decode: Callable[[list[int]], str],
) -> tuple[list[int], str]:
    """The text of a row alone, token by token with the noise of the `coupled` rule, and why it ended."""
    new: list[int] = []
    while True:
        logits = model(torch.tensor([[*text, *new]])).logits[0, -1]
        probs = reference(logits, [*text, *new], len(text), sampling, ends)
        noise = gumbel(seed, torch.tensor([id]), torch.tensor([[len(new)]]), len(probs))[0, 0]
        new.append(int((probs.log() + noise).argmax()))
        if new[-1] in {*ends, *sampling.stop_ids} or any(stop in decode(new) for stop in sampling.stop):
            return new, "stop"
        if len(new) == limit:
            return new, "length"
