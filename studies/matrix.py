"""Speed-up by temperature and batch size, or by the weight quantisations of target and draft.

    python -m studies.matrix draft.path=outputs/demo/draft matrix.temperatures=[0,0.7,1] matrix.vllm=<its Python>
    python -m studies.matrix draft.path=outputs/demo/draft matrix.targets=[none,int8,nf4] matrix.temperatures=[0,1]

The other settings are those of `cotrain bench`, which runs first; its report gets the cells in extra.matrix or, with
matrix.targets=, in extra.bits. A cell is one temperature and batch size, and an arm is one engine or draft length. The
arms of a cell are timed in turn. Each speed-up is compared with the one that the measured costs allow."""

import copy
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import PreTrainedModel

from cotrain.commands import bench
from cotrain.commands.served_pair import Pair, measurable_folder, refuse_pair, resolved
from cotrain.config.overrides import quote
from cotrain.config.settings import BenchConfig, checked, register
from cotrain.errors import UserError
from cotrain.paths import folder
from cotrain.planning.forecast import forecast
from cotrain.planning.plan import Plan
from cotrain.planning.planner import measure_acceptance, measured_costs
from cotrain.students.base import DEFAULT
from cotrain.students.quantised import refuse_unknown
from cotrain.training.job import models
from cotrain.training.preconditions import refuse_rounded
from inference import Sampling
from inference.drafts.bundled_target import resolve
from inference.measure.arms import Arm
from inference.measure.costs import Costs
from inference.measure.timing import Timing, interleave
from inference.models.lm import LM
from inference.models.quantisation import refuse_quantisation
from inference.proposers import Independent, NGram
from inference.proposers.quantised import Quantised
from inference.servers.vllm_server import draft_model
from studies.assisted import assisted_arm
from studies.floor import Machine, measure_machine, peak_memory, round_loads
from studies.quantisation_table import QUANTISATIONS, table
from studies.vllm_arm import Server, vllm_arm

BATCHES = 3  # the least number of batches of prompts, for an interval
QUEUE = 6  # prompts per row in each run of an arm, so that the idle rows at the end of a run matter little
Say = Callable[[str], None]


@dataclass
class Matrix:
    """The settings. Without targets the cells are of several engines at each temperature and batch size; with them, of
    weight quantisations (none, int8, nf4) of target and draft. k: the draft length of engines that do not choose their
    own. vllm: the Python interpreter of a vLLM installation."""

    temperatures: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=lambda: [1, 4, 8, 32])
    k: int = 4
    vllm: str | None = None
    targets: list[str] = field(default_factory=list)
    drafts: list[str] = field(default_factory=lambda: ["none", "int8", "nf4"])


@dataclass(frozen=True)
class Grid:
    """The cells of the matrix. k: the draft length of the other engines; this engine is timed at k with the token rule,
    and at its planned length. vllm: (interpreter of a vLLM installation, target, draft folder), or None if vLLM is not
    measured. logs: folder for the servers' logs."""

    temperatures: Sequence[float]
    batches: Sequence[int]
    k: int
    vllm: tuple[str, str, str] | None
    logs: Path


def matrix(plan: Plan, grid: Grid, say: Say = print) -> list[dict[str, Any]]:
    """Measure each cell, with the plan's settings except for temperature and batch size. Return one entry per cell. It
    has the speeds, their ratios with intervals, the costs, and the measured speed-up as a share of the one that the
    costs allow."""
    cells, machine = [], measure_machine(plan.target.device, plan.target.dtype)
    for rows in grid.batches:
        plan = plan.batched(rows)
        with ExitStack() as stack:
            servers = _servers(plan, grid, stack) if grid.vllm else {}
            for temperature in grid.temperatures:
                say(f"matrix: temperature {temperature:g}, {rows} rows")
                here = replace(plan, sampling=replace(plan.sampling, temperature=temperature))
                cells.append(_cell(here, grid, servers, machine))
                say(line(cells[-1]))
    return cells


def _servers(plan: Plan, grid: Grid, stack: ExitStack) -> dict[str, Server]:
    assert grid.vllm is not None
    python, target, draft = grid.vllm
    rows, context = plan.bench.rows, plan.bench.prompt_tokens + plan.bench.new_tokens + 16
    configs = {"vllm": None, "vllm speculative": draft_model(draft, grid.k)}
    return {
        name: stack.enter_context(Server(python, target, config, rows, context, grid.logs / f"{name}, {rows} rows.log"))
        for name, config in configs.items()
    }


