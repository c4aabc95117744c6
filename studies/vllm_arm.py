"""A vLLM installation as an arm of a timing. A separate process, with vLLM's Python interpreter, answers one request at
a time. `Worker` is such a process of any program; it reads a line of JSON and writes a line of JSON."""

import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from inference.measure.arms import Arm, ArmResult, refuse
from inference.output import Counts, Stats
from inference.sampling import Sampling

WORKER = Path(__file__).with_name("vllm_worker.py")
TRANSLATED = ("temperature",)
SETTLE = 0.3  # seconds to wait, since idle threads of both processes may still spin on the shared cores


class Worker:
    """A process that runs `command`, with its settings as the last argument, in JSON. Its first line of output is a
    JSON object with its `version`.

    name: the program's name, for messages. log: the file that gets the process's standard error. pauses: whether to
    stop the process between requests, so that its idle threads do not use the cores while something else is timed; the
    process must then have no children. Raises RuntimeError, with the last lines of the log, if the process does not
    start or ends early.
    """

    def __init__(
        self, name: str, command: Sequence[str], settings: Mapping[str, Any], log: Path, pauses: bool = False
    ) -> None:
        self.name, self.log, self.pauses = name, log, pauses
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.version: str = self._read()["version"]
        if pauses:
            self.process.send_signal(signal.SIGSTOP)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, and return its answer. Raises RuntimeError, with the last lines of the log, if the process
        has ended."""
        assert self.process.stdin is not None
        with self._running():
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return self._read()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Within the `with` block, let the process run if it pauses between requests."""
        if not self.pauses:
            yield
            return
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            tail = self.log.read_text(errors="replace").splitlines()[-8:]
            raise RuntimeError(f"{self.name} has ended; see {self.log}, whose last lines are: " + "\n".join(tail))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self.process.stdin is not None
        if self.pauses:
            self.process.send_signal(signal.SIGCONT)  # a stopped process does not see the end of its input
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


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


class VllmCommand(NamedTuple):
    """A README's command for vLLM. environment: its environment variables. target: a folder or hub id. speculative:
    vLLM's speculative_config."""

    environment: dict[str, str]
    target: str
    speculative: dict[str, Any]


def on_card(card: str) -> VllmCommand:
    """Return the vLLM command in the README's first block of code. card: the README's text. Raises ValueError if the
    block is no command for vLLM."""
    block = re.search(r"```(?:sh)?\n(.*?)\n```", card, re.S)
    words = shlex.split(block[1]) if block else []
    if "vllm" not in words:
        raise ValueError("the card has no command for vLLM: export the draft with engine=vllm")
    start = words.index("vllm")
    asked = json.loads(words[words.index("--speculative-config") + 1])
    environment = dict(word.split("=", 1) for word in words[:start])
    return VllmCommand(environment, words[start + 2], asked)
