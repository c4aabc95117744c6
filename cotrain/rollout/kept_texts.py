"""Sets of texts sampled from the target: rows of token ids in parquet, with a manifest beside them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.nn.utils.rnn import pad_sequence

from cotrain.data.texts import Texts
from inference.drafts.atomic import new_file, write_atomic

FEATURES = datasets.Features(
    {
        "domain": datasets.Value("string"),
        "prompt": datasets.Sequence(datasets.Value("int32")),
        "completion": datasets.Sequence(datasets.Value("int32")),
    }
)


def beside(path: Path, ending: str) -> Path:
    """path.ending; `with_suffix` would take the .5 of `held_out_T0.5` for one."""
    return path.with_name(f"{path.name}.{ending}")


def save(rows: list[dict[str, Any]], path: Path, manifest: dict[str, Any]) -> None:
    """Write rows of FEATURES to path.parquet and the manifest to path.json, whole or not at all."""
    table = datasets.Dataset.from_list(rows, features=FEATURES)
    with new_file(beside(path, "parquet")) as new:
        table.to_parquet(str(new))
        beside(path, "json").unlink(missing_ok=True)  # stopped between both, the set before would vouch for these rows
    tokens = sum(len(row["completion"]) for row in rows)
    write_atomic(beside(path, "json"), json.dumps(manifest | {"rows": len(rows), "tokens": tokens}, indent=2) + "\n")


def manifest(path: Path) -> dict[str, Any] | None:
    """What path.json says of the set, None when there is none."""
    file = beside(path, "json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def read(path: Path) -> datasets.Dataset:
    """Rows of a set. Raises ValueError when there is none."""
    file = beside(path, "parquet")
    if not file.is_file():
        raise ValueError(f"rollouts: there is no {file}; make it with cotrain rollout")
    try:
        return datasets.Dataset.from_parquet(str(file), keep_in_memory=True)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{file} cannot be read: delete it and {beside(path, 'json').name}, they are made anew"
        ) from error


def texts(rows: Iterable[Mapping[str, Any]]) -> Texts:
    """Pad rows of FEATURES to Texts."""
    rows = list(rows)
    ids = [torch.tensor([*row["prompt"], *row["completion"]], dtype=torch.int64) for row in rows]
    prompt = torch.tensor([len(row["prompt"]) for row in rows])
    length = torch.tensor([len(row) for row in ids])
    return Texts(pad_sequence(ids, batch_first=True), prompt, length, [row["domain"] for row in rows])
