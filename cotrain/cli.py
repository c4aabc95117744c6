"""Console script: `cotrain NAME key=value ...` runs a command of `cotrain.commands` through Hydra.

Hydra and the command's module are imported only if a command runs, so that `cotrain --help` answers at once.
"""

import difflib
import importlib
import linecache
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotrain import __version__
from cotrain.errors import Interrupted, UserError, warn
from cotrain.paths import draft_folder, folder, from_hub
from inference.measure.contention import set_waiting

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Each command's code is `run(cfg)` in `cotrain/commands/NAME.py`, and its settings are in `conf/NAME.yaml`.
COMMANDS = {
    "rollout": "sample continuations from the target: text to train a draft on",
    "teacher": "say how a vLLM serves a target that does not fit into the training's process",
    "datastore": "index a corpus, from which drafts are then looked up",
    "train": "distil a draft from a target and measure its speed-up",
    "bench": "measure speculative decoding beside plain decoding",
    "plan": "forecast the speed of drafts at every draft length and batch size",
    "export": "write a draft in the layout that a serving engine loads",
    "compare": "compare the tau (acceptance length) of runs, with confidence intervals",
    "report": "write a page of one run or several: speed, acceptance, where it fails, a replay",
    "serve_check": "compare a running server's acceptance with this engine's",
    "audit": "say whether a server's texts are sampled from its target (status 0: yes, 3: no, 4: too few tokens)",
    "generate": "generate text in which drafted tokens are marked",
}
SEEDS = ("trainer.seed",)  # jobs of a sweep that differ only in these get one label; `cotrain compare` pairs them
SIZED = ("train", "rollout", "teacher")  # commands with defaults that follow the target's size
FLAGS = (
    "--hydra-help",
    "--version",
    "--resolve",
    "--cfg",
    "--package",
    "--run",
    "--multirun",
    "--shell-completion",
    "--config-path",
    "--config-name",
    "--config-dir",
    "--info",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: the arguments of this process) and return the exit status.

    The status is 0 after success, 1 after a failure, and 2 if the command line is wrong. It is 130 after SIGINT, 143
    after SIGTERM, and 141 if standard output was closed. `audit` ends with 3 if the texts are not the target's, with 4
    if they are too few to tell.
    """
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        try:
            status = main(sys.argv[1:])
            sys.stdout.flush()
            return status
        except BrokenPipeError as error:
            return _failed("", error)
        finally:  # while the process exits, too, a signal ends it without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"cotrain {__version__}")
        return 0
    name, *arguments = argv
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"the nearest is {near[0]!r}" if near else "`cotrain --help` lists them"
        return _say("cotrain", f"no command {name!r}; {hint}", 2)
    return _command(name, arguments)


def _interrupt(number: int, _: object) -> None:
    """Raise KeyboardInterrupt at the first signal. A second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _usage() -> str:
    rows = "\n".join(f"  {name:<11} {line}" for name, line in COMMANDS.items())
    return f"""usage: cotrain NAME key=value ...

{rows}

  cotrain NAME --help             the settings of a command, their values and groups
  cotrain NAME --cfg job ...      print the settings and stop
  cotrain NAME -m key=a,b ...     run once for each value

In vLLM's words: policy.k is num_speculative_tokens, the speculative tokens of a round; tau is the acceptance
length, tokens per target call. A name of another program is answered with the setting's name here.
A failure shows its traceback with COTRAIN_TRACEBACK=1 in the environment."""


def _command(name: str, arguments: list[str]) -> int:
    who = f"cotrain {name}"
    if {"-h", "--help"} & {*arguments}:
        from cotrain.config.help import help_page

        print(help_page(name, COMMANDS[name], dict(argument.partition("=")[::2] for argument in arguments)))
        return 0
    for flag in (argument.partition("=")[0] for argument in arguments if argument.startswith("--")):
        if not any(known.startswith(flag) for known in FLAGS):
            from cotrain.config.overrides import flag as no_flag

            return _say(who, no_flag(flag, name), 2)
    set_waiting()  # sets environment variables that torch reads when it is imported
    try:
        status = _hydra(name, arguments)
        sys.stdout.flush()
        return status
    except Interrupted as stop:
        return _say(who, str(stop), 128 + stop.signum)
    except KeyboardInterrupt:
        return _say(who, "interrupted" + "; nothing of it is kept" * (name == "bench"), 130)
    except SystemExit as stop:  # from --help and the like
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        return _report_refusal(name, arguments, error)


