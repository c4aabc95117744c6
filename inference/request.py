"""Requests. A request is one prompt while it is decoded, with its text, its limits and its end; `PromptReader` makes
the requests of a call.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.models.encoder_decoder import features_shape, longest_source
from inference.models.pretrained import id_of
from inference.output import Logprobs
from inference.sampling import Sampling
from inference.sampling.noise import row_ids
from inference.sampling.parameters import is_whole
from inference.source import Source, SourcedText, source_in_text

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any] | Tensor | np.ndarray
ACCEPTED = "text, token ids, messages, or what a tokenizer returns"


@dataclass
class Request:
    """One row while it is decoded. `text` is the prompt's ids followed by the emitted ids. For an encoder-decoder it is
    the decoder's text, and carries its source.

    index: index of the prompt in the call. id: key of the row's random numbers. limit: the largest number of new
    tokens. ends: token ids that end the row. finish: "stop", "length" or "error" once the row has ended. error: the
    message of the error. alone: whether the row is decoded without drafts from now on. stained: whether the row's keys
    and values may contain NaN. top: number of likeliest tokens to report at each position beside the emitted one, None
    for no log-probabilities. prompt: number of tokens of the prompt. logprobs: of the new tokens so far, if `top` is
    not None.
    """

    index: int
    id: int
    text: list[int]
    limit: int
    sampling: Sampling
    ends: frozenset[int]
    tokenizer: PreTrainedTokenizerBase | None = None
    finish: str | None = None
    error: str | None = None
    alone: bool = False
    stained: bool = False
    top: int | None = None
    prompt: int = field(init=False)  # its length
    logprobs: Logprobs = field(init=False, default_factory=lambda: Logprobs([], []))

    def __post_init__(self) -> None:
        self.prompt = len(self.text)

    @property
    def source(self) -> Source | None:
        """Return what the encoder reads, or None for a causal LM."""
        return source_in_text(self.text)

    @property
    def new(self) -> list[int]:
        return self.text[self.prompt :]

    @property
    def shown(self) -> list[int]:
        """Return the new tokens without the end token, for `Output.text`."""
        return self.new[:-1] if self.finish == "stop" and self.text[-1] in self.ends else self.new

    @property
    def emitted(self) -> int:
        return len(self.text) - self.prompt

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Append `tokens` to the text, up to and including the first one that ends the row. If there is one, set
        `finish` to "stop" or "length". Return the tokens that were appended."""
        text, full, stops = self.text, self.prompt + self.limit, bool(self.sampling.stop)
        for count, token in enumerate(tokens, 1):
            text.append(token)
            if token in self.ends or stops and self._stopped():
                self.finish = "stop"
            elif len(text) >= full:
                self.finish = "length"
            else:
                continue
            return list(tokens[:count])
        return list(tokens)

    def fail(self, message: str) -> None:
        """End the row with an error message."""
        self.finish, self.error = "error", message

    def _stopped(self) -> bool:
        """Return whether the new text has a stop string. Only the newest tokens can complete one, so only the end of
        the text is decoded: 4 tokens per character of the longest stop string (a character has at most 4 bytes), and 32
        tokens before them.

        The first characters of a decoded part may differ from those of the whole text. A stop string that occurs in the
        part is therefore searched in the whole text too.
        """
        if self.tokenizer is None:
            return False
        longest = max(map(len, self.sampling.stop))
        first = max(self.prompt, len(self.text) - 4 * longest - 32)
        tail = self._decoded(first)
        if first > self.prompt and len(tail) < longest + 8:  # tokens without characters
            first, tail = self.prompt, self._decoded(self.prompt)
        return self._has_stop(tail) and (first == self.prompt or self._has_stop(self._decoded(self.prompt)))

    def _has_stop(self, text: str) -> bool:
        return any(stop in text for stop in self.sampling.stop)

    def _decoded(self, first: int) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(self.text[first:]))


