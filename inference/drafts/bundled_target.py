"""Where the bundled target lies: beside a checkout's packages, or packed into an installed `cotrain`."""

from pathlib import Path

NAME = "bundled"


def resolve(path: str) -> str:
    """The folder of the bundled target for "bundled", else `path` as it is. Raises FileNotFoundError."""
    if path != NAME:
        return path
    root = Path(__file__).resolve().parents[2]
    places = (root / "data" / "target", root / "cotrain" / "_data" / "target")
    for place in places:
        if (place / "config.json").is_file():
            return str(place)
    raise FileNotFoundError(f"target.path: no bundled target at {places[0]} or {places[1]}")
