"""The settings of each command, as classes with types, ranges and defaults.

Hydra composes them. `conf/NAME.yaml` names the groups of a command; the options of a group are files in conf/ or
presets of its class, see `register`. `checked` then validates the composed settings once. So an unknown key, a wrong
type or a value outside its range is an error, both in a file and on the command line.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial, reduce
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field, ValidationError

from cotrain.config.base import (
    Count,
    Mark,
    Objective,
    Output,
    Path,
    Positive,
    Settings,
    Size,
    Some,
    Store,
    Temperature,
    Text,
    Verify,
    allowed,
    marked,
    one_of,
)
from cotrain.config.drafts import DRAFTS, OF_KINDS, AnyDraft, IndependentDraft
from cotrain.config.groups import (
    Bench,
    Data,
    FolderBench,
    Init,
    Joint,
    Loss,
    Model,
    Optimizer,
    PolicySettings,
    Quantisation,
    Regime,
    Rollout,
    ServedBench,
    ServedPolicy,
    ServedRegime,
    ServedTarget,
    Target,
    Teacher,
    Trainer,
)
from cotrain.config.names import IN_VLLM, below, unknown
from cotrain.errors import UserError, warn

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import Tensor

    from inference import Sampling

LEAST_TEXTS = 16  # of a plan
Json = Annotated[bool, Field(alias="json")]


class GenerateConfig(Settings):
    """Settings of `cotrain generate`."""

    draft: Model = Model()
    target: Model = Model()
    prompt: Text = None
    """A prompt; `prompts` has several."""
    prompts: Path = None
    """A file of one prompt a line, or - for standard input."""
    chat: bool | None = None
    """A prompt is a user's message, for the target's chat template; null: as the draft was trained."""
    max_new_tokens: Size = 128
    """Tokens that are generated per prompt."""
    regime: ServedRegime = ServedRegime()
    policy: ServedPolicy = ServedPolicy(file=None)
    verify: Verify | None = None
    """null: the rule stored in the draft folder if policy.k=null, else token."""
    seed: int = 0
    """The seed of the sampled texts."""
    color: bool | None = None
    """null: when standard output is a terminal."""


class TrainConfig(Settings):
    """Settings of `cotrain train`, which distils a draft, measures every checkpoint, and exports the one with the
    highest tau."""

    mode: Annotated[str, one_of("distil", "joint")] = "distil"
    """distil: the target is frozen; joint: it moves too, within a bound."""
    target: Target = Target()
    teacher: Teacher = Teacher()
    quantisation: Quantisation = Quantisation()
    draft: AnyDraft = IndependentDraft()
    init: Init = Init()
    loss: Loss = Loss()
    regime: Regime = Regime()
    objective: Objective = "sampled_draft"
    """How the serving engine will choose drafts."""
    data: Data = Data()
    rollout: Rollout = Rollout()
    optimizer: Optimizer = Optimizer()
    trainer: Trainer = Trainer()
    joint: Joint = Joint()
    """Read with mode=joint."""
    policy: PolicySettings = PolicySettings()
    verify: Verify = "token"
    """The rule with which the engine verifies drafts; lossy_typical changes the distribution."""
    bench: Annotated[Bench, Mark.FREE] = Bench()
    label: Annotated[str | None, Mark.FREE] = None
    """What `cotrain compare` calls the run; null: the loss."""
    measure: bool = True
    """Measure speed; false for sweeps that compare held-out acceptance."""
    output: Output = "outputs/train"
    """The folder of the run."""
    overwrite: bool = False
    """Replace a run in `output`, unless it is an unfinished one of the same settings, which is resumed."""
    check: bool = False
    """Only print what the run would need."""
    overfit: bool = False
    """Only learn one text of each domain until its drafts are accepted, to tell a wrong pipeline from a small draft;
    nothing is kept."""
    minutes: Annotated[Positive | None, Mark.LONGER] = None
    """A budget for sampling, training and measurement, without the checks of exactness; null: no budget."""

    @property
    def shards_target(self) -> bool:
        """Return whether the target's layers are sharded over several processes."""
        return self.target.device_map is not None and self.trainer.processes > 1


class RolloutConfig(Settings):
    """Settings of `cotrain rollout`, which samples texts of the target."""

    target: Target = Target()
    quantisation: Quantisation = Quantisation()
    regime: Regime = Regime()
    data: Data = Data()
    rollout: Rollout = Rollout()
    draft: Model = Model()
    """Speeds up sampling; the texts have the same distribution without it."""
    kind: Annotated[str, one_of("train", "held_out")] = "train"
    """The split that prompts come from."""
    output: Output = "outputs/rollouts"
    """The folder of the texts."""
    threads: Count = 0
    """Threads of torch; 0: torch's default."""


