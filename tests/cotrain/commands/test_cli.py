"""The command line: what is typed arrives unchanged, what is wrong is named, nothing is left lying about."""

import errno
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from lightning.pytorch.trainer.connectors import checkpoint_connector
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cotrain.cli import COMMANDS, main, quiet
from cotrain.config.names import ALIASES, REMOVED, alias, nearest, unknown
from cotrain.config.overrides import quote
from cotrain.config.settings import SCHEMAS, keys_of, register
from cotrain.errors import UserError
from cotrain.paths import folder
from inference import Engine, Sampling
from tests.tiny import tiny

HOSTILE = [
    "",
    " ",
    "  two spaces around  ",
    "\ttab\t",
    "a, b, c",
    "a=b",
    "a == b  # c",
    "[1, 2]",
    "{a: 1}",
    "(x)",
    "f(x)",
    "'",
    '"',
    "it's",
    '"quoted"',
    "'quoted'",
    "\\",
    "\\\\",
    "a\\",
    "C:\\new\\table",
    "\\'",
    "\\\\'",
    "'\\",
    "\n",
    "def f(x):\n    return [x, 'y'] \n",
    "$",
    "$HOME",
    "${",
    "${x}",
    "\\${x}",
    "\\\\${x}\\",
    "${oc.env:HOME}",
    "a ${x} '",
    "true",
    "???",
    "1",
    "1e3",
    "~",
    "!x",
    "#",
    "%",
    "@",
    "a:b",
    "é ü 漢字 🙂",
    "\udc80",
    "-m",
    "--help",
    "+x=1",
    "<|endoftext|>",
    "choices(a,b)",
    "range(1,3)",
    "*",
    "glob(*)",
]


def arrived(texts: Sequence[str]) -> list[str]:
    """What Hydra makes of `texts` as the values of path keys."""
    arguments = quote([f"+t{index}.path={text}" for index, text in enumerate(texts)])
    register()
    with initialize_config_dir(str(folder("conf")), version_base="1.3"):
        cfg = compose("generate", overrides=arguments)
    return [cfg[f"t{index}"].path for index in range(len(texts))]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The configurations that `run` of any command is called with, from an empty working folder."""
    seen: list[Any] = []
    for name in COMMANDS:
        monkeypatch.setitem(sys.modules, f"cotrain.commands.{name}", SimpleNamespace(run=seen.append))
    monkeypatch.chdir(tmp_path)
    return seen


def stopped_by(error: BaseException, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The status of `cotrain bench` whose `run` raises `error`."""

    def run(cfg: Any) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "cotrain.commands.bench", SimpleNamespace(run=run))
    return main(["bench", *arguments])


def test_text_arrives_unchanged() -> None:
    assert arrived(HOSTILE) == HOSTILE


def test_random_text_arrives_unchanged() -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("\\\\'\"${}[](),=: \na", k=rng.randint(1, 9))) for _ in range(200)]
    assert arrived(texts) == texts


@pytest.mark.parametrize("key", ["prompts", "target.path", "a.b.path", "path", "output", "log", "url", "check"])
def test_paths_are_literal_but_null_unsets_them(key: str) -> None:
    assert quote([f"{key}=/a, b/[c]=d", f"+{key}=x y", f"{key}=null"]) == [
        f"{key}='/a, b/[c]=d'",
        f"+{key}='x y'",
        f"{key}=null",
    ]


def test_a_key_of_a_list_is_typed_several_times() -> None:
    assert quote(["run=a, b", "page=p", "run=[c]", "rows=1"]) == ["run=['a, b','[c]']", "page='p'", "rows=1"]


def test_other_settings_and_flags_are_left_to_hydra() -> None:
    arguments = [
        "-m",
        "--cfg",
        "job",
        "seed=1,2",
        "check=true",
        "check=False",
        "regime=t0",
        "~draft.path",
        "paths=[a,b]",
    ]
    assert quote(arguments) == arguments


def test_a_run_gets_the_typed_values_and_leaves_nothing(ran: list[Any], tmp_path: Path) -> None:
    typed, environment = list(sys.argv), dict(os.environ)
    assert main(["generate", "prompt=null", "regime=t0", "target.path=/x y/${z}", "draft.path=null"]) == 0
    (cfg,) = ran
    assert (cfg.prompt, cfg.regime.temperature) == ("null", 0.0)
    assert (cfg.target.path, cfg.draft.path) == ("/x y/${z}", None)
    assert list(tmp_path.iterdir()) == []
    assert (sys.argv, dict(os.environ)) == (typed, environment)


