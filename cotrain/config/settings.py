"""Types of all settings. Their values, including defaults, are in the YAML files of conf/.

`conf/NAME.yaml` starts from `NAME_schema` and gives each field its value. So an unknown key or a wrong type is an
error, in a file and on the command line.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from cotrain.config.groups import (
    Bench,
    Data,
    Draft,
    Init,
    Joint,
    Loss,
    Model,
    Optimizer,
    PolicySettings,
    Quantisation,
    Regime,
    Rollout,
    ServedPolicy,
    ServedRegime,
    ServedTarget,
    Target,
    Trainer,
)
from cotrain.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import Tensor

    from inference import Sampling


@dataclass
class GenerateConfig:
    """Settings of `cotrain generate`."""

    draft: Model
    target: Model
    prompt: str | None
    prompts: str | None  # a file of one prompt a line, or - for standard input
    chat: bool | None  # a prompt is a user's message, for the target's chat template; null: as the draft was trained
    max_new_tokens: int
    regime: ServedRegime
    policy: ServedPolicy
    verify: str | None  # null: the rule stored in the draft folder if policy.k=null, else token
    seed: int
    color: bool | None  # null: when standard output is a terminal


@dataclass
class TrainConfig:
    """Settings of `cotrain train`, which distils a draft, measures every checkpoint, and exports the one with the
    highest tau."""

    mode: str  # distil: the target is frozen; joint: it moves too, within a bound
    target: Target
    quantisation: Quantisation
    draft: Draft
    init: Init
    loss: Loss
    regime: Regime
    objective: str  # sampled_draft or greedy_draft: how the serving engine will choose drafts
    data: Data
    rollout: Rollout
    optimizer: Optimizer
    trainer: Trainer
    joint: Joint  # read with mode=joint
    policy: PolicySettings
    verify: str
    bench: Bench
    label: str | None  # what `cotrain compare` calls the run; null: the loss
    measure: bool  # measure speed; false for sweeps that compare held-out acceptance
    output: str
    overwrite: bool
    check: bool  # only print what the run would need
    minutes: float | None  # a budget for the whole run, measurement included; null: no budget


@dataclass
class RolloutConfig:
    """Settings of `cotrain rollout`, which samples texts of the target."""

    target: Target
    quantisation: Quantisation
    regime: Regime
    data: Data
    rollout: Rollout
    draft: Model  # speeds up sampling; the texts have the same distribution without it
    kind: str  # the split that prompts come from: train or held_out
    output: str
    threads: int


@dataclass
class DatastoreConfig:
    """Settings of `cotrain datastore`, which indexes texts, from which drafts are then looked up."""

    target: Target
    data: Data
    depth: int  # the longest match, in tokens
    output: str
    overwrite: bool


@dataclass
class BenchConfig:
    """Settings of `cotrain bench`, which measures a draft folder against plain decoding on the same engine."""

    target: ServedTarget
    quantisation: Quantisation
    draft: Model
    regime: ServedRegime
    data: Data  # the source of prompts; data.path=null: those of the draft folder, or the shipped ones
    bench: Bench
    verify: str | None  # null: the rule stored in the draft folder
    output: str
    overwrite: bool
    threads: int
    json: bool  # print one JSON object on standard output, and all messages on standard error


@dataclass
class PlanConfig:
    """Settings of `cotrain plan`, which forecasts the speed of drafts of one target."""

    target: ServedTarget
    quantisation: Quantisation
    draft: Model
    drafts: list[str]  # further draft folders, of the same target
    shapes: list[str]  # without draft folders: settings of cotrain train, which make a draft each
    regime: ServedRegime
    data: Data  # as in BenchConfig
    bench: Bench
    verify: str | None  # as in BenchConfig
    temperatures: list[float]  # []: the regime's
    batches: list[int]  # rows that are decoded together
    texts: int  # of the target, at each temperature; more give narrower intervals
    costs: str | None  # costs of rounds of another machine: its plan.json, or JSON as in docs/settings.md
    log: str | None  # a server's counters, which are compared with the plan in `output`; nothing else is done
    measure: bool  # also time the recommended draft length, its neighbours and the adaptive policy
    output: str
    overwrite: bool
    threads: int
    json: bool  # as in BenchConfig


@dataclass
class CompareConfig:
    """Settings of `cotrain compare`."""

    folder: str  # contains the runs of cotrain train, at any depth
    baseline: str | None  # the label that the others are compared with; null: the first in alphabetical order
    report: str | None  # a JSON file to write
    json: bool  # as in BenchConfig


@dataclass
class ReportConfig:
    """Settings of `cotrain report`."""

    run: list[str]  # output folders of cotrain train or bench, or their report.json; run= may be repeated
    page: str | None  # the HTML file to write; null: report.html in the first run's folder


@dataclass
class ExportConfig:
    """Settings of `cotrain export`."""

    draft: Model
    target: Model
    engine: str  # vllm, sglang, tensorrt_llm, transformers or llamacpp
    layout: str  # the file format; auto: that in which the engine loads such drafts
    k: int | None
    objective: str | None  # sampled_draft or greedy_draft
    temperature: float | None  # for a conditioned draft: the temperature that it is exported for
    dtype: str  # of the weights in layout hf or gguf; auto: the draft's
    check: str | None  # an exported folder: check it, write nothing
    push_to_hub: str | None  # user/name of a model repository to push the folder to
    output: str
    overwrite: bool
    json: bool  # as in BenchConfig, with check=


@dataclass
class ServeCheckConfig:
    """Settings of `cotrain serve_check`."""

    url: str | None  # the server's root
    model: str | None  # null: the first model that the server lists
    draft: Model
    target: ServedTarget
    quantisation: Quantisation
    regime: ServedRegime
    data: Data  # as in BenchConfig
    k: int | None  # null: the planned draft length
    objective: str | None  # sampled_draft or greedy_draft; null: the one that the draft was trained for
    prompts: int
    prompt_tokens: int  # 0: the value stored in the draft folder
    new_tokens: int
    at_once: int  # concurrent requests
    output: str
    overwrite: bool
    threads: int
    json: bool  # as in BenchConfig


SCHEMAS = {
    "serve_check": ServeCheckConfig,
    "export": ExportConfig,
    "compare": CompareConfig,
    "report": ReportConfig,
    "bench": BenchConfig,
    "plan": PlanConfig,
    "generate": GenerateConfig,
    "datastore": DatastoreConfig,
    "rollout": RolloutConfig,
    "train": TrainConfig,
}


SAMPLING_COMMANDS = ("train", "rollout")  # they can use data=self


@cache
def register() -> None:
    """Register each schema with Hydra as `NAME_schema`, the name that `conf/NAME.yaml` refers to."""
    from hydra.core.config_store import ConfigStore

    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(name=f"{name}_schema", node=schema)


def checked(name: str, cfg: "DictConfig") -> "DictConfig":
    """Return `cfg` typed by the schema of the command `name`.

    Raises UserError for a key that the schema lacks (`+key=` can add one) and for a key without a value (after `~key`,
    or with `???` in a file). It is also raised for a value outside its range, see `cotrain.config.ranges`.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import ConfigKeyError

    from cotrain.config.overrides import flat, unknown
    from cotrain.config.ranges import refuse

    try:
        typed = OmegaConf.merge(OmegaConf.structured(SCHEMAS[name]), OmegaConf.to_container(cfg))
    except ConfigKeyError as error:
        wrong = str(error.full_key)
        keys = {key for key, _ in flat(OmegaConf.to_container(cfg)) if key != wrong}
        raise UserError(unknown(wrong, name, keys)) from error
    assert isinstance(typed, DictConfig)
    missing = sorted(OmegaConf.missing_keys(typed))
    if missing:
        raise UserError(f"set a value for {', '.join(f'{key}=' for key in missing)}")
    refuse(name, typed)
    return typed


