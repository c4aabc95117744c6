"""Drafts served by a real vLLM: it accepts them as often as this engine does, and as predicted, for either way of
drafting, and serves the target's text."""

import copy
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.bench import server_parity as checked
from cotrain.cli import main
from cotrain.evaluation.held_out import held_out
from cotrain.evaluation.profile import provenance
from cotrain.export.hf import export
from cotrain.planning.plan import Plan
from cotrain.planning.planner import BATCH
from cotrain.rollout import training_texts
from cotrain.teacher.target_model import load_pair, served
from inference import Sampling
from inference.drafts.bundled_target import resolve
from inference.drafts.draft_folder import load_draft, read
from inference.exactness.ties import check_text
from inference.measure.arms import engine_arm
from inference.measure.timing import interleave
from inference.models.pretrained import cast
from inference.proposers import NGram
from inference.sampling.noise import row_ids
from inference.servers.openai_client import Client
from inference.servers.vllm_server import draft_model
from tests.engines.conftest import CASES, OUTPUT, SIZE
from tests.engines.drafts import K, draft_folder
from tests.engines.servers import serving
from tests.settings import resized

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
TEMPERATURES = (1.0, 0.0)
ALONE, TOGETHER = 3, 16  # prompts that are served one by one, and eight at a time, for their speed


