"""A vLLM installation as an arm of a timing. A separate process, with vLLM's Python interpreter, answers one request at
a time."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.measure.arms import Arm, ArmResult, refuse
from inference.output import Counts, Stats
from inference.sampling import Sampling
from inference.servers.worker import Worker

WORKER = Path(__file__).with_name("vllm_worker.py")
TRANSLATED = ("temperature",)
SETTLE = 0.3  # seconds to wait, since idle threads of both processes may still spin on the shared cores


class Server(Worker):
    """A process that runs vLLM. It runs `vllm_worker`, which describes settings and requests.

    python: path of the Python interpreter of the environment with vLLM. target: folder of the target. speculative:
    vLLM's speculative_config, None for plain decoding. rows: the largest number of requests at once. context: the
    largest number of tokens per request. log: the file that gets vLLM's log. pauses: whether to stop the process
    between requests, so that its idle threads do not use the cores. dtype: of weights and passes. Raises RuntimeError,
    with the last lines of vLLM's log, if vLLM does not start or ends early.
    """

    def __init__(
        self,
        python: str,
        target: str,
        speculative: dict[str, Any] | None,
        rows: int,
        context: int,
        log: Path,
        pauses: bool = False,
        dtype: str = "bfloat16",
    ) -> None:
        settings = {"target": target, "speculative": speculative, "rows": rows, "context": context, "dtype": dtype}
        super().__init__("vLLM", [python, str(WORKER)], settings, log, pauses)

    def generate(
        self, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> dict[str, Any]:
        """Continue prompts (lists of token ids), and return the answer by name: tokens (lists of new ids), seconds (of
        vLLM's generate), drafts (number of rounds that drafted), accepted (number of accepted drafts) and by_depth (the
        number of rounds that accepted drafts 0 to d, for each depth d). temperature, seed: of all prompts. Raises
        RuntimeError, with the last lines of the log, if vLLM has ended."""
        return self.ask(prompts=list(prompts), max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


def draft_model(
    folder: str, k: int, objective: str = "sampled", method: str = "draft_model", parallel: bool = False
) -> dict[str, Any]:
    """Return vLLM's speculative_config for a draft folder. method: vLLM's name for the kind of draft; "draft_model" is
    a causal LM. k: drafts per round. objective: "sampled" to draw drafts, "greedy" (vLLM's default) for the likeliest
    tokens. parallel: whether to draft all tokens in one pass, at the mask token of the draft's config.json."""
    sample = "probabilistic" if objective == "sampled" else "greedy"
    config = {"method": method, "model": folder, "num_speculative_tokens": k, "draft_sample_method": sample}
    return config | ({"parallel_drafting": True} if parallel else {})


def custom_class(k: int) -> dict[str, Any]:
    """Return vLLM's speculative_config for look-up with k drafts per round, with or without a model. vLLM's environment
    must name the draft folder in COTRAIN_DRAFT."""
    return {"method": "custom_class", "model": "inference.servers.vllm_lookup.Lookup", "num_speculative_tokens": k}


def vllm_arm(name: str, server: Server, sampling: Sampling, max_new_tokens: int) -> Arm:
    """Return an arm that decodes with a vLLM server. Seconds are measured inside the server's process, without the
    transfer. name: the arm's name in reports. max_new_tokens: the number of new tokens of each prompt. Raises
    ValueError for sampling settings other than the temperature."""
    refuse(sampling, *(field for field in vars(sampling) if field not in TRANSLATED))

    def run(prompts: Sequence[list[int]], ids: Sequence[int], seed: int) -> ArmResult:
        time.sleep(SETTLE)
        answer = server.generate(prompts, max_new_tokens, sampling.temperature, seed)
        time.sleep(SETTLE)
        tokens, rounds = answer["tokens"], answer["drafts"]
        total = sum(map(len, tokens))
        # vLLM counts only rounds that drafted: each emits its accepted drafts and one token more
        counted = (rounds + answer["accepted"], rounds) if rounds else (total, total)
        stats = Stats(tokens=counted[0], target_calls=counted[1], rows=[Counts(len(text)) for text in tokens])
        return ArmResult(tokens, answer["seconds"], answer["seconds"], stats)

    return Arm(name, run)
