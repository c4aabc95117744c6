"""Checks of settings, files and machine before a training run loads any weight of the target.

Both `check=true` and a run call `require` first, so both reject the same settings with the same message.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning
import torch
from lightning.pytorch.strategies import StrategyRegistry
from transformers import PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cotrain.board.curves import WANDB
from cotrain.config.drafts import DRAFTS
from cotrain.config.groups import OF_PATH, Bench, Regime, ServedRegime, Trainer
from cotrain.config.settings import RolloutConfig, TrainConfig, from_target, learnt, sampling
from cotrain.data.prompt_rows import PromptRows, Source, prompt_tokens, said_of_rows
from cotrain.data.sequence_tasks import CORPORA, LONGEST
from cotrain.data.sources import files_of, refuse_short, sources_apart
from cotrain.data.splits import SPLITS, apart
from cotrain.errors import UserError, user_errors, warn
from cotrain.ranks import rank
from cotrain.rollout.self_prompts import SELF, opening, unended
from cotrain.rollout.training_texts import Start, completed, start_of
from cotrain.run_folder import writable
from cotrain.students.base import KINDS, Student, student_class
from cotrain.students.independent import CACHED, refuse_fewer
from cotrain.students.quantised import refuse_unknown
from cotrain.teacher.server_states import asked_layers, final_norm
from cotrain.teacher.servers import require_states
from cotrain.teacher.target_model import halves, keeps_apart, load_config, load_words
from cotrain.training.assembly import initial, shares_of, stages
from cotrain.training.deadline import LEAST, time_limited
from cotrain.training.fit import SHARDED, strategy_of
from cotrain.training.job import Job, asked, reads_given, template_of
from cotrain.training.optim import precision
from inference import Sampling
from inference.drafts.bundled_target import resolve
from inference.drafts.causal_lm import generation_of
from inference.drafts.compatibility import hash_tokenizer, tokenizer_problems
from inference.drafts.draft_folder import GENERATION, Metadata, load_tokenizer, other_weights, read
from inference.drafts.published import published
from inference.drafts.weight_files import building, refuse_other_sizes, weight_files
from inference.measure.costs import SPANS
from inference.measure.environment import device
from inference.models.llama import INT8_ROWS
from inference.models.pretrained import auto_class, layers_of, longest_text, quantisation_of, refuse_unsupported
from inference.models.quantisation import refuse_quantisation
from inference.proposers.retrieval import Retrieval
from inference.servers.openai_client import Client

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN = "num_experts_per_tok"
LAUNCHERS = {"WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "SLURM_NTASKS"}  # set by launchers of several machines
SHOWN, CHARACTERS = 3, 300  # prompts that are shown, and characters from either end of one
OFTEN = 10  # a line says that texts are read so many times, or more
READ = 3  # the times that the measured draft of many texts read each
# outputs/results/gpu.json
MEASURED = (
    "on SmolLM2-135M 1,857 texts read 22 times gave acceptance .65 on them and .52 on others, 4,405 read 3 times .54"
)
HALF = ("16", "16-mixed")  # Lightning's names of float16
# kinds that learn from the target's states alone, so it may run on a server
TAUGHT = ("independent", "conditioned", "parallel", "eagle", "p_eagle", "block", "medusa", "hydra")


@dataclass(frozen=True)
class RunOutline:
    """A run before its weights are loaded. target, draft: models on the meta device, which stores no weights.
    tokenizer: the target's. sources: split -> the user's prompts or documents; {} for the embedded corpora."""

    target: PreTrainedModel
    tokenizer: Tokenizer
    draft: PreTrainedModel
    sources: Mapping[str, Source] = field(default_factory=dict)


def require(cfg: TrainConfig) -> RunOutline:
    """Check, before any weight is loaded, everything that would stop the run later. Return the models without weights,
    and the texts. rollout.prompt_tokens in `cfg` is set, in place, if it is 0. Raises UserError, which names the key to
    change.

    Two things are checked elsewhere: `run_folder.refuse_folder` checks the output folder, and whether the embedded
    corpora have enough prompts is known only after they are read.
    """
    with user_errors():
        _settings(cfg)
        _folders(cfg)
        target, tokenizer = outline(cfg.target.path, cfg.target.trust_remote_code)
        _target(cfg, target, tokenizer)
        _spread(cfg, target)
        _teacher(cfg)
        draft = _draft(cfg, target, tokenizer)
        if cfg.teacher.urls:  # each must give the states that the draft reads, for a short text
            final_norm(target)
            layers = served_layers(cfg.draft.kind, draft, target, tokenizer)
            require_states(cfg.teacher.urls, layers, target.config.get_text_config().hidden_size)
        if from_target(cfg.data):  # its texts are checked once they are sampled, see `require_texts`
            template = template_of(cfg, target, tokenizer)
            _refuse_template(cfg, opening(template).chat)
            _shares(cfg, target, {})
            if end := unended(template):
                warn(
                    f"warning: the target's chat template ends answers with {end!r}, but its texts go on after it: "
                    f"add {template.ids(end)[0]} to eos_token_id of its generation_config.json"
                )
            _say(cfg, cfg.rollout.texts * len(learnt(cfg)))
            if reads_given(cfg, True):
                raise UserError(
                    "data=self: prompts are sampled, without texts to learn from: set "
                    "trainer.corpus_steps=0 data.on_target=false"
                )
            sources = {}
        else:
            sources = require_texts(cfg, target, tokenizer)
        _lengths(cfg, target, draft)
    return RunOutline(target, tokenizer, draft, sources)


def require_texts(cfg: TrainConfig, target: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, Source]:
    """Read and check the user's texts, and set rollout.prompt_tokens in `cfg`, in place, if it is 0. Return the texts,
    keyed by split; {} for the embedded corpora. Raises UserError or ValueError, which names the key."""
    sources = read_texts(cfg, target, tokenizer)
    _texts(cfg, tokenizer, sources)
    _shares(cfg, target, sources)
    if not cfg.data.path:
        each = [shares_of(cfg).get(domain, 1.0) for domain in domains(cfg, target, sources, "train")]
        _say(cfg, round(sum(each) * cfg.rollout.texts) * len(learnt(cfg)))
    if reads_given(cfg, isinstance(sources.get("train"), PromptRows)):
        _refuse_given_texts(cfg, target, tokenizer, sources)
    return sources


def _refuse_given_texts(
    cfg: TrainConfig, target: PreTrainedModel, tokenizer: Tokenizer, sources: Mapping[str, Source]
) -> None:
    """Raise UserError or ValueError, which names the key, if the user's texts cannot be used as they are: no prompt has
    a completion, a block exceeds the target's context, or the texts fill less than one block. sources: the texts, keyed
    by split."""
    for split in SPLITS[:2]:
        texts = sources[split]
        if isinstance(texts, PromptRows):
            completed(texts, asked(cfg), split, cfg.rollout.seed)
            continue
        if cfg.data.block > (longest := longest_text(target.config)):
            raise UserError(
                f"data.block={cfg.data.block}: the target reads texts of at most {longest} tokens: "
                f"set data.block={longest} or less"
            )
        refuse_short(texts.texts, tokenizer, cfg.data.block)


def outline(path: str, trust_remote_code: bool = False) -> tuple[PreTrainedModel, Tokenizer]:
    """Return the target `path` (a folder or hub id) on the meta device, without weights, and its tokenizer. Raises
    UserError if its folder has no weights, and ValueError or OSError for a missing model or tokenizer."""
    config, tokenizer = load_config(path, trust_remote_code)
    return sketch(path, config, trust_remote_code), tokenizer


def sketch(
    path: str, config: PretrainedConfig, trust_remote_code: bool = False, key: str = "target.path"
) -> PreTrainedModel:
    """Return a model on the meta device, without weights. path: its folder or hub id. config: its config. key: the
    setting that names it, for messages. Raises UserError, which names `key`, if its folder has no weights, or if the
    engine cannot run the model."""
    folder = Path(resolve(path))
    _weights(key, folder)
    try:
        model_class = auto_class(config)
        with building(folder), torch.device("meta"):
            model = model_class.from_config(config, trust_remote_code=trust_remote_code)
        if (folder / GENERATION).is_file():  # it names the ids that end a text
            model.generation_config = generation_of(folder)
        refuse_unsupported(model, model.config.get_text_config())
        if folder.is_dir() and quantisation_of(model.config) == "none":  # others are packed
            refuse_other_sizes(folder, model)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from error
    return model.eval()


def _weights(key: str, folder: Path) -> None:
    """Raise UserError for a folder without weights. Models on the hub are checked when they are loaded."""
    try:
        if folder.is_dir():
            weight_files(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {error}") from error


def _settings(cfg: TrainConfig) -> None:
    """Raise UserError or ValueError for wrong settings, as far as they can be checked without models or texts."""
    if cfg.trainer.corpus_steps > cfg.trainer.steps:
        raise UserError(
            f"trainer.corpus_steps={cfg.trainer.corpus_steps}: it must be at most trainer.steps={cfg.trainer.steps}"
        )
    if cfg.trainer.nodes > 1 and not LAUNCHERS & set(os.environ):
        raise UserError(
            f"trainer.nodes={cfg.trainer.nodes}: each machine's process must be started by torchrun or "
            "srun, see docs/distributed.md; set trainer.nodes=1 to use this machine alone"
        )
    if cfg.policy.k is None:
        raise UserError(
            "policy.k=null (num_speculative_tokens in vLLM): checkpoints are compared at one draft length: set one, as "
            "in policy.k=4"
        )
    refuse_training(cfg)
    refuse_losses(cfg)
    if cfg.trainer.strategy not in ("auto", SHARDED, *StrategyRegistry.available_strategies()):
        raise UserError(
            f"trainer.strategy={cfg.trainer.strategy}: it must be auto, ddp, {SHARDED} or another strategy of Lightning"
        )
    if cfg.trainer.logger == WANDB and find_spec("wandb") is None:
        raise UserError("trainer.logger=wandb: it needs wandb: pip install wandb")
    machine(cfg.trainer)
    _lightning(cfg.trainer)


def refuse_training(cfg: TrainConfig) -> None:
    """Raise ValueError, which names the keys, for wrong training settings: numbers out of range, a batch that the
    processes cannot share equally, or both quantised and sharded weights."""
    trainer, kind = cfg.trainer, cfg.draft.quantisation
    world = trainer.processes
    refuse_fractions(cfg.optimizer.warmup, cfg.optimizer.decay, trainer.steps)
    refuse_minutes(cfg)
    if trainer.batch % world:
        raise ValueError(
            f"trainer.batch: {trainer.batch} texts cannot be divided equally among {world} devices: set a multiple of "
            f"{world}"
        )
    if kind != "none" and trainer.strategy == SHARDED:
        raise ValueError("draft.quantisation, trainer.strategy: use only one: quantised or sharded (fsdp2) weights")


def refuse_fractions(warmup: float, decay: float, steps: int) -> None:
    """Raise ValueError, which names the key, if optimizer.warmup or optimizer.decay is not in [0, 1]. steps: the number
    of steps, for the message."""
    for key, value in (("warmup", warmup), ("decay", decay)):
        if not 0 <= value <= 1:
            hint = f"; {value:g} of {steps} steps are optimizer.{key}={value / steps:.2g}" if 1 < value <= steps else ""
            raise ValueError(f"optimizer.{key}: set a fraction of the training in [0, 1], not {value:g}{hint}")


def refuse_minutes(cfg: TrainConfig) -> None:
    """Raise ValueError, which names the key, if a run measures and bench.minutes leaves training less than the
    share LEAST of minutes=."""
    if cfg.minutes and cfg.measure and cfg.bench.minutes > (1 - LEAST) * cfg.minutes:
        raise ValueError(
            f"minutes={cfg.minutes:g}: bench.minutes={cfg.bench.minutes:g} leaves training less than "
            f"{100 * LEAST:.0f} % of them: raise minutes= or lower bench.minutes="
        )


def _lightning(cfg: Trainer) -> None:
    """Let Lightning check devices, strategy and precision now, without starting a process. Otherwise an error would
    come only after texts were sampled."""
    accelerator, chosen = "gpu" if device() != "cpu" else "cpu", precision(cfg.precision)
    if accelerator == "cpu" and chosen in HALF:
        raise UserError(
            f"trainer.precision={cfg.precision}: float16 trains only on a GPU, and this machine has none: "
            "set trainer.precision=auto"
        )
    for key, value, strategy, name in (
        ("precision", cfg.precision, "auto", chosen),
        ("strategy", cfg.strategy, strategy_of(cfg), "32-true"),
        ("strategy", cfg.strategy, strategy_of(cfg), chosen),
    ):
        try:
            lightning.Trainer(
                strategy=strategy,
                precision=cast(Any, name),
                devices=cfg.devices,
                num_nodes=cfg.nodes,
                accelerator=accelerator,
                logger=False,
                enable_checkpointing=False,
            )
        except Exception as error:  # MisconfigurationException, ImportError, TypeError, ... by strategy
            why = " ".join(str(error).split())
            message = f"trainer.{key}={value}: Lightning cannot use it here: {why}"
            raise UserError(f"{message}; set trainer.{key}=auto") from error


def machine(cfg: Trainer) -> None:
    """Raise UserError if the settings ask for a GPU and the machine has none, or for more GPUs than it has. Without a
    GPU, processes share the CPU."""
    if device() == "cpu":
        if cfg.accelerator == "gpu":
            raise UserError(
                "trainer.accelerator=gpu: this machine has no GPU that torch can use; trainer=cpu trains without one"
            )
    elif cfg.devices > (count := torch.cuda.device_count()):
        raise UserError(
            f"trainer.devices={cfg.devices}: each process needs a GPU, and this machine has {count}: "
            f"set trainer.devices={count}"
        )


def _folders(cfg: TrainConfig) -> None:
    """Check the user's texts, the adapter, the server, and the folders that are written, except the run's own."""
    if cfg.data.path:
        files_of(cfg.data.path)
    for key, folder in (("trainer.cache", cfg.trainer.cache), ("rollout.folder", cfg.rollout.folder)):
        if folder:
            writable(key, folder)
    adapter = cfg.target.adapter
    if adapter and find_spec("peft") is None:
        raise UserError("target.adapter: it needs peft: pip install 'cotrain[adapter]'")
    local = adapter and (Path(adapter).is_absolute() or Path(adapter).exists())
    if adapter and local and not (Path(adapter) / "adapter_config.json").is_file():
        raise UserError(
            f"target.adapter: {adapter} is not an adapter: it has no adapter_config.json: name a PEFT folder"
        )
    if cfg.rollout.url:
        server("rollout.url", cfg.rollout.url, sampling(cfg.regime))


def _teacher(cfg: TrainConfig) -> None:
    """Raise UserError for settings that need the target's layers in this process, though servers run it."""
    if not cfg.teacher.urls:
        return
    needs = {
        f"draft={cfg.draft.kind}": cfg.draft.kind not in TAUGHT,
        f"mode={cfg.mode}": cfg.mode != "distil",
        f"quantisation={cfg.quantisation.kind}": cfg.quantisation.kind != "none",
        "target.adapter": bool(cfg.target.adapter),
        "init=target_layers": cfg.init.kind == "target_layers" and not cfg.draft.one_start,
        "measure=true": cfg.measure,
    }
    if wrong := [key for key, used in needs.items() if used]:
        remedies = {f"draft={cfg.draft.kind}": f"use one of {', '.join(TAUGHT)}", "init=target_layers": "init=scratch"}
        remedy = remedies.get(wrong[0], "measure=false" if wrong[0] == "measure=true" else "leave it out")
        raise UserError(
            f"{wrong[0]}: it needs the target's layers in this process, and with teacher.url= only its embeddings, "
            f"norm and head are here: {remedy}"
        )