@pytest.fixture(scope="session")
def plain(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The target served without a draft: its greedy texts, texts that it sampled to learn from, and tokens per second
    alone and eight at a time."""
    target, tokenizer = load_pair("bundled")
    plan = Plan(target, tokenizer, target, Sampling(), "token", SIZE, ("bundled", "none"))
    asked = ["rollout", "kind=held_out", "rollout.held_out_texts=8", "rollout.rows=8", f"output={OUTPUT / 'rollouts'}"]
    with serving(resolve("bundled"), None, OUTPUT / "plain.log") as url:
        texts = greedy(Client(url), plan.final(0, SIZE.prompts))
        found["plain"] = speeds(Client(url), plan)
        shutil.rmtree(OUTPUT / "rollouts", ignore_errors=True)
        assert main([*asked, f"rollout.url={url}"]) == 0
    yield {"plan": plan, "texts": texts}


def greedy(client: Client, prompts: list[list[int]]) -> list[list[int]]:
    """Return the ids of a server without a draft, which has no counters of drafts."""
    answers = client.complete(prompts, SIZE.new_tokens, Sampling(0.0), row_ids(prompts), 8, ignore_eos=True)
    return [answer.ids or [] for answer in answers]


def speeds(client: Client, plan: Plan) -> dict[str, float]:
    """Tokens per second at temperature 1, one request at a time and eight."""
    prompts, speed = plan.final(0, SIZE.prompts), {}
    for at_once, part in ((1, prompts[:ALONE]), (8, prompts[:TOGETHER])):
        client.complete(part[:at_once], 8, Sampling(), row_ids(part[:at_once]), at_once, ignore_eos=True)  # warm
        begun = time.perf_counter()
        client.complete(part, SIZE.new_tokens, Sampling(), row_ids(part), at_once, ignore_eos=True)
        speed[f"tokens_per_second_{at_once}"] = len(part) * SIZE.new_tokens / (time.perf_counter() - begun)
    return speed


def in_regime(plan: Plan, temperature: float) -> Plan:
    """The plan at a temperature. Greedy rounds are certain, so half of the prompts show as much of them."""
    prompts = plan.bench.prompts if temperature else plan.bench.prompts // 2
    return replace(plan, sampling=Sampling(temperature=temperature), bench=resized(plan.bench, prompts=prompts))


def same_text(plan: Plan, plain: list[list[int]], served: list[list[int]]) -> Any:
    """Of greedy texts of the first prompts: equal ones, ties, and differences that rounding, as the server rounds, does
    not explain. plain: of these prompts, and of more."""
    prompts = plan.final(0, len(served))
    keys, target = (row_ids(prompts), 0), cast(copy.deepcopy(plan.target), torch.bfloat16)
    return check_text(target, prompts, plain[: len(served)], served, keys, Sampling(temperature=0), 4096, K)


@pytest.mark.parametrize(("size", "objective"), CASES, ids=[", ".join(case) for case in CASES])
def test_a_draft_is_accepted_as_here(
    size: str, objective: str, plain: dict[str, Any], found: dict[str, Any], tmp_path: Path
) -> None:
    made = draft_folder(f"{size}, {objective}")
    folder = export(made, tmp_path / "served", "vllm")
    metadata = read(folder).metadata
    assert metadata is not None and metadata.objective == objective
    draft, _, _ = load_draft(folder)
    plan = replace(plain["plan"], draft=draft, objective=objective, kind=metadata.kind)
    config = draft_model(str(folder), K, metadata.objective)
    figures = found[f"{size}, {objective}"] = {}
    with serving(resolve("bundled"), config, OUTPUT / f"{size}, {objective}.log") as url:
        client = Client(url)
        for temperature in TEMPERATURES:
            regime = in_regime(plan, temperature)
            kept: list[list[list[int]]] = []
            ask = checked.over_http(client, regime)

            def noted(prompts: list[list[int]], at_once: int, ask: Any = ask, kept: Any = kept) -> checked.Answer:
                answer = ask(prompts, at_once)
                kept.append(answer[0])
                return answer

            parity = checked.server_parity(regime, noted, K, at_once=8)
            figures[f"temperature {temperature:g}"] = parity.report()
            print(f"\nvllm, {size}, {objective}, temperature {temperature:g}: {parity.line()}")
            assert parity.passed, parity.line()
        text = same_text(plan, plain["texts"], kept[0])
        figures["greedy_text"] = vars(text) | {"line": text.line()}
        figures |= speeds(client, plan)
    print(text.line(), {name: round(value) for name, value in figures.items() if name.startswith("tokens")})
    assert text.unexplained == 0


def test_texts_that_it_samples_are_the_targets_own(plain: dict[str, Any], found: dict[str, Any]) -> None:
    """rollout.url=: by the target's surprise at them."""
    texts = training_texts.padded(training_texts.read_rows(OUTPUT / "rollouts" / "held_out_T1"))
    read, head = served(plain["plan"].target)
    own = provenance(held_out(read, texts, 1.0), head)
    found["rollout.url"] = vars(own)
    print(f"\nvllm, rollout.url: {own.line()}")
    assert own.own and own.tokens > 3000


def test_defaults_of_the_targets_config_change_no_text(plain: dict[str, Any], tmp_path: Path) -> None:
    """A request that leaves fields out gets them; those of `rollout.url=` and `serve_check` leave none out."""
    folder, plan = tmp_path / "target", replace(plain["plan"], sampling=Sampling(temperature=0))
    shutil.copytree(resolve("bundled"), folder)
    file = folder / "generation_config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(config | {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3}))
    prompts = plan.final(0, 8)
    with serving(str(folder), None, OUTPUT / "defaults.log") as url:
        client = Client(url)
        texts = greedy(client, prompts)
        few = {
            "model": client.model,
            "prompt": prompts[0],
            "max_tokens": SIZE.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        filled = client._read("/v1/completions", json.loads, few)["choices"][0]["token_ids"]
        sampled = client.complete(prompts, SIZE.new_tokens, Sampling(), row_ids(prompts), ignore_eos=True)
    assert filled != texts[0]  # the server does fill
    assert same_text(plan, plain["texts"], texts).unexplained == 0
    starts, ids = [len(prompt) for prompt in prompts], [one.ids or [] for one in sampled]
    below = 0  # tokens that are not among the target's five likeliest
    for start, prompt, new in zip(starts, prompts, ids, strict=True):
        logits = plan.target(torch.tensor([prompt + new])).logits[0, start - 1 : -1]
        below += int((logits.topk(5).indices != torch.tensor(new)[:, None]).all(1).sum())
    assert below > 10


def test_ngram_serves_the_targets_text(plain: dict[str, Any], found: dict[str, Any]) -> None:
    config = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    plan = replace(plain["plan"], sampling=Sampling(temperature=0))
    with serving(resolve("bundled"), config, OUTPUT / "ngram.log") as url:
        texts, _, counted = checked.over_http(Client(url), plan)(plan.final(0, SIZE.prompts), 8)
        speed = speeds(Client(url), plan)
    own = engine_arm("own", plan.engine(K, BATCH, proposer=NGram()), plan.sampling, SIZE.new_tokens)
    ours = interleave([own], plan.final(0, SIZE.prompts), BATCH, warmup=0).stats("own")
    text = same_text(plan, plain["texts"], texts)
    assert counted is not None and ours is not None
    drafted = 1 + sum(ours.accepted) / ours.drafted[0]  # of rounds that drafted, as the server counts
    figures = {"served": counted.tau, "ours": drafted, "greedy_text": vars(text) | {"line": text.line()}, **speed}
    found["ngram"] = figures
    print(f"\nvllm, ngram: {figures}")
    assert text.unexplained == 0 and counted.tau > 1
