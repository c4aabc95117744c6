"""The sampling settings of a request. `Sampling` holds and checks them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

Processor = Callable[[Tensor, Tensor], Tensor]

# settings of a generation config that change the distribution and have no counterpart here, with their neutral values
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
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "watermarking_config": (),
    "constraints": (),
    "force_words_ids": (),
}

_SEARCHES = {"num_beams": "beam search", "penalty_alpha": "contrastive search"}

COLDEST = 1e-5  # divided by a lower temperature, logits overflow float32


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of a request, applied in the order of transformers and with its ties.

    temperature: 0 (greedy, a one-hot distribution) or at least 1e-5. top_k: number of tokens to keep (and those equally
    likely to the last of them); 0 keeps all. top_p: nucleus mass in (0, 1]. min_p: in [0, 1], relative to the likeliest
    token. repetition_penalty: > 0, divides positive and multiplies negative logits of every token of prompt and text.
    presence_penalty, frequency_penalty: subtracted once, and once per occurrence, from the logits of tokens generated
    so far, without the prompt. logit_bias: token id -> number added to its logit. banned: sequences of token ids that
    must never occur in full. banned_first: token ids that must not be the first new token. min_new_tokens: the least
    number of new tokens before an end token. stop: strings that end the text. stop_ids: token ids that end the text.
    processors: functions (ids (1, T), logits (1, V)) -> logits (1, V), like transformers' LogitsProcessor. The
    result must depend only on these arguments: the ids contain drafts, and those of the next call may lack some of
    them. A grammar that keeps a state rolls it back then (docs/examples/json_grammar.py).

    Raises ValueError naming a wrong field and its value.
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
    banned_first: tuple[int, ...] = ()

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
        words = "a sequence of token-id sequences, such as [[5, 6]]"
        listed = _items("banned", self.banned, words)
        self._set("banned", tuple(_ids("banned", _items("banned", word, words)) for word in listed))
        _reject("banned", self.banned, () in self.banned, "token-id sequences that are not empty")
        self._set("banned_first", _ids("banned_first", self.banned_first))
        self._set("stop", (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop))
        _reject("stop", self.stop, not all(isinstance(s, str) and s for s in self.stop), "strings, not empty")
        self._set("stop_ids", _ids("stop_ids", self.stop_ids))
        self._set("processors", _items("processors", self.processors))
        _reject("processors", self.processors, not all(map(_calls, self.processors)), "callables, not classes")

    @classmethod
    def of(cls, config: GenerationConfig) -> "Sampling":
        """Return the settings of a transformers generation config. Engines do not call this: of a generation config
        they read only the end tokens, and the first ids of an encoder-decoder's texts.

        Without do_sample the temperature is 0. An unset top_k is 50, as in transformers. Raises ValueError naming a
        setting that has no counterpart here, such as the beams of a beam search.
        """
        foreign = [name for name, plain in _NO_COUNTERPART.items() if getattr(config, name, None) not in (None, *plain)]
        if foreign:
            what = f"{foreign[0]}={getattr(config, foreign[0])}"
            what += f" ({_SEARCHES[foreign[0]]})" if foreign[0] in _SEARCHES else ""
            raise ValueError(f"Sampling.of: {what} has no counterpart in Sampling; unset it in the generation config")
        suppressed = tuple((token,) for token in config.suppress_tokens or ())
        shared = {
            "repetition_penalty": config.repetition_penalty,
            "banned": (*(tuple(word) for word in config.bad_words_ids or ()), *suppressed) or None,
            "banned_first": config.begin_suppress_tokens,
            "min_new_tokens": config.min_new_tokens,
            "stop": config.stop_strings,
        }
        top_k = 50 if config.top_k is None else config.top_k
        sampled = {"temperature": config.temperature, "top_k": top_k, "top_p": config.top_p, "min_p": config.min_p}
        drawn = sampled if config.do_sample else {"temperature": 0.0}
        return cls(**{name: value for name, value in {**shared, **drawn}.items() if value is not None})

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the one way to normalise a field of a frozen dataclass


def _reject(name: str, value: Any, wrong: bool, wanted: str) -> None:
    if wrong:
        raise ValueError(f"Sampling.{name} must be {wanted}, not {value!r}")


def _calls(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _number(name: str, value: Any, fits: Callable[[Any], bool], wanted: str) -> None:
    real = isinstance(value, Real) and not isinstance(value, bool)
    _reject(name, value, not (real and fits(value)), f"a number {wanted}")


def is_whole(value: Any, least: int | None = None, below: int | None = None) -> bool:
    """Return whether a value is a whole number, at least `least` and less than `below` (None for no bound). True and
    False are not whole numbers."""
    # the first test is the same, without the search of a class that is asked about in every round
    whole = type(value) is int or isinstance(value, Integral) and not isinstance(value, bool)
    return whole and (least is None or int(value) >= least) and (below is None or int(value) < below)


def _whole(name: str, value: Any) -> None:
    _reject(name, value, not is_whole(value, 0), "a whole number >= 0")


def _items(name: str, value: Any, wanted: str = "a sequence") -> tuple[Any, ...]:
    _reject(name, value, isinstance(value, str) or not isinstance(value, Iterable), wanted)
    return tuple(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    for item in _items(name, value):
        _whole(name, item)
    return tuple(int(item) for item in value)


def _biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    _reject("logit_bias", value, not isinstance(value, Mapping), "a mapping from token id to number")
    for token, bias in value.items():
        _whole("logit_bias", token)
        _number("logit_bias", bias, lambda b: b < math.inf, "below infinity")
    return {int(token): float(bias) for token, bias in value.items()}