def refuse_from_target(name: str, cfg: "DictConfig") -> None:
    """Raise UserError for data=self with a command that samples no prompts."""
    if "data" in cfg and from_target(cfg.data) and name not in SAMPLING_COMMANDS:
        raise UserError(f"data=self: only cotrain {' and '.join(SAMPLING_COMMANDS)} sample prompts; give the file "
                        "that a run sampled, as in data.path=outputs/train/rollouts/self_prompts.jsonl")  # fmt: skip


def from_target(data: Data) -> bool:
    """Return whether the target samples the prompts itself. If data.path is set, it has priority."""
    return data.from_target and data.path is None


def sampling(regime: Regime | ServedRegime, temperature: float | None = None) -> "Sampling":
    """Return the regime as sampling settings of the engine. `temperature`, if given, replaces the regime's. No value of
    the regime may be None, see `served_pair.as_trained`."""
    from inference import Sampling  # imports torch

    temperature = regime.temperature if temperature is None else temperature
    assert temperature is not None and regime.top_k is not None and regime.top_p is not None
    return Sampling(temperature, regime.top_k, regime.top_p)


def learnt(cfg: TrainConfig) -> list[float]:
    """Return the temperatures of a run's training texts. Each has equally many texts. They are
    rollout.train_temperatures, else draft.temperatures, else the regime's temperature."""
    return list(cfg.rollout.train_temperatures) or list(cfg.draft.temperatures) or [cfg.regime.temperature]


def judged(cfg: TrainConfig) -> list[float]:
    """Return the temperatures of the held-out texts, in ascending order. They are rollout.temperatures, those of the
    training texts, and the regime's temperature, at which checkpoints are ranked."""
    return sorted({*cfg.rollout.temperatures, *learnt(cfg), cfg.regime.temperature})


def truncation(regime: Regime) -> "Callable[[Tensor], Tensor] | None":
    """Return a function logits (n, V) -> (n, V) that applies the regime's top-k and top-p, or None if it has
    neither."""
    from inference.sampling import keep_top_k, keep_top_p  # imports torch

    cuts: list[Callable[[Tensor], Tensor]] = [partial(keep_top_k, k=regime.top_k)] if regime.top_k else []
    cuts += [partial(keep_top_p, p=regime.top_p)] if regime.top_p < 1 else []
    if not cuts:
        return None
    return cuts[0] if len(cuts) == 1 else lambda logits: cuts[1](cuts[0](logits))
