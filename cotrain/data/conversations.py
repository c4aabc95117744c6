"""Conversations from the user's logs, rendered by the target's chat template.

Each turn of the assistant becomes one text. Its prompt is everything before the turn, rendered with the generation
prompt. Its completion is the text that the template adds for the turn. So only generated tokens are learnt, and the
earlier turns look as the template renders them at that moment; some templates drop the thoughts of earlier turns.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from cotrain.data.rows import DataRow, Message
from cotrain.errors import first_line
from inference.request import require_text

EMPTY_THOUGHT = re.compile(r"\s*<(\w+)>\s*</\1>\s*")
CLOCK = "strftime_now"  # what templates ask for the date
DIRECTIVES = [f"%{sign}{letter}" for letter in "aAbBcdDeFGHIjmMpSTuUVwWxXyY" for sign in ("", "-")]  # of strftime


class Turn(NamedTuple):
    """A prompt and the assistant's answer to it, as token ids. lost: why the answer cannot be learnt, for the user; ""
    if it can."""

    prompt: list[int]
    completion: list[int]
    lost: str = ""


@dataclass(frozen=True)
class Template:
    """Renders messages with the target's chat template.

    Args:
        options: arguments of the template, by name, such as enable_thinking.
        ends: token ids that end a completion. After one, the template may add more text, such as a line break, which
            the target did not generate.
        day: the date that the template writes; None for today.
    """

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any]
    ends: Collection[int]
    day: date | None = None

    @property
    def dated(self) -> bool:
        """Return whether the template writes a date."""
        return CLOCK in str(self.tokenizer.chat_template)

    def text(self, messages: Sequence[Message], tools: Any, prompt: bool) -> str:
        """Return the messages as text, rendered by the chat template.

        tools: definitions of tools, or None. prompt: True to end the text with the tokens that begin the assistant's
        turn. Raises ValueError if the template fails, renders nothing or no valid Unicode, or ignores the user's
        messages.
        """
        try:
            text = self._rendered(messages, tools, prompt)
        except ValueError:
            if not any("tool_calls" in one for one in messages):
                raise
            text = self._rendered([_written(one) for one in messages], tools, prompt)
        if not text.strip():
            raise ValueError("the target's chat template renders no text for this conversation")
        require_text("the rendered conversation", text)
        if self.ignores_user:
            raise ValueError(
                "the target's chat template renders the same text whatever the user says: correct how it uses "
                "message.content"
            )
        return text

    @cached_property
    def ignores_user(self) -> bool:
        """Return whether the template renders the same text whatever the user's message is."""
        try:
            said, other = (self._rendered([{"role": "user", "content": one}], None, True) for one in ("a", "b"))
        except ValueError:  # it needs more than a message
            return False
        return said == other

    def _rendered(self, messages: Sequence[Message], tools: Any, prompt: bool) -> str:
        fixed: dict[str, Any] = {}
        try:
            if self.day and self.dated:
                fixed = {"chat_template": _fixed(self.day) + self.tokenizer.get_chat_template(None, tools or None)}
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools or None,
                    add_generation_prompt=prompt,
                    tokenize=False,
                    **self.options,
                    **fixed,
                )
            )
        except Exception as error:  # whatever a template and its values raise
            raise ValueError(f"the target's chat template fails: {first_line(error)}") from error

    def ids(self, text: str) -> list[int]:
        """Return the token ids of rendered text. No special tokens are added, since the template has already written
        them."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def ended(self, ids: list[int]) -> list[int]:
        """Return `ids` up to and including the first end token, or all of them if there is none."""
        return ids[: next((place + 1 for place, token in enumerate(ids) if token in self.ends), len(ids))]

    def turns(self, row: DataRow) -> Iterator[Turn]:
        """Yield one `Turn` for each message of the assistant that follows a user's message. A conversation that ends
        without an answer also yields its last prompt, with an empty completion. A row without messages (a prompt or a
        text) yields one turn. Raises ValueError if the template cannot render a prompt."""
        if not row.messages:
            end = self.tokenizer.eos_token_id
            said = [*self.ids(row.completion), *([] if end is None else [end])] if row.completion else []
            yield Turn(list(self.tokenizer(row.prompt, verbose=False)["input_ids"]), said)
            return
        asked = [place for place, one in enumerate(row.messages) if one["role"] == "user"][0]
        for place, message in enumerate(row.messages):
            if message["role"] == "assistant" and place > asked:
                before = self.text(row.messages[:place], row.tools, prompt=True)
                yield self._turn(before, message, self.text(row.messages[: place + 1], row.tools, prompt=False))
        if row.messages[-1]["role"] != "assistant":
            yield Turn(self.ids(self.text(row.messages, row.tools, prompt=True)), [])

    def _turn(self, before: str, message: Message, whole: str) -> Turn:
        """Return the turn that ends with the assistant's `message`. before: the rendered conversation up to the
        beginning of the message. whole: the rendered conversation up to its end."""
        prompt = self.ids(before)
        if message.get("weight") == 0:  # of OpenAI's fine-tuning files
            return Turn(prompt, [], "the answer has weight 0")
        if not message["content"].strip() and "tool_calls" not in message:
            return Turn(prompt, [], "the answer is empty")
        if not whole.startswith(before):
            return Turn(
                prompt, [], "the target's chat template renders the text before an answer differently with the answer"
            )
        said = whole[len(before) :]
        thought = EMPTY_THOUGHT.match(said)  # the target did not write it, unless the message has it
        own = EMPTY_THOUGHT.match(message["content"])  # templates write it with blanks of their own
        if thought and not (own and own[1] == thought[1]):
            said = said[thought.end() :]
        if not said.strip():
            return Turn(prompt, [], "the target's chat template renders no text for the answer")
        return Turn(prompt, self.ended(self.ids(said)))


def _fixed(day: date) -> str:
    """Return code to put before a chat template, so that the template writes `day` as today's date."""
    values = "".join(f".replace({one!r}, {day.strftime(one)!r})" for one in DIRECTIVES)
    return f"{{%- macro {CLOCK}(format) %}}{{{{ format{values} }}}}{{%- endmacro %}}{{{{ '' }}}}"


def _written(message: Message) -> Message:
    """Return a copy of the message in which the arguments of tool calls are JSON text, because some templates
    concatenate them with text."""
    calls = [json.loads(json.dumps(call)) for call in message.get("tool_calls", ())]
    for call in calls:
        function = call.get("function", call)
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return message | {"tool_calls": calls} if calls else message
