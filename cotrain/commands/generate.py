"""`cotrain generate`: continue prompts with a draft, or by plain decoding without one."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cotrain.config import GenerateConfig
from cotrain.errors import UserError
from inference import Engine, Event, Sampling
from inference.policy import Fixed
from inference.proposers.independent import Independent

GREEN, PLAIN = "\033[32m", "\033[0m"


def run(cfg: GenerateConfig) -> None:
    """Print the continuation of every prompt; in colour, the drafted tokens that were accepted are green."""
    prompts = _prompts(cfg.prompt, cfg.prompts)
    if cfg.target.path is None:
        raise UserError("name the model with target.path=")
    tokenizer = AutoTokenizer.from_pretrained(cfg.target.path)
    proposer = Independent(cfg.draft.path) if cfg.draft.path else None
    policy = Fixed(cfg.policy.k)
    engine = Engine(cfg.target.path, proposer, verify=cfg.verify, policy=policy, tokenizer=tokenizer)
    sampling = Sampling(cfg.regime.temperature, cfg.regime.top_k, cfg.regime.top_p)
    settings: dict[str, Any] = {"max_new_tokens": cfg.max_new_tokens, "sampling": sampling, "seed": cfg.seed}
    color = sys.stdout.isatty() if cfg.color is None else cfg.color
    if color:
        for prompt in prompts:
            for piece in _colored(engine.stream(prompt, **settings), tokenizer):
                print(piece, end="", flush=True)
            print()
    else:
        print(*engine.generate(prompts, **settings).text or (), sep="\n")


def _prompts(prompt: str | None, prompts: str | None) -> list[str]:
    if (prompt is None) == (prompts is None):
        raise UserError("give the text as prompt=, or one prompt a line in the file prompts= (- reads them)")
    if prompt is not None:
        return [prompt]
    text = sys.stdin.read() if prompts == "-" else Path(str(prompts)).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line]
    if not lines:
        raise UserError(f"prompts={prompts} holds no prompt")
    return lines


def _colored(events: Iterable[Event], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The text as it comes; bytes that end inside a character wait for the rest of it."""
    ids: list[int] = []
    shown = text = ""
    for event in events:
        for token, kind in zip(event.ids, event.kinds, strict=True):
            ids.append(token)
            text = str(tokenizer.decode(ids))
            if not text.endswith("\ufffd"):
                piece, shown = text[len(shown) :], text
                yield f"{GREEN}{piece}{PLAIN}" if kind == "drafted" else piece
    yield text[len(shown) :]
