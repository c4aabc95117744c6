"""Reads a row of the user's data: a conversation, a whole prompt, or a text that begins with a prompt; each with a
completion if the row has one.

A row that cannot be read is skipped with a reason. Every column is either read or counted as unread.
"""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inference.request import content_of

Message = dict[str, Any]
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}
CONVERSATION, PROMPT, INSTRUCTION, TEXT, QUESTION, SOURCE = (
    ("messages", "conversations", "conversation"),
    "prompt",
    "instruction",
    "text",
    "question",
    "source",
)
COMPLETION = ("completion", "response", "output", "answer")
MEANINGS = {
    **dict.fromkeys(CONVERSATION, "the conversation"),
    **dict.fromkeys(COMPLETION, "the answer"),
    "system": "the system turn",
    "tools": "the tools",
    "domain": "the domain, by which figures are given",
}
COLUMNS = (*CONVERSATION, PROMPT, INSTRUCTION, TEXT, QUESTION)  # the first of them that is in a row is read
NAMES = {"from": "role", "value": "content"}  # of ShareGPT
ENVELOPES = ("body", "request")  # columns of logged requests and of OpenAI's batches, whose content is the row
REASONS = 4  # as many are listed
BLANK = "it holds no text"  # many rows of a corpus are so: they do not stop a run
WIDTH = 600  # characters of a reason, or of a list of columns, in a message


@dataclass(frozen=True)
class DataRow:
    """The content of a row of the user's data. It is one of three: `messages`, which the chat template renders; a
    prompt with its completion ("" without one); or a text. The last two are used as they are.

    plain: whether the messages were made from a prompt that was plain text, because the target has a chat template.
    place: where the row is ("own.jsonl, line 3"), for messages to the user. columns: the names of the columns that were
    read. unread: the names of the other columns with a value.
    """

    place: str
    columns: tuple[str, ...]
    unread: tuple[str, ...]
    domain: str = "own"
    messages: tuple[Message, ...] = ()
    tools: Any = None
    prompt: str = ""
    completion: str = ""
    text: str = ""
    plain: bool = False

    @cached_property
    def opening(self) -> str:
        """Return the beginning of the row, up to the first answer to a user. It decides the row's split."""
        if not self.messages:
            return self.prompt or self.text
        roles = [one["role"] for one in self.messages]
        asked = roles.index("user")
        before = asked + roles[asked:].index("assistant") if "assistant" in roles[asked:] else None
        return json.dumps(self.messages[:before])

    @property
    def content(self) -> str:
        """Return everything that was read from the row, as JSON text."""
        return json.dumps([self.messages, self.tools, self.prompt, self.completion, self.text])


