"""The README of an exported draft: how to serve it, what was measured, what it was trained for."""

from collections.abc import Mapping
from typing import Any

from cotrain.export.engines import MARK, captured, caveats, engine_named, launch, place
from inference.drafts.bundled_target import resolve
from inference.drafts.draft_folder import Metadata
from inference.report.table import table

LONGEST = 8  # drafts a round that held-out texts are judged for
FRONT = "---\nlibrary_name: transformers\ntags: [speculative-decoding, draft-model]\n---"


def card(
    metadata: Metadata,
    engine: str,
    draft_path: str,
    report: Mapping[str, Any] | None,
    remarks: list[str],
    layout: str = "hf",
) -> str:
    """Markdown: launch command, caveats, remarks on the export, regime, measured table, licence note.

    draft_path: the folder, or its name on the hub; report: one that `inference.report.build.validate` accepts, or None;
    layout: of the folder.
    """
    target, objective, k = str(metadata.target["name"]), metadata.objective, metadata.k
    drafting, layers = (objective, layout, metadata.kind, metadata.tree), captured(metadata.origin)
    command = launch(engine, draft_path, place(resolve(target)), k, *drafting, layers)
    parts = [
        FRONT,
        f"# Draft for {target}",
        f"Guesses {k} tokens a round for speculative decoding; the target checks them all.",
        f"## Serve ({engine_named(engine).versions})",
        f"```sh\n{command}\n```",
        "\n".join(f"- {line}" for line in caveats(engine, objective) + remarks),
        "## Trained for",
        "\n".join(f"- {key}: {value}" for key, value in {"objective": objective, **metadata.regime}.items()),
    ]
    if report is not None:
        parts += ["## Measured (report.json, before export)", f"```text\n{table(report)}```"]
        parts += _predicted(report, metadata)
        lengths = tau_by_length(report, metadata)
        parts += ["## tau by draft length, predicted on held-out texts", lengths] if lengths else []
    parts += [
        "## Licence",
        f"The weights learnt from the outputs of {target}: its licence, and that of the training text, may "
        "bind them. Read both before passing this folder on.",
        MARK,
    ]
    return "\n\n".join(parts) + "\n"


def tau_by_length(report: Mapping[str, Any], metadata: Metadata) -> str:
    """A table of tau, tokens a target call, over the drafts of a round, in the regime, for either way of drafting; ""
    where they were not judged."""
    held, at = (report.get("extra") or {}).get("held_out") or {}, f"T{metadata.regime.get('temperature', 1.0):g}/all"
    names = {"sampled": f"tau_{at}", "greedy": f"tau_greedy_draft_{at}"}
    lengths = [k for k in range(1, LONGEST + 1) if all(f"{name}/{k}" in held for name in names.values())]
    if not lengths:
        return ""
    head = ["drafts a round", *(f"**{k}**" if k == metadata.k else str(k) for k in lengths)]
    rows = [[drafting, *(f"{held[f'{name}/{k}']:.2f}" for k in lengths)] for drafting, name in names.items()]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _predicted(report: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """What either way of drafting will have accepted, from the target's held-out texts in the regime; nothing where
    they were not judged."""
    held, at = (report.get("extra") or {}).get("held_out") or {}, f"T{metadata.regime.get('temperature', 1.0):g}/all"
    rows = []
    for drafting, alpha, tau in (("sampled", "alpha", "tau"), ("greedy", "alpha_greedy_draft", "tau_greedy_draft")):
        found = held.get(f"{alpha}_{at}"), held.get(f"{tau}_{at}/{metadata.k}")
        if None not in found:
            rows.append("| {} | {:.3f} | {:.2f} |".format(drafting, *found))
    if not rows:
        return []
    head = f"| drafting | acceptance at a token | tau at {metadata.k} drafts |\n|---|---|---|"
    return ["## Predicted for an engine, by how it drafts", "\n".join([head, *rows])]
