"""Speeds of two running servers of one target, one with a draft, at several numbers of concurrent requests."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cotrain.evaluation.comparison import FIGURES
from cotrain.run_folder import MARKER
from inference.drafts.weight_files import read_json
from inference.measure.arms import Arm, ArmResult
from inference.measure.timing import Interval, interleave
from inference.sampling import Sampling
from inference.servers.openai_client import Client, Served, stable_counters

PLAIN, WITH_DRAFT = "plain", "with the draft"


@dataclass(frozen=True)
class ServersCell:
    """The result at one number of concurrent requests.

    Args:
        concurrent: that number.
        tokens: new tokens of each server.
        plain, drafted: tokens per second over HTTP, prefill included.
        speedup: drafted / plain, bootstrapped over batches of prompts.
        tau: tokens per target call that verified drafts, by the counters of the server with the draft.
        predicted: tau on held-out texts after the draft's training, and its draft length; None if not known, or if the
            server drafts another number of tokens.
    """

    concurrent: int
    tokens: int
    plain: float
    drafted: float
    speedup: Interval
    tau: float
    predicted: tuple[float, int] | None

    def line(self) -> str:
        expected = ", {:.2f} on held-out texts with k={}".format(*self.predicted) if self.predicted else ""
        low, high = self.speedup.low, self.speedup.high
        return (
            f"{self.concurrent} at once: {self.plain:.1f} -> {self.drafted:.1f} tokens/s, {self.speedup.value:.2f}x "
            f"[{low:.2f}, {high:.2f}], tau {self.tau:.2f}{expected}"
        )

    def report(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.speedup._asdict()}


def server_arm(name: str, client: Client, sampling: Sampling, new_tokens: int, at_once: int) -> Arm:
    """Return an arm that runs on a server and ignores end tokens. new_tokens: of each prompt. at_once: concurrent
    requests. Its run raises ValueError if the server sends no token ids, or fewer than `new_tokens`."""

    def run(prompts: Sequence[list[int]], ids: Sequence[int], seed: int) -> ArmResult:
        clock = time.perf_counter()
        seeds = [seed * 2**32 + key % 2**32 for key in ids]
        texts = client.complete(list(prompts), new_tokens, sampling, seeds, at_once, ignore_eos=True)
        seconds = time.perf_counter() - clock
        tokens = [text.ids or [] for text in texts]
        if any(len(text) != new_tokens for text in tokens):
            raise ValueError(
                f"{client.root} does not send {new_tokens} token ids for each prompt: use a server that sends ids and "
                "takes ignore_eos, such as vLLM"
            )
        return ArmResult(tokens, seconds, seconds)

    return Arm(name, run)


def measured(
    plain: Client,
    drafted: Client,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    new_tokens: int,
    concurrent: Sequence[int],
    predicted: tuple[float, int] | None,
    seed: int = 0,
) -> list[ServersCell]:
    """Return a cell for each number of concurrent requests. Both servers continue the same prompts in turn. predicted:
    see `ServersCell`. Raises the errors of `Client.complete` and `server_arm`, and ValueError if by their counters
    `plain` drafts or `drafted` does not."""
    cells = []
    for number in concurrent:
        arms = [
            server_arm(name, client, sampling, new_tokens, number)
            for name, client in ((PLAIN, plain), (WITH_DRAFT, drafted))
        ]
        before = [stable_counters(client) for client in (plain, drafted)]
        timing = interleave(arms, prompts, number, seed)
        after = [stable_counters(client) for client in (plain, drafted)]
        idle, counted = (_between(*pair) for pair in zip(before, after, strict=True))
        if idle:
            raise ValueError(f"url={plain.root}: this server drafts; start it without --speculative-config")
        if not counted:
            raise ValueError(f"url_draft={drafted.root}: this server does not draft, or shows no counters of it")
        same = predicted if predicted and round(counted.drafted / counted.rounds) == predicted[1] else None
        speed, speedup = timing.speed, timing.ratio(WITH_DRAFT, PLAIN)
        tokens = new_tokens * len(prompts)
        cells.append(ServersCell(number, tokens, speed(PLAIN), speed(WITH_DRAFT), speedup, counted.tau, same))
    return cells


def trained_for(run: Path, regime: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return tau on held-out texts after a training, and its draft length. run: the folder of `cotrain train`. regime:
    the settings of the regime that is served. None if `run` is no such folder, or of another regime, or if its tau is
    not of the rule that servers have, `token`."""
    try:
        tau, settings = read_json(run / FIGURES)["tau"], read_json(run / MARKER)["settings"]
        alike = settings["regime"] == regime and settings["verify"] == "token"
        return (float(tau), int(settings["policy"]["k"])) if alike else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _between(before: Served | None, after: Served | None) -> Served | None:
    """Return what a server drafted between two readings of its counters, None without counters or rounds."""
    if before is None or after is None or after.rounds == before.rounds:
        return None
    return after - before
