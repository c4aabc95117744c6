"""Conversations of the user's own logs, rendered by the target's chat template.

Each turn of the assistant is one text. The prompt is everything before it, rendered with the generation prompt. The
completion is what the template adds for the turn. So only generated tokens are learnt, and the history is as the
template renders it at that turn; some templates drop the thoughts of earlier turns.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from cotrain.data.prompt_rows import PromptRows
from cotrain.data.splits import in_split
from inference.request import content_of

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Chats(PromptRows):
    """Turns of conversations: only what was generated is learnt from."""


@dataclass(frozen=True)
class Template:
    """Renders messages by the target's chat template. options: arguments of the template, such as enable_thinking.
    ends: ids that end a completion; the template may add more after one (a line break, say), which was never
    generated."""

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any]
    ends: Collection[int]

    def text(self, messages: list[Message], tools: Any, prompt: bool) -> str:
        """The messages rendered by the chat template. prompt: end with the tokens that open the assistant's turn.
        Raises ValueError when the template fails."""
        try:
            return str(self.tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=prompt, tokenize=False, **self.options
            ))  # fmt: skip
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the target's chat template fails: {error}") from error

    def ids(self, text: str) -> list[int]:
        """The template has written the special tokens already."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def ended(self, ids: list[int]) -> list[int]:
        """The ids up to and including the first end token."""
        return ids[: next((place + 1 for place, token in enumerate(ids) if token in self.ends), len(ids))]


def is_chat(columns: Collection[str], first: Mapping[str, Any]) -> bool:
    """Whether rows of these columns are conversations: messages, also under prompt, or prompt and response."""
    return "messages" in columns or {"prompt", "response"} <= set(columns) or isinstance(first.get("prompt"), list)


def cleaned(value: Any) -> Any:
    """Without the keys that are null."""
    if isinstance(value, Mapping):
        return {key: cleaned(one) for key, one in value.items() if one is not None}
    return [cleaned(one) for one in value] if isinstance(value, list) else value


def chats_of(rows: Iterable[Mapping[str, Any]], split: str, template: Template) -> Chats:
    """The turns of the conversations in a split of `splits`; a hash of a conversation's first messages chooses its
    split.

    Raises ValueError, naming the row, for values that are no messages, and for a template that fails, renders nothing
    or renders earlier messages anew; and if no conversation is in the split.
    """
    turns: list[dict[str, Any]] = []
    conversations = list(_read(rows))
    for place in in_split([_opened(messages) for messages, _ in conversations], split):
        messages, row = conversations[place]
        with _naming_row(place + 1):
            pairs = _turns(messages, row.get("tools"), template)
            domain = str(row.get("domain") or "own")
            turns += [{"domain": domain, "prompt": a, "completion": b, "unit": place} for a, b in pairs]
    if not turns:
        raise ValueError(f"data.path: none of {len(conversations)} conversations falls to the split {split}: give more")
    return Chats(turns)


def _read(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[list[Message], Mapping[str, Any]]]:
    for number, row in enumerate(rows, 1):
        with _naming_row(number):
            yield _messages(row), row


def _opened(messages: list[Message]) -> str:
    """What opens a conversation, up to the first turn of the assistant."""
    first = next((place for place, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
    return json.dumps(messages[:first])


@contextmanager
def _naming_row(number: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"data.path: row {number}: {error}") from error


def _messages(row: Mapping[str, Any]) -> list[Message]:
    opened, said = row.get("prompt"), row.get("response")
    pair = (("user", opened), ("assistant", said))
    messages = row.get("messages") or [{"role": role, "content": text} for role, text in pair if text is not None]
    if not row.get("messages") and isinstance(opened, list):
        messages = opened + ([{"role": "assistant", "content": said}] if isinstance(said, str) else said or [])
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise ValueError("it holds no list of messages, each with role and content")
    for one in messages:
        if one.get("role") not in ROLES:
            raise ValueError(f"role {one.get('role')!r} is none of {', '.join(ROLES)}")
    return [one | {"content": content_of(f"message {place}", one)} for place, one in enumerate(messages, 1)]


def _turns(messages: list[Message], tools: Any, template: Template) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, completion) of each turn of the assistant, and of an open conversation also its last prompt."""
    if template.tokenizer.chat_template is None:
        yield _plain(messages, template)
        return
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _said(template.text(messages[:place], tools, prompt=True))
            whole = template.text(messages[: place + 1], tools, prompt=False)
            if not whole.startswith(before):
                raise ValueError(f"the target's chat template renders what is before message {place + 1} otherwise "
                                 f"once that is there: {_apart(before, whole)}")  # fmt: skip
            yield template.ids(before), template.ended(template.ids(_said(whole[len(before) :])))
    if messages[-1]["role"] != "assistant":
        yield template.ids(_said(template.text(messages, tools, prompt=True))), []


def _plain(messages: list[Message], template: Template) -> tuple[list[int], list[int]]:
    """A prompt as it is served, and its response, for a target without a chat template."""
    if [message["role"] for message in messages] not in (["user"], ["user", "assistant"]):
        raise ValueError("the target's tokenizer has no chat template, so only one message of a user, with or "
                         "without its answer, can be read")  # fmt: skip
    prompt, *said = (message["content"] for message in messages)
    if said == [None]:
        raise ValueError(
            "message 2 calls tools, which only a chat template can render, and the target's tokenizer has none"
        )
    end = template.tokenizer.eos_token_id
    return list(template.tokenizer(prompt)["input_ids"]), [*template.ids(said[0]), end] if said else []


def _said(text: str) -> str:
    if not text.strip():
        raise ValueError("the target's chat template renders nothing for it")
    return text


def _apart(before: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole))
    return f"{before[max(at - 20, 0) : at + 20]!r} becomes {whole[max(at - 20, 0) : at + 20]!r}"
