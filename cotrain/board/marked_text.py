"""A fixed prompt's text as a checkpoint decodes it, in Markdown that TensorBoard shows as it stands."""

from typing import Any

from cotrain.bench.measurement import Plan
from inference.output import pieces

TOKENS = 64
TAGS = {"drafted": "strong", "corrected": "em", "bonus": "code"}
LEGEND = "**accepted drafts**, *corrected tokens*, `bonus tokens`"


def marked(plan: Plan, k: int) -> str:
    """The first of the prompts that rank, continued in the plan's regime at draft length k, always with the same noise:
    every new token marked, and how many a target call gave."""
    decode: Any = plan.tokenizer.decode
    (prompt,) = plan.ranking(0, 1)
    engine, tokens = plan.engine(k, 1), min(TOKENS, plan.bench.new_tokens)
    events = list(engine.stream(prompt, max_new_tokens=tokens, sampling=plan.sampling, seed=plan.bench.seed))
    new = sum(len(event.ids) for event in events)
    head = f"{LEGEND}; {new} new tokens in {len(events)} target calls"
    said = "".join(f"<{TAGS[kind]}>{escaped(text)}</{TAGS[kind]}>" for kind, text in pieces(events, decode))
    return f"{head}\n\n{escaped(decode(prompt))}{said}"


def escaped(text: str) -> str:
    """As it stands in Markdown and HTML: every character but letters, digits and single spaces by its number, line ends
    as a sign and a break."""
    found = "".join(one if one.isalnum() else f"&#{ord(one)};" for one in text.replace("\r\n", "\n"))
    return found.replace("&#10;", "&#8629;<br>")
