"""Folders of settings and data that belong to the code, in a checkout and in an installed wheel."""

from pathlib import Path


def folder(name: str, package: Path | None = None) -> Path:
    """Return the folder `name` ("conf" or "data") that belongs to the running code.

    A wheel packs `conf/` as `cotrain/_conf` and `data/` as `cotrain/_data`; in a checkout they are next to `cotrain/`.
    The packed folder is tried first, since a folder next to an installed package may belong to another one.

    Args:
        name: "conf" or "data".
        package: the folder of the package `cotrain`; by default the parent folder of this file.

    Raises:
        FileNotFoundError: neither folder exists; the message names both.
    """
    package = package or Path(__file__).resolve().parent
    places = (package / f"_{name}", package.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"no folder {name!r}: neither {places[0]} nor {places[1]} exists")