@dataclass(frozen=True)
class Reader:
    """Reads rows of the user's data.

    Args:
        column: the column with the conversation, prompt or text; None for the first of `COLUMNS` in the row.
        chat: whether a prompt or text becomes a user's message. None: a prompt does, if the target has a chat template;
            a text does not.
        templated: whether the target has a chat template.
        encoder: whether the target has an encoder. Each row is then one whole encoder input.
        other: what the user should do if a row has no such column, for the error message.
    """

    column: str | None = None
    chat: bool | None = None
    templated: bool = False
    encoder: bool = False
    other: str = "name another by data.column="

    def row(self, values: Any, place: str = "") -> DataRow:
        """Return the content of a row. values: the row, which should be a mapping from column to value; or the error
        for which it could not be read. place: where the row is, for messages to the user. Raises ValueError, with the
        reason, if the row must be skipped."""
        if isinstance(values, Exception):
            raise ValueError(str(values))
        if not isinstance(values, Mapping):
            raise ValueError(
                "it is no JSON object; a file of plain text, one prompt per line, must end in .txt, and "
                'a row of JSON is an object such as {"prompt": "..."}'
            )
        if None in values:  # `csv.DictReader`
            raise ValueError("it has more cells than the file's first line: quote cells that contain commas")
        whole = next((values[name] for name in ENVELOPES if isinstance(values.get(name), Mapping)), None)
        if whole and not self.column and not {*COLUMNS} & {*values}:
            values = {name: value for name, value in values.items() if not isinstance(value, Mapping)} | whole
        if not self.column and {"model", "input"} <= {*values} and not {*COLUMNS} & {*values}:  # OpenAI's Responses
            asked = values["input"]
            messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            about = {name: value for name, value in values.items() if name not in ("input", "output", "instructions")}
            system = {"system": values["instructions"]} if values.get("instructions") else {}
            values = about | {"messages": messages} | system
        left = {name: value for name, value in values.items() if not _blank(value)}
        domain = _text("domain", left.pop("domain", "own"))
        content = self._read(self._column(values, left), left)
        read = tuple(name for name in values if name not in left and not _blank(values[name]))
        return DataRow(place, read, tuple(left), domain, **content)

    def _column(self, values: Mapping[str, Any], left: Mapping[str, Any]) -> str:
        """Return the name of the column with the conversation, prompt or text. left: the values that are not blank.
        Raises ValueError if there is no such column."""
        names = (self.column,) if self.column else (SOURCE, PROMPT, TEXT) if self.encoder else COLUMNS
        for name in names:
            if name in left:
                return name
        if any(name in values for name in names):
            raise ValueError(BLANK)
        for name, value in left.items():
            if len(values) == 1 and (between := next((one for one in ";\t|" if one in name), "")):
                raise ValueError(f"its only column is {name!r}: separate columns by commas, not by {between!r}")
            if name == "choices":  # of OpenAI's completions
                raise ValueError("it is a server's answer without the prompt: write the request's messages beside it")
            if has_objects(value):
                raise ValueError(
                    f"its {name!r} is a list of objects: if these are the rows, write a file of that list alone"
                )
        named = "" if self.column else f": {self.other}"
        raise ValueError(f"it has no column {' or '.join(map(repr, names))}, but {', '.join(left) or 'none'}{named}")

    def _read(self, name: str, left: dict[str, Any]) -> dict[str, Any]:
        value = left.pop(name)
        if not self.encoder and (name in CONVERSATION or isinstance(value, list)):
            return self._conversation(conversation(value), left)
        text = _text(name, value)
        if self.encoder:
            return {"prompt": text}
        if name == INSTRUCTION and "input" in left:
            text += "\n" + _text("input", left.pop("input"))
        prompt = name in (PROMPT, INSTRUCTION, QUESTION)
        if self.chat or (self.chat is None and prompt and self.templated):
            return {**self._conversation([{"role": "user", "content": text}], left), "plain": self.chat is None}
        if not prompt:
            return {"text": text}
        return _plain([{"role": "user", "content": text}, *_answer(left)])

    def _conversation(self, messages: list[Message], left: dict[str, Any]) -> dict[str, Any]:
        if messages[-1]["role"] != "assistant":
            messages = messages + _answer(left)
        if not any(one["role"] == "user" for one in messages):
            raise ValueError("it has no message of a user")
        if not self.templated:
            return _plain(messages)
        if "system" in left and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": _text("system", left.pop("system"))}, *messages]
        return {"messages": tuple(messages), "tools": decoded("tools", left.pop("tools", None))}


def has_objects(value: Any) -> bool:
    """Return whether the value is a list of objects that are no messages."""
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and not {"role", "from"} & {*value[0]}
    )


def conversation(value: Any) -> list[Message]:
    """Return the messages of a conversation, with the keys and roles of OpenAI's API. The arguments of tool calls are
    objects.

    value: a list of messages with the keys of OpenAI's API or of ShareGPT, or such a list as JSON text. Raises
    ValueError for anything else.
    """
    value = decoded("messages", value)
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
        raise ValueError("it holds no list of messages, each with role and content")
    return [_message(f"message {place}", one) for place, one in enumerate(value, 1)]


