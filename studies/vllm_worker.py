"""A worker process that runs inside a vLLM installation, as `PYTHON vllm_worker.py SETTINGS`. It reads one request per
line and writes one answer per line.

SETTINGS (JSON): target, a folder; speculative, vLLM's speculative_config or null; rows, the largest number of requests
at once; context, the largest number of tokens per request; dtype, of weights and passes, bfloat16 if not given. A
request has the keys prompts (lists of ids), max_new_tokens, temperature and seed. Its answer has the keys tokens (lists
of new ids), seconds (of vLLM's generate), drafts (number of rounds that drafted), accepted (number of accepted drafts)
and by_depth (for each depth d, 0-based, the number of rounds that accepted drafts 0 to d). The first line of the output
is {"version": vLLM's version}. The module imports only `inference/servers/vllm_repair.py` of this project, because vLLM
has its own environment.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SERVERS = str(Path(__file__).parents[1] / "inference" / "servers")
del sys.path[0]  # this folder: vLLM would import its modules by mistake, and those of SERVERS
sys.path.insert(0, SERVERS)
from vllm_repair import repair  # noqa: E402

sys.path.remove(SERVERS)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if hasattr(os, "sched_getaffinity"):  # every core, none reserved for a server's front end
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))


def counters(llm: Any) -> list[int]:
    """Return counts since the engine started, in one list: the number of rounds that drafted, the number of accepted
    drafts, then the number of drafts accepted at each depth. llm: vLLM's engine."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    by_depth = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    counts = [metrics[name].value if name in metrics else 0 for name in names]
    return [int(count) for count in [*counts, *(by_depth.values if by_depth else ())]]


def answer(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Continue the prompts of a request, and return the answer. The module lists the keys of both."""
    from vllm import SamplingParams

    length = request["max_new_tokens"]
    params = [
        SamplingParams(
            temperature=request["temperature"],
            max_tokens=length,
            min_tokens=length,
            ignore_eos=True,
            seed=request["seed"] + row,
            detokenize=False,
        )
        for row in range(len(request["prompts"]))
    ]
    before = counters(llm)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    drafts, accepted, *by_depth = (after - earlier for after, earlier in zip(counters(llm), before, strict=True))
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    counts = {"drafts": drafts, "accepted": accepted, "by_depth": by_depth}
    return {"tokens": tokens, "seconds": seconds, **counts}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its own lines to standard output
    settings = json.loads(sys.argv[1])
    import vllm

    repair()
    llm = vllm.LLM(
        settings["target"],
        dtype=settings.get("dtype", "bfloat16"),
        max_model_len=settings["context"],
        max_num_seqs=settings["rows"],
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=settings["speculative"],
    )
    print(json.dumps({"version": vllm.__version__}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(llm, json.loads(line))), file=out, flush=True)
    out.flush()
    os._exit(0)  # vLLM's own end takes seconds, and nothing outlives the process


if __name__ == "__main__":
    main()
