"""A folder that `cotrain export` writes for vLLM, served as the command on its card says."""

import os
from pathlib import Path
from typing import Any

from cotrain.bench.server_parity import Answer, Ask
from cotrain.cli import main
from cotrain.planning.plan import Plan
from inference.servers.openai_client import Served
from studies.vllm_arm import Server, VllmCommand, on_card
from tests.engines.drafts import K, draft_folder

CONTEXT, ROWS = 256, 8


def exported(name: str, output: Path, *settings: str) -> VllmCommand:
    """Export the draft of that name for vLLM -> what its card says to serve it with."""
    assert main(["export", f"draft.path={draft_folder(name)}", f"output={output}", "engine=vllm", *settings]) == 0
    return on_card((output / "README.md").read_text(encoding="utf-8"))


def server(target: str, speculative: dict[str, Any] | None, log: Path) -> Server:
    """The engine of `vllm serve` in a process of its own, which starts faster than with the HTTP server before it."""
    return Server(os.environ["COTRAIN_VLLM"], target, speculative, ROWS, CONTEXT, log)


def asking(vllm: Server, plan: Plan, kept: list[list[list[int]]]) -> Ask:
    """Asks it under the plan's regime, and keeps its texts; every round of these kinds drafts K."""

    def ask(prompts: list[list[int]], at_once: int) -> Answer:
        found = vllm.generate(prompts, plan.bench.new_tokens, plan.sampling.temperature, plan.bench.seed)
        kept.append(found["tokens"])
        counted = Served(found["drafts"], K * found["drafts"], found["accepted"])
        return found["tokens"], found["seconds"], counted

    return ask
