"""Packs what a bare machine with a GPU lacks into a folder that travels with the checkout: see `studies.gpu_day`.

    python -m studies.gpu_carry .day

Written are site.tgz (pure Python packages of this environment, bitsandbytes with its library for CUDA 13, and wheels of
compiled ones for that machine's Python) and the GGUF file of `target=smollm2` in two pieces, of which the first travels
with site.tgz. The folder must be ignored by git.
"""

import ast
import hashlib
import importlib
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

from inference.drafts.gguf_target import PACKAGED, gguf_file

FIRST = 44_000_000  # bytes of the first piece; the second has 54 MB
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
WHEELS = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions")
PYTHON = "3.12"  # of that machine
# imported packages that it has; and those that only a setting or another environment asks for
THERE = set(
    "accelerate huggingface_hub jinja2 lightning markupsafe matplotlib numpy packaging peft pyarrow pytest rich "
    "safetensors tensorboard tokenizers torch transformers yaml".split()
)
ELSEWHERE = {"PIL", "hypothesis", "small_target", "trl", "vllm", "vllm_repair", "wandb", "xllamacpp"}
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


def lacking(root: Path) -> set[str]:
    """Packages that the code of a checkout imports and that machine will not have."""
    files = [file for part in ("cotrain", "inference", "studies", "tests") for file in (root / part).rglob("*.py")]
    found = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    carried = {*PACKAGES, *(name.replace("-", "_") for name in WHEELS)}
    ours = {"cotrain", "inference", "studies", "tests"}
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names - carried - THERE - ELSEWHERE - ours


def add_wheels(archive: tarfile.TarFile) -> None:
    """Add to site/ what this environment has for another Python."""
    with tempfile.TemporaryDirectory() as place:
        wanted = [f"{name}=={metadata.version(name)}" for name in WHEELS]
        kind = ["--only-binary=:all:", "--platform=manylinux2014_x86_64", f"--python-version={PYTHON}"]
        words = ["-m", "pip", "download", "-q", "--no-deps", *kind, "-d", place, *wanted]
        subprocess.run([sys.executable, *words], check=True)
        for wheel in sorted(Path(place).glob("*.whl")):
            ZipFile(wheel).extractall(Path(place) / "site")
        archive.add(Path(place) / "site", "site")


def pack(folder: Path) -> list[Path]:
    """Write the files of the folder and return them."""
    if wanted := lacking(Path(__file__).parents[1]):
        raise SystemExit(f"the other machine lacks {', '.join(sorted(wanted))}: add them to PACKAGES, WHEELS or THERE")
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "site.tgz", "w:gz") as archive:
        for name in PACKAGES:
            (place,) = importlib.import_module(name).__path__
            archive.add(place, f"site/{name}", filter=carried)
        for name in {one for package in PACKAGES for one in metadata.packages_distributions()[package]}:
            (about,) = (file for file in metadata.files(name) or () if file.name == "METADATA")
            archive.add(about.locate(), f"site/{about}")  # transformers asks for versions
        add_wheels(archive)
    file = gguf_file("smollm2")
    assert file is not None
    return [folder / "site.tgz", *parts(file, folder / "smollm2", [FIRST])]


def split(file: Path, place: Path, most: int) -> list[Path]:
    """Write the file in pieces place.00, place.01, ... of at most so many bytes; `cat place.*` joins them."""
    return parts(file, place, list(range(most, file.stat().st_size, most)))


def parts(file: Path, place: Path, borders: list[int]) -> list[Path]:
    """Write the file in pieces place.00, place.01, ... that end at these bytes; `cat place.*` joins them."""
    content = file.read_bytes()
    pieces = [content[start:end] for start, end in zip([0, *borders], [*borders, len(content)], strict=True)]
    names = [place.with_name(f"{place.name}.{number:02}") for number in range(len(pieces))]
    for name, piece in zip(names, pieces, strict=True):
        name.write_bytes(piece)
    assert hashlib.sha256(b"".join(name.read_bytes() for name in names)).digest() == hashlib.sha256(content).digest()
    return names


if __name__ == "__main__":
    for one in pack(Path(sys.argv[1])):
        print(f"{one.stat().st_size / 2**20:6.1f} MiB  {one}")
    print(f"on the other machine: site/{PACKAGED['smollm2'].module}/{PACKAGED['smollm2'].file} of smollm2.*")
