"""Exported drafts in llama.cpp's own server and in transformers' generate, served as their cards say: accepted as often
as predicted and as here, and the text is the target's."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from cotrain.bench import server_parity as checked
from cotrain.cli import main
from cotrain.export.gguf import write_file
from cotrain.planning.plan import Plan
from cotrain.teacher.target_model import load_pair
from inference import Sampling
from inference.exactness.figures import Figures, expected, reach_of
from inference.exactness.likelihood import check_likelihood
from inference.exactness.side_by_side import pair_figures
from inference.measure.arms import transformers_arm
from inference.measure.timing import interleave
from inference.output import Counts, Emitted
from inference.sampling.noise import row_ids
from inference.servers.openai_client import Served
from inference.verify import predict_chain
from studies.assisted import assisted_arm
from studies.vllm_arm import Worker
from tests.engines.conftest import OUTPUT, reported, require_same
from tests.engines.conftest import SIZE as vllm_size
from tests.engines.drafts import K, draft_folder, load
from tests.engines.test_vllm import TEMPERATURES, in_regime, same_text
from tests.settings import resized

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
SIZE = resized(vllm_size, prompts=16, new_tokens=96)
SERVER = Path(__file__).parent / "llamacpp" / "server.py"
CONTEXT = 256
TOP = 10  # of the draft's tokens, from which llama.cpp draws


class LlamaCpp(Worker):
    """llama.cpp's server. command: of a card, after `llama-server`; () for no draft. rows: texts at once; with several,
    its EAGLE-3 accepts less (build 11549)."""

    def __init__(self, target: Path, command: tuple[str, ...] = (), rows: int = 1) -> None:
        flags = dict(zip(command[::2], command[1::2], strict=True))
        settings = {
            "target": str(target),
            "draft": flags.get("-md"),
            "type": flags.get("--spec-type"),
            "k": int(flags.get("--spec-draft-n-max", 0)),
            "sampled": flags.get("--spec-draft-sampling") == "probabilistic",
            "context": CONTEXT,
            "rows": rows,
        }
        python = os.environ["COTRAIN_VLLM"]
        super().__init__("llama.cpp", [python, str(SERVER)], settings, OUTPUT / "llamacpp server.log")

    def generate(self, prompts: list[list[int]], temperature: float, new_tokens: int = SIZE.new_tokens) -> Any:
        """The texts of the prompts, with `drafted`, `accepted` and `seconds`."""
        return self.ask(prompts=prompts, max_new_tokens=new_tokens, temperature=temperature, seed=0)


class Case(NamedTuple):
    """draft: of `drafts`; settings: of the export; markov: whether its head is kept."""

    draft: str
    settings: tuple[str, ...] = ()
    markov: bool = False


CASES = {
    "draft-eagle3": Case("eagle"),
    "draft-dspark": Case("block", markov=True),
    "draft-dflash": Case("block", settings=("layout=dflash",)),
    "draft-simple, greedy": Case("four layers, sampled", settings=("objective=greedy_draft",)),
    "draft-eagle3, d2t": Case("eagle, pruned"),
    "draft-dflash, causal, d2t": Case("block, causal"),
}


@pytest.fixture(scope="module")
def found(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    yield from reported("engines_out", pytestconfig)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Its draft is still to be set."""
    target, tokenizer = load_pair("bundled")
    return Plan(target, tokenizer, target, Sampling(), "token", SIZE, ("bundled", "none"))


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target for llama.cpp."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_file(plan.target, plan.tokenizer, path)
    return path


@pytest.fixture(scope="module")
def plain(plan: Plan, file: Path, found: dict[str, Any]) -> list[list[int]]:
    """Greedy texts of llama.cpp's server without a draft."""
    with LlamaCpp(file) as server:
        found["xllamacpp"] = server.version
        return server.generate(plan.final(0, SIZE.prompts), 0.0)["tokens"]


def asking(server: LlamaCpp, plan: Plan, kept: list[list[list[int]]]) -> checked.Ask:
    """Asks it under the plan's regime, and keeps its texts. Each round ends with a token that is no draft."""

    def ask(prompts: list[list[int]], at_once: int) -> checked.Answer:
        answer = server.generate(prompts, plan.sampling.temperature, plan.bench.new_tokens)
        kept.append(answer["tokens"])
        rounds = sum(len(text) - 1 for text in answer["tokens"]) - answer["accepted"]
        return answer["tokens"], answer["seconds"], Served(rounds, answer["drafted"], answer["accepted"])

    return ask


