"""Where the files beside the code live: in a checkout and in an installed wheel."""

from pathlib import Path


def folder(name: str, package: Path | None = None) -> Path:
    """The folder `name` ("conf" or "data") that belongs to the running code.

    A wheel packs `conf/` as `cotrain/_conf` and `data/` as `cotrain/_data`; a checkout keeps them beside
    `cotrain/`. The packed folder wins: beside an installed package lies whatever else is installed.

    Args:
        name: "conf" or "data".
        package: folder of the package `cotrain`; by default the one this file lies in.

    Raises:
        FileNotFoundError: neither place holds the folder; the message names both.
    """
    package = package or Path(__file__).resolve().parent
    places = (package / f"_{name}", package.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"no folder {name!r}: neither {places[0]} nor {places[1]} exists")