def _message(who: str, given: Mapping[str, Any]) -> Message:
    names = {} if "role" in given else NAMES
    one = {names.get(key, key): value for key, value in given.items() if value is not None}
    role = one.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{who} has the role {role!r}: it must be one of {', '.join(ROLES)}")
    call = decoded(who, one.pop("function_call", None))  # of OpenAI's first API
    calls = decoded(who, one.pop("tool_calls", None)) or ([{"type": "function", "function": call}] if call else [])
    if not isinstance(calls, list):
        raise ValueError(f"{who}: its tool_calls must be a list")
    one |= {"role": ROLES[role]} | ({"tool_calls": [_call(who, each) for each in calls]} if calls else {})
    return one | {"content": content_of(who, one) or ""}


def _call(who: str, call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are an object. who: the message with the call, for the error message. Raises
    ValueError if the arguments are no JSON object."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    arguments = decoded(who, function.get("arguments")) if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments or {}, Mapping):
        raise ValueError(f"{who}: a tool call needs a name, and arguments that are a JSON object")
    function = {**function, "arguments": arguments or {}}
    return {**call, "function": function} if "function" in call else function


def decoded(who: str, value: Any) -> Any:
    """Return the value of JSON text. Any other value is returned unchanged. Blank text and an empty object or list
    become None. who: the owner of the value, for the error message. Raises ValueError for text that is not JSON."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{who}: the text is not JSON: {error.args[0]}") from error
    return None if value in ({}, []) or _blank(value) else value


def _answer(left: dict[str, Any]) -> list[Message]:
    """Return the messages of the completion in a row, or [] if there is none. left: the row's values by column; columns
    of the completion are removed from it, in place. Raises ValueError if two such columns have different content."""
    given = {name: left.pop(name) for name in COMPLETION if name in left}
    first, *others = given.items() or [("", "")]
    if differs := [name for name, value in others if value != first[1]]:
        raise ValueError(f"its columns {first[0]} and {differs[0]} differ: leave one out")
    name, value = first
    if isinstance(value, list):
        return conversation(value)
    return [{"role": "assistant", "content": _text(name, value)}] if value else []


def _plain(messages: list[Message]) -> dict[str, Any]:
    """Return {"prompt", "completion"} of a user's message and its answer, as texts that no chat template renders.
    Raises ValueError if there are other messages."""
    if [one["role"] for one in messages] not in (["user"], ["user", "assistant"]):
        raise ValueError(
            "without a chat template only one message of a user, with or without its answer, can be read: leave "
            "data.chat=false out, or name a target whose tokenizer has a chat template"
        )
    if any("tool_calls" in one for one in messages):
        raise ValueError(
            "message 2 calls tools, which only a chat template can render: leave data.chat=false out, or name a target "
            "whose tokenizer has a chat template"
        )
    prompt, *said = (one["content"] for one in messages)
    return {"prompt": prompt, "completion": said[0] if said else ""}


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"column {name!r} holds {type(value).__name__}, not text")
    return content_of(f"column {name!r}", {"content": value}) or ""


def _line(text: str) -> str:
    """Return the text as one line that can be printed, of at most `WIDTH` characters."""
    return textwrap.shorten(text.encode(errors="backslashreplace").decode(), WIDTH, placeholder=" ...")


@dataclass(frozen=True)
class Skipped:
    """Rows or answers that are left out. reasons: their number, keyed by reason; reasons that differ only in numbers
    are one. first: the place and the whole reason of the first one, keyed by reason."""

    reasons: Counter[str]
    first: dict[str, str]

    def add(self, place: str, reason: Exception | str) -> None:
        """Count one more row as left out for this reason. place: where the row is."""
        kind = re.sub(r"\d+", "0", str(reason))
        self.reasons[kind] += 1
        self.first.setdefault(kind, _line(f"{place}: {reason}"))

    def said(self) -> str:
        """Return the reasons as text, the most frequent first, each with its count and the place of its first row."""
        listed = [f"{count}, the first {self.first[reason]}" for reason, count in self.reasons.most_common()]
        return "; ".join(listed[:REASONS] + ["other reasons"] * (len(listed) > REASONS))

    def refuse(self, setting: str, total: int) -> None:
        """Raise ValueError if more than a tenth of the `total` rows are skipped. Blank rows do not count. setting: the
        setting that the message names."""
        count = self.reasons.total() - self.reasons[BLANK]
        if 10 * count > total:
            raise ValueError(f"{setting}: {count} of {total} rows cannot be read: {self.said()}")


def nothing_skipped() -> Skipped:
    """Return a `Skipped` without rows."""
    return Skipped(Counter(), {})


def remarks(rows: Sequence[DataRow], reader: Reader, skipped: Skipped, total: int) -> list[str]:
    """Return lines for the user: which columns were read, and as what, how prompts are used, and which rows were left
    out. rows: the rows that were read. reader: what read them. skipped: the rows left out. total: the number of rows,
    including skipped ones."""
    read, unread = (Counter(name for row in rows for name in getattr(row, part)) for part in ("columns", "unread"))
    ignored = f"; not read: {_counted(unread, len(rows))}" * bool(unread)
    lines = [
        f"data.path: {total - skipped.reasons.total()} of {total} rows are read, columns "
        f"{_counted(read, len(rows))}{ignored}"
    ]
    if skipped.reasons:
        lines += [f"data.path: {skipped.reasons.total()} of {total} rows are skipped: {skipped.said()}"]
    repeated = len(rows) - len({row.content for row in rows})
    lines += [f"data.path: {repeated} of {len(rows)} rows are repetitions of others"] * bool(repeated)
    return lines if reader.encoder else [*lines, _meanings(rows, read), _rendered(rows, reader)]


def _meanings(rows: Sequence[DataRow], read: Collection[str]) -> str:
    """Return a line for the user: what each column is read as. rows: the rows that were read. read: their columns."""
    main = "a text, continued from its start" if rows[0].text else "the prompt"
    columns: dict[str, list[str]] = {}
    for name in read:
        columns.setdefault(MEANINGS.get(name, main), []).append(name)
    return _line("data.path: read as " + "; ".join(f"{one}: {', '.join(columns[one])}" for one in columns))


def _rendered(rows: Sequence[DataRow], reader: Reader) -> str:
    if any(row.plain for row in rows):
        return (
            "data.path: is each prompt what a user says? The target's chat template renders prompts of plain text "
            "as users' messages; data.chat=true answers yes, data.chat=false uses them as they are"
        )
    if rows[0].messages:
        return "data.path: prompts are messages, rendered by the target's chat template" + (
            "" if {*rows[0].columns} & {*CONVERSATION} else "; data.chat=false uses them as they are"
        )
    if not reader.templated:
        said = ", so the user's messages are used as prompts without one" * bool({*rows[0].columns} & {*CONVERSATION})
        return f"data.path: prompts are used as they are: the target's tokenizer has no chat template{said}"
    return (
        "data.path: prompts are used as they are; data.chat=true makes each a user's message in the target's chat "
        "template"
    )


def _counted(columns: Mapping[str, int], rows: int) -> str:
    """Return the names of columns as text. A column that is not in all rows is followed by its count. columns: the
    number of rows that have each column. rows: the number of all rows."""
    return _line(", ".join(name if count == rows else f"{name} ({count})" for name, count in columns.items()))


def of_one_kind(rows: list[DataRow], skipped: Skipped) -> list[DataRow]:
    """Return the rows if all are texts or none is. Otherwise return only the prompts and conversations, and add each
    text to `skipped`, in place."""
    if all(row.text for row in rows):
        return rows
    for row in rows:
        if row.text:
            skipped.add(row.place, "it is a text, but other rows are prompts: name one column by data.column=")
    return [row for row in rows if not row.text]