def on_card(folder: Path, program: str) -> list[str]:
    """The words of the command on an exported draft's card, after the program."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    words = shlex.split(card.split("```sh\n")[1].split("\n```")[0])
    assert words[0] == program
    return words[1:]


def for_llamacpp(name: str, file: Path, output: Path, *settings: str) -> tuple[str, ...]:
    """Export the draft of that name for llama.cpp. Return the words of the command on its card, after the program."""
    paths = [f"draft.path={draft_folder(name)}", f"target.path={file}", f"output={output}"]
    assert main(["export", "engine=llamacpp", *paths, *settings]) == 0
    return tuple(on_card(output, "llama-server"))


@pytest.mark.parametrize("name", CASES)
def test_llamacpp_accepts_a_draft_as_predicted(
    name: str, plan: Plan, file: Path, plain: list[list[int]], found: dict[str, Any], tmp_path: Path
) -> None:
    case, figures = CASES[name], found.setdefault(name, {})
    command = for_llamacpp(case.draft, file, tmp_path / "served", *case.settings)
    network, metadata = load(case.draft)
    if not case.markov:
        network.markov_head = None
    drafting = replace(plan, draft=network, objective="greedy", kind=metadata.kind)
    kept: list[list[list[int]]] = []
    with LlamaCpp(file, command) as server:
        for temperature in TEMPERATURES:
            regime = in_regime(drafting, temperature)
            parity = checked.server_parity(regime, asking(server, regime, kept), K, at_once=1)
            figures[f"temperature {temperature:g}"] = parity.report()
            print(f"\nllama.cpp, {name}, temperature {temperature:g}: {parity.line()}")
            assert parity.passed and parity.served > 1.1, parity.line()
    require_same(same_text(plan, plain, kept[TEMPERATURES.index(0.0)]), figures)


@pytest.fixture(scope="module")
def drawn(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    yield from reported("engines_out_sampled", pytestconfig)


def test_llamacpp_draws_drafts_of_the_ten_likeliest(
    plan: Plan, file: Path, plain: list[list[int]], drawn: dict[str, Any], tmp_path: Path
) -> None:
    """So q is that of its ten likeliest tokens; the text is the target's all the same."""
    command = for_llamacpp("four layers, sampled", file, tmp_path / "served")
    network, metadata = load("four layers, sampled")
    with LlamaCpp(file, command) as server:
        for temperature in TEMPERATURES:
            regime = in_regime(replace(plan, draft=network, kind=metadata.kind), temperature)
            prompts = regime.final(0, regime.bench.prompts)
            answer = server.generate(prompts, temperature)
            texts, draft = answer["tokens"], regime.proposer()
            emitted = sum(len(text) - 1 for text in texts)
            whole = checked.figures_after(regime, regime.engine(K, 1, proposer=draft), draft, prompts, texts)
            top = of_likeliest(whole, network, prompts, texts) if temperature else whole
            tau = {"served": emitted / (emitted - answer["accepted"])}
            for name, figures in (("predicted", top), ("predicted of the whole q", whole)):
                reach = reach_of(figures, "token")
                assert reach is not None
                tau[name] = emitted / float(predict_chain.calls_from(reach, figures.lengths).sum())
            ids = row_ids(prompts)
            likely = check_likelihood(
                regime.engine(K, 1), Emitted(prompts, ids, texts, [Counts() for _ in ids]), regime.sampling
            )
            drawn[f"temperature {temperature:g}"] = tau | {"tokens": emitted, "texts": likely.line()}
            print(f"\nllama.cpp, drawn, temperature {temperature:g}: {tau}; {likely.line()}")
            assert abs(tau["served"] / tau["predicted"] - 1) < checked.TOLERANCE and likely.passed
    require_same(same_text(plan, plain, texts), drawn)


@torch.no_grad()
def of_likeliest(figures: Figures, draft: Any, prompts: list[list[int]], texts: list[list[int]]) -> Figures:
    """The figures with log q of the draft's `TOP` likeliest tokens at temperature 1, renormalised. texts: each without
    its first token in the figures."""
    logq = figures.logq.clone()
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        logits = draft(torch.tensor([prompt + text])).logits[0, len(prompt) : -1].float()
        at, top = logits.gather(1, torch.tensor(text[1:])[:, None])[:, 0], logits.topk(TOP).values
        logq[row, : len(at)] = (at - top.logsumexp(-1)).where(at >= top[:, -1], -torch.inf).double()
    return replace(figures, logq=logq)