def _cell(plan: Plan, grid: Grid, servers: dict[str, Server], machine: Machine) -> dict[str, Any]:
    size, sampling, costs = plan.bench, plan.sampling, measured_costs(plan).costs
    most = max(plan.depths)
    k, fixed = forecast(measure_acceptance(plan), costs).among(range(1, most + 1)).k, min(grid.k, most)
    lengths = {"speculative": k, f"speculative k={fixed}": fixed, "plain": 0}
    token = replace(plan, verify="token")  # the rule of the other engines
    engines = {"speculative": plan.engine(k), f"speculative k={fixed}": token.engine(fixed), "plain": plan.plain()}
    draft = plan.proposer().for_forced_rounds
    sizes = size.rows, engines["plain"].target.vocabulary
    lm = Independent.language_model(draft, *sizes) if isinstance(draft, Quantised) else draft.language_model(*sizes)
    arms = [
        *plan.arms(engines | {"ngram": plan.engine(fixed, proposer=NGram())}),
        *_transformers(plan, fixed, lm),
        *[vllm_arm(name, server, sampling, size.new_tokens) for name, server in servers.items()],
    ]
    queue = size.rows if size.rows == 1 else QUEUE * size.rows  # waiting prompts replace rows that end
    prompts = plan.final(0, max(size.prompts, BATCHES * queue))
    timing = interleave(arms, prompts, queue, size.seed)
    entry = _entry(timing, costs, lengths, sampling)
    floor = _floor(engines["plain"].target, lm, costs, k, machine)
    return entry | {"floor": floor}


def _transformers(plan: Plan, k: int, lm: LM | None) -> list[Arm]:
    """Return the arms of transformers. These are plain generation and, if rows == 1 (its limit) and the draft is a
    language model, assisted generation. Assisted generation is timed with its defaults ("assisted"), and with constant
    k and no confidence threshold ("matched")."""
    new, sampling = plan.bench.new_tokens, plan.sampling
    rows = plan.bench.rows
    arms = [assisted_arm("transformers", plan.target, sampling, new, rows=rows)]
    if rows == 1 and lm is not None:
        arms += [
            assisted_arm("transformers assisted", plan.target, sampling, new, assistant=lm.model),
            assisted_arm("transformers matched", plan.target, sampling, new, assistant=lm.model, k=k),
        ]
    return arms


def _floor(target: LM, draft: LM | None, costs: Costs, k: int, machine: Machine) -> dict[str, Any]:
    """Return the floor, the least time that this machine needs for a plain step and for a round, as a share of the
    measured time. The bytes moved and the peak memory are returned with it. A draft that is no language model adds
    nothing to the floor."""
    floor: dict[str, Any] = {"machine": asdict(machine), "peak_memory_mib": peak_memory() / 2**20}
    for name, drafted in (("plain", 0), ("round", k)):
        loads = round_loads(target, draft, drafted, costs.rows, costs.context)
        floor[f"{name}_share"] = sum(load.seconds(machine) for load in loads) / costs.round(drafted)
        floor[f"{name}_bytes"] = sum(load.bytes for load in loads)
    return floor


def _entry(timing: Timing, costs: Costs, lengths: dict[str, int], sampling: Sampling) -> dict[str, Any]:
    """Return the entry of a cell, with these ratios. over_plain: an arm's speed divided by that of plain decoding.
    under_speculative: the speed of the fastest speculative arm divided by the arm's. allowed: the speed-up that the
    costs allow at the arm's tau. lengths: the draft lengths of this engine's arms."""
    speculative = max((name for name, k in lengths.items() if k), key=timing.speed)
    arms: dict[str, Any] = {}
    for name in timing.arms:
        stats = timing.stats(name)
        arms[name] = {
            "speed": timing.speed(name),
            "tau": stats.tau if stats else None,
            "over_plain": timing.ratio(name, "plain")._asdict(),
            "under_speculative": timing.ratio(speculative, name)._asdict(),
        }
        if lengths.get(name) and stats:
            allowed = stats.tau * costs.round(0) / costs.round(lengths[name])
            decoding = timing.ratio(name, "plain", decode=True)
            arms[name] |= {"k": lengths[name], "allowed": allowed, "of_allowed": decoding.value / allowed}
    return {
        "temperature": sampling.temperature,
        "rows": costs.rows,
        "prompts": sum(len(batch) for batch, _ in timing.batches),
        "speculative": speculative,
        "arms": arms,
        "costs": asdict(costs),
    }


