"""Compare what two checkouts compute, bit for bit, before and after a change of structure.

    python -m studies.golden OTHER_CHECKOUT [output=FOLDER] [only=train,generate]

Both checkouts run the same commands and calls of the public interface in processes of their own, on the same tiny
target, texts and draft folders: weights of trained drafts, texts of rollouts, held-out figures, forecasts on stored
costs, exported files, messages of refusals, and the tokens and counts of engines in float64 and float32 under every
rule. Times are left out. The status is 1 if anything differs, or if a command that should succeed does not; each is a
line.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

KINDS = (
    "independent",
    "conditioned",
    "parallel",
    "medusa",
    "hydra",
    "eagle",
    "p_eagle",
    "block",
    "early_exit",
    "quantised",
    "retrieval",
    "hybrid",
    "two_levels",
)
COMMON = (
    "target.path={inputs}/target data.path={inputs}/texts.jsonl rollout.texts=24 rollout.held_out_texts=8 "
    "rollout.new_tokens=16 rollout.prompt_tokens=12 trainer.threads=1 trainer.batch=4 trainer.precision=32-true "
    "measure=false bench.draft_int8=false bench.draft_dtype=float32"
)
MODELS = {
    "independent": "init.layers=[0]",
    "conditioned": "init.layers=[0] draft.temperatures=[0,1]",
    "eagle": "draft.depths=3 draft.vocabulary=200",
    "block": "draft.depths=3 draft.markov=8",
    "parallel": "init.layers=[0] draft.depths=3",
    "p_eagle": "draft.depths=3",
    "medusa": "draft.depths=3",
    "hydra": "draft.depths=3",
    "early_exit": "",
    "hybrid": "init=pretrained draft.path={folders}/independent",
    "two_levels": "init=scratch draft.path={folders}/independent",
}
LOSSES = ("tv", "nla", "lk", "greedy", "greedy_draft", "calls", "calls_block", "calls_tv", "kl_then_nla")
TRAINED = {f"train {kind}": f"train draft={kind} {MODELS.get(kind, '')} trainer.steps=8" for kind in KINDS}
TRAINED |= {f"loss {loss}": f"train init.layers=[0] loss={loss} trainer.steps=4" for loss in LOSSES}
TRAINED |= {
    "train accumulated": "train init.layers=[0] trainer.steps=8 trainer.accumulate=2",
    "train nucleus": "train trainer.steps=4 regime=nucleus init=scratch "
    "draft.width=64 draft.layers=1 draft.intermediate=64",
    "train int8": "train init.layers=[0] quantisation=int8 trainer.steps=4 rollout.train_temperatures=[0.5,1]",
    "joint": "train init.layers=[0] mode=joint loss=kl trainer.steps=4 joint.warm_steps=2 "
    "joint.steps=4 joint.lr=0.02 joint.uncertified=true rollout.held_out_texts=24",
}
COMMANDS = {
    "rollout": "rollout target.path={inputs}/target data.path={inputs}/texts.jsonl rollout.texts=8 "
    "rollout.new_tokens=8 rollout.prompt_tokens=12",
    "plan": "plan draft.path={folders}/independent data.path={inputs}/texts.jsonl texts=16 "
    "bench.new_tokens=16 costs={inputs}/costs.json temperatures=[0,1]",
    "plan block": "plan draft.path={folders}/block data.path={inputs}/texts.jsonl texts=16 "
    "bench.new_tokens=16 costs={inputs}/costs.json",
    "export vllm": "export draft.path={folders}/independent engine=vllm",
    "export llamacpp": "export draft.path={folders}/independent engine=llamacpp",
    "export eagle": "export draft.path={folders}/eagle engine=vllm",
    "export block": "export draft.path={folders}/block engine=vllm",
    "export medusa": "export draft.path={folders}/medusa engine=vllm",
    "export sglang": "export draft.path={folders}/independent engine=sglang",
    "datastore": "datastore target.path={inputs}/target data.path={inputs}/texts.jsonl",
    "generate": "generate draft.path={folders}/independent prompts={inputs}/prompts.txt max_new_tokens=12",
    "generate block": "generate draft.path={folders}/block prompts={inputs}/prompts.txt max_new_tokens=12 verify=block",
    "generate greedy": "generate draft.path={folders}/eagle prompts={inputs}/prompts.txt max_new_tokens=12 regime=t0",
}
WRONG = """train lr=1
train draft=nope
train target.path=nowhere
train data.path=nowhere.jsonl
train init.layers=[7] {common}
train draft=eagle draft.width=7 {common}
train loss=tvv
train trainer.steps=-1 {common}
train trainer.precision=bf16-true {common}
train regime.temperature=-1 {common}
train rollout.texts=0 {common}
train draft.bits=3 {common}
train draft=retrieval loss=tv {common}
train optimizer.lr=x
train draft=block draft.depths=0 {common}
train verify=tok {common}
train quantisation=int9
train data.block=1 {common}
bench
bench draft.path=nowhere
bench draft.path={folders}/independent verify=tree
bench draft.path={folders}/independent bench.rows=0
plan draft.path={folders}/independent batches=[]
plan log=nowhere.txt
plan draft.path={folders}/independent costs=nowhere.json
export draft.path=nowhere
export draft.path={folders}/hydra engine=vllm
export draft.path={folders}/independent engine=nope
generate prompt=a
generate draft.path={folders}/independent
generate draft.path={folders}/independent prompt=a max_new_tokens=0
rollout kind=other
report outputs=1
compare
serve_check url=http://127.0.0.1:9
nothing"""
RULES = {"token": KINDS, "block": KINDS, "coupled": KINDS, "match": KINDS, "tree": KINDS, "traversal": KINDS}
TREE = (-1, -1, 0)
VOLATILE = {"environment", "seconds", "date", "minutes", "made", "command", "commit", "weights", "report"}


def make_inputs(folder: Path) -> None:
    """Write the target, the texts, the prompts and the costs that both checkouts read."""
    from tests.folders import own_texts, target_folder

    target_folder(folder / "target")
    own_texts(folder / "texts.jsonl", 240)
    rows = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    (folder / "prompts.txt").write_text("\n".join(row[:20].split("\n")[0] for row in rows[:4]) + "\n")
    costs = {
        str(rows): {
            "target": [0.01 + 0.001 * n * rows for n in range(12)],
            "draft": 0.002,
            "first": 0.001,
            "rest": [0.002] * 12,
        }
        for rows in (1, 8)
    }
    (folder / "costs.json").write_text(json.dumps(costs))


def run(output: Path, inputs: Path, folders: Path, only: tuple[str, ...]) -> None:
    """Run every case in this process and checkout, and write its facts to output/facts.json."""
    facts: dict[str, Any] = {}
    words = {"inputs": inputs, "folders": folders}
    for name, line in {**TRAINED, **COMMANDS}.items():
        if line.split()[0] in only:
            extra = COMMON if line.startswith("train ") else ""
            command, *arguments = line.format(**words).split()
            arguments = [*extra.format(**words).split(), *arguments]
            target = output / name.replace(" ", "_")
            where = [] if command == "generate" else [f"output={target}"]
            facts[name] = call([command, *arguments, *where])
            if target.is_dir():
                facts[name]["files"] = dict(files(target, target))
            kind = name.removeprefix("train ")
            if (target / "draft").is_dir() and kind in KINDS and not (folders / kind).exists():
                shutil.copytree(target / "draft", folders / kind)  # of the first checkout: both read them
            print(name, facts[name]["status"], *facts[name]["said"], flush=True)
    if "wrong" in only:
        for line in WRONG.splitlines():
            command, *arguments = line.format(common=COMMON.format(**words), **words).split()
            where = [f"output={output / 'wrong'}"] if command in ("train", "bench", "plan", "export", "rollout") else []
            facts[f"wrong {line}"] = call([command, *arguments, *where])
    if "engines" in only:
        facts["engines"] = engines(inputs, folders)
    (output / "facts.json").write_text(json.dumps(facts, indent=1, default=str))


def call(argv: list[str]) -> dict[str, Any]:
    """Run a command; return its status and what it says, without times, speeds and paths."""
    from cotrain.cli import main

    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as left:
            status = int(left.code or 0)
    refused = err.getvalue().splitlines()[-1:] if status else []
    return {"status": status, "out": out.getvalue().splitlines() if argv[0] == "generate" else [], "said": refused}


def files(folder: Path, root: Path) -> Iterator[tuple[str, Any]]:
    """Yield the content of the files that do not depend on time."""
    from safetensors.torch import load_file

    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(root))
        if file.suffix == ".safetensors":
            yield name, {key: digest(value.numpy().tobytes()) for key, value in load_file(file).items()}
        elif file.suffix == ".parquet":
            import pyarrow.parquet as parquet

            yield name, digest(json.dumps(parquet.read_table(file).to_pylist(), default=str).encode())
        elif file.name in ("held_out.json", "plan.json", "config.json", "generation_config.json", "tokenizer.json"):
            yield name, steady(json.loads(file.read_text()), root)
        elif file.suffix in (".gguf", ".bin", ".npy"):
            yield name, digest(file.read_bytes())


def steady(value: Any, root: Path) -> Any:
    """Return a JSON value without what depends on time or place."""
    if isinstance(value, dict):
        return {key: steady(one, root) for key, one in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [steady(one, root) for one in value]
    return value.replace(str(root.parent), "") if isinstance(value, str) else value


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def engines(inputs: Path, folders: Path) -> dict[str, Any]:
    """Return tokens and counts of every kind, rule and dtype over rows of mixed settings."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from inference import Engine, Sampling, load
    from inference.policy import Fixed

    tokenizer = AutoTokenizer.from_pretrained(inputs / "target")
    prompts = (inputs / "prompts.txt").read_text().splitlines()
    penalties = Sampling(1.0, repetition_penalty=1.2, presence_penalty=0.3, logit_bias={5: 1.0}, banned=((7,),))
    mixed = [Sampling(1.0), Sampling(0.0), Sampling(0.7, top_k=20, top_p=0.9, min_p=0.01), penalties]
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32):
        target = AutoModelForCausalLM.from_pretrained(inputs / "target", dtype=dtype).eval()
        plain = Engine(target, tokenizer=tokenizer, rows=4).generate(prompts, max_new_tokens=24, sampling=mixed, seed=3)
        found[f"plain {dtype}"] = plain.tokens
        for kind in KINDS:
            if not (folders / kind / "cotrain.json").is_file():
                continue
            for rule in RULES:
                try:
                    engine = load(folders / kind, target, tokenizer=tokenizer, verify=rule, policy=Fixed(3), rows=3)
                    if rule in ("tree", "traversal"):
                        engine.proposer.shape = TREE  # type: ignore[union-attr]
                    said = engine.generate(prompts, max_new_tokens=24, sampling=mixed, seed=3)
                    found[f"{kind} {rule} {dtype}"] = [
                        said.tokens,
                        said.stats.drafted,
                        said.stats.accepted,
                        said.stats.target_calls,
                    ]
                except (ValueError, AttributeError, RuntimeError) as error:
                    found[f"{kind} {rule} {dtype}"] = re.sub(r"/\S+", "PATH", str(error))
    return found


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each value in which two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if key not in one or key not in other:
                yield f"{path}/{key}: only in the {'first' if key in one else 'second'}"
            else:
                yield from differences(one[key], other[key], f"{path}/{key}")
    elif one != other:
        yield f"{path}: {str(one)[:150]} != {str(other)[:150]}"