def _spread(cfg: TrainConfig, target: PreTrainedModel) -> None:
    """Raise UserError for settings that do not fit target.device_map=auto. Layers on several devices cannot be copied
    into a draft that runs them in one pass, nor moved. If they are sharded, each process must call the target equally
    often, and none has it alone."""
    if cfg.target.device_map is None:
        return
    kind, several = f"draft={cfg.draft.kind}", cfg.shards_target
    taught = TAUGHT if several else [name for name in DRAFTS if name not in ("early_exit", "hybrid_exit")]
    nodes = f"--nnodes={cfg.trainer.nodes} " * (cfg.trainer.nodes > 1)
    torchrun = f"torchrun {nodes}--nproc-per-node={cfg.trainer.devices} -m cotrain train"
    remedies = {
        kind: (cfg.draft.kind not in taught, f"use one of {', '.join(taught)}"),
        "target.path": (target.config.is_encoder_decoder, "use a decoder alone, or leave out target.device_map="),
        "mode=joint": (cfg.mode != "distil", "set mode=distil"),
        "quantisation": (several and cfg.quantisation.kind != "none", "set quantisation=none"),
        "teacher.url": (bool(cfg.teacher.urls), "leave out one of the two"),
        "data=self": (several and from_target(cfg.data), "sample prompts first, cotrain rollout data=self"),
        "measure=true": (several and cfg.measure, "set measure=false, and measure the draft with cotrain bench"),
        "trainer.cache": (several and cfg.trainer.cache is not None, "leave it out"),
        "trainer.devices": (several and not {"RANK", "WORLD_SIZE"} <= set(os.environ), f"start it with {torchrun}"),
    }
    how = "sharded over the processes, which call it in step" if several else "spread over devices"
    for key, (wrong, remedy) in remedies.items():
        if wrong:
            raise UserError(f"{key}: with target.device_map=auto the target is {how}: {remedy}")