def line(cell: dict[str, Any]) -> str:
    """Return a cell's entry as aligned lines of text."""
    rows = [f"temperature {cell['temperature']:g}, {cell['rows']} rows, {cell['prompts']} prompts"]
    for name, arm in cell["arms"].items():
        ratio = arm["over_plain"]
        interval = f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        share = f", {100 * arm['of_allowed']:.0f} % of what costs allow" if "of_allowed" in arm else ""
        k = f", k {arm['k']}" if "k" in arm else ""
        tau = f", tau {arm['tau']:.2f}" if arm["tau"] else ""
        rows.append(f"  {name:24}{arm['speed']:8.1f} tokens/s  {ratio['value']:5.2f}x{interval}{tau}{k}{share}")
    costs = cell["costs"]
    target, rest = (", ".join(f"{1e3 * value:.2f}" for value in costs[part]) for part in ("target", "rest"))
    rows.append(
        f"  milliseconds: target {target}; draft {1e3 * costs['draft']:.2f}, first {1e3 * costs['first']:+.2f}; rest "
        f"{rest}"
    )
    floor = cell["floor"]
    rows.append(
        f"  floor: {100 * floor['plain_share']:.0f} % of a plain step, {100 * floor['round_share']:.0f} % of a round; "
        f"{floor['plain_bytes'] / 1e6:.0f} and {floor['round_bytes'] / 1e6:.0f} MB moved at "
        f"{floor['machine']['bandwidth'] / 1e9:.0f} GB/s; peak memory {floor['peak_memory_mib']:.0f} MiB"
    )
    return "\n".join(rows)


# --- the command


def refuse(asked: Matrix, cfg: BenchConfig, kind: str, pair: Pair) -> None:
    """Raise UserError or ValueError, naming the key, for a matrix that cannot be measured."""
    regime = cfg.regime
    if not asked.targets and not asked.temperatures:
        raise UserError("name matrix.temperatures=, or matrix.targets= for a table of weight quantisations")
    if asked.vllm and kind != DEFAULT:
        raise UserError(
            f"matrix.vllm: vLLM is measured with {DEFAULT} drafts only, and draft.path={cfg.draft.path} is {kind}"
        )
    if asked.vllm and cfg.target.adapter:
        raise UserError("matrix.vllm: vLLM would ignore target.adapter=; merge the adapter into a target folder first")
    if asked.vllm and (regime.top_k or regime.top_p != 1):
        raise UserError("matrix.vllm: vLLM is measured without top-k and top-p: set regime.top_k=0 regime.top_p=1")
    if asked.vllm and shutil.which(asked.vllm) is None:
        raise UserError(
            f"matrix.vllm={asked.vllm} is not a Python interpreter: name the interpreter of a vLLM installation"
        )
    if wrong := sorted(set(asked.drafts) - set(QUANTISATIONS)):
        raise UserError(f"matrix.drafts: {wrong[0]!r} is not one of {', '.join(QUANTISATIONS)}")
    if asked.targets and "nf4" in asked.drafts and find_spec("bitsandbytes") is None:
        raise UserError("matrix.drafts: nf4 needs bitsandbytes: pip install bitsandbytes, or matrix.drafts=[none,int8]")
    if asked.targets and {*asked.drafts} - {"none"} and pair.draft is not None:
        refuse_unknown(pair.draft, "matrix.drafts")
    for bits in asked.targets:
        refuse_rounded(kind, bits, pair.target)
        try:
            refuse_quantisation(str(cfg.target.path), bits, pair.target.config)
        except ValueError as error:
            raise UserError(f"matrix.targets: {error}") from error


def cells_of(asked: Matrix, cfg: BenchConfig, plan: Plan, logs: Path) -> dict[str, Any]:
    """Measure what is asked for, and return the entry of the report's `extra`."""

    def load(kind: str) -> PreTrainedModel:
        other = copy.deepcopy(cfg)
        other.quantisation.kind = kind
        return models(other)[0]

    if asked.targets:
        temperatures = asked.temperatures or [plan.sampling.temperature]
        return {"bits": table(plan, load, asked.targets, asked.drafts, temperatures, asked.k)}
    servers = None if asked.vllm is None else (asked.vllm, resolve(str(cfg.target.path)), str(cfg.draft.path))
    return {"matrix": matrix(plan, Grid(asked.temperatures, asked.batches, asked.k, servers, logs))}


def main(arguments: Sequence[str]) -> None:
    own = [argument.removeprefix("matrix.") for argument in arguments if argument.startswith("matrix.")]
    settings: Any = OmegaConf.merge(OmegaConf.structured(Matrix), OmegaConf.from_dotlist(own))
    asked: Any = OmegaConf.to_object(settings)
    register()
    with initialize_config_dir(str(folder("conf")), version_base="1.3"):
        others = [argument for argument in arguments if not argument.startswith("matrix.")]
        cfg: Any = checked("bench", compose("bench", overrides=quote(others)))
    known = copy.deepcopy(cfg)
    pair = refuse_pair(cfg.draft.path, resolved(known), cfg.target.trust_remote_code)
    refuse(asked, known, measurable_folder(cfg.draft.path).kind, pair)
    bench.run(cfg, partial(cells_of, asked, cfg))


if __name__ == "__main__":
    main(sys.argv[1:])