class TeacherConfig(Settings):
    """Settings of `cotrain teacher`, which says how a vLLM serves the target to `cotrain train teacher.url=`."""

    target: Target = Target()
    draft: AnyDraft = IndependentDraft()
    init: Init = Init(kind="scratch")
    output: Output = "outputs/states"
    """Where the server writes states, and the training reads them, under the same path."""
    port: Size = 8000
    """The server's port."""
    gpus: Count = 1
    """GPUs that share the target (vLLM's tensor parallelism); 0: a CPU."""
    python: Text = None
    """The interpreter of an environment with vLLM, to start the server here; null: only print its command."""


class DatastoreConfig(Settings):
    """Settings of `cotrain datastore`, which indexes texts for drafts by look-up."""

    target: Target = Target()
    data: Data = Data()
    depth: Size = 32
    """The longest match, in tokens."""
    output: Output = "outputs/datastore"
    """The folder of the index."""
    overwrite: bool = False
    """Replace an index in `output`."""


class DraftFolderConfig(Settings):
    """The settings shared by all commands that read a draft folder and measure its draft."""

    target: ServedTarget = ServedTarget()
    quantisation: Quantisation = Quantisation()
    draft: Model = Model()
    regime: ServedRegime = ServedRegime()
    data: Data = Data()
    """The source of prompts; data.path=null: those of the draft folder, or the shipped ones."""
    overwrite: bool = False
    """Replace an earlier result in `output`; false: keep it beside."""
    threads: Count = 0
    """Threads of torch; 0: torch's default."""
    as_json: Json = False
    """Print one JSON object on standard output, and all messages on standard error."""


class BenchConfig(DraftFolderConfig):
    """Settings of `cotrain bench`, which measures a draft folder against plain decoding on the same engine."""

    bench: FolderBench = FolderBench(prompt_tokens=0, depths=[], draft_dtype="as_trained", draft_int8=None)
    verify: Verify | None = None
    """null: the rule stored in the draft folder."""
    url: Text = None
    """A server of the target without a draft; with url_draft=, these servers are measured instead of this engine."""
    url_draft: Text = None
    """A server of the target with the draft of draft.path=."""
    concurrent: Some = [1, 8]
    """Numbers of concurrent requests to the servers."""
    output: Output = "outputs/bench"
    """The folder of the result."""


class PlanConfig(DraftFolderConfig):
    """Settings of `cotrain plan`, which forecasts the speed of one target with one or several drafts."""

    drafts: Annotated[list[str], Mark.PATH] = []
    """Further draft folders, of the same target."""
    shapes: list[str] = []
    """Without draft folders: settings of cotrain train, which make a draft each."""
    bench: ServedBench = ServedBench(
        prompt_tokens=0, depths=[1, 2, 3, 4, 5, 6, 7, 8], draft_dtype="as_trained", draft_int8=None
    )
    verify: Verify | None = None
    """null: the rule stored in the draft folder."""
    temperatures: list[Temperature] = []
    """[]: the regime's."""
    batches: Some = [1, 8]
    """Rows that are decoded together."""
    texts: Annotated[int, allowed("at least 16: an interval from fewer texts is too narrow", LEAST_TEXTS.__le__)] = 32
    """Texts of the target at each temperature; more give narrower intervals."""
    costs: Path = None
    """Costs of rounds of another machine: its plan.json, or JSON as in docs/settings.md."""
    log: Path = None
    """A server's counters, which are compared with the plan in `output`; nothing else is done."""
    measure: bool = False
    """Also time the recommended draft length, its neighbours and the adaptive policy."""
    output: Output = "outputs/plan"
    """The folder of the plan."""


class CompareConfig(Settings):
    """Settings of `cotrain compare`."""

    folder: Annotated[str, Mark.PATH] = "outputs/losses"
    """Contains the runs of cotrain train, at any depth."""
    baseline: Text = None
    """The label that the others are compared with; null: the first in alphabetical order."""
    report: Store = None
    """A JSON file to write."""
    as_json: Json = False
    """Print one JSON object on standard output, and all messages on standard error."""


