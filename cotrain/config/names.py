"""Names that are no settings here: settings of earlier versions, names from other programs, and misspellings."""

import difflib
from collections.abc import Collection
from typing import Any, NamedTuple

ANY: Any = object()  # of a setting that no value of changes a draft


class Removed(NamedTuple):
    """A setting of earlier versions. neutral: the value with which it had no effect, or ANY; a stored run with this
    value can still be resumed. instead: what the user should do now, for the message."""

    neutral: Any
    instead: str


REMOVED = {
    "bench.compile": Removed(ANY, "leave out bench.compile=; kernels of this CPU serve small models"),
    "loss.hardest": Removed(1.0, "leave out loss.hardest="),
    "draft.confidence": Removed(None, "leave out draft.confidence=; policy.file= ends rounds early, see cotrain plan"),
    "init.cosine": Removed(0.0, "leave out init.cosine=; the loss alone trains the draft"),  # a run goes on without it
    "optimizer.kind": Removed("adamw", "leave out optimizer.kind=; AdamW trains the draft"),
    "rollout.on_draft": Removed(0.0, "leave out rollout.on_draft=; the target samples all texts"),
    "rollout.rounds": Removed(1, "leave out rollout.rounds=; all texts are sampled before the training"),
    "trainer.ema": Removed(0.0, "leave out trainer.ema=; the rate falls to the end of a training"),
    "trainer.top": Removed(0, "leave out trainer.top=; hidden states are stored"),
}

# Names of other programs, and the settings that do the same here, of which a command has at most one
ALIASES: dict[str, list[str]] = {
    name: settings.split()
    for names, settings in {
        "lr learning_rate": "optimizer.lr",
        "draft_vocab_size": "draft.vocabulary",
        "num_samples max_samples max_train_samples": "rollout.texts",
        "eval_steps save_steps": "trainer.validations",
        "epochs num_epochs num_train_epochs max_steps steps": "trainer.steps",
        "max_num_seqs": "bench.rows rollout.rows",
        "method speculative_algorithm": "draft",
        "batch batch_size per_device_train_batch_size": "trainer.batch bench.rows rollout.rows",
        "gradient_accumulation_steps": "trainer.accumulate",
        "warmup_steps warmup_ratio": "optimizer.warmup",
        "max_grad_norm": "trainer.clip",
        "bf16 fp16 precision": "trainer.precision",
        "seed": "trainer.seed bench.seed rollout.seed",
        "num_gpus nproc_per_node": "trainer.devices",
        "report_to": "trainer.logger",
        "output_dir resume resume_from_checkpoint": "output",
        "model model_name_or_path target_model target_model_path": "target.path",
        "draft_model assistant_model speculative_model speculative_draft_model_path init.path": "draft.path",
        "dataset dataset_name train_file train_data_path path": "data.path",
        "num_speculative_tokens num_assistant_tokens speculative_num_steps gamma k speculative_tokens "
        "num_draft_tokens": "policy.k k bench.depths",
        "load_in_4bit load_in_8bit quantization": "quantisation",
        "torch_dtype dtype": "target.dtype",
        "max_tokens max_new_tokens": "max_new_tokens bench.new_tokens new_tokens rollout.new_tokens",
        "num_layers num_hidden_layers": "draft.layers",
        "hidden_size": "draft.width",
    }.items()
    for name in names.split()
}
COUNTED = {  # names with another unit here -> what the setting counts
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "batches of texts, not epochs"),
    **dict.fromkeys(("eval_steps", "save_steps"), "how many there are in all, not the steps between them"),
    "warmup_steps": "a fraction of the training, not steps",
}
IN_VLLM = dict.fromkeys(("policy.k", "k", "bench.depths"), "num_speculative_tokens")  # in messages about a value
PATHS = ("data.path", "target.path", "draft.path")  # each is another thing


def unknown(key: str, command: str, keys: Collection[str]) -> str:
    """Return the error message for an unknown key. It says what to do instead of a removed setting; for any other key
    it names the most similar setting, the setting that means the same, or how to list all. command: the command's name.
    keys: all its keys."""
    if key in REMOVED:
        return f"{key}= was removed: {REMOVED[key].instead}"
    last = "path" if key in PATHS else key
    same = sorted(other for other in keys if "." not in last and other.rpartition(".")[2] == last)
    if typo := difflib.get_close_matches(key, sorted(keys), n=1, cutoff=0.9):
        hint = f"the nearest is {typo[0]!r}"
    elif known := alias(key, keys):
        unit = COUNTED.get(key.rpartition(".")[2])
        hint = f"the setting is {known}=" + (f", {unit}" if unit else "")
    elif len(same) > 1:
        hint = f"the settings of this name are {', '.join(f'{other}=' for other in same)}"
    else:
        near = nearest(key, keys)
        hint = f"the nearest is {near!r}" if near else f"`cotrain {command} --help` shows all"
    return f"no key {key!r}; {hint}"


def alias(key: str, keys: Collection[str]) -> str | None:
    """Return the key that does here what `key` (for example `learning_rate`) does in other programs. Return None if the
    name is not known, or if the command has no such key. keys: all keys of the command."""
    settings = ALIASES.get(key) or ALIASES.get("" if key in PATHS else key.rpartition(".")[2], [])
    return next((known for known in settings if known in keys and key != known), None)


def below(key: str, keys: Collection[str]) -> str | None:
    """Return the error message for a key that is a group of settings (`draft`, which has `draft.layers`). Return None
    if `key` is no group. keys: all keys of the command."""
    below = sorted(other for other in keys if other.startswith(f"{key}."))
    return f"{key}= is a group of settings: set {', '.join(f'{other}=' for other in below)} instead" if below else None


def nearest(key: str, keys: Collection[str]) -> str | None:
    """Return the key of `keys` that begins with `key`, or that is spelt most similarly. If some keys have the same name
    after the last dot, only these are compared. Return None if no key is similar enough. keys: all keys of the
    command."""
    if longer := sorted(other for other in keys if other.startswith(key)):
        return longer[0]
    same = [other for other in sorted(keys) if other.rpartition(".")[2] == key.rpartition(".")[2]]
    near = difflib.get_close_matches(key, same or sorted(keys), n=1, cutoff=0.0 if same else 0.7)
    return near[0] if near else None