class TextLimits(Protocol):
    """Limits of the texts that a target can read. vocabulary: token ids are in [0, vocabulary). context: the largest
    number of tokens of a text."""

    vocabulary: int
    context: int


@dataclass(frozen=True)
class SourceLimits:
    """What an encoder can read, and how the decoder's text begins. start: the token ids that the text begins with, None
    if the generation config does not give them. vocabulary: source ids are in [0, vocabulary). longest: the largest
    number of source ids, None for no limit. features: the shape (F, T) of the features that the encoder reads, F
    numbers for each of T frames; None if it reads token ids."""

    start: tuple[int, ...] | None
    vocabulary: int
    longest: int | None
    features: tuple[int, int] | None


@dataclass(frozen=True)
class PromptReader:
    """Turns the prompts of a call into requests. target: the model whose limits are checked. ends: token ids that end a
    text. tokenizer: encodes strings; None to reject strings. pads: ids that pad the rows of a tensor. encoder: limits
    of an encoder-decoder's sources, None for a causal LM. template: arguments of the chat template."""

    target: TextLimits
    ends: frozenset[int]
    tokenizer: PreTrainedTokenizerBase | None
    pads: frozenset[int] = frozenset()
    encoder: SourceLimits | None = None
    template: Mapping[str, Any] = field(default_factory=dict)

    def texts(self, prompts: Sequence[Prompt] | Mapping[str, Any]) -> list[list[int]]:
        """Return, for each prompt, the token ids that its text begins with. For an encoder-decoder each list is a
        `SourcedText`. Raises ValueError for anything that is not a prompt."""
        if self.encoder and isinstance(prompts, Mapping):
            prompts = _separate("prompts", prompts)
        return [self._text(f"prompt {index}", prompt) for index, prompt in enumerate(listed(prompts, self.pads))]

    def requests(
        self,
        prompts: Sequence[Prompt] | Mapping[str, Any],
        limits: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling],
        ids: Sequence[int] | None,
        ignore_eos: bool,
        logprobs: int | None | Sequence[int | None] = None,
    ) -> list[Request]:
        """Return one request per prompt. limits: the largest number of new tokens, one value or one per prompt;
        shortened to the target's context. sampling: one setting, or one per prompt. ids: one key of random numbers per
        prompt, from -2**63 to 2**63 - 1; None to hash the prompts. ignore_eos: True to continue past the target's end
        tokens. logprobs: number of likeliest tokens to report at each position, one value or one per prompt.

        Raises ValueError for a prompt or source that is empty, too long or of a wrong type or shape; for token ids
        outside the vocabulary; for wrong limits, settings, keys or numbers of log-probabilities; for stop strings
        without a tokenizer; or if a list does not have one entry per prompt.
        """
        texts = self.texts(prompts)
        limits = _each("max_new_tokens", limits, len(texts))
        regimes = _each("sampling", sampling, len(texts))
        keys = _each("ids", row_ids(texts) if ids is None else ids, len(texts))
        tops = _each("logprobs", logprobs, len(texts))
        ends = frozenset() if ignore_eos else self.ends
        rows = []
        for index, (text, limit, regime, key, top) in enumerate(zip(texts, limits, regimes, keys, tops, strict=True)):
            self._validate(f"prompt {index}", text, limit, regime, key)
            if top is not None and not is_whole(top, 0, self.target.vocabulary + 1):
                raise ValueError(
                    f"prompt {index}: logprobs must be None, or a number of likeliest tokens from 0 to "
                    f"{self.target.vocabulary}, not {top!r}"
                )
            limit = min(limit, self.target.context - len(text))
            stops = ends | frozenset(regime.stop_ids)
            rows.append(Request(index, key, text, limit, regime, stops, self.tokenizer, top=top))
        return rows

    def _validate(self, who: str, text: list[int], limit: Any, sampling: Any, key: Any) -> None:
        if not text:
            raise ValueError(f"{who}: the prompt is empty; it needs at least one token, such as the start token")
        if not is_whole(limit, 1):
            raise ValueError(f"{who}: max_new_tokens must be a whole number of at least 1, not {limit!r}")
        if not is_whole(key, -(2**63), 2**63):
            raise ValueError(
                f"{who}: its number in ids= (the key of its random numbers) must be whole and from -2**63 to 2**63 - "
                f"1, not {key!r}"
            )
        if len(text) >= self.target.context:
            raise ValueError(
                f"{who}: its {len(text)} tokens leave no room for new ones in a context of {self.target.context}; give "
                "a shorter prompt"
            )
        if not isinstance(sampling, Sampling):
            raise ValueError(
                f"{who}: sampling must be a Sampling, such as Sampling(temperature=0.7), not a "
                f"{type(sampling).__name__}"
            )
        if min(text) < 0 or max(text) >= self.target.vocabulary:
            raise ValueError(
                f"{who}: its token ids go from {min(text)} to {max(text)}, and the target's from 0 to "
                f"{self.target.vocabulary - 1}; encode it with the target's tokenizer"
            )
        named = {*(sampling.logit_bias or ()), *chain(*sampling.banned), *sampling.banned_first, *sampling.stop_ids}
        foreign = [token for token in named if not 0 <= token < self.target.vocabulary]
        if foreign:
            raise ValueError(
                f"{who}: Sampling.logit_bias, banned, banned_first or stop_ids has the token ids "
                f"{sorted(foreign)[:5]}; remove them, since the target's ids go from 0 to {self.target.vocabulary - 1}"
            )
        if sampling.stop and self.tokenizer is None:
            raise ValueError(
                "Sampling.stop: stop strings need a tokenizer; give Engine(tokenizer=...), or use stop_ids="
            )

        self._validate_source(who, source_in_text(text))

    def _validate_source(self, who: str, source: Source | None) -> None:
        if self.encoder is None or source is None:
            return
        if isinstance(source, Tensor):
            if source.shape != self.encoder.features:
                raise ValueError(
                    f"{who}: its features have the shape {tuple(source.shape)}; the encoder reads "
                    + (f"features of shape {self.encoder.features}" if self.encoder.features else "token ids")
                    + ": give these"
                )
            return
        if self.encoder.features:
            raise ValueError(
                f"{who}: it has token ids, but the encoder reads sound; give input_features of shape "
                f"{self.encoder.features}"
            )
        if not source:
            raise ValueError(f"{who}: the source is empty; it needs at least one token")
        if min(source) < 0 or max(source) >= self.encoder.vocabulary:
            raise ValueError(
                f"{who}: its source ids go from {min(source)} to {max(source)}, and the encoder's from 0 to "
                f"{self.encoder.vocabulary - 1}; encode it with the target's tokenizer"
            )
        if self.encoder.longest is not None and len(source) > self.encoder.longest:
            raise ValueError(
                f"{who}: its source has {len(source)} tokens, and the encoder reads at most {self.encoder.longest}; "
                "give a shorter source"
            )

    def _text(self, who: str, prompt: Any) -> list[int]:
        if self.encoder is None:
            if isinstance(prompt, SourcedText):
                raise ValueError(f"{who}: it has a source, but the target has no encoder to read it; give text or ids")
            return self._encode(who, prompt)
        if isinstance(prompt, SourcedText):
            return SourcedText(prompt, prompt.source)
        start: Sequence[int] | None = None
        if isinstance(prompt, Mapping):
            rows = _separate(who, prompt)
            if len(rows) != 1:
                raise ValueError(f"{who}: {len(rows)} rows in one prompt; give the tokenizer's output as the prompts")
            (prompt,) = rows
            start = prompt.get("decoder_input_ids")
        read = isinstance(prompt, Mapping) and "input_features" in prompt
        source = prompt["input_features"] if read else tuple(self._encode(who, prompt))
        return SourcedText(self._first_ids(who, start), source)

    def _first_ids(self, who: str, ids: Sequence[int] | None) -> Sequence[int]:
        """Return the ids that the decoder's text begins with. ids: the prompt's `decoder_input_ids`; the start token is
        put before them if they lack it, as in transformers. If there are none, return the ids of the generation config.
        who: names the prompt in errors. Raises ValueError if it does not give them."""
        start = self.encoder.start if self.encoder else None
        if ids:
            return ids if not start or ids[0] == start[0] else [start[0], *ids]
        if not start:
            raise ValueError(
                f"{who}: the target's generation_config.json has no decoder_start_token_id, or null in "
                "forced_decoder_ids (such as the language); set them there, or give decoder_input_ids with the prompt"
            )
        return start

    def _encode(self, who: str, prompt: Any) -> list[int]:
        """Return the token ids of one prompt. If a text already begins with the start token, as a rendered chat
        template does, the start token that the tokenizer adds is removed. who: names the prompt in errors. Raises
        ValueError if this is no single prompt, or if a text has no tokenizer."""
        if isinstance(prompt, Mapping):
            rows = _unpadded(who, prompt)
            if len(rows) != 1:
                raise ValueError(f"{who}: {len(rows)} rows in one prompt; give the tokenizer's output as the prompts")
            return rows[0]
        if isinstance(prompt, str):
            tokenizer = self._tokenizer(who, "text")
            require_text(who, prompt)
            ids = list(tokenizer(prompt)["input_ids"])
            start = tokenizer.bos_token
            doubled = bool(start) and prompt.startswith(str(start)) and ids[:2] == [tokenizer.bos_token_id] * 2
            return ids[1:] if doubled else ids
        if isinstance(prompt, list | tuple) and prompt and all(isinstance(one, Mapping) for one in prompt):
            return self._rendered(who, prompt)
        return _ids(who, prompt)

    def _rendered(self, who: str, messages: Sequence[Message]) -> list[int]:
        """Return the ids of messages, rendered by the chat template. If the last message is the assistant's, the model
        continues its text. who: names the prompt in errors. Raises ValueError if a message lacks a key, if the
        tokenizer has no chat template, or if that fails."""
        lacking = [one for one in messages if "role" not in one or "content" not in one]
        if lacking:
            raise ValueError(f"{who}: each message needs the keys role and content; one has {sorted(lacking[0])}")
        tokenizer = self._tokenizer(who, "messages")
        if tokenizer.chat_template is None:
            raise ValueError(f"{who}: messages need a tokenizer with a chat template; give text or token ids")
        continues = messages[-1]["role"] == "assistant"
        contents = [dict(one) | {"content": content_of(who, one)} for one in messages]
        try:
            text = tokenizer.apply_chat_template(
                contents,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **self.template,
            )
        except Exception as error:  # whatever a template and its values raise
            raise ValueError(
                f"{who}: the tokenizer's chat template fails ({error}); give messages that it can render, or text"
            ) from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tokenizer(self, who: str, what: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(f"{who}: {what} needs a tokenizer; give Engine(tokenizer=...) or lists of token ids")
        return self.tokenizer


def require_text(who: str, text: str) -> None:
    """Raise ValueError for text that is no valid Unicode, such as one half of a surrogate pair. who: names the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{who}: the text is no valid Unicode ({error}); decode it again from its bytes") from error


def content_of(who: str, message: Message) -> str | None:
    """Return the text of a message's content: a string, or the joined texts of its parts. Return None if the message
    calls tools instead. who: names the prompt in errors.

    Raises ValueError for other content, which many templates would print as a Python object, and for text that is no
    valid Unicode.
    """
    content = message.get("content")
    if content is None and message.get("tool_calls") and message.get("role") == "assistant":
        return None
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    if not parts or not all(isinstance(one, Mapping) and isinstance(one.get("text"), str) for one in parts):
        raise ValueError(
            f"{who}: the content of a message is text or a list of text parts, not {reprlib.repr(content)}"
        )
    text = "".join(str(one["text"]) for one in parts)
    require_text(who, text)
    return text


def listed(prompts: Any, pads: frozenset[int]) -> list[Any]:
    """Return the prompts of a call as a list, given a list of prompts, a tensor or array of them, or a tokenizer's
    output for several texts. Padding that its attention mask marks is removed.

    pads: ids that may be padding. Raises ValueError for a tensor whose rows begin or end with a pad id, for one prompt
    in place of a list, and for any other type.
    """
    if isinstance(prompts, Mapping):
        return _unpadded("prompts", prompts)
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype.kind in "UO":
        return list(prompts.tolist())
    if isinstance(prompts, Tensor | np.ndarray) and prompts.ndim == 2:
        rows = prompts.tolist()
        if all(type(token) is int for row in rows for token in row) and any(
            row and (row[0] in pads or row[-1] in pads) for row in rows
        ):
            raise ValueError(
                "prompts: rows of this tensor begin or end with the pad id, which may be padding or text; hand in the "
                "tokenizer's whole output, with its attention_mask, or lists of token ids"
            )
        return list(rows)
    one = isinstance(prompts, str) or isinstance(prompts, Tensor | np.ndarray) and prompts.ndim < 2
    one |= (
        isinstance(prompts, list | tuple)
        and bool(prompts)
        and all(isinstance(item, Integral) or isinstance(item, Mapping) and "role" in item for item in prompts)
    )
    if one:
        raise ValueError("prompts must be a list; put [ ] around the one prompt")
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a list of {ACCEPTED}, not {type(prompts).__name__}")
    return list(prompts)


def single(prompt: Any) -> list[Any]:
    """Return a list that contains only `prompt`, the argument of `Engine.stream`. Raises ValueError if it is a list of
    prompts."""
    if isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], Integral | Mapping):
        raise ValueError(f"prompt must be one prompt, not a list of {len(prompt)}; remove the [ ] around it")
    return [prompt]


def _unpadded(who: str, encoding: Mapping[str, Any]) -> list[list[int]]:
    """Return the rows of ids of a tokenizer's output, without the ids that its attention_mask excludes. who: names the
    prompts in errors. Raises ValueError if there are no input_ids, if several rows of a tensor have no attention_mask,
    or if its shape differs."""
    if "input_ids" not in encoding:
        raise ValueError(f"{who}: a dict needs input_ids, as a tokenizer returns; this one has {sorted(encoding)}")
    rows = _rows(encoding["input_ids"])
    mask = encoding.get("attention_mask")
    if mask is None:
        if isinstance(encoding["input_ids"], Tensor | np.ndarray) and len(rows) > 1:
            raise ValueError(
                f"{who}: input_ids of several rows need their attention_mask; give the tokenizer's whole output"
            )
        return [_ids(who, row) for row in rows]
    masks = _rows(mask)
    if [len(row) for row in masks] != [len(row) for row in rows]:
        raise ValueError(
            f"{who}: attention_mask and input_ids differ in shape; give both as the tokenizer returned them"
        )
    return [
        _ids(who, [token for token, on in zip(row, own, strict=True) if on])
        for row, own in zip(rows, masks, strict=True)
    ]


def _separate(who: str, encoding: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the prompts for an encoder-decoder in a tokenizer's or a processor's output: one dict per row, of its
    `input_ids` or `input_features`, and its `decoder_input_ids` if there are any. who: names the prompts in errors.
    Raises ValueError for features that are no numbers, and if the numbers of rows differ."""
    if encoding.get("input_features") is not None:
        try:
            features = torch.as_tensor(encoding["input_features"])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{who}: input_features must be numbers: {error}") from error
        rows: list[dict[str, Any]] = [{"input_features": one} for one in features.view(-1, *features.shape[-2:])]
    else:
        rows = [{"input_ids": ids} for ids in _unpadded(who, encoding)]
    if encoding.get("decoder_input_ids") is None:
        return rows
    starts = _rows(encoding["decoder_input_ids"])
    if len(starts) != len(rows):
        raise ValueError(
            f"{who}: decoder_input_ids has {len(starts)} rows for {len(rows)} sources; give one per source"
        )
    return [row | {"decoder_input_ids": _ids(who, ids)} for row, ids in zip(rows, starts, strict=True)]


def _rows(values: Any) -> list[list[Any]]:
    """Return the rows of a tensor, an array or lists; values without a second dimension are one row."""
    values = values.tolist() if isinstance(values, Tensor | np.ndarray) else list(values)
    return [list(row) for row in values] if values and isinstance(values[0], Sequence) else [values]


def _ids(who: str, prompt: Any) -> list[int]:
    if isinstance(prompt, Tensor | np.ndarray) and prompt.ndim == 1:
        prompt = prompt.tolist()
    whole = (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and all(is_whole(token) for token in prompt)
    )
    if not whole:
        inside = (
            next((type(token).__name__ for token in prompt if not isinstance(token, Integral)), "")
            if isinstance(prompt, list | tuple)
            else ""
        )
        what = f"{type(prompt).__name__}{f' of {inside}' if inside else ''}"
        raise ValueError(f"{who}: a prompt must be {ACCEPTED}, not a {what}")
    return [int(token) for token in prompt]


def _each(name: str, value: Any, count: int) -> list[Any]:
    value = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} values for {count} prompts; give one value, or one per prompt")
    return values