def served_layers(kind: str, draft: PreTrainedModel, target: PreTrainedModel, tokenizer: Tokenizer) -> list[int]:
    """Return the layers that a server must write for a draft of this kind, see `asked_layers`. draft, target: may be
    without storage."""
    return asked_layers(target, student_class(kind)(draft, target, ids_of(tokenizer)).reads)


def server(key: str, url: str, regime: Sampling, model: str | None = None) -> Client:
    """Return a client for the server at `url`. Print the sampling settings that the server applies in the regime, if it
    reports them. key: the setting with the address, for messages. model: the model's name on the server; None: the
    first that the server lists. Raises UserError, which names `key`, if no server answers."""
    try:
        client = Client(url, model)
        if said := client.resolved_settings(regime):
            print(f"{key}={url} samples with {', '.join(f'{name} {value}' for name, value in said.items())}")
        return client
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{key}={url}: no OpenAI-compatible server answers there: {error}") from error


def _target(cfg: TrainConfig, target: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Raise UserError for a target that does not support its quantisation setting, or that has fewer rows in its head
    than its tokenizer has ids."""
    refuse_quantisation(cfg.target.path, cfg.quantisation.kind, target.config)
    if target.config.is_encoder_decoder:
        refuse_sourced(cfg, target)
    size, rows = ids_of(tokenizer), target.config.get_text_config().vocab_size
    if not 0 < size <= rows:
        raise UserError(
            f"target.path: {cfg.target.path} has a tokenizer with {size} ids, but its model has logits for {rows} ids: "
            "put the model's own tokenizer into the folder"
        )
    if cfg.regime.top_k > size:
        raise UserError(
            f"regime.top_k={cfg.regime.top_k}: the target has {size} tokens; set regime.top_k=0 to cut no tokens"
        )
    if cfg.quantisation.kind not in ("none", INT8_ROWS) and device() == "cpu":
        warn(f"warning: quantisation={cfg.quantisation.kind} on a CPU: acceptance is as on a GPU, but speeds are not")


def refuse_sourced(cfg: TrainConfig, target: PreTrainedModel) -> None:
    """Raise UserError, which names the key, for settings that an encoder-decoder does not support, and ValueError if
    its encoder reads audio or image features or if the ids of its decoder's first tokens are not known. Any other
    target passes."""
    start_of(target)
    config, depth = target.config, layers_of(target.config)
    if depth > config.num_hidden_layers and not getattr(config, CACHED, None):
        raise UserError(
            f"target.path: {cfg.target.path} has a decoder of {depth} layers, deeper than its encoder; "
            f'transformers\' generate, which a measurement is compared with, needs "{CACHED}": {depth} in '
            "its config.json"
        )
    kinds = [kind for kind in KINDS if student_class(kind).sourced]
    name, choice = type(target).__name__, f"it is an encoder-decoder, for which {', '.join(kinds)} drafts are made"
    unsupported = {
        f"draft={cfg.draft.kind}": cfg.draft.kind not in kinds,
        f"mode={cfg.mode}": cfg.mode != "distil",
        "data=self": from_target(cfg.data),
        "data.chat": bool(cfg.data.chat),
        "data.template": bool(cfg.data.template),
        "data.on_target": cfg.data.on_target,  # rows are sources, without outputs
        "trainer.corpus_steps": cfg.trainer.corpus_steps > 0,
        "rollout.url": bool(cfg.rollout.url),
        "draft.quantisation": cfg.draft.quantisation != "none",
        f"trainer.strategy={SHARDED}": cfg.trainer.strategy == SHARDED,
    }
    if wrong := [key for key, used in unsupported.items() if used]:
        raise UserError(
            f"{wrong[0]}: not for {name}: {choice}, with encoder inputs from data.path=, texts that this engine "
            "samples, and a draft that is neither quantised nor sharded: change or leave out this setting"
        )


def ids_of(tokenizer: Tokenizer) -> int:
    """Return the number of ids in a tokenizer. Ids without a token below the last one count too."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _draft(cfg: TrainConfig, target: PreTrainedModel, tokenizer: Tokenizer) -> PreTrainedModel:
    """Return the draft on the meta device. Raises UserError if its token ids are not the target's, or if it is larger
    than the target."""
    given = not cfg.draft.trained  # such a kind first checks what the folder holds
    if not given:
        _draft_path(cfg, tokenizer)
    with torch.device("meta"):
        draft = initial(cfg, target)
    if given:
        _draft_path(cfg, tokenizer)
    refuse_datastore(f"draft.datastore={cfg.draft.datastore}", draft, tokenizer)
    if "vocab_size" in draft.config.get_text_config().to_dict():  # some kinds have none
        refuse_fewer(draft, ids_of(tokenizer), _size_settings(cfg))
    refuse_rounded(cfg.draft.kind, cfg.quantisation.kind, target)
    if cfg.draft.quantisation != "none":
        refuse_unknown(draft)
    if cfg.draft.bits and cfg.draft.trained:
        return draft  # its size is the target's, of fewer bits
    larger, smaller = size_of(target), size_of(draft)
    for what, ours, theirs in zip(("parameters", "parameters used for a token"), smaller, larger, strict=True):
        if ours > theirs:
            raise UserError(
                f"{_size_settings(cfg)}: the draft has {ours / 1e6:.2f} M {what}, the target "
                f"{theirs / 1e6:.2f} M: a draft must not be larger: make the draft smaller"
            )
    return draft


def _draft_path(cfg: TrainConfig, tokenizer: Tokenizer) -> None:
    """Check the model draft.path=, if the run reads it: it must have weights and, but for init=transplant, the target's
    token ids."""
    if (path := cfg.draft.path) and cfg.init.kind == "transplant":
        _weights("draft.path", Path(path))
    elif path and _named(cfg):
        if not Path(path).is_dir() or published(Path(path)) is None:
            own = load_words(path, key="draft.path")
            _weights("draft.path", Path(path))
            same_tokenizer(path, tokenizer, own)
        elif words := load_tokenizer(Path(path)):  # published drafts often have none
            same_tokenizer(path, tokenizer, words)
        say_other_weights(path, read(path).metadata, cfg.target.path, cfg.target.adapter)


def _named(cfg: TrainConfig) -> bool:
    """Return whether the run reads draft.path=: with some values of init=, and for kinds that are not trained."""
    return cfg.init.kind in OF_PATH or (not cfg.draft.trained and cfg.draft.path is not None)


def _size_settings(cfg: TrainConfig) -> str:
    """Return the settings that determine a draft's size, for an error message."""
    shape = cfg.draft
    if _named(cfg):
        return f"draft.path={shape.path}"
    if cfg.init.kind == "target_layers":
        return f"init.layers={cfg.init.layers}"
    return f"draft.width={shape.width}, draft.layers={shape.layers}, draft.intermediate={shape.intermediate}"


def same_tokenizer(path: str, tokenizer: Tokenizer, own: Tokenizer) -> None:
    """Raise UserError if a draft's token ids are not the target's. path: the draft's folder or hub id, for the message.
    tokenizer: the target's. own: the draft's."""
    if problems := tokenizer_problems(tokenizer, own):
        raise UserError(
            f"draft.path={path}: a draft must use the target's token ids; {problems[0]}: name a draft of the target's "
            "family"
        )


def refuse_datastore(where: str, draft: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Raise UserError if a draft looks up token ids that were made with another tokenizer than the target's. where: the
    beginning of the message, a setting of the draft."""
    store = Retrieval.of_settings(getattr(draft.config, "lookup", None) or {}).datastore
    if store and store.about.tokenizer not in (None, hash_tokenizer(tokenizer)):
        raise UserError(
            f"{where}: the datastore has token ids of another tokenizer (that of {store.about.made.get('target')}): "
            "make a new one for this run's target with cotrain datastore target.path="
        )


def say_other_weights(draft: str, metadata: Metadata | None, target: str, adapter: str | None) -> None:
    """Print a line to stderr if the draft was trained for other weights of this target.

    draft: the draft's folder. metadata: the content of its cotrain.json, or None without one. target, adapter: paths.
    """
    if not rank() and (changed := other_weights(metadata, target, adapter)):
        warn(f"draft.path={draft}: {changed}")


class Size(NamedTuple):
    """The size of a model. parameters: the number of all parameters. active: how many a pass uses for one token, which
    gives its cost: with the head and the chosen experts, without embeddings that are only looked up."""

    parameters: int
    active: int


def other_sampling(regime: Regime | ServedRegime, target: PreTrainedModel) -> list[str]:
    """Return a line for the user with the regime and the target's own sampling settings, if these are others: a server
    fills what a request leaves out with them. Return [] if they are the same."""
    given = regime.model_dump()
    own = {key: getattr(target.generation_config, key, None) for key in given}
    if not any(own[key] not in (None, value) for key, value in given.items()):
        return []
    asked = " ".join(f"{key}={value}" for key, value in given.items())
    said = " ".join(f"regime.{key}={value}" for key, value in own.items() if value is not None)
    return [
        f"{asked}; the target's generation_config.json, which servers take for what a request leaves out, says {said}"
    ]


def size_of(model: PreTrainedModel) -> Size:
    """Return the size of a model. The model may be on the meta device."""
    config = model.config.get_text_config()
    share = next(
        (
            getattr(config, CHOSEN) / getattr(config, key)
            for key in EXPERTS
            if getattr(config, key, None) and getattr(config, CHOSEN, None)
        ),
        1.0,
    )
    looked_up, head = model.get_input_embeddings(), model.get_output_embeddings()
    total, active = 0, 0.0
    for name, weight in model.named_parameters():
        total += weight.numel()
        if looked_up is not None and weight is looked_up.weight and (head is None or head.weight is not weight):
            continue
        active += weight.numel() * (share if ".experts." in name else 1.0)
    return Size(total, int(active))


def read_texts(cfg: TrainConfig, target: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, Source]:
    """Return the user's prompts or documents, keyed by split, and set rollout.prompt_tokens in `cfg`, in place, if it
    is 0. The draft learns from no held-out prompt. The embedded corpora are read only for trainer.corpus_steps;
    otherwise {} is returned for them."""
    splits = SPLITS if cfg.data.path else SPLITS[:2] if reads_given(cfg, False) else ()
    limit = partial(fill_prompt_tokens, cfg, target, timed(cfg.bench) * cfg.measure)
    if not splits:
        limit({})
        return {}
    template, encoder = template_of(cfg, target, tokenizer), target.config.is_encoder_decoder
    return sources_apart(cfg.data, splits, template, encoder, limit)


def fill_prompt_tokens(
    cfg: TrainConfig | RolloutConfig, target: PreTrainedModel, measured: int, sources: Mapping[str, Source]
) -> int:
    """Set rollout.prompt_tokens in `cfg`, in place, if it is 0, and return it. Raises UserError if the target's context
    has no room for prompts.

    measured: how many tokens a measurement needs after a prompt. sources: split -> the user's texts, or {} for the
    embedded corpora.
    """
    if not cfg.rollout.prompt_tokens and target.config.is_encoder_decoder and not cfg.data.path:
        cfg.rollout.prompt_tokens = LONGEST
    if not cfg.rollout.prompt_tokens:
        after = 0 if target.config.is_encoder_decoder else max(cfg.rollout.new_tokens, measured)
        room = longest_text(target.config) - after
        if room < 1:
            key = "rollout.new_tokens" if after == cfg.rollout.new_tokens else "bench.new_tokens"
            raise UserError(
                f"{key}={after}: the target's context has {longest_text(target.config)} tokens, and prompts need some "
                f"of them: lower {key}="
            )
        others = [texts for split, texts in sources.items() if split != "train"]
        cfg.rollout.prompt_tokens = prompt_tokens(sources.get("train"), room, others)
    return cfg.rollout.prompt_tokens


def shown(cfg: TrainConfig, source: Source, tokenizer: Tokenizer) -> list[str]:
    """Return one line for each of the first `SHOWN` training prompts, as the target reads them, special tokens
    included; with data.on_target, also one for the part of its answer that is learnt."""
    ask = cfg.rollout
    if isinstance(source, PromptRows):
        given = ask.new_tokens if cfg.data.on_target else 0
        rows = source.chosen(SHOWN, ask.prompt_tokens, ask.seed)
        pairs = [(row["prompt"], row["completion"][:given]) for row in rows]
    else:
        pairs = [(prompt, []) for _, prompt in source.prompts(SHOWN, ask.prompt_tokens, ask.seed)]
    lines = []
    for prompt, answer in pairs[:SHOWN]:
        lines.append(f"prompt        of {len(prompt)} tokens, as the target reads it: {_excerpt(tokenizer, prompt)}")
        if answer:
            lines.append(f"answer        of {len(answer)} tokens, which are learnt: {_excerpt(tokenizer, answer)}")
    return lines


def _excerpt(tokenizer: Tokenizer, ids: list[int]) -> str:
    text = str(tokenizer.decode(ids))
    return repr(text if len(text) <= 2 * CHARACTERS else f"{text[:CHARACTERS]} ... {text[-CHARACTERS:]}")


def _counts(cfg: TrainConfig, source: Source) -> list[str]:
    """Return lines for the user, if they apply: there are fewer prompts than rollout.texts=; completions are not
    learnt; each text is read many times (`repetitions`)."""
    ask, given = cfg.rollout, cfg.data.on_target and isinstance(source, PromptRows)
    prompts = source.prompts(ask.texts, ask.prompt_tokens, ask.seed)
    fewer = max(Counter(domain for domain, _ in prompts).values()) < ask.texts
    lines = [f"rollout.texts={ask.texts}: data.path has {len(prompts)} prompts to learn from"] * fewer
    if not cfg.draft.trained:
        return lines
    if (
        isinstance(source, PromptRows)
        and not given
        and not cfg.trainer.corpus_steps
        and any(row["completion"] for row in source.rows)
    ):
        lines.append(
            "data.path: its completions are not learnt from, since the target writes its own; "
            "data.on_target=true learns from those of the target"
        )
    return [*lines, *repetitions(cfg, len(prompts) if given else len(prompts) * len(learnt(cfg)), fewer)]


def repetitions(cfg: TrainConfig, texts: int, all_prompts: bool = False) -> list[str]:
    """Return a line for the user if each of `texts` training texts is read many times, which says what more of them
    would give; else [], and if time limits the steps. all_prompts: whether rollout.texts= exceeds the prompts that the
    data have."""
    reads = (cfg.trainer.steps - cfg.trainer.corpus_steps) * cfg.trainer.batch * cfg.trainer.accumulate
    if cfg.overfit or time_limited(cfg) or not texts or reads < OFTEN * texts:
        return []
    more = round(reads / READ)
    remedy = "give more prompts" if all_prompts else f"set rollout.texts={round(cfg.rollout.texts * more / texts)}"
    return [
        f"{texts} texts are learnt from, each about {reads / texts:.0f} times; more texts help more than "
        f"repetitions ({MEASURED}): for {more} texts, each read {READ} times, {remedy}"
    ]


def _say(cfg: TrainConfig, texts: int) -> None:
    """Print the line about `texts` training texts that are read many times, for texts that are not the user's."""
    if cfg.draft.trained and not rank():
        for line in repetitions(cfg, texts):
            print(line)


def _texts(cfg: TrainConfig, tokenizer: Tokenizer, sources: Mapping[str, Source]) -> None:
    """Check that there are enough texts for training, for ranking checkpoints and for measuring. Print how many there
    are."""
    if not cfg.data.path:
        refuse_given(cfg)
        return
    ask = cfg.rollout
    _refuse_template(cfg, sources["train"].rendered)
    if not rank():
        lines = said_of_rows(sources, ask.prompt_tokens)
        print(*lines, *shown(cfg, sources["train"], tokenizer), *_counts(cfg, sources["train"]), sep="\n")
    for split, count in (("train", ask.texts), ("held_out", ask.held_out_texts)):
        if not (cfg.data.on_target and isinstance(sources[split], PromptRows)):
            sources[split].prompts(count, ask.prompt_tokens, ask.seed)
    if cfg.measure:
        train, ranking, final = (sources[split].several(ask.prompt_tokens, ask.seed) for split in SPLITS)
        apart(ranking, final, train, "own")
    if not (cfg.data.on_target and isinstance(sources["train"], PromptRows)):
        refuse_given(cfg)


def _refuse_template(cfg: TrainConfig, rendered: bool) -> None:
    if cfg.data.template and not rendered:
        raise UserError(
            "data.template: the setting has no effect here, because these texts are not rendered; set data.chat=true "
            "to render them"
        )


def domains(cfg: TrainConfig, target: PreTrainedModel, sources: Mapping[str, Source], split: str) -> set[str]:
    """Return the names of a split's domains, in the user's texts or in the embedded corpora. For an encoder-decoder,
    the latter are tasks."""
    if from_target(cfg.data):
        return {SELF}
    if split in sources:
        return {domain for domain, _ in sources[split].prompts(1, cfg.rollout.prompt_tokens, 0)}
    sizes = cfg.data.bytes if split == "train" else cfg.data.held_out_bytes
    named = {domain for domain, size in sizes.items() if size}
    return {task for task, corpus in CORPORA.items() if corpus in named} if target.config.is_encoder_decoder else named


def _shares(cfg: TrainConfig, target: PreTrainedModel, sources: Mapping[str, Source]) -> None:
    """Raise UserError if data.shares names unknown domains, or leaves no text to learn from."""
    if not (shares := shares_of(cfg)):
        return
    known = domains(cfg, target, sources, "train")
    if unknown := sorted(set(cfg.data.shares) - known):
        raise UserError(
            f"data.shares: no text of {', '.join(unknown)}; the domains are {', '.join(sorted(known))}: set "
            "data.shares= for these alone"
        )
    if all(shares.get(domain, 1.0) * cfg.rollout.texts < 1 for domain in known):
        raise UserError(
            f"data.shares: {shares} leave no text to learn from, of {cfg.rollout.texts} texts of a domain: "
            "raise a share or rollout.texts="
        )


def _lengths(cfg: TrainConfig, target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raise UserError if the texts to sample, to learn from or to time exceed the context of target or draft."""
    ask, size = cfg.rollout, cfg.bench
    long, short = longest_text(target.config), longest_text(draft.config)
    start = start_of(target)
    fits("rollout.prompt_tokens", ask.prompt_tokens, "rollout.new_tokens", ask.new_tokens, long, start)
    if cfg.measure:
        key, prompt = "bench.prompt_tokens", size.prompt_tokens
        if cfg.data.path:
            key, prompt = "rollout.prompt_tokens", ask.prompt_tokens
        fits(key, prompt, timed_by(size), timed(size), min(long, short), start)


def timed(size: Bench) -> int:
    """Return how many tokens a measurement needs after a prompt: the larger of bench.new_tokens and the tokens of the
    texts on which costs are timed."""
    return max(size.new_tokens, size.new_tokens // 2 + max(*size.depths, *SPANS, size.trees) + 1)


def timed_by(size: Bench) -> str:
    """Return the keys that determine `timed(size)`, for an error message."""
    return "bench.new_tokens" + ", bench.depths" * (timed(size) > size.new_tokens)


def fits(key: str, prompt: int, other: str, new: int, room: int, start: Start | None = None) -> None:
    """Raise UserError if a prompt of `prompt` tokens, followed by `new` tokens, exceeds `room`, the context in tokens.

    key, other: the settings that give `prompt` and `new`, for the message. start: for an encoder-decoder, the first ids
    of the decoder's texts. The encoder input (`prompt` tokens) and the decoder's text (`start` plus `new` tokens) must
    then each fit.
    """
    if start is not None:
        for name, size in ((key, prompt), (other, len(start) + new)):
            if size > room:
                raise UserError(f"{name}: {size} tokens exceed the context of {room} tokens: lower {name}=")
    elif prompt + new > room:
        raise UserError(
            f"{key}, {other}: prompts of {prompt} tokens and {new} new tokens exceed {room} tokens, the longest text "
            "for target and draft: lower one of the two"
        )


# --- combinations of losses, kinds and texts that are not possible


def refuse_packed(job: Job, student: Student) -> None:
    """Raise ValueError if target or draft would read several texts that are packed into one block as a single text."""
    if not job.cfg.trainer.corpus_steps or job.chats:
        return
    # servers read each text of a block as a request of its own
    apart = bool(job.cfg.teacher.urls) or keeps_apart(job.target, halves(job.target)[0])
    for key, model, separate in (("target.path", job.target, apart), ("draft", student.network, student.keeps_apart())):
        if not separate:
            raise ValueError(
                f"{key}: {type(model).__name__} reads texts packed into blocks as one text; "
                "train only on texts of the target: set trainer.corpus_steps=0"
            )


def refuse_losses(cfg: TrainConfig) -> None:
    """Raise ValueError if no training text is sampled at a temperature in draft.temperatures=."""
    if missing := [t for t in cfg.draft.temperatures or () if t not in learnt(cfg)]:
        raise ValueError(
            f"draft.temperatures: temperature {missing[0]:g} is not in rollout.train_temperatures={learnt(cfg)}: add "
            "it there, or set rollout.train_temperatures=[] to train at all of draft.temperatures"
        )


def refuse_rounded(kind: str, quantisation: str, target: PreTrainedModel) -> None:
    """Raise ValueError for a draft that is the target in fewer bits, if the target is already quantised. kind: the kind
    of draft. quantisation: the run's quantisation.kind."""
    current = quantisation if quantisation != "none" else quantisation_of(target.config)
    if student_class(kind).rounds_target and current != "none":
        raise ValueError(
            f"quantisation: draft={kind} rounds the target itself, but the target is already in {current}: set "
            "quantisation=none or name an unquantised target.path=, or set another draft="
        )


def refuse_given(cfg: TrainConfig) -> None:
    """Raise ValueError if a loss that needs texts sampled from the target would be applied to the user's texts."""
    corpus, losses = cfg.trainer.corpus_steps, stages(cfg.loss)
    begins = [0.0, *(stage.until * cfg.trainer.steps for stage in losses[:-1])]
    early = time_limited(cfg)  # with a budget of time, a stage may begin earlier
    active = [stage for stage, begin in zip(losses, begins, strict=True) if corpus > begin or (corpus and early)]
    # such a loss counts target calls, which are known only for tokens that the target emitted
    if any(stage.loss.sequence or stage.loss.weighted for stage in active):
        raise ValueError(
            "trainer.corpus_steps: calls, calls_block and calls_tv need texts "
            "sampled from the target, not texts of the user: set trainer.corpus_steps=0"
        )