class ReportConfig(Settings):
    """Settings of `cotrain report`."""

    run: Annotated[list[str], Mark.PATH] = []
    """Output folders of cotrain train or bench, or their report.json; run= may be repeated."""
    page: Store = None
    """The HTML file to write; null: report.html in the first run's folder."""
    issue: bool = False
    """Print instead what an issue needs: versions, the machine, settings and figures of runs, no paths and texts."""


class ExportConfig(Settings):
    """Settings of `cotrain export`."""

    draft: Model = Model()
    target: Model = Model()
    engine: str = "vllm"
    """vllm, sglang, tensorrt_llm, transformers or llamacpp."""
    layout: str = "auto"
    """The file format: hf, gguf for llamacpp, of feature drafts eagle3 or speculators, of blocks dflash or dspark;
    auto: that in which the engine loads such drafts."""
    k: Size | None = None
    """null: the planned draft length."""
    objective: Objective | None = None
    """null: the objective that the draft was trained for."""
    temperature: Temperature | None = None
    """For a conditioned draft: the temperature that it is exported for."""
    dtype: Annotated[str, one_of("auto", "float32", "bfloat16", "float16", "q8_0")] = "auto"
    """Of the weights in layout hf or for llamacpp (q8_0: llamacpp alone); auto: the draft's."""
    check: Annotated[str | bool | None, Mark.PATH] = None
    """An exported folder: check it, write nothing."""
    push_to_hub: Text = None
    """user/name of a model repository to push the folder to."""
    output: Output = "outputs/export"
    """The folder that is written."""
    overwrite: bool = False
    """Replace an exported folder in `output`."""
    as_json: Json = False
    """Print one JSON object on standard output, and all messages on standard error, with check=."""


class ServeCheckConfig(DraftFolderConfig):
    """Settings of `cotrain serve_check`."""

    url: Text = None
    """The server's root."""
    model: str | None = None
    """null: the first model that the server lists."""
    k: Size | None = None
    """null: the planned draft length."""
    objective: Objective | None = None
    """null: the one that the draft was trained for."""
    prompts: Size = 48
    """Prompts that are asked of the server."""
    prompt_tokens: Count = 0
    """0: the value stored in the draft folder."""
    new_tokens: Size = 128
    """Tokens of each text."""
    at_once: Size = 8
    """Concurrent requests."""
    output: Output = "outputs/serve_check"
    """The folder of the result."""


class AuditConfig(DraftFolderConfig):
    """Settings of `cotrain audit`. draft.path=null: without the draft that the server uses."""

    url: Text = None
    """The server's root."""
    model: str | None = None
    """null: the first model that the server lists."""
    texts: Path = None
    """Instead of url=: a parquet file of cotrain rollout, or JSON lines with prompt and completion."""
    p: Annotated[str, one_of("target", "server")] = "target"
    """Whose distributions the texts are compared with. server: the server's own log-probabilities of its likeliest
    tokens, for a target that does not fit here."""
    prompts: Size = 80
    """Prompts that are asked of the server."""
    repeats: Size = 2
    """Texts of each prompt."""
    objective: Objective | None = None
    """How the server drafts. null: as the draft was trained."""
    prompt_tokens: Count = 0
    """The longest prompt, in tokens. 0: the value stored in the draft folder, else 48, or, if the prompts of data.path
    are longer, the length that 95 % of them do not exceed."""
    new_tokens: Size = 128
    """Tokens of each text."""
    at_once: Size = 8
    """Concurrent requests."""
    seed: int = 0
    """The seed of the choice of prompts and of the requests."""
    output: Output = "outputs/audit"
    """The folder of the result."""


SCHEMAS: dict[str, type[Settings]] = {
    "audit": AuditConfig,
    "serve_check": ServeCheckConfig,
    "export": ExportConfig,
    "compare": CompareConfig,
    "report": ReportConfig,
    "bench": BenchConfig,
    "plan": PlanConfig,
    "generate": GenerateConfig,
    "teacher": TeacherConfig,
    "datastore": DatastoreConfig,
    "rollout": RolloutConfig,
    "train": TrainConfig,
}


SAMPLING_COMMANDS = ("train", "rollout")  # they can use data=self