def _hydra(name: str, arguments: list[str]) -> int:
    """Run the command through Hydra, and return the highest exit status of its jobs."""
    import hydra

    from cotrain.config.overrides import is_setting, quote
    from cotrain.config.settings import register

    register()
    quoted, statuses, outputs = quote(arguments), [0], list[str]()
    flags = [argument for argument in quoted if not is_setting(argument)]
    settings = [argument for argument in quoted if is_setting(argument)]
    typed, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")

    def job(cfg: "DictConfig") -> float | None:
        sys.argv = typed  # Lightning starts further processes with it
        status, value = _job(name, cfg, settings, outputs)
        statuses.append(status)
        return value  # the objective, for Hydra's sweepers

    with tempfile.TemporaryDirectory(prefix="cotrain-") as scratch:
        sys.argv = [f"cotrain {name}", *flags, *_options(name, scratch, settings), *settings]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them
        try:
            hydra.main(version_base="1.3", config_path=str(folder("conf")), config_name=name)(job)()
        finally:
            sys.argv = typed
            os.environ.pop("HYDRA_FULL_ERROR")
            if full_error is not None:
                os.environ["HYDRA_FULL_ERROR"] = full_error
    if len(outputs) > 1:
        swept = getattr(importlib.import_module(f"cotrain.commands.{name}"), "swept", None)
        if swept:
            swept(outputs)
    return max(statuses)


def _options(name: str, scratch: str, arguments: Sequence[str]) -> list[str]:
    """Return settings (key=value) that keep Hydra from writing files of its own. Settings that the user gave in
    `arguments` are left out. scratch: a temporary folder."""
    from cotrain.config.overrides import literal

    settings = {
        "hydra.run.dir": ".",
        "hydra.sweep.dir": literal(scratch),
        "hydra.output_subdir": "null",
        "hydra.job.chdir": "false",
        "hydra.job.name": name,
        "hydra/job_logging": "none",
        "hydra/hydra_logging": "none",
    }
    given = {argument.partition("=")[0] for argument in arguments}
    return [f"{key}={value}" for key, value in settings.items() if key not in given]


def _job(name: str, cfg: "DictConfig", arguments: Sequence[str], outputs: list[str]) -> tuple[int, float | None]:
    """Run one job. Return its exit status, and the value that the command returned (None after a failure). The job's
    output folder is appended to `outputs`.

    arguments: the settings that the user gave, as key=value. Errors are printed here, because Hydra would add its own
    lines to an exception.
    """
    from hydra.core.hydra_config import HydraConfig

    from cotrain.config.settings import checked, refuse_from_target, refuse_unread

    quiet()
    output = cfg.get("output")
    try:
        settings = checked(name, cfg)
        if draft := getattr(settings, "draft", None) and settings.draft.path:
            settings.draft.path = draft_folder(draft, hub=name == "train")  # a model of the hub can be trained further
        refuse_from_target(name, settings)
        output = _own_folder(name, settings, arguments)
        _refuse_paths(name, settings)
        if name in SIZED:
            _follow_target(name, settings)
        refuse_unread(settings, HydraConfig.get().overrides.task)
        if draft:
            settings.draft.path = from_hub(settings.draft.path, models=name != "train")
        outputs.append(str(output))
        run: Callable[[Any], float | None] = importlib.import_module(f"cotrain.commands.{name}").run
        return 0, run(settings)
    except Exception as error:
        return _failed(name, error, output), None


def quiet() -> None:
    """Silence the progress bars and tips of libraries."""
    import logging
    import warnings

    import datasets
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    datasets.disable_progress_bars()
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.seed",
        "lightning.pytorch.trainer.connectors.checkpoint_connector",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # one line, without the code's


def _follow_target(name: str, settings: Any) -> None:
    """Set the settings that follow the target's size, in place, and print which. A run that is resumed has those that
    it was started with."""
    from hydra.core.hydra_config import HydraConfig

    from cotrain.config.overrides import chosen
    from cotrain.ranks import rank
    from cotrain.run_folder import read_marker
    from cotrain.training.by_size import follow_target

    marker = None if name != "train" or settings.overwrite else read_marker(Path(settings.output))
    stored = marker["settings"] if marker and marker.get("command") == name else None
    line = follow_target(settings, chosen(HydraConfig.get().overrides.task), stored)
    if line and not rank():
        print(line, file=sys.stdout if name == "train" else sys.stderr)


def _refuse_paths(name: str, settings: Any) -> None:
    """Raise UserError if an output overlaps with an input, or if a local path does not exist. Warn if target.path= is a
    draft folder."""
    from cotrain.config.settings import flat
    from cotrain.run_folder import refuse_overlap, refuse_unfinished
    from inference.drafts.bundled_target import refuse_missing

    values = settings.model_dump()
    refuse_overlap(name, values)
    target = (values.get("target") or {}).get("path")
    if target and os.path.isfile(os.path.join(target, "cotrain.json")):
        warn(
            f"warning: target.path={target} is a draft folder: set draft.path={target}, and set target.path= to the "
            "model that it drafts for"
        )
    for key, value in flat(values):
        if key.rpartition(".")[2] not in ("path", "adapter") or not isinstance(value, str):
            continue
        if key == "draft.path" and not any(map(os.path.isfile, (f"{value}/config.json", f"{value}/draft/config.json"))):
            refuse_unfinished(key, Path(value))
        if not os.path.isabs(value) and not set(value) & set("*?["):  # others cannot be hub ids
            try:
                refuse_missing(key, value, "file or folder" if key == "data.path" else "folder")
            except ValueError as error:
                raise UserError(str(error)) from error


