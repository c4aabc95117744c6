"""Allowed values of settings, which every command checks first, and the settings that may change on resume. Those are
the settings that change no weights, and those that extend the training."""

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cotrain.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
MOST_NODES = 62  # of inference.verify.tree, a test compares them
OF_STEPS = ("steps", "corpus_steps", "batch", "validations", "checkpoint_minutes", "accumulate", "clip", "ema",
            "minutes", "remember_mb", "cache", "precision", "strategy")  # fmt: skip
OF_TEXTS = ("texts", "held_out_texts", "new_tokens", "temperatures", "train_temperatures", "rows", "rounds", "url")
COLDEST = 1e-5  # of inference.sampling, which takes torch to import; a test compares them


class Range(NamedTuple):
    """The allowed values of a setting. fits: a function that says whether a value is allowed. words: the allowed
    values, for the error message. empty: whether a list of them may have none."""

    fits: Callable[[Any], bool]
    words: str
    empty: bool = True


def _at_least(least: float) -> Range:
    return Range(lambda value: value >= least, f"at least {least}")


def _one_of(names: tuple[str, ...]) -> Range:
    return Range(lambda value: value in names, f"one of {', '.join(names)}")


SOME, ANY = _at_least(1), _at_least(0)  # counts that may not, and may, be 0
POSITIVE = Range(lambda value: 0 < value < math.inf, "above 0")
NOT_NEGATIVE = Range(lambda value: 0 <= value < math.inf, "at least 0")
SHARE = Range(lambda value: 0 <= value <= 1, "from 0 to 1")
FRACTION = Range(lambda value: 0 < value <= 1, "above 0, at most 1")
TEMPERATURE = Range(lambda value: value == 0 or COLDEST <= value < math.inf, f"0 (greedy) or at least {COLDEST:g}")
VERIFY = _one_of(("token", "block", "match", "coupled", "tree", "traversal", "lossy_typical"))
DTYPE, SERVED_DTYPE = _one_of(DTYPES), _one_of((*DTYPES, "as_trained"))