@pytest.fixture(scope="module")
def at_once(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    yield from reported("engines_out_rows", pytestconfig)


@pytest.mark.parametrize("name", ["draft-eagle3", "draft-dspark", "draft-dflash"])
def test_llamacpp_serves_the_targets_texts_at_once(
    name: str, plan: Plan, file: Path, plain: list[list[int]], at_once: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever is accepted; tau with one text at a time and with four is kept."""
    case, prompts = CASES[name], plan.final(0, SIZE.prompts // 2)
    command = for_llamacpp(case.draft, file, tmp_path / "served", *case.settings)
    figures = at_once[name] = {}
    for rows in (1, 4):
        with LlamaCpp(file, command, rows) as server:
            answer = server.generate(prompts, 0.0)
        emitted = sum(len(text) - 1 for text in answer["tokens"])
        text = same_text(plan, plain, answer["tokens"])
        tau = emitted / (emitted - answer["accepted"])
        figures[f"{rows} at once"] = {"served": tau, "tokens": emitted, "greedy_text": text.line()}
        print(f"\nllama.cpp, {name}, {rows} at once: tau {tau:.3f}; {text.line()}")
        assert text.unexplained == 0 and tau >= 1


@pytest.fixture(scope="module")
def assisted(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    yield from reported("engines_out_transformers", pytestconfig)


# of `drafts`: the class that loads the assistant, and arguments of generate
ASSISTANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "four layers, sampled": (AutoModelForCausalLM, {}),
    "block": (AutoModel, {"speculation_type": "dflash"}),
}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", ASSISTANTS)
def test_transformers_accepts_an_exported_draft_as_predicted(
    name: str, temperature: float, plan: Plan, assisted: dict[str, Any], tmp_path: Path
) -> None:
    """tau counts the target's calls; the greedy text is that of generate without a draft. A block reads states of the
    target, so it drafts nothing in the first call, which is not counted."""
    folder, (model, more) = tmp_path / "served", ASSISTANTS[name]
    assert main(["export", "engine=transformers", f"draft.path={draft_folder(name)}", f"output={folder}"]) == 0
    network, metadata = load(name)
    if more:
        network.markov_head = None
    plan = in_regime(replace(plan, draft=network, kind=metadata.kind), temperature)
    prompts, skipped = plan.final(0, plan.bench.prompts), len(more)
    arms = [
        assisted_arm(
            "assisted",
            plan.target,
            plan.sampling,
            SIZE.new_tokens,
            assistant=model.from_pretrained(folder, dtype=plan.target.dtype).eval(),
            k=K,
            **more,
        ),
        transformers_arm("plain", plan.target, plan.sampling, SIZE.new_tokens),
    ]
    timing = interleave(arms, prompts, len(prompts), warmup=0)
    tokens, stats = timing.texts("assisted").tokens, timing.stats("assisted")
    begun = [prompt + text[:skipped] for prompt, text in zip(prompts, tokens, strict=True)]
    ids, rest = row_ids(begun), [text[skipped:] for text in tokens]
    texts = Emitted(begun, ids, rest, [Counts() for _ in ids])
    engine = plan.engine(K, 1, proposer=plan.proposer())
    new_tokens = SIZE.new_tokens - skipped
    predicted = expected(pair_figures(engine, plan.proposer(), texts, plan.sampling, new_tokens, 0.0), "token")
    assert stats is not None and predicted is not None
    emitted, calls = sum(map(len, rest)), stats.target_calls - skipped * len(prompts)
    figures = {"served": emitted / calls, "predicted": emitted / predicted.calls, "tokens": emitted}
    found = assisted.setdefault(name, {})
    found[f"temperature {temperature:g}"] = figures | {"deviation": predicted.variance**0.5 / predicted.calls}
    print(f"\ntransformers, {name}, temperature {temperature:g}: {found}")
    assert abs(figures["served"] / figures["predicted"] - 1) < checked.TOLERANCE
    if not temperature:
        require_same(same_text(plan, timing.texts("plain").tokens, tokens), found)
        command = [sys.executable, *on_card(folder, "python")]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("The")
