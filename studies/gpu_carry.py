"""Packs what a bare machine with a GPU lacks into a folder that travels with the checkout: see `studies.gpu_day`.

    python -m studies.gpu_carry .day

Written are site.tgz (pure Python packages of this environment, and bitsandbytes with its library for CUDA 13) and the
GGUF file of `target=smollm2` in pieces of at most `PIECE` bytes. The folder must be ignored by git.
"""

import hashlib
import importlib
import sys
import tarfile
from importlib import metadata
from pathlib import Path

from inference.drafts.gguf_target import PACKAGED, gguf_file

PIECE = 44 * 2**20
PACKAGES = (
    "hydra",
    "omegaconf",
    "antlr4",
    "datasets",
    "dill",
    "multiprocess",
    "gguf",
    "bitsandbytes",
    "plotly",
    "_plotly_utils",
    "_multiprocess",
)
# of plotly a page needs its JavaScript alone; of bitsandbytes one library of many
LEFT_OUT = (
    "__pycache__",
    "plotly/graph_objs",
    "plotly/validators",
    "plotly/labextension",
    "package_data/datasets",
    "plotly/matplotlylib",
    "plotly/figure_factory",
)
LIBRARY = "libbitsandbytes_cuda130.so"


def carried(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    library = entry.name.endswith(".so") and not entry.name.endswith(LIBRARY)
    return None if library or any(part in entry.name for part in LEFT_OUT) else entry


def pack(folder: Path) -> list[Path]:
    """Write the files of the folder and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "site.tgz", "w:gz") as archive:
        for name in PACKAGES:
            (place,) = importlib.import_module(name).__path__
            archive.add(place, f"site/{name}", filter=carried)
        for name in {one for package in PACKAGES for one in metadata.packages_distributions()[package]}:
            (about,) = (file for file in metadata.files(name) or () if file.name == "METADATA")
            archive.add(about.locate(), f"site/{about}")  # transformers asks for versions
    file = gguf_file("smollm2")
    assert file is not None
    return [folder / "site.tgz", *split(file, folder / "smollm2", PIECE)]


def split(file: Path, place: Path, most: int) -> list[Path]:
    """Write the file in pieces place.00, place.01, ... of at most so many bytes; `cat place.*` joins them."""
    content = file.read_bytes()
    pieces = [content[start : start + most] for start in range(0, len(content), most)]
    names = [place.with_name(f"{place.name}.{number:02}") for number in range(len(pieces))]
    for name, piece in zip(names, pieces, strict=True):
        name.write_bytes(piece)
    assert hashlib.sha256(b"".join(name.read_bytes() for name in names)).digest() == hashlib.sha256(content).digest()
    return names


if __name__ == "__main__":
    for one in pack(Path(sys.argv[1])):
        print(f"{one.stat().st_size / 2**20:6.1f} MiB  {one}")
    print(f"on the other machine: site/{PACKAGED['smollm2'].module}/{PACKAGED['smollm2'].file} of smollm2.*")