# By key; of a list, each value. A key of one command alone is written `command:key`.
RULES: dict[str, Range] = {
    "regime.temperature": TEMPERATURE,
    "regime.top_k": ANY,
    "regime.top_p": FRACTION,
    "policy.k": SOME,
    "generate:policy.k": ANY,
    "verify": VERIFY,
    "objective": _one_of(("sampled_draft", "greedy_draft")),
    "target.dtype": DTYPE,
    "export:dtype": _one_of(("auto", "float32", "bfloat16", "float16", "q8_0")),
    "draft.width": SOME,
    "draft.layers": SOME,
    "draft.intermediate": SOME,
    "draft.head_dim": SOME,
    "draft.kv_heads": SOME,
    "draft.rank": ANY,
    "draft.depths": SOME,
    "draft.vocabulary": SOME,
    "draft.head_rank": SOME,
    "draft.encoder_layers": SOME,
    "draft.bits": Range(lambda value: value in (4, 8), "8 (int8) or 4 (nf4)"),
    "draft.inner": SOME,
    "draft.temperatures": TEMPERATURE,
    "draft.markov": ANY,
    "loss.switch": SHARE,
    "loss.decay": NOT_NEGATIVE,
    "mode": _one_of(("distil", "joint")),
    "joint.epsilon": POSITIVE,
    "joint.rank": SOME,
    "joint.lr": POSITIVE,
    "joint.warm_steps": ANY,
    "joint.steps": SOME,
    "joint.every": SOME,
    "joint.weight": NOT_NEGATIVE,
    "joint.detach": SHARE,
    "data.block": _at_least(2),
    "data.shares": SHARE,
    "data.embedded_shares": SHARE,
    "rollout.texts": SOME,
    "rollout.held_out_texts": SOME,
    "rollout.prompt_tokens": ANY,
    "rollout.new_tokens": SOME,
    "rollout.temperatures": TEMPERATURE,
    "rollout.train_temperatures": TEMPERATURE,
    "rollout.rows": SOME,
    "rollout.rounds": SOME,
    "optimizer.kind": _one_of(("adamw", "muon")),
    "optimizer.lr": POSITIVE,
    "optimizer.betas": Range(lambda value: 0 <= value < 1, "from 0 to below 1"),
    "optimizer.weight_decay": ANY,
    "trainer.steps": SOME,
    "trainer.corpus_steps": ANY,
    "trainer.batch": SOME,
    "trainer.validations": SOME,
    "trainer.patience": ANY,
    "trainer.checkpoint_minutes": NOT_NEGATIVE,
    "trainer.remember_mb": ANY,
    "trainer.accumulate": SOME,
    "trainer.clip": ANY,
    "trainer.ema": Range(lambda value: 0 <= value < 1, "from 0 (no average) to below 1"),
    "trainer.accelerator": _one_of(("auto", "gpu")),
    "trainer.logger": _one_of(("tensorboard", "wandb")),
    "trainer.devices": SOME,
    "trainer.nodes": SOME,
    "trainer.threads": ANY,
    "bench.prompts": SOME,
    "bench.quick_prompts": SOME,
    "bench.prompt_tokens": SOME,
    "bench:bench.prompt_tokens": ANY,
    "serve_check:prompt_tokens": ANY,
    "bench.new_tokens": SOME,
    "bench.parity_tokens": SOME,
    "bench.rows": SOME,
    "bench.draft_dtype": DTYPE,
    "bench:bench.draft_dtype": SERVED_DTYPE,
    "plan:bench.draft_dtype": SERVED_DTYPE,
    "bench.trees": Range(lambda value: value == 0 or 2 <= value <= MOST_NODES, f"0, or from 2 to {MOST_NODES} nodes"),
    "minutes": POSITIVE,
    "max_new_tokens": SOME,
    "k": SOME,
    "temperature": TEMPERATURE,
    "prompts": SOME,
    "generate:prompts": Range(lambda value: True, "a file"),
    "prompt_tokens": SOME,
    "new_tokens": SOME,
    "at_once": SOME,
    "threads": ANY,
    "rollout:kind": _one_of(("train", "held_out")),
    "datastore:depth": SOME,
    "plan:bench.prompt_tokens": ANY,
    "plan:texts": Range(lambda value: value >= 16, "at least 16: an interval from fewer texts is too narrow"),
    "plan:batches": SOME._replace(empty=False),
    "plan:temperatures": TEMPERATURE,
    "draft.shortest": SOME,
}


def refuse(command: str, cfg: "DictConfig") -> None:
    """Raise UserError for the first setting of `command` that is outside its range. The message has its key and value.

    null is not checked here. The types allow it for some keys, and there it means that nothing was chosen.
    """
    from omegaconf import OmegaConf

    for key in (key for key in RULES if ":" not in key):
        _refuse(key, rule(command, key), OmegaConf.select(cfg, key))
    for key in (key.partition(":")[2] for key in RULES if key.startswith(f"{command}:")):
        _refuse(key, rule(command, key), OmegaConf.select(cfg, key))


class Unread(NamedTuple):
    """Settings that nothing reads in some runs. A key that ends in a point stands for all keys below it.

    when: a function that says whether this is such a run. It gets the run's settings and a function that returns the
    class of the draft's kind, a `Student`. instead: the reason and what to set. fatal: whether it is an error. If it is
    not, only a line is printed, because in a sweep over kinds some settings apply to some kinds only.
    """

    keys: tuple[str, ...]
    when: Callable[[Any, Callable[[], Any]], bool]
    instead: str
    fatal: bool = True

    def names(self, key: str) -> bool:
        return any(key == one or (one.endswith(".") and key.startswith(one)) for one in self.keys)


def _is_file(cfg: Any, _: Any = None) -> bool:
    """Return whether data.path names a file, or files by a pattern."""
    path = str(cfg.data.path)
    return Path(path).is_file() or bool(set(path) & set("*?["))


