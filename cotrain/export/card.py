"""The README of an exported draft: how to serve it, what was measured, what it was trained for."""

from collections.abc import Iterator, Mapping
from typing import Any

from cotrain.export.engines import caveats, engine_named, launch
from inference.store import Metadata

FRONT = "---\nlibrary_name: transformers\ntags: [speculative-decoding, draft-model]\n---"
LONGEST = 16  # entries of a list that a table row may show


def card(metadata: Metadata, engine: str, draft_path: str, report: Mapping[str, Any] | None, remarks: list[str]) -> str:
    """Markdown: launch command, caveats, what the export changed, regime, measured table, licence note."""
    target, objective, k = str(metadata.target["name"]), metadata.objective, metadata.k
    parts = [
        FRONT,
        f"# Draft for {target}",
        f"Guesses {k} tokens a round for speculative decoding; the target checks them all.",
        f"## Serve ({engine_named(engine).versions})",
        f"```sh\n{launch(engine, draft_path, target, k, objective)}\n```",
        "\n".join(f"- {line}" for line in caveats(engine, objective) + remarks),
        "## Trained for",
        table({"objective": objective, **{f"regime.{key}": value for key, value in metadata.regime.items()}}),
    ]
    if report is not None:
        parts += ["## Measured (report.json, before export)", table(report)]
    parts += [
        "## Licence",
        f"The weights learnt from the outputs of {target}: its licence, and that of the training text, may "
        "bind them. Read both before passing this folder on.",
    ]
    return "\n\n".join(parts) + "\n"


def table(values: Mapping[str, Any]) -> str:
    """A Markdown table of the numbers, words and short lists in nested mappings, keys joined by dots."""
    rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in _leaves(values, "")]
    return "\n".join(["| key | value |", "|---|---|", *rows])


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            if len(value) <= LONGEST and not any(isinstance(item, Mapping | list | tuple) for item in value):
                yield prefix + key, ", ".join(_said(item) for item in value)
        else:
            yield prefix + key, _said(value)


def _said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
