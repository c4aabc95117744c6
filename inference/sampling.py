"""Logits to distributions, and draws from distributions by given uniforms.

B rows, V vocabulary. Temperature acts in `_scaled` alone, which `probs_at` and `log_probs_at` call: for rows of one
setting (`probs`), rows of several (`batched.distributions.Regimes`), compiled drafts (`models.step`, `models.one_pass`)
and the losses (`cotrain.losses.served_distributions`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

Processor = Callable[[Tensor, Tensor], Tensor]
Truncate = Callable[[Tensor], Tensor]  # logits (..., V) -> logits (..., V) with -inf where cut

# settings of a generation config that change the distribution and cannot be asked for here, with what leaves it alone
_NO_COUNTERPART: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "guidance_scale": (1.0,),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "constraints": (),
    "force_words_ids": (),
}

COLDEST = 1e-5  # logits divided by less overflow float32


@dataclass(frozen=True)
class Sampling:
    """The sampling regime of a request; order and ties are those of transformers.

    temperature: 0 (greedy, a one-hot distribution) or at least 1e-5. top_k: tokens kept, ties with the last one
    included; 0 keeps all. top_p: nucleus mass in (0, 1]. min_p: in [0, 1], relative to the likeliest token.
    repetition_penalty: > 0, divides positive and multiplies negative logits of every token of prompt and
    text. presence_penalty, frequency_penalty: subtracted once, and once per occurrence, from the logits of
    tokens generated so far (the prompt does not count). logit_bias: token id -> number added to its logit.
    banned: token-id sequences that are never completed. min_new_tokens: no end token before that many.
    stop: strings, stop_ids: token ids that end the text. processors: callables (ids (1, T), logits (1, V))
    -> logits (1, V), as transformers' LogitsProcessor, pure functions of the prefix.

    Raises ValueError naming the field and the value it cannot use.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    banned: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, lambda t: t == 0 or COLDEST <= t < math.inf, "0 or >= 1e-5")
        _whole("top_k", self.top_k)
        _number("top_p", self.top_p, lambda t: 0 < t <= 1, "in (0, 1]")
        _number("min_p", self.min_p, lambda t: 0 <= t <= 1, "in [0, 1]")
        _number("repetition_penalty", self.repetition_penalty, lambda t: 0 < t < math.inf, "> 0 and finite")
        _number("presence_penalty", self.presence_penalty, math.isfinite, "finite")
        _number("frequency_penalty", self.frequency_penalty, math.isfinite, "finite")
        _whole("min_new_tokens", self.min_new_tokens)
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("banned", tuple(_ids("banned", word) for word in _items("banned", self.banned)))
        _refuse("banned", self.banned, () in self.banned, "token-id sequences that are not empty")
        self._set("stop", (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop))
        _refuse("stop", self.stop, not all(isinstance(s, str) and s for s in self.stop), "strings, not empty")
        self._set("stop_ids", _ids("stop_ids", self.stop_ids))
        self._set("processors", _items("processors", self.processors))
        _refuse("processors", self.processors, not all(map(callable, self.processors)), "callables")

    @classmethod
    def of(cls, config: GenerationConfig) -> "Sampling":
        """The settings of a transformers generation config, of which engines read the end tokens alone by themselves.

        Without do_sample it is temperature 0; top_k that is not set is 50, as in transformers. Raises ValueError naming
        a setting that has no counterpart here.
        """
        foreign = [name for name, plain in _NO_COUNTERPART.items() if getattr(config, name, None) not in (None, *plain)]
        if foreign:
            raise ValueError(f"Sampling.of: {foreign[0]}={getattr(config, foreign[0])} has no counterpart; unset it")
        shared = {
            "repetition_penalty": config.repetition_penalty,
            "banned": tuple(tuple(word) for word in config.bad_words_ids or ()) or None,
            "min_new_tokens": config.min_new_tokens,
            "stop": config.stop_strings,
        }
        top_k = 50 if config.top_k is None else config.top_k
        sampled = {"temperature": config.temperature, "top_k": top_k, "top_p": config.top_p, "min_p": config.min_p}
        drawn = sampled if config.do_sample else {"temperature": 0.0}
        return cls(**{name: value for name, value in {**shared, **drawn}.items() if value is not None})

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the one way to normalise a field of a frozen dataclass


def _refuse(name: str, value: Any, wrong: bool, wanted: str) -> None:
    if wrong:
        raise ValueError(f"Sampling.{name} must be {wanted}, not {value!r}")


def _number(name: str, value: Any, fits: Callable[[Any], bool], wanted: str) -> None:
    real = isinstance(value, Real) and not isinstance(value, bool)
    _refuse(name, value, not (real and fits(value)), f"a number {wanted}")


def _whole(name: str, value: Any) -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    _refuse(name, value, not (whole and value >= 0), "a whole number >= 0")