@cache
def register() -> None:
    """Register the options of all groups with Hydra, and the defaults of each command as `NAME_schema`, to which
    `conf/NAME.yaml` refers."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    vars(store)["__deepcopy__"] = lambda _: store  # Hydra would copy it with every composition
    for group, options in presets().items():
        for option, settings in options.items():
            store.store(name=option, group=group, node=settings.model_dump())
    for name, schema in SCHEMAS.items():
        store.store(name=f"{name}_schema", node=_own(schema))


def presets() -> dict[str, dict[str, Settings]]:
    """Return the options of each group in the settings of `cotrain train`, as group -> option -> settings. Options that
    are files in conf/ are not included."""
    groups = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    drafts: dict[str, Settings] = {kind: one(kind=kind) for kind, one in DRAFTS.items()}
    return {"draft": drafts} | {
        name: {option: group(**values) for option, values in group.presets.items()}
        for name, group in groups.items()
        if isinstance(group, type) and issubclass(group, Settings) and group.presets is not None
    }


def _own(schema: type[Settings]) -> dict[str, Any]:
    """Return the defaults of a command's class as nested dictionaries. A group with options has only the values in
    which the command's default differs from the option."""
    node = {}
    for name, field in schema.model_fields.items():
        value = field.default
        if isinstance(value, Settings):
            value = value.model_dump(exclude_unset=value.presets is not None)
        if value != {}:
            node[field.alias or name] = value
    return node


def keys_of(name: str, kind: str | None = None) -> dict[str, object]:
    """Return every dotted key of the command `name` with its default value; a group's key has a dictionary. kind: the
    kind of draft whose settings are included, for `cotrain train`; None for the default kind."""
    values = SCHEMAS[name]().model_dump(by_alias=True)
    if kind in DRAFTS and name == "train":
        values["draft"] = DRAFTS[kind](kind=kind).model_dump()
    return dict(flat(values))


def flat(values: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) for all keys of nested dictionaries. A key whose value is a dictionary is yielded too,
    before the keys inside it. prefix: text before each key."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{prefix}{key}", value
            yield from flat(value, f"{prefix}{key}.")


def checked(name: str, cfg: "DictConfig") -> Any:
    """Return the validated settings of the command `name`, an instance of its class. cfg: the settings that Hydra
    composed.

    Raises UserError for a key that the command's class does not have (`+key=` can add one), a missing value, a wrong
    type, or a value outside its range.
    """
    from omegaconf import OmegaConf

    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise UserError(f"set a value for {', '.join(f'{key}=' for key in missing)}")
    composed = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    try:
        return SCHEMAS[name].model_validate(composed)
    except ValidationError as error:
        raise UserError(_wrong(name, composed, error)) from error


TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text"}  # by pydantic's


def _wrong(name: str, composed: Any, error: ValidationError) -> str:
    """Return the error message for the first wrong setting: its key, its value, and what to set instead. composed: all
    settings, nested."""
    first = error.errors(include_url=False)[0]
    kind, path = None, [part for part in first["loc"] if isinstance(part, str)]
    if path[0] == "draft" and len(path) > 1 and path[1] in DRAFTS:
        kind = path.pop(1)
    key, keys = ".".join(path), keys_of(name, kind)
    value = reduce(lambda values, part: values[part], path, composed)
    also = f" ({IN_VLLM[key]} in vLLM)" if key in IN_VLLM else ""
    said = f"{key}={'null' if value is None else value}{also}: "
    if first["type"] == "extra_forbidden":
        if kind is None or path[-1] not in OF_KINDS:
            inner = next(iter(value), "") if isinstance(value, dict) else ""  # of a group that the command lacks
            return unknown(f"{key}.{inner}".rstrip("."), name, keys)
        own = [one for one in keys if one.startswith("draft.") and one != "draft.kind"]
        others = [other for other, one in DRAFTS.items() if path[-1] in one.model_fields]
        return f"{said}{kind} drafts do not have it; they have {', '.join(own)}; draft={' or '.join(others)} has it"
    if first["type"] == "union_tag_invalid":
        return f"draft.kind={value['kind']}: it must be one of {', '.join(DRAFTS)}"
    if first["type"] == "list_type":
        return f"{said}it must be a list: write {key}=[{value}]"
    if group := below(key, keys):
        return group
    word = (
        str(first["ctx"]["error"])
        if first["type"] == "value_error"
        else TYPES.get(first["type"].partition("_")[0], first["msg"])
    )
    return f"{said}{'each' if isinstance(first['loc'][-1], int) else 'it'} must be {word}"


