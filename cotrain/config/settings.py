"""The types of every setting. Dataclasses hold types, YAML holds every value (one home for a default).

No field has a default here: `conf/NAME.yaml` starts from `NAME_schema` and gives each field its value, so an
unknown key or a wrong type is refused where it is written, in a file or on the command line.
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
    Loss,
    Matrix,
    Model,
    Optimizer,
    PolicySettings,
    Pretraining,
    Quantisation,
    Regime,
    Rollout,
    ServedRegime,
    ServedTarget,
    Target,
    TargetShape,
    Trainer,
)
from cotrain.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import Tensor

    from inference import Sampling


@dataclass
class GenerateConfig:
    """`cotrain generate`."""

    draft: Model
    target: Model
    prompt: str | None
    prompts: str | None  # a file of one prompt a line, or - for standard input
    max_new_tokens: int
    regime: ServedRegime
    policy: PolicySettings
    verify: str | None  # null: the rule that the draft folder was planned with, token for chains
    seed: int
    color: bool | None  # null: when standard output is a terminal


@dataclass
class TrainConfig:
    """`cotrain train`: distil, measure every checkpoint, export the one of the highest tau."""

    target: Target
    quantisation: Quantisation
    draft: Draft
    init: Init
    loss: Loss
    regime: Regime
    objective: str  # sampled_draft or greedy_draft: how the engine that will serve it drafts
    data: Data
    rollout: Rollout
    optimizer: Optimizer
    trainer: Trainer
    policy: PolicySettings
    verify: str
    bench: Bench
    label: str | None  # what `cotrain compare` calls the run; null: the loss
    measure: bool  # the best checkpoint in full; false in sweeps, where held-out acceptance is compared
    output: str
    overwrite: bool
    check: bool  # only say what the run would need
    minutes: float | None  # of the whole run: training ends in time for the measurement; null: no budget


@dataclass
class PretrainConfig:
    """`cotrain pretrain`: the tokenizer and weights of the bundled target."""

    shape: TargetShape
    data: Data
    tokenizer_bytes: dict[str, int]
    pretraining: Pretraining
    output: str
    export: str | None  # folder for the finished target


@dataclass
class RolloutConfig:
    """`cotrain rollout`: sample texts of the target."""

    target: Target
    quantisation: Quantisation
    regime: Regime
    data: Data
    rollout: Rollout
    draft: Model  # that makes sampling faster, the texts' distribution being the same
    kind: str  # train or held_out: the split that prompts come from
    output: str
    threads: int


@dataclass
class DatastoreConfig:
    """`cotrain datastore`: ids of texts in which drafts are looked up. depth: tokens of a text's end that are told
    apart."""

    target: Target
    data: Data
    depth: int
    output: str
    overwrite: bool


@dataclass
class BenchConfig:
    """`cotrain bench`: measure a draft folder against plain decoding on the same engine."""

    target: ServedTarget
    quantisation: Quantisation
    draft: Model
    regime: ServedRegime
    data: Data  # where prompts come from; the shipped ones without data.path
    bench: Bench
    matrix: Matrix
    verify: str | None  # null: as the draft folder says
    output: str
    overwrite: bool
    threads: int
    json: bool  # one JSON object on standard output, all words on standard error


@dataclass
class CompareConfig:
    """`cotrain compare`."""

    folder: str  # runs of cotrain train below it
    baseline: str  # the label that others are compared with
    report: str | None  # a JSON file to write
    json: bool  # as of BenchConfig


@dataclass
class ReportConfig:
    """`cotrain report`."""

    run: list[str]  # folders of cotrain train or bench, or their report.json; run= may be typed several times
    page: str | None  # the HTML file; null: report.html in the first run's folder


@dataclass
class ExportConfig:
    """`cotrain export`."""

    draft: Model
    target: Model
    engine: str  # vllm, sglang, tensorrt_llm or transformers
    layout: str  # of the folder, as the engine loads it
    k: int | None
    objective: str | None  # sampled_draft or greedy_draft
    temperature: float | None  # that a draft which is told it is served at
    check: str | None  # a folder to check instead
    push_to_hub: str | None  # user/name of a model repository that gets the folder
    output: str
    overwrite: bool
    json: bool  # as of BenchConfig, with check=


@dataclass
class ServeCheckConfig:
    """`cotrain serve_check`."""

    url: str | None  # the server's root
    model: str | None  # null: the first that the server lists
    draft: Model
    target: ServedTarget
    quantisation: Quantisation
    regime: ServedRegime
    k: int | None  # null: the draft length that was planned
    objective: str | None  # sampled_draft or greedy_draft; null: the one that the draft was trained for
    prompts: int
    prompt_tokens: int  # 0: as the draft folder says
    new_tokens: int
    at_once: int  # requests under way
    output: str
    overwrite: bool
    threads: int
    json: bool  # one JSON object on standard output, all words on standard error


SCHEMAS = {
    "serve_check": ServeCheckConfig,
    "export": ExportConfig,
    "compare": CompareConfig,
    "report": ReportConfig,
    "bench": BenchConfig,
    "generate": GenerateConfig,
    "pretrain": PretrainConfig,
    "datastore": DatastoreConfig,
    "rollout": RolloutConfig,
    "train": TrainConfig,
}


@cache
def register() -> None:
    """Register each schema with Hydra as `NAME_schema`, the name that the primary configs start from."""
    from hydra.core.config_store import ConfigStore

    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(name=f"{name}_schema", node=schema)


def checked(name: str, cfg: "DictConfig") -> "DictConfig":
    """`cfg` by the schema of the command `name`, every value there.

    Raises UserError for a key that the schema lacks (`+key=` adds what nothing reads), for one without a
    value (`~key`, or `???` in a file) and for a value outside its range, see `cotrain.config.ranges`.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import ConfigKeyError

    from cotrain.config.ranges import refuse

    try:
        typed = OmegaConf.merge(OmegaConf.structured(SCHEMAS[name]), OmegaConf.to_container(cfg))
    except ConfigKeyError as error:
        raise UserError(f"no key {str(error.full_key)!r}") from error
    assert isinstance(typed, DictConfig)
    missing = sorted(OmegaConf.missing_keys(typed))
    if missing:
        raise UserError(f"give a value to {', '.join(f'{key}=' for key in missing)}")
    refuse(name, typed)
    return typed


