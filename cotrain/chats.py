"""Conversations of the user's own logs, as the target is served them: rendered by its chat template.

Each turn of the assistant is one text: the prompt is everything before it, rendered with the generation prompt, and the
completion is what the template adds for the turn. So the history stands as the template shows it at that moment
(without the thoughts of earlier turns, where it drops them), and only what was generated is learnt from.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from cotrain.corpora import Document

Message = dict[str, Any]
Row = dict[str, Any]  # of rollouts.FEATURES
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Chats:
    """Prompts, each with the completion that the logs hold, if they do: rows of `rollouts.FEATURES`."""

    rows: list[Row]

    def prompts(self, count: int, tokens: int, seed: int) -> list[tuple[str, list[int]]]:
        """(domain, prompt ids) of `count` rows of each domain, as `chosen`. Raises ValueError when one has fewer."""
        chosen = self.chosen(count, tokens, seed)
        for domain in {row["domain"] for row in self.rows}:
            found = sum(row["domain"] == domain for row in chosen)
            if found < count:
                raise ValueError(f"rollout.texts, rollout.held_out_texts: {count} prompts asked of {domain}, there are "
                                 f"{found} of at most rollout.prompt_tokens={tokens}: ask for fewer, or allow longer "
                                 "ones")  # fmt: skip
        return [(row["domain"], row["prompt"]) for row in chosen]

    def chosen(self, count: int, tokens: int, seed: int) -> list[Row]:
        """At most `count` rows of each domain, chosen by seed among those with at most `tokens` ids of prompt: a prompt
        that is cut would be none."""
        fitting = self._fitting(tokens, seed)
        domains = sorted({row["domain"] for row in fitting})
        return [row for domain in domains for row in [one for one in fitting if one["domain"] == domain][:count]]

    def left_out(self, tokens: int, split: str) -> str:
        """A line that says how many prompts have more than `tokens` ids or none, and are not used; nothing where all
        are."""
        sizes = [len(row["prompt"]) for row in self.rows]
        long, empty = sum(size > tokens for size in sizes), sizes.count(0)
        found = [f"{long} are longer than rollout.prompt_tokens={tokens}"] * (long > 0) + [f"{empty} are empty"] * (
            empty > 0
        )
        return (
            f"data.path: of {len(sizes)} prompts of the split {split}, {' and '.join(found)}: left out\n"
            if found
            else ""
        )

    def several(self, tokens: int, seed: int) -> list[list[int]]:
        """Every prompt of at most `tokens` ids, in an order of the seed. Raises ValueError without any."""
        fitting = self._fitting(tokens, seed)
        if not fitting:
            shortest = min(len(row["prompt"]) for row in self.rows)
            raise ValueError(f"data.path: no prompt of at most {tokens} tokens, the shortest has {shortest}: raise "
                             "rollout.prompt_tokens (of cotrain bench, bench.prompt_tokens)")  # fmt: skip
        return [row["prompt"] for row in fitting]

    def _fitting(self, tokens: int, seed: int) -> list[Row]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed)).tolist()
        return [self.rows[i] for i in order if 0 < len(self.rows[i]["prompt"]) <= tokens]


@dataclass(frozen=True)
class Template:
    """How the target is shown messages. options: handed to its chat template, as enable_thinking. ends: ids that end a
    completion; what the template adds behind one (a line break, say) was never generated."""

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any]
    ends: Collection[int]

    def text(self, messages: list[Message], tools: Any, prompt: bool) -> str:
        """prompt: with what opens the assistant's turn. Raises ValueError when the template fails."""
        try:
            return str(self.tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=prompt, tokenize=False, **self.options
            ))  # fmt: skip
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the target's chat template fails: {error}") from error

    def ids(self, text: str) -> list[int]:
        """The template has written the special tokens already."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def ended(self, ids: list[int]) -> list[int]:
        """Up to the first end token, which is kept."""
        return ids[: next((place + 1 for place, token in enumerate(ids) if token in self.ends), len(ids))]


def is_chat(columns: Collection[str]) -> bool:
    """Whether rows of these columns are conversations: messages, or prompt and response."""
    return "messages" in columns or {"prompt", "response"} <= set(columns)


def cleaned(value: Any) -> Any:
    """Without the keys that are null."""
    if isinstance(value, Mapping):
        return {key: cleaned(one) for key, one in value.items() if one is not None}
    return [cleaned(one) for one in value] if isinstance(value, list) else value


def chats_of(rows: Iterable[Mapping[str, Any]], split: str, template: Template) -> Chats:
    """Turns of the conversations that fall to a split, "train" or "held_out", by a hash of what opens them.

    Raises ValueError naming the row for messages that are none and a template that fails, renders nothing or rewrites
    what it had rendered; and when nothing is left.
    """
    turns, number = [], 0
    for number, row in enumerate(rows, 1):
        try:
            messages = _messages(row)
            first = next((place for place, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
            if Document(json.dumps(messages[:first]), "").held_out == (split == "held_out"):
                pairs = _turns(messages, row.get("tools"), template)
                turns += [{"domain": str(row.get("domain") or "own"), "prompt": a, "completion": b} for a, b in pairs]
        except ValueError as error:
            raise ValueError(f"data.path: row {number}: {error}") from error
    if not turns:
        raise ValueError(f"data.path: none of {number} conversations falls to the split {split}: give more")
    return Chats(turns)


def _messages(row: Mapping[str, Any]) -> list[Message]:
    pair = (("user", row.get("prompt")), ("assistant", row.get("response")))
    messages = row.get("messages") or [{"role": role, "content": text} for role, text in pair if text is not None]
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise ValueError("it holds no list of messages, each with role and content")
    for one in messages:
        if one.get("role") not in ROLES:
            raise ValueError(f"role {one.get('role')!r} is none of {', '.join(ROLES)}")
    return messages


def _turns(messages: list[Message], tools: Any, template: Template) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, completion) of each turn of the assistant; of an open conversation also the prompt it ends with."""
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
    """Of a target without a template: a prompt, as it is served, and its response."""
    if [message["role"] for message in messages] not in (["user"], ["user", "assistant"]):
        raise ValueError("the target's tokenizer has no chat template, by which conversations are rendered")
    prompt, *said = (str(message["content"]) for message in messages)
    end = template.tokenizer.eos_token_id
    return list(template.tokenizer(prompt)["input_ids"]), [*template.ids(said[0]), end] if said else []


def _said(text: str) -> str:
    if not text.strip():
        raise ValueError("the target's chat template renders nothing for it")
    return text


def _apart(before: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole))
    return f"{before[max(at - 20, 0) : at + 20]!r} becomes {whole[max(at - 20, 0) : at + 20]!r}"
