"""Sets of texts sampled from the target: rows of token ids in parquet, with a manifest beside them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.nn.utils.rnn import pad_sequence

from inference.drafts.atomic import write_atomic

FEATURES = datasets.Features(
    {
        "domain": datasets.Value("string"),
        "prompt": datasets.Sequence(datasets.Value("int32")),
        "completion": datasets.Sequence(datasets.Value("int32")),
    }
)


@dataclass
class Texts:
    """Texts ids (N, T), padded with 0 on the right; prompt (N,) and length (N,) in tokens; domain of each;
    position_ids (N, T) where a row is several texts, see `data.Blocks`."""

    ids: torch.Tensor
    prompt: torch.Tensor
    length: torch.Tensor
    domain: list[str]
    position_ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def spread(self, count: int) -> "Texts":
        """About `count` of them, of every domain."""
        rows = slice(None, None, max(len(self) // count, 1))
        return Texts(self.ids[rows], self.prompt[rows], self.length[rows], self.domain[rows], self.read(rows)[1])

    def read(self, rows: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a model is given to read some rows: ids and position_ids."""
        return self.ids[rows], None if self.position_ids is None else self.position_ids[rows]

    @property
    def prompts(self) -> list[list[int]]:
        """Ids of each prompt, without what was sampled after it."""
        return [row[:length].tolist() for row, length in zip(self.ids, self.prompt.tolist(), strict=True)]

    @property
    def predicted(self) -> torch.Tensor:
        """(N, T-1): True at t when token t+1 is a sampled one."""
        after = torch.arange(1, self.ids.shape[1])
        return (after >= self.prompt.unsqueeze(1)) & (after < self.length.unsqueeze(1))


def beside(path: Path, ending: str) -> Path:
    """path.ending; `with_suffix` would take the .5 of `held_out_T0.5` for one."""
    return path.with_name(f"{path.name}.{ending}")


def save(rows: list[dict[str, Any]], path: Path, manifest: dict[str, Any]) -> None:
    """Write rows of FEATURES to path.parquet and the manifest to path.json, whole or not at all."""
    table = datasets.Dataset.from_list(rows, features=FEATURES)
    temporary = beside(path, "parquet.new")
    table.to_parquet(str(temporary))
    beside(path, "json").unlink(missing_ok=True)  # stopped between both, the set before would vouch for these rows
    temporary.replace(beside(path, "parquet"))
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
    return datasets.Dataset.from_parquet(str(file), keep_in_memory=True)


def texts(rows: Iterable[Mapping[str, Any]]) -> Texts:
    """Pad rows of FEATURES to Texts."""
    rows = list(rows)
    ids = [torch.tensor([*row["prompt"], *row["completion"]], dtype=torch.int64) for row in rows]
    prompt = torch.tensor([len(row["prompt"]) for row in rows])
    length = torch.tensor([len(row) for row in ids])
    return Texts(pad_sequence(ids, batch_first=True), prompt, length, [row["domain"] for row in rows])