def _items(name: str, value: Any) -> tuple[Any, ...]:
    _refuse(name, value, isinstance(value, str) or not isinstance(value, Iterable), "a sequence")
    return tuple(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    for item in _items(name, value):
        _whole(name, item)
    return tuple(int(item) for item in value)


def _biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    _refuse("logit_bias", value, not isinstance(value, Mapping), "a mapping from token id to number")
    for token, bias in value.items():
        _whole("logit_bias", token)
        _number("logit_bias", bias, lambda b: b < math.inf, "below infinity")
    return {int(token): float(bias) for token, bias in value.items()}


def wide(x: Tensor) -> Tensor:
    """x in its own dtype, float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def probs(logits: Tensor, sampling: Sampling | Sequence[Sampling]) -> Tensor:
    """softmax of the logits after temperature, top-k, top-p and min-p, in the order and with the ties of
    transformers' warpers; temperature 0 gives the one-hot distribution of the first maximum.

    logits (..., V), already processed where the regime reads history (`inference.processors`); -inf keeps
    zero mass. sampling: one, or one for each entry of the first dimension. Returns (..., V) in the logits'
    dtype, float32 at least; logits without a distribution (NaN, +inf, or -inf alone) give NaN throughout. Raises
    ValueError when the number of regimes is not the number of rows.
    """
    if isinstance(sampling, Sampling):
        return probs_of(wide(logits), sampling)
    if len(sampling) != logits.shape[0]:
        raise ValueError(f"{len(sampling)} sampling settings for {logits.shape[0]} rows of logits")
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, one in enumerate(sampling):
        groups.setdefault((one.temperature, one.top_k, one.top_p, one.min_p), []).append(row)
    probs = torch.empty_like(wide(logits))
    for rows in groups.values():
        at = torch.tensor(rows, device=logits.device)
        probs[at] = probs_of(wide(logits[at]), sampling[rows[0]])
    return probs


def probs_of(logits: Tensor, sampling: Sampling) -> Tensor:
    """`probs` of one regime: logits (..., V), float32 at least."""
    if sampling.temperature == 0:
        return certain(logits)

    def truncate(logits: Tensor) -> Tensor:
        if 0 < sampling.top_k < logits.shape[-1]:
            logits = keep_top_k(logits, sampling.top_k)
        if sampling.top_p < 1:
            logits = keep_top_p(logits, sampling.top_p)
        if sampling.min_p > 0:
            logits = keep_min_p(logits, sampling.min_p)
        return logits

    return probs_at(logits, sampling.temperature, truncate)


def probs_at(logits: Tensor, temperature: float | Tensor, truncate: Truncate | None = None) -> Tensor:
    """softmax(truncate(logits / temperature)): logits (..., V), float32 at least; temperature above 0, a number or one
    of each entry of the first dimension; truncate: -inf on what is cut. Returns (..., V)."""
    scaled = _scaled(logits, temperature)
    return (truncate(scaled) if truncate else scaled).softmax(-1)


def log_probs_at(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """log `probs_at`, computed as a log-softmax."""
    return _scaled(logits, temperature).log_softmax(-1)


def _scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return logits / by_row(temperature, logits)
    return logits if temperature == 1 else logits / temperature


def by_row(values: Tensor, like: Tensor) -> Tensor:
    """(A,) -> (A, 1, ..., 1), as many dimensions as `like`; floating-point values in its dtype."""
    values = values.to(like.dtype) if values.is_floating_point() else values
    return values.view(-1, *(1,) * (like.dim() - 1))


def certain(logits: Tensor) -> Tensor:
    """One-hot distributions (..., V) of the first maximum; NaN throughout where that is not finite."""
    ids = logits.argmax(-1, keepdim=True)
    top = logits.gather(-1, ids)
    none = top - top  # 0, or NaN
    return none.expand_as(logits).scatter(-1, ids, none + 1)


def one_hot(ids: Tensor, like: Tensor) -> Tensor:
    """ids (...) -> (..., V) one-hot distributions with the V, dtype and device of `like` (..., V)."""
    return torch.zeros_like(like).scatter_(-1, ids.unsqueeze(-1), 1.0)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """-inf below the k-th largest logit; ties with it stay (Fan et al. 2018, 1805.04833)."""
    return logits.masked_fill(logits < logits.topk(k, dim=-1).values[..., -1:], -math.inf)


def keep_top_p(logits: Tensor, p: float = 1.0, *, rest: float | Tensor | None = None) -> Tensor:
    """-inf on the tail whose mass, summed from the least likely token, is at most 1 - p; the likeliest token
    always stays (Holtzman et al. 2020, 1904.09751). Which of equal logits leaves first is up to torch.sort,
    called as transformers calls it: a row's order depends on that row alone. rest: 1 - p, where rows differ."""
    ascending, order = logits.sort(dim=-1, descending=False)
    gone = ascending.softmax(-1).cumsum(-1) <= (1 - p if rest is None else rest)
    gone[..., -1] = False
    return logits.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), -math.inf)


def keep_min_p(logits: Tensor, p: float | Tensor) -> Tensor:
    """-inf on tokens less likely than p times the likeliest one (Nguyen et al. 2024, 2407.01082)."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: the first token with mass whose cumulative probability exceeds u, strictly.

    distribution (..., V), u (...) in [0, 1) -> ids (...) int64. The sum runs in float64 and u is scaled by its last
    value, so what rounding leaves off falls on no token in particular; should nothing exceed u, the last
    token with mass is taken. A token of probability 0 is never returned, however a parallel scan rounds.
    """
    cdf = probs.to(torch.float64).cumsum(-1)  # (..., V)
    total = cdf[..., -1:]
    bound = u.unsqueeze(-1) * total
    if probs.device.type == "cpu":  # a sequential sum rises at tokens with mass alone, so that a bisection finds one
        below = torch.minimum(bound, total * (1 - 2.0**-53))  # of a u that was rounded up to 1
        return torch.searchsorted(cdf, below, right=True).clamp(max=probs.shape[-1] - 1).squeeze(-1)
    return _first_above(probs, cdf, bound)


def _first_above(probs: Tensor, cdf: Tensor, bound: Tensor) -> Tensor:
    """The first token (...) with mass where cdf > bound (..., 1), else the last one with mass."""
    mass = probs > 0
    hit = mass & (cdf > bound)
    last = probs.shape[-1] - 1 - mass.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(hit.any(-1), hit.to(torch.uint8).argmax(-1), last)