def refuse_unread(cfg: Any, typed: Iterable[str]) -> None:
    """Raise UserError for the first setting that the user typed and that has no effect in this run. If it has no effect
    only because of the kind of draft, a line is printed to stderr instead, because a sweep over kinds sets it for all
    of them.

    cfg: the command's settings. typed: the typed settings, as "key=value". The values null, 0 and [] are always
    accepted.
    """
    pairs = (setting.partition("=") for setting in typed)
    values = {key.lstrip("+"): value for key, _, value in pairs if value not in ("null", "0", "[]")}
    wrong = {
        f"{group}.{name}": why
        for group, settings in cfg
        if isinstance(settings, Settings)
        for name, why in {**settings.foreign(type(cfg)), **settings.unread(cfg)}.items()
    }
    for key in values:
        if key in wrong:
            raise UserError(f"{key}={values[key]}: the setting has no effect here: {wrong[key]}")
    idle = _idle(cfg) if isinstance(cfg, TrainConfig) else {}
    for why in dict.fromkeys(idle.values()):
        if keys := [f"{key}={value}" for key, value in values.items() if idle.get(key) == why]:
            warn(f"{', '.join(keys)}: the setting has no effect here: {why}")


def _idle(cfg: TrainConfig) -> dict[str, str]:
    """Return the settings that have no effect for this kind of draft, as dotted key -> the reason."""
    draft, init, idle = cfg.draft, cfg.init.kind, dict[str, str]()
    if not draft.trained:
        groups = {key for key in keys_of("train") if key.partition(".")[0] in ("loss", "optimizer")}
        texts = set() if from_target(cfg.data) else marked(TrainConfig, Mark.TRAINING)
        steps = {key for key in marked(TrainConfig, Mark.TRAINING) if key.startswith("trainer.")}
        idle |= dict.fromkeys(groups | texts | steps, "this kind of draft is not trained")
    if draft.one_start and init != "pretrained":
        idle |= dict.fromkeys(("init", "init.kind"), f"{draft.kind} drafts begin in one way, unless init=pretrained")
    if init not in draft.layers_with:
        ways = " or ".join(f"init={way}" for way in draft.layers_with)
        idle["init.layers"] = f"{draft.kind} drafts " + (f"read it only with {ways}" if ways else "do not read it")
    return idle


def refuse_from_target(name: str, cfg: Any) -> None:
    """Raise UserError if data=self is set for a command that samples no prompts. name: its name. cfg: its settings."""
    if "data" in type(cfg).model_fields and from_target(cfg.data) and name not in SAMPLING_COMMANDS:
        raise UserError(
            f"data=self: only cotrain {' and '.join(SAMPLING_COMMANDS)} sample prompts: name the file of prompts that "
            "a run sampled, for example data.path=outputs/train/rollouts/self_prompts.jsonl"
        )


def from_target(data: Data) -> bool:
    """Return whether the target samples the prompts itself (data=self). It does not if data.path is set."""
    return data.from_target and data.path is None


def sampling(regime: Regime | ServedRegime, temperature: float | None = None) -> "Sampling":
    """Return the engine's sampling settings for a regime, whose fields must all have values (`served_pair.as_trained`
    replaces None). temperature: used in place of the regime's; None for the regime's."""
    from inference import Sampling  # imports torch

    temperature = regime.temperature if temperature is None else temperature
    assert temperature is not None and regime.top_k is not None and regime.top_p is not None
    return Sampling(temperature, regime.top_k, regime.top_p)


def learnt(cfg: TrainConfig) -> list[float]:
    """Return the temperatures at which training texts are sampled, equally many texts at each:
    rollout.train_temperatures, or if it is empty draft.temperatures, or else the regime's temperature alone."""
    return cfg.rollout.train_temperatures or cfg.draft.temperatures or [cfg.regime.temperature]


def judged(cfg: TrainConfig) -> list[float]:
    """Return the temperatures at which held-out texts are sampled, in ascending order: rollout.temperatures, the
    temperatures of the training texts, and the regime's. Checkpoints are ranked at the regime's."""
    return sorted({*cfg.rollout.temperatures, *learnt(cfg), cfg.regime.temperature})


def truncation(regime: Regime) -> "Callable[[Tensor], Tensor] | None":
    """Return a function logits (n, V) -> logits (n, V) that applies the regime's top-k and top-p, or None if the regime
    has neither."""
    from inference.sampling import keep_top_k, keep_top_p  # imports torch

    cuts: list[Callable[[Tensor], Tensor]] = [partial(keep_top_k, k=regime.top_k)] if regime.top_k else []
    cuts += [partial(keep_top_p, p=regime.top_p)] if regime.top_p < 1 else []
    if not cuts:
        return None
    return cuts[0] if len(cuts) == 1 else lambda logits: cuts[1](cuts[0](logits))