def sampling(regime: Regime | ServedRegime, temperature: float | None = None) -> "Sampling":
    """The regime as sampling settings of the engine, at its own temperature or another one. A served regime must have
    all its values, see `served_pair.as_trained`."""
    from inference import Sampling  # imports torch

    temperature = regime.temperature if temperature is None else temperature
    assert temperature is not None and regime.top_k is not None and regime.top_p is not None
    return Sampling(temperature, regime.top_k, regime.top_p)


def learnt(cfg: TrainConfig) -> list[float]:
    """The temperatures of the texts that a run learns from, equally many texts for each: rollout.train_temperatures, by
    default draft.temperatures, by default that of the regime."""
    return list(cfg.rollout.train_temperatures) or list(cfg.draft.temperatures) or [cfg.regime.temperature]


def judged(cfg: TrainConfig) -> list[float]:
    """The temperatures of the held-out texts, in ascending order: rollout.temperatures, those that the run learns at,
    and that of the regime, which ranks checkpoints."""
    return sorted({*cfg.rollout.temperatures, *learnt(cfg), cfg.regime.temperature})


def truncation(regime: Regime) -> "Callable[[Tensor], Tensor] | None":
    """The top-k and top-p cuts of the regime, logits (n, V) -> (n, V); None without any."""
    from inference.sampling import keep_top_k, keep_top_p  # imports torch

    cuts: list[Callable[[Tensor], Tensor]] = [partial(keep_top_k, k=regime.top_k)] if regime.top_k else []
    cuts += [partial(keep_top_p, p=regime.top_p)] if regime.top_p < 1 else []
    if not cuts:
        return None
    return cuts[0] if len(cuts) == 1 else lambda logits: cuts[1](cuts[0](logits))
