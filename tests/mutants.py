"""Known ways to break the code, each with the test that must notice.

A row of `MUTANTS` replaces the text `old`, which must occur exactly once in `file`, by `new`; one of `tests`
must then fail. `pitfall` says what the bug is, with the number of its row where it is a known pitfall of
speculative decoding. `python -m tests.run_mutants` plants them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One planted bug: a name, the change of one file, the node ids that must fail, what it stands for."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    pitfall: int | str


MUTANTS = [
    Mutant(
        "paths_neighbour_first",
        "cotrain/paths.py",
        'places = (package / f"_{name}", package.parent / name)',
        'places = (package.parent / name, package / f"_{name}")',
        ["tests/test_package.py::test_the_packed_folder_wins"],
        "an installed wheel reads another package's data",
    ),
    Mutant(
        "wheel_without_data",
        "pyproject.toml",
        '"data" = "cotrain/_data"',
        "",
        ["tests/test_package.py::test_wheel_packs_conf_and_data_inside_the_package"],
        "data/ lands at the top of site-packages",
    ),
    Mutant(
        "inference_imports_training",
        "inference/verify.py",
        "import torch\n",
        "import torch\nfrom omegaconf import OmegaConf\n",
        ["tests/test_imports.py::test_inference_names_no_training_library[inference/verify.py]"],
        "inference no longer ships alone",
    ),
]
