"""What a training run asks of its settings, files and machine. `check=true` and the run call the same function first,
so that what one refuses the other does too; no weight of the target is read here."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

import torch
from lightning.fabric.connector import _PRECISION_INPUT
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cotrain.bench import measurement
from cotrain.board.loggers import WANDB
from cotrain.config.groups import Bench, Trainer
from cotrain.config.settings import TrainConfig
from cotrain.data.conversations import Chats
from cotrain.data.prompt_lengths import prompt_tokens
from cotrain.data.prompt_rows import PromptRows
from cotrain.data.splits import SPLITS, apart
from cotrain.errors import UserError
from cotrain.rollout.training_texts import Source
from cotrain.run_folder import writable
from cotrain.students.base import UNTRAINED
from cotrain.teacher.target_model import load_config, load_words, refuse_quantisation
from cotrain.training import assembly, fit
from cotrain.training.job import source
from cotrain.training.optim import precision
from cotrain.training.phases import phases_of
from cotrain.training.sizes import Size, size_of
from inference.drafts.bundled_target import resolve
from inference.drafts.compatibility import tokenizer_problems
from inference.drafts.draft_folder import GENERATION
from inference.drafts.weight_files import weight_files
from inference.measure.costs import SPANS
from inference.measure.environment import device
from inference.servers.openai_client import Client

LAUNCHERS = {"WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "SLURM_NTASKS"}  # variables of what starts several machines
HALF = ("16", "16-true", "16-mixed")  # Lightning's names of float16, "16" meaning 16-mixed


@dataclass(frozen=True)
class Known:
    """What a run knows before it loads weights: both models without storage, the target's tokenizer, own texts."""

    target: PreTrainedModel
    tokenizer: Tokenizer
    draft: PreTrainedModel
    sources: Mapping[str, Source] = field(default_factory=dict)


def require(cfg: TrainConfig) -> Known:
    """Raise UserError, naming the key to change, for what would stop the run later. Its output folder is for
    `run_folder.refuse`; whether the embedded corpora hold as many prompts as asked is found when they are read."""
    try:
        _settings(cfg)
        _places(cfg)
        target, tokenizer = outline(cfg.target.path, cfg.target.trust_remote_code)
        _target(cfg, target, tokenizer)
        draft = _draft(cfg, target, tokenizer)
        sources = _sources(cfg, target, tokenizer)
        fill_prompt_tokens(cfg, target, sources.get("train"))
        _lengths(cfg, target, draft)
        _texts(cfg, target, tokenizer, sources)
        _shares(cfg, sources)
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error
    return Known(target, tokenizer, draft, sources)


def outline(path: str, trust_remote_code: bool = False) -> tuple[PreTrainedModel, Tokenizer]:
    """A target without storage, and its tokenizer. Raises as `load_config`, and for weights that are not there."""
    config, tokenizer = load_config(path, trust_remote_code)
    return sketch(path, config, trust_remote_code), tokenizer


def sketch(
    path: str, config: PretrainedConfig, trust_remote_code: bool = False, key: str = "target.path"
) -> PreTrainedModel:
    """A model without storage. Raises UserError, naming the key, where a folder holds no weights."""
    place = Path(resolve(path))
    _weights(key, place)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    if (place / GENERATION).is_file():  # which names the ids that end a text
        model.generation_config = GenerationConfig.from_pretrained(place)
    return model.eval()


def _weights(key: str, place: Path) -> None:
    """Of a folder; what the hub has is known when it is loaded."""
    try:
        if place.is_dir():
            weight_files(place)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {error}") from error