def vocabulary_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Return the number of ids that can be emitted: the model's vocabulary size, or the tokenizer's if that is smaller,
    since padded rows of the embedding are no tokens."""
    size = int(model.config.get_text_config().vocab_size)
    return min(size, 1 + max(tokenizer.get_vocab().values())) if tokenizer else size


def ends_of(model: PreTrainedModel) -> frozenset[int]:
    """Return the token ids that end a text: the eos_token_id of the model's generation config, or of its config if the
    generation config has none."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = id_of(model.config, "eos_token_id") if ends is None else ends
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)


def pads_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the ids that pad the rows of a tensor: the pad ids of the tokenizer and of the model's config."""
    ids = (id_of(model.config.get_text_config(), "pad_token_id"), tokenizer.pad_token_id if tokenizer else None)
    return frozenset(id for id in ids if id is not None)


def source_limits(model: PreTrainedModel) -> SourceLimits | None:
    """Return what the encoder of a model can read and how its decoder's text begins, or None for a causal LM.

    The text begins with the generation config's decoder_start_token_id, then its forced_bos_token_id or
    forced_decoder_ids. Raises ValueError if sources and texts have different vocabularies.
    """
    config: Any = model.config
    if not config.is_encoder_decoder:
        return None
    if (getattr(config, "decoder_vocab_size", None) or config.vocab_size) != config.vocab_size:
        raise ValueError(
            f"{type(model).__name__}: decoder_vocab_size={config.decoder_vocab_size} is not vocab_size="
            f"{config.vocab_size}; use a model whose encoder and decoder have the same token ids"
        )
    return SourceLimits(_start_of(model), config.vocab_size, longest_source(model), features_shape(model))


def _start_of(model: PreTrainedModel) -> tuple[int, ...] | None:
    settings: dict[str, Any] = {**model.config.to_dict()}
    if model.generation_config is not None:
        settings |= {key: value for key, value in model.generation_config.to_dict().items() if value is not None}
    start, bos = settings.get("decoder_start_token_id"), settings.get("forced_bos_token_id")
    forced = settings.get("forced_decoder_ids") or ([[1, bos]] if bos is not None else [])
    ids = [start, *(token for _, token in forced)]
    in_order = [place for place, _ in forced] == list(range(1, len(ids)))
    return tuple(int(token) for token in ids) if in_order and all(map(is_whole, ids)) else None
