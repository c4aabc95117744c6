"""Does a folder hold what engines that load the plain Hugging Face layout expect?"""

from pathlib import Path

from safetensors import safe_open

from inference.drafts.draft_folder import GENERATION, METADATA, REPORT, digest, load_tokenizer, read
from inference.drafts.weight_files import CONFIG, load_weights, read_json, weight_files

REQUIRED = (CONFIG, GENERATION, "tokenizer.json", "tokenizer_config.json")
KEYS = ("architectures", "model_type", "vocab_size", "dtype", "tie_word_embeddings")
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def check(folder: str | Path) -> list[str]:
    """Problems of a folder in the plain Hugging Face layout, each naming file and key; empty when it is good.

    Looks at required files, keys of config.json and generation_config.json, names, shapes and dtype of the
    tensors against the model that config.json builds, values that are not finite, the tokenizer's size, and
    the hash of report.json. Tensors are loaded as transformers loads them, since on disk some families
    go by other names than in memory.
    """
    try:
        draft = read(folder)
    except (OSError, ValueError) as error:
        return [str(error)]
    path = draft.path
    problems = [f"{path}: {name} is missing" for name in REQUIRED if not (path / name).is_file()]
    problems += _config(path) + _generation(path) + _weights(path) + _tokenizer(path)
    report = draft.metadata.report if draft.metadata else None
    if report is not None and (not (path / REPORT).is_file() or digest(path / REPORT) != report):
        problems.append(f"{path / REPORT} is missing or not the one {METADATA} was written with")
    return problems


def _config(path: Path) -> list[str]:
    config = read_json(path / CONFIG)
    return [f"{path / CONFIG}: key {key} is missing" for key in KEYS if config.get(key) is None]


def _generation(path: Path) -> list[str]:
    """Keys that fix the draft length of transformers' assisted generation."""
    if not (path / GENERATION).is_file():
        return []
    values, file = read_json(path / GENERATION), path / GENERATION
    k = values.get("num_assistant_tokens")
    problems = []
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        problems.append(f"{file}: num_assistant_tokens must be a whole number of at least 1, not {k!r}")
    for key, wanted in (("num_assistant_tokens_schedule", "constant"), ("assistant_confidence_threshold", 0)):
        if values.get(key) != wanted:
            problems.append(f"{file}: {key} must be {wanted!r} (fixed draft length), not {values.get(key)!r}")
    return problems


def _weights(path: Path) -> list[str]:
    try:
        _, problems, unexpected = load_weights(path)
    except (OSError, ValueError) as error:
        return [str(error)]
    problems += [f"{path}: tensor {name} is not in the model of {CONFIG}" for name in unexpected]
    return problems + _dtypes(path)


def _dtypes(path: Path) -> list[str]:
    """Tensors on disk in another float type than config.json says; quantised ones have several, and pass."""
    config = read_json(path / CONFIG)
    wanted = DTYPES.get(str(config.get("dtype")))
    if wanted is None or "quantization_config" in config:
        return []
    problems = []
    for file in weight_files(path):
        with safe_open(file, "pt") as tensors:
            dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}
        odd = sorted(name for name, dtype in dtypes.items() if dtype in DTYPES.values() and dtype != wanted)
        if odd:
            problems.append(f"{file}: tensor {odd[0]} is {dtypes[odd[0]]}, {CONFIG} says {config['dtype']}")
    return problems


def _tokenizer(path: Path) -> list[str]:
    if not (path / "tokenizer.json").is_file():
        return []
    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:
        return [str(error)]
    size = read_json(path / CONFIG).get("vocab_size")
    if tokenizer is None or not isinstance(size, int):
        return []
    used = max(tokenizer.get_vocab().values()) + 1
    return [f"{path / CONFIG}: vocab_size {size} is below the tokenizer's {used} ids"] if used > size else []
