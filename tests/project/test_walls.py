"""Imports point one way. Every import counts, those under TYPE_CHECKING and inside functions too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("cotrain", "inference")
    for path in sorted((ROOT / top).rglob("*.py"))
}
SCRIPTS = ("vllm_serve.py", "states_on_cpu.py")  # run inside a vLLM installation
TRAINING = ("cotrain", "lightning", "pytorch_lightning", "hydra", "omegaconf", "datasets")
MOST = {"cotrain": 12, "inference": 12}  # files at the top of each

# what the modules of the left may not import, and why
WALLS = {
    "inference": (*TRAINING, "the engine ships and runs without the training"),
    "inference.models": ("inference.proposers", "inference.round", "inference.engine", "models know no draft or round"),
    "inference.engine": (
        "inference.report",
        "inference.exactness",
        "inference.measure",
        "a report hooks into the engine",
    ),
    "inference.measure.timing": ("inference.exactness", "time is measured of any text"),
    "inference.verify": ("inference.models", "inference.sampling.parameters", "inference.proposers", "rules are pure"),
    "inference.sampling": ("inference.proposers", "inference.request", "inference.models", "settings know no draft"),
    "inference.exactness": ("inference.report", "a report prints the verdict"),
    "cotrain.config": ("inference.proposers", "cotrain.students", "cotrain.training", "settings know no draft"),
    "cotrain.students": ("cotrain.bench", "cotrain.training", "a kind knows no benchmark: it says what it wants"),
    "cotrain.losses": ("cotrain.students", "cotrain.training", "cotrain.bench", "a loss knows no kind"),
    "cotrain.bench": ("cotrain.training", "cotrain.commands", "a measurement is asked for"),
    "cotrain.board": ("inference.engine", "cotrain.bench", "TensorBoard shows what is handed to it"),
    "cotrain.page": ("cotrain.training", "cotrain.bench", "inference.engine", "the page shows files"),
}


def imports(source: str) -> set[str]:
    """Full names that a source imports anywhere: modules, and what is imported from them."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


ARROWS = {name: imports(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def broken(walls: dict[str, tuple[str, ...]], arrows: dict[str, set[str]]) -> list[str]:
    """Imports across a wall."""
    return sorted(
        f"{module} imports {name}: {reason}"
        for left, (*right, reason) in walls.items()
        for module, names in arrows.items()
        for name in names
        if below(module, left) and any(below(name, one) for one in right)
    )


def test_every_form_of_import_is_seen() -> None:
    source = "import a.b as c, d\nfrom e.f import g\nfrom . import h\ndef k():\n    if 1:\n        import l"
    assert imports(source) == {"a.b", "d", "e.f.g", "l"}
    arrows = {"x.y": {"z.w.Name"}, "x": {"z"}}
    assert broken({"x": ("z.w", "why")}, arrows) == ["x.y imports z.w.Name: why"]


def test_no_import_crosses_a_wall() -> None:
    assert all(any(below(module, left) for module in FILES) for left in WALLS)
    assert not broken(WALLS, ARROWS)


def test_no_imports_go_in_a_circle() -> None:
    """Between files."""
    nearest = {module: {_file(name) for name in names} - {None, module} for module, names in ARROWS.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name in done:
            return
        for other in sorted(nearest[name]):  # type: ignore[type-var]
            visit(str(other), (*way, name))
        done.add(name)

    for module in nearest:
        visit(module, ())


def _file(name: str) -> str | None:
    """The module of ours that an imported name is in."""
    return name if name in FILES else name.rpartition(".")[0] if name.rpartition(".")[0] in FILES else None


def test_packages_of_cotrain_import_one_way() -> None:
    uses: dict[str, set[str]] = {}
    for module, names in ARROWS.items():
        if below(module, "cotrain") and module != "cotrain":
            own = module.split(".")[1]
            others = {name.split(".")[1] for name in names if below(name, "cotrain") and name.count(".")}
            uses.setdefault(own, set()).update(others - {own, "__version__"})
    order: list[str] = []
    while left := {name: names & set(uses) - set(order) for name, names in uses.items() if name not in order}:
        free = sorted(name for name, names in left.items() if not names)
        assert free, f"a circle among {left}"
        order += free
    assert {"training", "data", "bench", "losses"} <= set(order)


@pytest.mark.thorough
def test_importing_inference_loads_no_training_library() -> None:
    modules = [name for name, path in FILES.items() if below(name, "inference") and path.name not in SCRIPTS]
    code = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"inference", "torch"} <= loaded
    assert loaded & set(TRAINING) == set()


@pytest.mark.parametrize("top", MOST)
def test_few_files_lie_at_the_top_and_every_package_says_what_lives_there(top: str) -> None:
    assert len(list((ROOT / top).glob("*.py"))) <= MOST[top]
    folders = {path.parent for name, path in FILES.items() if below(name, top)}
    assert not [folder for folder in folders if not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))]
