"""Serves a GGUF target with llama.cpp's own server, alone or with a draft: `python server.py SETTINGS`, in an
environment with the package xllamacpp, which has the server as a library.

One request a line in, one answer a line out. SETTINGS (JSON): target and draft, GGUF files, draft null for none; type,
the server's --spec-type; k, drafts a round; sampled, whether drafts are drawn (--spec-draft-sampling probabilistic);
context, the most tokens of a text; rows, texts at once. A request: {"prompts": lists of ids, "max_new_tokens",
"temperature", "seed", "may_end": whether texts end at the end token, false if not given}; its answer: {"tokens": lists
of ids, "ended": whether each ended so, "seconds", "drafted", "accepted"}.
"""

import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any


def started(settings: dict[str, Any]) -> Any:
    import xllamacpp

    params, rows, threads = xllamacpp.CommonParams(), settings["rows"], len(os.sched_getaffinity(0))
    params.model.path = settings["target"]
    params.n_ctx, params.n_parallel, params.n_predict = settings["context"] * rows, rows, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib, params.n_gpu_layers, params.warmup = 0, 0, False
    params.port, params.fit_params, params.verbosity = 0, False, 3
    if settings["draft"]:
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = settings["draft"], settings["k"], 0, 0.0
        draft.probabilistic = settings["sampled"]
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
        kind = f"COMMON_SPECULATIVE_TYPE_{settings['type'].upper().replace('-', '_')}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    return xllamacpp.Server(params)


def main() -> None:
    settings = json.loads(sys.argv[1])
    server = started(settings)

    def one(asked: dict[str, Any], item: tuple[int, list[int]]) -> dict[str, Any]:
        row, prompt = item
        body = {
            "prompt": prompt,
            "n_predict": asked["max_new_tokens"],
            "temperature": asked["temperature"],
            "seed": asked["seed"] * 65536 + row,
            "samplers": ["temperature"],
            "ignore_eos": not asked.get("may_end"),
            "return_tokens": True,
            "cache_prompt": False,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    print(json.dumps({"version": version("xllamacpp")}), flush=True)
    with ThreadPoolExecutor(settings["rows"]) as pool:
        for line in sys.stdin:
            asked = json.loads(line)
            start = time.perf_counter()
            answers = list(pool.map(partial(one, asked), enumerate(asked["prompts"])))
            counts = [answer["timings"] for answer in answers]
            answer = {
                "tokens": [answer["tokens"] for answer in answers],
                "ended": [answer["stop_type"] == "eos" for answer in answers],
                "seconds": time.perf_counter() - start,
                "drafted": sum(one.get("draft_n", 0) for one in counts),
                "accepted": sum(one.get("draft_n_accepted", 0) for one in counts),
            }
            print(json.dumps(answer), flush=True)


main()