def _settings(cfg: TrainConfig) -> None:
    """What settings alone tell."""
    if cfg.trainer.corpus_steps > cfg.trainer.steps:
        raise UserError(f"trainer.corpus_steps={cfg.trainer.corpus_steps}: at most trainer.steps={cfg.trainer.steps}")
    if cfg.trainer.nodes > 1 and not LAUNCHERS & set(os.environ):
        raise UserError(f"trainer.nodes={cfg.trainer.nodes}: each machine's process must be started by torchrun or "
                        "srun, see docs/distributed.md; trainer.nodes=1 on this machine alone")  # fmt: skip
    if cfg.policy.k is None:
        raise UserError("policy.k: checkpoints are compared at a draft length that is given, as in policy=fixed")
    measurement.refuse(cfg.bench)
    fit.refuse(cfg)
    assembly.refuse(cfg, assembly.stages(cfg.loss))
    phases_of(cfg, max(cfg.trainer.steps // cfg.trainer.validations, 1))
    known = {str(name): None for one in get_args(_PRECISION_INPUT) for name in get_args(one)}
    if (chosen := precision(cfg.trainer.precision)) not in known:
        raise UserError(f"trainer.precision={cfg.trainer.precision}: it must be auto or one of {', '.join(known)}")
    if cfg.trainer.strategy not in ("auto", fit.SHARDED, *StrategyRegistry.available_strategies()):
        raise UserError(f"trainer.strategy={cfg.trainer.strategy}: it must be auto, ddp, {fit.SHARDED} or another "
                        "that Lightning knows")  # fmt: skip
    if cfg.trainer.logger == WANDB and find_spec("wandb") is None:
        raise UserError("trainer.logger=wandb: it needs wandb: pip install wandb")
    machine(cfg.trainer)
    _lightning(cfg.trainer, chosen)


def _lightning(cfg: Trainer, chosen: str) -> None:
    """Lightning's own choice of accelerator, strategy and precision, which is what refuses them after texts were
    sampled. No process is started."""
    where = "gpu" if device() != "cpu" else "cpu"
    if where == "cpu" and chosen in HALF:
        raise UserError(f"trainer.precision={cfg.precision}: float16 trains on a GPU alone, and this machine has none: "
                        "trainer.precision=auto")  # fmt: skip
    for key, value, strategy, name in (
        ("precision", cfg.precision, "auto", chosen),
        ("strategy", cfg.strategy, fit.strategy_of(cfg), "32-true"),
        ("strategy", cfg.strategy, fit.strategy_of(cfg), chosen),
    ):
        try:
            _AcceleratorConnector(devices=cfg.devices, num_nodes=cfg.nodes, accelerator=where, strategy=strategy,
                                  precision=cast(Any, name))  # fmt: skip
        except Exception as error:  # MisconfigurationException, ImportError, TypeError, ... by strategy
            why = " ".join(str(error).split())
            said = f"trainer.{key}={value}: Lightning cannot use it here: {why}"
            raise UserError(f"{said}; trainer.{key}=auto") from error


def machine(cfg: Trainer) -> None:
    """GPUs that are asked for are there; without one, processes share the CPU."""
    if device() == "cpu":
        if cfg.accelerator == "gpu":
            raise UserError("trainer.accelerator=gpu: this machine has no GPU that torch can use; trainer=cpu trains "
                            "without one")  # fmt: skip
    elif cfg.devices > (found := torch.cuda.device_count()):
        raise UserError(f"trainer.devices={cfg.devices}: one process a GPU, and this machine has {found}")


def _places(cfg: TrainConfig) -> None:
    """Folders to write to besides the run's own, the adapter, the server."""
    for key, place in (("trainer.cache", cfg.trainer.cache), ("rollout.folder", cfg.rollout.folder)):
        if place:
            writable(key, place)
    adapter = cfg.target.adapter
    if adapter and find_spec("peft") is None:
        raise UserError("target.adapter: it needs peft: pip install 'cotrain[adapter]'")
    local = adapter and (Path(adapter).is_absolute() or Path(adapter).exists())
    if adapter and local and not (Path(adapter) / "adapter_config.json").is_file():
        raise UserError(f"target.adapter: {adapter} is no adapter: it has no adapter_config.json")
    if cfg.rollout.url:
        server("rollout.url", cfg.rollout.url)


def server(key: str, url: str, model: str | None = None) -> Client:
    """A server that answers. Raises UserError naming the key for any other."""
    try:
        return Client(url, model)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{key}={url}: no OpenAI-compatible server answers there: {error}") from error


def _target(cfg: TrainConfig, target: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Can be held as asked, and has a row for every id of its tokenizer."""
    refuse_quantisation(cfg.target.path, cfg.quantisation.kind, target.config)
    size, rows = ids_of(tokenizer), target.config.get_text_config().vocab_size
    if not 0 < size <= rows:
        raise UserError(f"target.path: {cfg.target.path} has a tokenizer of {size} ids and a model of {rows}")
    if cfg.regime.top_k > size:
        raise UserError(f"regime.top_k={cfg.regime.top_k}: the target has {size} tokens; regime.top_k=0 cuts none")
    if cfg.trainer.top > size:
        raise UserError(f"trainer.top: {cfg.trainer.top} tokens of {size}")
    if cfg.quantisation.kind != "none" and device() == "cpu":
        print(f"warning: quantisation={cfg.quantisation.kind} on a CPU: acceptance is as on a GPU, speeds are not",
              file=sys.stderr)  # fmt: skip


def ids_of(tokenizer: Tokenizer) -> int:
    """How many ids a tokenizer has."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _draft(cfg: TrainConfig, target: PreTrainedModel, tokenizer: Tokenizer) -> PreTrainedModel:
    """Without storage. Raises for one that shares no tokenizer with the target, or is the larger of the two."""
    given = cfg.draft.kind in UNTRAINED  # a kind that takes draft.path as it is says first what it is
    if not given:
        _place(cfg, tokenizer)
    with torch.device("meta"):
        draft = assembly.initial(cfg, target)
    if given:
        _place(cfg, tokenizer)
    assembly.refuse_draft(cfg, draft, target)
    not_larger(_origin(cfg), size_of(target), size_of(draft))
    return draft


def _place(cfg: TrainConfig, tokenizer: Tokenizer) -> None:
    """draft.path, where weights come from it: a model, with weights and the target's token ids."""
    if (path := cfg.draft.path) and _named(cfg):
        own = load_words(path, key="draft.path")
        _weights("draft.path", Path(path))
        same_tokenizer(path, tokenizer, own)


def _named(cfg: TrainConfig) -> bool:
    """Whether the draft's weights are those of draft.path: init=pretrained, and kinds that train nothing."""
    return cfg.init.kind == "pretrained" or (cfg.draft.kind in UNTRAINED and cfg.draft.path is not None)


def _origin(cfg: TrainConfig) -> str:
    """The settings that decide a draft's size, as an error names them."""
    shape = cfg.draft
    if _named(cfg):
        return f"draft.path={shape.path}"
    if cfg.init.kind == "target_layers":
        return f"init.layers={list(cfg.init.layers)}"
    return f"draft.width={shape.width}, draft.layers={shape.layers}, draft.intermediate={shape.intermediate}"


def same_tokenizer(path: str, tokenizer: Tokenizer, own: Tokenizer) -> None:
    """Raise UserError for a draft whose token ids are not the target's."""
    if problems := tokenizer_problems(tokenizer, own):
        raise UserError(f"draft.path={path}: a draft must use the target's token ids; {problems[0]}")


def not_larger(origin: str, target: Size, draft: Size) -> None:
    """Raise UserError for a draft of more parameters than its target, or one that computes with more for a token."""
    for what, ours, theirs in (
        ("parameters", draft.parameters, target.parameters),
        ("parameters a token is computed with", draft.active, target.active),
    ):
        if ours > theirs:
            raise UserError(f"{origin}: the draft has {ours / 1e6:.2f} M {what}, the target {theirs / 1e6:.2f} M: a "
                            "draft must be the smaller model")  # fmt: skip


def _sources(cfg: TrainConfig, target: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, Source]:
    """Own texts by split, read as the run reads them; none of the embedded corpora."""
    return {split: source(cfg, split, target, tokenizer) for split in SPLITS} if cfg.data.path else {}


def fill_prompt_tokens(cfg: TrainConfig, target: PreTrainedModel, train: Source | None) -> None:
    """Give `rollout.prompt_tokens` its value where it is 0; train: own texts to learn from, if there are."""
    if not cfg.rollout.prompt_tokens:
        room = holds(target.config) - max(cfg.rollout.new_tokens, timed(cfg.bench))
        cfg.rollout.prompt_tokens = prompt_tokens(train, room)


def _texts(cfg: TrainConfig, target: PreTrainedModel, tokenizer: Tokenizer, found: Mapping[str, Source]) -> None:
    """Whether own texts give prompts to learn from, to rank and to measure by."""
    if not found:
        return
    ask, chats = cfg.rollout, isinstance(found["train"], Chats)
    if cfg.data.template and not (chats or cfg.data.chat):
        raise UserError(
            "data.template: nothing reads it here: these texts are not rendered; data.chat=true renders them"
        )
    if chats and tokenizer.chat_template is None:
        print("warning: the target's tokenizer has no chat template: what a user says is the prompt as it stands",
              file=sys.stderr)  # fmt: skip
    for split, texts in found.items():
        print(texts.left_out(ask.prompt_tokens, split), end="")
    for split, count in (("train", ask.texts), ("held_out", ask.held_out_texts)):
        if not (cfg.data.on_target and isinstance(found[split], PromptRows)):
            found[split].prompts(count, ask.prompt_tokens, ask.seed)
    if cfg.measure:
        learnt, ranking, final = (found[split].several(ask.prompt_tokens, ask.seed) for split in SPLITS)
        apart(ranking, final, learnt, "own")
    if not (cfg.data.on_target and isinstance(found["train"], PromptRows)):
        assembly.refuse_given(cfg, assembly.stages(cfg.loss))
    long = holds(target.config)
    if cfg.trainer.corpus_steps and cfg.data.block > long and not isinstance(found["train"], PromptRows):
        raise UserError(f"data.block={cfg.data.block}: the target holds texts of at most {long} tokens")


def domains(cfg: TrainConfig, sources: Mapping[str, Source], split: str) -> set[str]:
    """Of own texts those that their rows name; of the embedded corpora those that are asked for."""
    if split in sources:
        return {domain for domain, _ in sources[split].prompts(1, cfg.rollout.prompt_tokens, 0)}
    sizes = cfg.data.bytes if split == "train" else cfg.data.held_out_bytes
    return {domain for domain, size in sizes.items() if size}


def _shares(cfg: TrainConfig, sources: Mapping[str, Source]) -> None:
    """A share of a domain that no text is of would change nothing, in silence; too small ones leave nothing."""
    if not cfg.data.shares:
        return
    known, shares = domains(cfg, sources, "train"), assembly.shares_of(cfg)
    if unknown := sorted(set(cfg.data.shares) - known):
        raise UserError(f"data.shares: no text is of {', '.join(unknown)}; the domains are {', '.join(sorted(known))}")
    each = cfg.rollout.texts // cfg.rollout.rounds  # of a domain in a round, at least
    if all(shares.get(domain, 1.0) * each < 1 for domain in known):
        raise UserError(f"data.shares: {shares} leave no text of {each} a domain to learn from")


def _lengths(cfg: TrainConfig, target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Texts that are to be sampled, learnt from and timed must fit what the models hold."""
    ask, size = cfg.rollout, cfg.bench
    long, short = holds(target.config), holds(draft.config)
    fits("rollout.prompt_tokens", ask.prompt_tokens, "rollout.new_tokens", ask.new_tokens, long)
    if cfg.measure:
        key, prompt = "bench.prompt_tokens", size.prompt_tokens
        if cfg.data.path:
            key, prompt = "rollout.prompt_tokens", ask.prompt_tokens
        fits(key, prompt, "bench.new_tokens", timed(size), min(long, short))


def timed(size: Bench) -> int:
    """Tokens behind a prompt that a measurement reaches: of its text, or where the costs of drafts are timed."""
    return max(size.new_tokens, size.new_tokens // 2 + max(*size.depths, *SPANS, size.trees) + 1)


def fits(key: str, prompt: int, other: str, new: int, room: int) -> None:
    """Raise UserError for prompts and what comes behind them that are more than a model holds."""
    if prompt + new > room:
        raise UserError(f"{key}, {other}: prompts of {prompt} tokens and {new} behind them are more than the {room} "
                        "that a text may have")  # fmt: skip


def holds(config: PretrainedConfig) -> int:
    """Tokens of a text that a model of this configuration holds."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31)