def _one_split(cfg: Any, _: Any = None) -> bool:
    """Return whether the texts have one split. Embedded texts, a file and a pattern have one; a folder, a saved data
    set and the hub may have several."""
    return cfg.data.path is None or (not cfg.data.config and _is_file(cfg))


def _same_exit(cfg: Any) -> bool:
    """Return whether the draft is an early exit without a change of its layers."""
    return "kind" in cfg.draft and cfg.draft.kind == "early_exit" and not cfg.draft.rank


UNREAD: dict[str, tuple[Unread, ...]] = {  # by the group that it is about
    "data": (
        Unread(("data.take",), lambda cfg, _: not cfg.data.streaming, "it applies to streams only: set "
                                                                      "data.streaming=true, or leave it out"),
        Unread(("data.split",), _one_split, "it applies only to a folder, a saved data set or the hub: leave it out"),
        Unread(("data.config",), lambda cfg, _: cfg.data.path is None, "it applies to data sets only: set data.path=, "
                                                                       "or leave it out"),
        Unread(("data.config",), _is_file, "it applies to data sets with several configurations, and a file has none: "
                                           "leave it out"),
    ),
    "draft": (
        Unread(("draft.depths",), lambda cfg, _: _same_exit(cfg), "with draft.rank=0 an exit drafts alike at every "
                                                                  "depth: leave it out, or set draft.rank=16"),
    ),
    "loss": (
        Unread(
            ("loss.decay",),
            lambda cfg, kind: kind().trained and ("depths" not in kind().takes or _same_exit(cfg)),
            "this draft has one distribution for all depths: leave it out",
        ),
        Unread(("loss.then",), lambda cfg, _: cfg.loss.switch >= 1, "the loss never switches: set loss.switch=0.5"),
        Unread(("loss.switch",), lambda cfg, _: cfg.loss.then is None, "no second loss is set: set loss.then=tv"),
    ),
    "joint": (
        Unread(("joint.",), lambda cfg, _: cfg.mode != "joint", "it applies to joint training: set mode=joint"),
    ),
    "trainer": (
        Unread(
            ("loss", "loss.", "optimizer", "optimizer.", *(f"trainer.{name}" for name in OF_STEPS)),
            lambda cfg, kind: "kind" in cfg.draft and not kind().trained,
            "this kind of draft is not trained", False,
        ),
        Unread(
            tuple(f"rollout.{name}" for name in OF_TEXTS),
            lambda cfg, kind: (
                (cfg.data.path or not cfg.data.from_target) and "kind" in cfg.draft and not kind().trained
            ),
            "this kind of draft is not trained", False,
        ),
        Unread(("trainer.patience",), lambda cfg, _: not cfg.measure, "it applies to measured runs only: set "
                                                                      "measure=true"),
    ),
}  # fmt: skip


def refuse_unread(cfg: "DictConfig", typed: Iterable[str], student_class: Callable[[str], Any]) -> None:
    """Raise UserError for the first setting, `key=value`, that the user typed and nothing reads in this run. The values
    null and 0 are always accepted. student_class: a function from the name of a kind of draft to its class."""
    values = {key.lstrip("+"): value for key, _, value in (setting.partition("=") for setting in typed)}
    if "init" in cfg:
        _refuse_by_init(cfg, values, student_class)
    for unread in (unread for group in UNREAD if group in cfg for unread in UNREAD[group]):
        keys = [key for key, value in values.items() if unread.names(key) and value not in ("null", "0")]
        if not keys or not unread.when(cfg, lambda: student_class(cfg.draft.kind)):
            continue
        said = f"{', '.join(f'{key}={values[key]}' for key in keys)}: the setting has no effect here: {unread.instead}"
        if unread.fatal:
            raise UserError(said)
        print(said, file=sys.stderr)


