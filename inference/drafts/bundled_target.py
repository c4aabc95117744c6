"""Paths of models. A path may be a name in `BUNDLED` (a target in a checkout or in an installed `cotrain`), a name in
`PACKAGED`, a GGUF file, a folder, or a hub id."""

import os
import re
import sys
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from ssl import SSLError
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants, try_to_load_from_cache

from inference.drafts.gguf_target import PACKAGED, dequantised, gguf_file

NAME = "bundled"
BUNDLED = {NAME: "target", "bundled_t5": "target_t5"}  # name -> folder in data/; the second is an encoder-decoder
# in a checkout, and in an installed wheel
DATA = [Path(__file__).resolve().parents[2] / data for data in ("data", "cotrain/_data")]
SECONDS = 10  # to wait for the hub's answer
CONFIGS = ("config.json", "adapter_config.json")  # one of them is in the cache with each model and adapter of the hub
UNREACHED = "the hub cannot be reached, nor is the model in its cache: give an existing folder"
REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # a name of a model or a data set on the hub


def resolve(path: str, key: str = "target.path") -> str:
    """Return the path that a model is loaded from. For a name in `BUNDLED` this is the target's folder. For a GGUF file
    or a name in `PACKAGED` it is the folder of the dequantised model in the cache, written if it is missing. Any other
    path is returned unchanged. key: the setting that has the path, for messages.

    Raises FileNotFoundError if a bundled target is missing. Raises ValueError if a GGUF file is missing, cannot be read
    or has another hash than its package, or if a package that it needs is not installed.
    """
    if path not in BUNDLED:
        file = gguf_file(path, key)
        return path if file is None else str(dequantised(file, key))
    folders = [data / BUNDLED[path] for data in DATA]
    for folder in folders:
        if (folder / "config.json").is_file():
            return str(folder)
    raise FileNotFoundError(
        f"{key}: the target {path} is missing: there is no folder {folders[0]} or {folders[1]}: install cotrain "
        "again, or name another model"
    )


def draft_of(name: str | Path) -> Path:
    """Return the path of a draft folder, for the name of a draft that comes along the folder in data/drafts."""
    folders = [data / "drafts" / name for data in DATA if Path(name).name == str(name) and not Path(name).exists()]
    return next((folder for folder in folders if folder.is_dir()), Path(name))


def refuse_missing(key: str, path: str, what: str = "folder") -> None:
    """Raise ValueError if `path` does not exist and cannot be the name of a repository on the hub, and for a model of
    the hub that is not in its cache while the hub cannot be reached. The message names the key and the working
    directory. For a name that may be a repository, this calls `reach_hub`.

    key: the setting that has the path. what: names what the path should be, for the message. A valid name of a
    repository counts as a mistyped path if its first part is an existing folder, or if a similar path exists. If the
    repository's config.json is in the hub's cache, the name does not count as mistyped.
    """
    if path in BUNDLED or path in PACKAGED or os.path.lexists(path):
        return
    hub, near = REPOSITORY.fullmatch(path) is not None, _nearest(path)
    cached = hub and any(isinstance(try_to_load_from_cache(path, file), str) for file in CONFIGS)
    if hub and (
        cached or not (near or ("/" in path and Path(path).parts[0] != "." and Path(path.split("/")[0]).is_dir()))
    ):
        reach_hub()
        if constants.HF_HUB_OFFLINE and not cached and what == "folder":
            raise ValueError(f"{key}: {path} is no {what}, and {UNREACHED}")
        return
    message = f"{key}: {path} is no {what}"
    message += "" if os.path.isabs(path) else f" in the working directory {os.getcwd()}"
    message += f"; the nearest is {near}" if near else ""
    message += "; the shell did not expand ~; write the path in full" if path.startswith("~") else ""
    message += "; to load a repository of the hub by this name, work in another folder" if hub else ""
    raise ValueError(f"{message}: give {key} an existing path")


@cache
def reach_hub() -> None:
    """If the hub cannot be reached, set HF_HUB_OFFLINE for this process and for processes that it starts. Files are
    then read from the hub's cache at once; without it, huggingface_hub repeats each request for half a minute."""
    if constants.HF_HUB_OFFLINE:
        return
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS).close()  # through the proxies that are set
    except OSError as error:
        if not isinstance(error, HTTPError) and not isinstance(getattr(error, "reason", error), SSLError):
            os.environ["HF_HUB_OFFLINE"] = "1"  # of processes that this one starts
            constants.HF_HUB_OFFLINE = True
            if datasets := cast(Any, sys.modules.get("datasets.config")):
                datasets.HF_HUB_OFFLINE = True


def _nearest(path: str) -> str | None:
    """Return the existing path that is most similar to `path`, compared part by part. Return None if nothing is similar
    enough to some part."""
    nearest = Path(path).parts[0] if os.path.isabs(path) else ""
    for part in Path(path).parts[bool(nearest) :]:
        names = os.listdir(nearest or os.curdir) if os.path.isdir(nearest or os.curdir) else []
        like = [part] if part in names else get_close_matches(part, names, n=1, cutoff=0.75)
        if not like:
            return None
        nearest = os.path.join(nearest, like[0])
    return nearest or None