def _own_folder(name: str, cfg: Any, arguments: Sequence[str]) -> str | None:
    """Return the job's output folder, or None if the command has none.

    In a sweep, `cfg` is changed in place: `output` becomes a subfolder that is named by the job's swept values, for
    example `output/lr=0.1,k=4`, and `label`, if it is None, becomes these values without the seed.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.types import RunMode

    hydra, has = HydraConfig.get(), type(cfg).model_fields
    if hydra.mode == RunMode.MULTIRUN:
        parsed = OverridesParser.create().parse_overrides(list(arguments))
        swept = {override.get_key_element().lstrip("+") for override in parsed if override.is_sweep_override()}
        task = [text.lstrip("+") for text in hydra.overrides.task]
        values = [text for text in task if text.partition("=")[0] in swept]
        title = ",".join(values) or f"job {hydra.job.num}"
        warn(f"cotrain {name}: {title}")
        if "trainer" in has and cfg.trainer.processes > 1:
            raise UserError(
                f"trainer.devices={cfg.trainer.devices}, trainer.nodes={cfg.trainer.nodes}: each job of a sweep runs "
                "in one process: set trainer.devices=1 trainer.nodes=1, or leave out -m"
            )
        if "label" in has and cfg.label is None:
            cfg.label = ",".join(text for text in values if text.partition("=")[0] not in SEEDS) or None
        if "output" in has and "output" not in swept:
            cfg.output = os.path.join(cfg.output, re.sub(r"[^\w.,=+-]", "_", title))
    return cfg.output if "output" in has else None


def _report_refusal(name: str, arguments: Sequence[str], error: Exception) -> int:
    """Print why no job ran, and return the exit status: 2 for an error of Hydra, which `explain` rewords, otherwise the
    status that `_failed` returns."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(error, HydraException | OmegaConfBaseException):
        return _failed(name, error)
    if _traced():
        traceback.print_exception(error)
    from cotrain.config.overrides import explain

    return _say(f"cotrain {name}", explain(error, name, arguments), 2)


def _failed(name: str, error: BaseException, output: str | None = None) -> int:
    """Print why a job failed, and return its exit status: 1, that of a UserError, or 141 if standard output was closed.

    A ValueError, an OSError, a full disk and a lost process are printed as one line. Any other error is printed with
    its traceback; with COTRAIN_TRACEBACK=1 every error is. output: the job's folder, for the message about a full disk.
    """
    from hydra.errors import InstantiationException

    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is still buffered
        return 141
    from cotrain.ranks import RESUMES, process_lost
    from inference.drafts.atomic import disk_full

    full, lost = disk_full(error), process_lost(error)
    status = error.status if isinstance(error, UserError) else 1
    if _traced() or not (full or lost or isinstance(error, ValueError | OSError)):
        traceback.print_exception(error)
        return status
    if lost:
        return _say(f"cotrain {name}", f"another process of this run has ended; {RESUMES}", 1)
    return _say(f"cotrain {name}", _full(error, output) if full else _message(error), status)


def _full(error: BaseException, output: str | None) -> str:
    """Return the message about a full disk. It names the file in `error`. Without one, it lists the free space of the
    disks on which the job writes. output: the job's folder."""
    if isinstance(error, OSError) and error.filename:
        return f"no space left for {error.filename}: it was not written, and no partial file remains"
    cache = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    free: dict[int, str] = {}  # by file system
    for place in (output or os.curdir, tempfile.gettempdir(), cache):
        there = os.path.abspath(place)
        while not os.path.exists(there):
            there = os.path.dirname(there)
        free.setdefault(os.stat(there).st_dev, f"{place} has {shutil.disk_usage(there).free / 2**20:.0f} MiB")
    return f"no space left (free: {', '.join(free.values())}): make room, and type the same command again"


def _message(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename and error.strerror:
        said = f"{error.filename}: {error.strerror}"
    return said + " (COTRAIN_TRACEBACK=1 shows where)" * (not _raised_here(error))


def _raised_here(error: BaseException) -> bool:
    """Return whether a `raise` statement of cotrain or inference raised the error, so that its message was written for
    the user."""
    for frame, line in list(traceback.walk_tb(error.__traceback__))[-1:]:
        ours = frame.f_globals["__name__"].partition(".")[0] in ("cotrain", "inference")
        return ours and linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
    return False


def _traced() -> bool:
    return os.environ.get("COTRAIN_TRACEBACK") == "1"


def _say(who: str, message: str, status: int) -> int:
    warn(f"{who}: {message}")
    return status
