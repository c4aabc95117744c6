"""Command `cotrain generate`. It continues prompts with a draft, or by plain decoding without one."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

from cotrain.commands.served_pair import as_trained, read_folder, refuse_pair
from cotrain.config.settings import GenerateConfig, sampling
from cotrain.data.conversations import Template
from cotrain.data.rows import PROMPT, Reader, nothing_skipped
from cotrain.data.sources import UNREADABLE, extension_of, rows_in
from cotrain.errors import UserError, user_errors, warn
from cotrain.teacher.target_model import load_config, load_pair
from inference import Engine, load
from inference.adaptive_policy import Adaptive
from inference.measure.environment import device
from inference.models.pretrained import longest_text
from inference.output import Event, pieces
from inference.policy import Fixed

PLAIN = "\033[0m"
COLORS = {"drafted": "\033[32m", "corrected": "\033[33m", "bonus": PLAIN}


def run(cfg: GenerateConfig) -> None:
    """Print the continuation of every prompt. In colour, accepted drafts are green and corrections yellow, and a last
    line shows the number of target calls and the speed. Raises UserError for settings that do not fit together or an
    unreadable prompt."""
    drafting = {"policy.k": cfg.policy.k, "policy.file": cfg.policy.file, "verify": cfg.verify}
    typed = [key for key, value in drafting.items() if value is not None]
    if typed and not cfg.draft.path:
        raise UserError(
            f"{typed[0]}={drafting[typed[0]]}: it has no effect without a draft: name one with draft.path=, or leave "
            f"{typed[0]}= out"
        )
    if {"policy.k", "policy.file"} <= {*typed}:
        raise UserError("set policy.k= (a fixed draft length) or policy.file= (an adaptive policy), not both")
    prompts = _read_by(cfg, _prompts(cfg.prompt, cfg.prompts))
    engine = _engine(cfg)
    settings: dict[str, Any] = {
        "max_new_tokens": cfg.max_new_tokens,
        "sampling": sampling(cfg.regime),
        "seed": cfg.seed,
    }
    color = sys.stdout.isatty() if cfg.color is None else cfg.color
    if not color:
        out = engine.generate(prompts, **settings)
        print(*out.text or (), sep="\n")
        for number, message in enumerate(out.errors, 1):
            if message is not None:
                raise UserError(f"the text of prompt {number} ends early, {message}")
        return
    _colored(engine, prompts, settings)


def _colored(engine: Engine, prompts: list[str | list[int]], settings: dict[str, Any]) -> None:
    """Print each text while it is generated, and a summary after the last text. settings: keyword arguments for
    `Engine.stream`."""
    assert engine.tokenizer is not None
    decode: Any = engine.tokenizer.decode
    events, began = list[Event](), time.perf_counter()
    for prompt in prompts:
        try:
            for kind, piece in pieces(_recorded(engine.stream(prompt, **settings), events), decode):
                print(f"{COLORS[kind]}{piece}", end="", flush=True)
        finally:
            print(PLAIN)
    print(_summary(events, time.perf_counter() - began))


def _recorded(events: Iterator[Event], into: list[Event]) -> Iterator[Event]:
    """Yield the events, and append each to the list `into`."""
    for event in events:
        into.append(event)
        yield event


def _summary(events: Sequence[Event], seconds: float) -> str:
    """Return the line that ends coloured output. It also explains the colours. events: one per target call. seconds:
    the time for all texts, including prefill."""
    tokens = sum(len(event.ids) for event in events)
    drafts = sum(event.kinds.count("drafted") for event in events)
    mean = tokens / max(len(events), 1)
    kinds = (
        f"colours: {COLORS['drafted']}accepted draft ({drafts}){PLAIN}, {COLORS['corrected']}corrected{PLAIN} "
        "(replaces a rejected draft), bonus (after all drafts were accepted)"
    )
    speed = f"{mean:.2f} per call; {tokens / seconds:.0f} tokens per second"
    return f"{tokens} tokens in {len(events)} target calls, {speed}; {kinds}"


def _read_by(cfg: GenerateConfig, rows: list[tuple[str, Any]]) -> list[str | list[int]]:
    """Return the prompts: a text, or the token ids of a conversation. Settings in `cfg` that are not set get the values
    stored in the draft folder, in place.

    rows: pairs (where the prompt is, row of data). Raises UserError, before weights are loaded, if the draft does not
    fit the target, or if a prompt does not fit into the context.
    """
    metadata = read_folder(cfg.draft.path).metadata if cfg.draft.path else None
    rule = cfg.verify  # if null, `load` chooses the folder's rule, which may be one for trees
    as_trained(cfg, metadata)
    cfg.verify = rule
    path = cfg.target.path or (metadata.target["name"] if metadata else None)
    if path is None and cfg.draft.path:
        raise UserError(f"draft.path={cfg.draft.path} does not name its target: set target.path= to this model")
    if path is None:
        raise UserError("name a draft folder with draft.path=, or a target for plain decoding with target.path=")
    if cfg.draft.path:
        target, tokenizer, _ = refuse_pair(cfg.draft.path, path)
        room = longest_text(target.config)
    else:
        with user_errors():
            config, tokenizer = load_config(path)
        room = longest_text(config)
    if cfg.chat and tokenizer.chat_template is None:
        raise UserError("chat=true: the target's tokenizer has no chat template; set chat=false")
    template = Template(tokenizer, metadata.served.template if metadata else {}, ())
    reader = Reader(
        chat=bool(cfg.chat),
        templated=tokenizer.chat_template is not None,
        other="rename the one that holds the prompts",
    )
    prompts, skipped, longest = list[str | list[int]](), nothing_skipped(), 0
    for place, values in rows:
        try:
            row = reader.row(values, place)
            prompt = row.text or row.prompt or [*template.turns(row)][-1].prompt
        except ValueError as error:
            skipped.add(place, error)
            continue
        prompts.append(prompt)
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if not 0 < (tokens := len(ids)) < room:
            raise UserError(
                f"{place} has {tokens} tokens: it must have from 1 to {room - 1}, so that one more fits into the "
                f"context of {room} tokens"
            )
        longest = max(longest, tokens)
    if longest + cfg.max_new_tokens > room:
        warn(
            f"max_new_tokens={cfg.max_new_tokens}: the context has {room} tokens, so after the longest prompt at most "
            f"{room - longest} are generated"
        )
    with user_errors():
        skipped.refuse(f"prompts={cfg.prompts}" if cfg.prompts else "prompt", len(rows))
    if not prompts:
        raise UserError(f"prompts={cfg.prompts} contains no prompt: {skipped.said()}")
    if skipped.reasons:
        warn(f"prompts={cfg.prompts}: {skipped.reasons.total()} rows are skipped: {skipped.said()}")
    return prompts


def _engine(cfg: GenerateConfig) -> Engine:
    """Return an engine with the draft in draft.path=, or without a draft if draft.path= is not set. Raises UserError if
    policy.k is more than the draft can draft in a round."""
    if cfg.draft.path:
        settings: dict[str, Any] = {} if cfg.verify is None else {"verify": cfg.verify}
        if cfg.policy.k is not None:
            settings["policy"] = Fixed(cfg.policy.k)
        elif cfg.policy.file is not None:
            settings["policy"] = Adaptive.load(cfg.policy.file)
        engine = load(cfg.draft.path, cfg.target.path, device=device(), **settings)
        if cfg.policy.k is not None and engine.proposer and cfg.policy.k > (most := engine.proposer.depths or inf):
            raise UserError(
                f"policy.k={cfg.policy.k}: {cfg.draft.path} drafts at most {most} speculative tokens a round: set "
                f"policy.k={most}"
            )
        return engine
    target, tokenizer = load_pair(str(cfg.target.path))
    return Engine(target, tokenizer=tokenizer)


def _prompts(prompt: str | None, prompts: str | None) -> list[tuple[str, Any]]:
    """Return pairs (place, row of data), one per prompt. place: text for messages that says where the prompt is.

    prompt: the text. prompts: a file of rows or lines, or "-" for standard input with one prompt per line. If both are
    None, all of standard input is one prompt. Raises UserError if both are set, or if there is no prompt.
    """
    if prompt is not None and prompts is not None:
        raise UserError("set prompt= (the text) or prompts= (a file with one prompt per line), not both")
    if prompt is not None and not prompt:
        raise UserError("prompt= is empty: set prompt= to the text that is to be continued")
    if prompt == "null":  # as every other setting is unset
        warn("prompt=null: the text 'null' is continued; leave prompt= out to read standard input")
    if prompt is not None:
        return [("prompt", {PROMPT: prompt})]
    if prompts is None and sys.stdin.isatty():
        raise UserError(
            "no prompt: set prompt= (the text) or prompts= (a file with one prompt per line), or write "
            "the text to standard input"
        )
    if prompts not in (None, "-") and not os.path.exists(str(prompts)):
        raise UserError(f"prompts={prompts}: there is no such file")
    if prompts is not None and extension_of(Path(prompts)) not in (None, ".txt"):
        try:
            rows = list(rows_in({prompts: Path(prompts)}))
        except UNREADABLE as error:
            raise UserError(f"prompts={prompts} cannot be read: {error}") from error
    else:
        lines = [sys.stdin.read()] if prompts is None else _read(prompts).split("\n")
        key = "prompts: number {}" if prompts else "prompt"
        rows = [(key.format(i), {PROMPT: line}) for i, line in enumerate(filter(str.strip, lines), 1)]
    if not rows:
        raise UserError(f"prompts={prompts} contains no prompt" if prompts else "standard input contains no prompt")
    return rows


def _read(prompts: str) -> str:
    if prompts == "-":
        return sys.stdin.read()
    try:
        return Path(prompts).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"prompts={prompts} cannot be read as text: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"prompts={prompts} cannot be read: line {line} is not UTF-8 text: save it as UTF-8") from error
