"""Where a model lies: the bundled target beside a checkout's packages, or packed into an installed `cotrain`; a folder;
or the hub."""

import os
import re
from difflib import get_close_matches
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

NAME = "bundled"
REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # what the hub calls a model or a data set


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


def refuse_missing(key: str, path: str, what: str = "folder") -> None:
    """Raise ValueError, before the hub is asked, for a path that is not there: one that no repository is called, one
    below a folder that is there, and a misspelt one. The message names the key and the working directory."""
    if path == NAME or os.path.lexists(path):
        return
    hub, near = REPOSITORY.fullmatch(path) is not None, _nearest(path)
    if hub and (isinstance(try_to_load_from_cache(path, "config.json"), str) or not (
        near or ("/" in path and Path(path).parts[0] != "." and Path(path.split("/")[0]).is_dir())
    )):  # fmt: skip
        return
    said = f"{key}: {path} is no {what}"
    said += "" if os.path.isabs(path) else f" in the working directory {os.getcwd()}"
    said += f"; the nearest is {near}" if near else ""
    said += "; the shell has left ~ as it is, write the path in full" if path.startswith("~") else ""
    said += "; to load a repository of the hub by this name, work in another folder" if hub else ""
    raise ValueError(f"{said}: give {key} a path that is there")


def _nearest(path: str) -> str | None:
    """What a misspelt path may mean, each part by itself; None where a part is like nothing there."""
    place = Path(path).parts[0] if os.path.isabs(path) else ""
    for part in Path(path).parts[bool(place) :]:
        names = os.listdir(place or os.curdir) if os.path.isdir(place or os.curdir) else []
        like = [part] if part in names else get_close_matches(part, names, n=1, cutoff=0.75)
        if not like:
            return None
        place = os.path.join(place, like[0])
    return place or None