def test_a_sweep_runs_each_value_in_its_own_folder(ran: list[Any], tmp_path: Path) -> None:
    assert main(["bench", "bench.rows=2,3", "output=o, 1", "-m", "draft.path=/a,${b}"]) == 0
    assert [(cfg.bench.rows, cfg.output) for cfg in ran] == [(2, "o, 1/bench.rows=2"), (3, "o, 1/bench.rows=3")]
    assert {cfg.draft.path for cfg in ran} == {"/a,${b}"}
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_goes_on_after_a_failed_job(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cfg: Any) -> None:
        if cfg.seed == 1:
            raise UserError("seed 1")
        ran.append(cfg)

    monkeypatch.setitem(sys.modules, "cotrain.commands.generate", SimpleNamespace(run=run))
    assert main(["generate", "-m", "seed=1,2"]) == 1
    assert [cfg.seed for cfg in ran] == [2]


def test_settings_are_shown_without_a_run(ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--cfg", "job", "prompt=a, b"]) == 0
    assert "prompt: a, b\n" in capsys.readouterr().out
    assert ran == []


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_is_named(key: str, ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """With what to do instead. A resumed run may have it at the value that changed nothing, see test_run_folder."""
    assert main(["train", f"{key}=1"]) == 2 and ran == []
    assert capsys.readouterr().err == f"cotrain train: {key}= was removed: {REMOVED[key].instead}\n"


def test_a_removed_loss_is_named(ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "loss=rkl"]) == 2 and ran == []
    assert capsys.readouterr().err == "cotrain train: loss=rkl was removed: set loss=kl\n"


# what users of other programs type -> what the one line says, and what it must not say
MISTAKES: dict[str, tuple[str, str]] = {
    "train lr=1e-3": ("no key 'lr'; the setting is optimizer.lr=", "joint.lr"),
    "train +lr=1e-3": ("no key 'lr'; the setting is optimizer.lr=", "joint"),
    "train trainer.lr=1e-3": ("no key 'trainer.lr'; the setting is optimizer.lr=", "joint"),
    "train epochs=3": ("no key 'epochs'; the setting is trainer.steps=, batches of texts, not epochs", "bench"),
    "train warmup_steps=9": ("the setting is optimizer.warmup=, a fraction of the training, not steps", "nearest"),
    "train draft_vocab_size=9": ("the setting is draft.vocabulary=", "nearest"),
    "train draft.rank=9": ("draft.encoder_layers; draft=early_exit or hybrid_exit has it", "nearest"),
    "train steps=100": ("the setting is trainer.steps=", "joint.steps"),
    "train batch_size=8": ("the setting is trainer.batch=", "nearest"),
    "train gradient_accumulation_steps=4": ("the setting is trainer.accumulate=", "nearest"),
    "train seed=1": ("the setting is trainer.seed=", "rollout"),
    "train load_in_4bit=true": ("the setting is quantisation=", "nearest"),
    "train num_speculative_tokens=5": ("the setting is policy.k=", "nearest"),
    "train learning_rate=1": ("the setting is optimizer.lr=", "nearest"),
    "train max_steps=9": ("the setting is trainer.steps=", "nearest"),
    "train method=eagle": ("the setting is draft=", "nearest"),
    "bench max_num_seqs=8": ("the setting is bench.rows=", "nearest"),
    "train policy.k=0": ("policy.k=0 (num_speculative_tokens in vLLM): it must be at least 1", "trainer"),
    "train model=gpt2": ("the setting is target.path=", "nearest"),
    "train path=a.jsonl": ("the setting is data.path=", "nearest"),
    "train temperature=0.7": ("'regime.temperature'", "temperatures"),
    "train top_p=0.9": ("'regime.top_p'", "bench"),
    "train layers=3": ("the settings of this name are draft.layers=, init.layers=", "nearest"),
    "train rollout.temperature=[0.5]": ("the nearest is 'rollout.temperatures'", "regime"),
    "train trainer.stepps=9": ("the nearest is 'trainer.steps'", "joint"),
    "train quxx=1": ("no key 'quxx'; `cotrain train --help` shows all", "nearest"),
    "train data=prompts.jsonl": ("data= cannot be a path: write data.path=prompts.jsonl", "embedded"),
    "train target=org/model": ("target= cannot be a path: write target.path=org/model", "folder"),
    "train draft=nope": ("draft=nope: draft is one of block, ", "Could not"),
    "train regime=0.7": (
        "regime=0.7: regime is one of as_trained, nucleus, t0, t03, t05, t07, t1; a value of your own "
        "is regime.temperature=0.7",
        "override",
    ),
    "train policy=4": ("a value of your own is policy.k=4", "override"),
    "train init.layers=0,-1": ("init.layers=0,-1: several values: write init.layers=[0,-1], or add -m", "mbiguous"),
    "train init.layers=0": ("init.layers=0: it must be a list: write init.layers=[0]", "ListConfig"),
    "train trainer.steps=10,20": ("trainer.steps=10,20: several values: give trainer.steps= one value, or add -m", "["),
    "train trainer.steps=many": ("trainer.steps=many: it must be a whole number", "nearest"),
    "train quantisation=[[1]]": ("quantisation=[[1]]: quantisation= names one option, no list: write", "rror"),
    "bench regime=[1,2]": ("regime= names one option, no list", "rror"),
    "train draft={eagle:1}": ("draft= names one option, no list", "rror"),
    "train draft.layers": ("'draft.layers' is not a setting: write key=value", "Error"),
    "train --lr 1e-3": ("no flag --lr: settings are key=value, as in optimizer.lr=", "as in lr"),
    "train --model gpt2": ("as in target.path=", "as in model"),
    "train --trainer.steps 9": ("as in trainer.steps=", "joint"),
    "train data=self data.column": ("'data.column' is not a setting", "Error"),
    "bench batch_size=8": ("the setting is bench.rows=", "nearest"),
    "bench max_new_tokens=9": ("the setting is bench.new_tokens=", "nearest"),
    "generate max_tokens=9": ("the setting is max_new_tokens=", "nearest"),
    "generate assistant_model=x": ("the setting is draft.path=", "nearest"),
    "generate k=4": ("the setting is policy.k=", "nearest"),
    "export num_speculative_tokens=4": ("the setting is k=", "nearest"),
    "plan batch=4": ("the setting is bench.rows=", "rollout"),
    "serve_check temperature=0.7": ("'regime.temperature'", "top"),
    "datastore dataset=a.jsonl": ("the setting is data.path=", "nearest"),
    "datastore draft.path=d": ("the settings of this name are data.path=, target.path=", "the setting is"),
    "generate max_new_tokns=3": ("no key 'max_new_tokns'; the nearest is 'max_new_tokens'", "setting is"),
    "generate +seeed=1": ("no key 'seeed'", "setting is"),
    "generate seed=null": ("seed=null: it must be a whole number", "nearest"),
    "generate -m regime=t0,warm": ("regime=warm: regime is one of as_trained, nucleus, t0, t03", "override"),
    "generate target=x": ("target= is a group of settings: set target.path=", "nearest"),
    "generate verify=[a": ("'verify=[a' cannot be read", "Error"),
    "compare runs=x": ("no key 'runs'", "nearest"),
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_what_users_mistype_points_to_the_right_setting(
    typed: str, ran: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *arguments = typed.split()
    assert main([command, *arguments]) in (1, 2)
    said, (right, wrong) = capsys.readouterr().err, MISTAKES[typed]
    assert said.startswith(f"cotrain {command}: ") and said.count("\n") == 1 and len(said) < 300
    assert right in said and wrong not in said
    assert ran == [] and list(tmp_path.iterdir()) == []


def test_every_name_of_another_program_is_a_setting_of_some_command() -> None:
    keys, named = {name: keys_of(name) for name in COMMANDS}, set[str]()
    for command, name in product(keys, ALIASES):
        typed = name if "." in name else f"x.{name}"
        found = re.search(r"the settings? (?:is|of this name are) (.*)=", unknown(typed, command, keys[command]))
        right = [key for key in ALIASES[name] if key in keys[command]]
        assert alias(name, keys[command]) in (None, *right) and (
            not found or {*found[1].split("=, ")} <= {*keys[command]}
        )
        assert not right or name in right or (found and found[1] == right[0]), (command, name)
        named |= {*right}
    assert named == {known for settings in ALIASES.values() for known in settings}


def test_the_nearest_key_shares_its_last_name() -> None:
    keys = {"draft", "draft.path", "target.path", "policy.k", "trainer.seed", "rollout.seed"}
    assert [nearest(key, keys) for key in ("target.paht", "rollouts.seed", "k", "zzz")] == [
        "target.path",
        "rollout.seed",
        "policy.k",
        None,
    ]


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["trian"]), main([])) == (2, 2)
    assert "no command 'trian'; the nearest is 'train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("draft.path=x is empty"), "draft.path=x is empty"),
        (ValueError("two\n lines"), "two lines (COTRAIN_TRACEBACK=1 shows where)"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/a"), "/a: No such file (COTRAIN_TRACEBACK=1 shows where)"),
        (OSError(errno.ENOSPC, "full", "/r/x"), "no space left for /r/x: it was not written, and no partial file"),
        (OSError(errno.ENOSPC, "full"), "no space left (free: run 1 has "),
    ],
)
def test_a_failure_is_one_line(
    error: Exception,
    message: str,
    ran: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert stopped_by(error, monkeypatch, "output=run 1") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"cotrain bench: {message}")
    assert said.count("\n") == 1