def main() -> int:
    """Run this checkout and the other one; say what differs."""
    other = Path(sys.argv[1]).resolve()
    if not (other / "cotrain").is_dir():  # else Python would import what is installed
        sys.exit(f"{other} is no checkout of cotrain")
    settings = dict(argument.split("=", 1) for argument in sys.argv[2:])
    output = Path(settings.get("output", "outputs/golden")).resolve()
    only = settings.get("only", "train,rollout,plan,export,datastore,generate,wrong,engines")
    inputs, folders = output / "inputs", output / "folders"
    if not inputs.is_dir():
        inputs.mkdir(parents=True)
        make_inputs(inputs)
    found: list[Any] = []
    for name, root in (("other", other), ("here", Path.cwd())):
        place = output / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        code = f"import sys; sys.path[:0] = [{str(root)!r}]; import runpy; runpy.run_path({__file__!r})['run'](" + (
            f"__import__('pathlib').Path({str(place)!r}), __import__('pathlib').Path({str(inputs)!r}), "
            f"__import__('pathlib').Path({str(folders)!r}), {tuple(only.split(','))!r})"
        )
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=inputs,
            check=True,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )
        found.append(json.loads(re.sub(re.escape(str(place)), "", (place / "facts.json").read_text())))
    lines = [
        f"{name}: it should succeed, and is refused: {' '.join(facts['said'])}"
        for name, facts in found[0].items()
        if name in {*TRAINED, *COMMANDS} and facts["status"]
    ]
    lines += differences(*found)
    print("\n".join(lines[:200]), f"{len(found[0])} cases, {len(lines)} differences", sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
