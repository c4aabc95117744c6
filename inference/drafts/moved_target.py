"""Targets that joint training has moved away from an original target (`cotrain train mode=joint`)."""

from pathlib import Path
from typing import Any

from inference.drafts.weight_files import read_json

MOVED = "moved.json"  # in the folder of a moved target or of its adapter: the original, and how far the target moved
IDENTITY = "identity"  # in that file: the fingerprint of the original target


def movement_of(path: str, adapter: str | None = None) -> dict[str, Any] | None:
    """Return the figures of a moved target: the path of the original, the bound epsilon, the measured KL in nats per
    token, and others. They are in the target's folder, or in its adapter's if the adapter is not merged. Return None
    for a target that was not moved."""
    file = Path(adapter or path) / MOVED
    if not file.is_file():
        return None
    return {name: value for name, value in read_json(file).items() if name != IDENTITY}


def said(moved: dict[str, Any]) -> str:
    """Return a sentence about a moved target, for reports and cards. moved: the result of `movement_of`."""
    if not moved["kl"]:
        return f"The target is {moved['original']}: joint training did not move it."
    sure = f"{100 * moved['confidence']:g} % confidence"
    bound = f"certified with {sure} to be at most {moved['epsilon']:g}" if moved["certified"] else "not certified"
    return (
        f"The target is {moved['original']}, moved by joint training: KL(original || moved) = {moved['kl']:.4f} "
        f"nats per token in the mean over held-out texts, {bound}. "
        "Exact means: with respect to the moved target."
    )
