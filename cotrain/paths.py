"""The folders of settings, data and shipped drafts that belong to the code, in a checkout and in an installed wheel."""

import os
from difflib import get_close_matches
from pathlib import Path

from cotrain.errors import UserError

DRAFTS = "drafts"  # in data/: a draft folder for each name
STORED = ("*.json", "*.safetensors", "*.bin", "*.pt", "*.jinja", "*.model", "*.txt")  # files of a draft on the hub


def folder(name: str, package: Path | None = None) -> Path:
    """Return the folder `name` ("conf" or "data") that belongs to the running code.

    A wheel packs `conf/` as `cotrain/_conf` and `data/` as `cotrain/_data`. In a checkout both are next to `cotrain/`.
    The packed folder is tried first, since a folder next to an installed package may belong to another package.

    Args:
        name: "conf" or "data".
        package: the folder of the package `cotrain`; None for the folder of this file.

    Raises FileNotFoundError, which names both places, if neither folder exists.
    """
    package = package or Path(__file__).resolve().parent
    places = (package / f"_{name}", package.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"no folder {name!r}: neither {places[0]} nor {places[1]} exists: install cotrain again")


def draft_folder(path: str, hub: bool = False) -> str:
    """Return the folder that draft.path= stands for.

    A path with "/", and an existing file or folder, is returned unchanged. Any other name should be a shipped draft's,
    a folder in data/drafts. hub: whether an unknown name may be a hub id, which is then returned unchanged. Otherwise
    UserError is raised, which lists the shipped drafts.
    """
    if "/" in path or os.path.lexists(path):
        return path
    root = folder("data") / DRAFTS
    shipped = {one.parent.name: str(one.parent) for one in sorted(root.glob("*/config.json"))}
    if path in shipped or hub:
        return shipped.get(path, path)
    names = {one.casefold(): one for one in [*(one for one in os.listdir() if os.path.isdir(one)), *shipped]}
    near = [names[one] for one in get_close_matches(path.casefold(), names, n=1)]
    raise UserError(
        f"draft.path: {path} is no folder in the working directory {os.getcwd()}, and no shipped draft "
        f"({', '.join(shipped) or 'there is none'}){f'; the nearest is {near[0]}' if near else ''}: give "
        "draft.path an existing folder or name"
    )


def from_hub(path: str, models: bool) -> str:
    """Return the folder in the hub's cache to which a draft was downloaded, if `path` is a hub id user/name. Any other
    path, and an id that the hub does not know or does not give, is returned unchanged.

    models: whether causal LMs are downloaded too. If not, only drafts in published layouts are, and transformers loads
    the others by their id.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HTTPError

    from inference.drafts.bundled_target import REPOSITORY
    from inference.drafts.published import published

    if "/" not in path or not REPOSITORY.fullmatch(path) or os.path.lexists(path):
        return path
    try:
        config = Path(hf_hub_download(path, "config.json"))
        if not models and published(config.parent) is None:
            return path
        return snapshot_download(path, allow_patterns=[*STORED])
    except (HTTPError, OSError, ValueError):  # what is wrong with the path is said by those who read it
        return path