def _refuse_by_init(cfg: "DictConfig", values: Mapping[str, str], student_class: Callable[[str], Any]) -> None:
    """Raise UserError for the first setting of draft.* that this kind does not read with this init=, see
    `Student.read_with`. For those of init.* only a line is printed, because a sweep over kinds gives them to all."""
    for key in (key for key, value in values.items() if value not in ("null", "[]")):
        if not key.startswith(("draft.", "init")):
            continue
        inits = student_class(cfg.draft.kind).read_with.get(key.removesuffix(".kind"))
        if inits is None or cfg.init.kind in inits:
            continue
        only = f"read it only with {' or '.join(f'init={init}' for init in inits)}" if inits else "do not read it"
        if key in ("init", "init.kind"):
            only = "begin in one way, unless init=pretrained"
        said = f"{key}={values[key]}: the setting has no effect here: {cfg.draft.kind} drafts {only}"
        if key.startswith("draft."):
            raise UserError(said)
        print(said, file=sys.stderr)


def rule(command: str, key: str) -> Range:
    """Return the range of a key for this command if there is one, else the range for all commands."""
    return RULES.get(f"{command}:{key}") or RULES[key]


def _refuse(key: str, rule: Range, value: Any) -> None:
    from omegaconf import ListConfig

    if isinstance(value, Mapping):
        for name, one in value.items():
            _refuse(f"{key}.{name}", rule, one)
    elif isinstance(value, ListConfig):
        if not all(one is not None and rule.fits(one) for one in value):
            raise UserError(f"{key}={list(value)}: each must be {rule.words}")
        if not value and not rule.empty:
            raise UserError(f"{key}=[]: name one or more, each {rule.words}")
    elif value is not None and not rule.fits(value):
        raise UserError(f"{key}={value}: it must be {rule.words}")


Change = Literal["same", "free", "longer", "other"]


class Removed(NamedTuple):
    """A setting of earlier versions. neutral: the value at which it changed nothing. instead: what to do now."""

    neutral: Any
    instead: str


REMOVED = {
    "loss.hardest": Removed(1.0, "leave it out"),
    "draft.confidence": Removed(None, "leave it out; policy.file= ends rounds early, see cotrain plan"),
    "init.cosine": Removed(0.0, "leave it out; the loss alone trains the draft"),  # a run goes on without it
    "rollout.on_draft": Removed(0.0, "leave it out; the target samples all texts"),
    "trainer.top": Removed(0, "leave it out; hidden states are stored"),
}
REMOVED_LOSSES = {
    "rkl": "kl", "jsd": "lk", "match": "greedy_draft", "length": "calls", "length_block": "calls_block",
}  # with what to use instead  # fmt: skip

# they decide how a run is measured and logged, how fast it is, and which folder stores its texts and states
FREE = ("label", "rollout.temperatures", "rollout.folder", "trainer.validations", "trainer.patience",
        "trainer.checkpoint_minutes", "trainer.threads", "trainer.remember_mb", "trainer.cache", "trainer.accelerator",
        "trainer.logger", "joint.uncertified")  # fmt: skip
MEASURED = "bench."
BUDGETS = ("trainer.steps", "trainer.minutes", "minutes")
BY_ROUNDS = ("trainer.validations", *BUDGETS)  # what decides which texts a step of several rounds learns from


def change(key: str, old: Any, new: Any, rounds: int = 1, unread: Collection[str] = ()) -> Change:
    """Return what a changed setting means: the weights of a run stay as they are ("free"), the training gets longer
    ("longer"), or it is another run ("other"). "same": an earlier version had another default that meant the same, or
    read nothing of it. rounds: rounds of sampling. unread: the settings that the kind of draft
    does not have. A budget is a number, or None without a limit."""
    was_unread = new is None and key in unread
    unknown = key == "target.weights" and None in (old, new)  # of an earlier version, or not on this machine
    if was_unread or unknown or key == "init.cosine" or (key, old, new) == ("data.column", "text", None):
        return "same"
    if rounds > 1 and key in BY_ROUNDS:
        return "other"
    if key == "measure":  # a finished training is measured when it is asked for
        return "longer" if new else "free"
    if key in FREE or key.startswith(MEASURED):
        return "free"
    if key in BUDGETS and old is not None and (new is None or new > old):
        return "longer"
    return "other"