def test_a_full_disk_that_nobody_named_is_one_of_those_that_are_listed(
    ran: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library writes to the temporary directory, or its cache, and does not say where."""
    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    free = {str(tmp_path): 5 * 2**20, "/dev/shm": 0}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[str(path)]))
    assert stopped_by(OSError(errno.ENOSPC, "full"), monkeypatch, f"output={tmp_path / 'run'}") == 1
    said = capsys.readouterr().err
    assert f"(free: {tmp_path / 'run'} has 5 MiB, /dev/shm has 0 MiB): make room" in said


def test_a_bug_and_a_wish_show_the_traceback(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stopped_by(KeyError("bug"), monkeypatch) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("COTRAIN_TRACEBACK", "1")
    assert stopped_by(UserError("a wish"), monkeypatch) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopped_by(KeyboardInterrupt(), monkeypatch) == 130


@pytest.mark.thorough
def test_a_reader_that_leaves_is_no_error() -> None:
    code = (
        "import sys, types; from cotrain.cli import main\n"
        "run = lambda cfg: [print('line') for _ in range(100000)]\n"
        "sys.modules['cotrain.commands.generate'] = types.SimpleNamespace(run=run); sys.exit(main(['generate']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 141)


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_a_command_composes_its_settings_with_hydra_as_it_is(flags: list[str]) -> None:
    """In this process files are parsed once, and `hydra.mode` is not asked for: see `tests/conftest.py`."""
    code = (
        "import sys, types; from cotrain.cli import main\n"
        "run = lambda cfg: print(cfg.max_new_tokens)\n"
        "sys.modules['cotrain.commands.generate'] = types.SimpleNamespace(run=run)\n"
        f"sys.exit(main(['generate', *{flags}, 'max_new_tokens=' + '7,9'[:{3 if flags else 1}]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == (["7", "9"] if flags else ["7"])


def test_help_lists_every_command_without_loading_one() -> None:
    """Neither does the page of a command load Hydra or torch."""
    code = (
        "import sys; from cotrain.cli import main; main(['--help']); main(['train', '-h']); "
        "print({'hydra', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout and line in done.stdout for name, line in COMMANDS.items())
    assert done.stdout.endswith("set()\n")


def test_every_command_has_module_schema_and_configuration() -> None:
    assert set(COMMANDS) == set(SCHEMAS) == {path.stem for path in folder("conf").glob("*.yaml")}
    assert [name for name in COMMANDS if find_spec(f"cotrain.commands.{name}") is None] == []


def saved(path: Path) -> Path:
    """A tiny target with a byte tokenizer."""
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    tiny(256).save_pretrained(path)
    return path


def test_generate_continues_the_prompt_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, prompt = saved(tmp_path / "a, b"), "x = [1, 'é']; ${y}"
    plain = Engine(str(target)).generate([prompt], max_new_tokens=6, sampling=Sampling(temperature=0.0)).text
    capsys.readouterr()
    arguments = [f"target.path={target}", f"draft.path={target}", f"prompt={prompt}", "max_new_tokens=6", "regime=t0"]
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == f"{plain[0]}\n"


def test_what_lightning_says_while_it_keeps_a_checkpoint_is_not_shown() -> None:
    quiet()
    assert not checkpoint_connector.log.isEnabledFor(logging.INFO)
