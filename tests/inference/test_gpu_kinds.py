"""Every kind of draft on the stand-in device, and on a GPU if there is one: what is replayed there drafts what single
steps draft on a CPU."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inference import Engine, Sampling
from inference.exactness.forced import rounds_along
from inference.models.lm import WORTH
from inference.output import Emitted
from inference.policy import Fixed
from inference.proposers.base import Proposal, Proposer
from inference.round import DecodingRound
from tests import gpu_counts, kinds, standin
from tests.tiny import tiny


def engine_on(kind: str, device: str, rule: str = "token") -> Engine:
    target = tiny()
    proposer = kinds.KINDS[kind].proposer(target)  # made on the CPU: random numbers of a GPU are others
    for module in (target, *modules_of(proposer)):
        module.to(device)
    return Engine(target, proposer, verify=rule, policy=Fixed(gpu_counts.K), rows=gpu_counts.ROWS)


def decoded(kind: str, device: str, sampling: Any, rule: str = "token", real: bool = False) -> Any:
    with standin.device() if device == "cuda" and not real else nullcontext():
        settings = {"max_new_tokens": 10, "sampling": sampling, "seed": 4, "ignore_eos": True}
        return engine_on(kind, device, rule).generate(gpu_counts.PROMPTS, **settings)


def expected_calls(kind: str, device: str, real: bool = False) -> list[Tensor]:
    """The distributions of drafts along given texts that end one after the other, as a verdict computes them."""
    counts = range(3, 3 + gpu_counts.ROWS)
    tokens = [[(5 * i + 3 * n) % 30 + 1 for i in range(n)] for n in counts]
    texts = Emitted(gpu_counts.PROMPTS, list(range(gpu_counts.ROWS)), tokens, [])
    place = standin.device() if device == "cuda" and not real else nullcontext()
    with place, torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORTH, "cpu", 512)  # rows in the order of the device
        rounds = rounds_along(engine_on(kind, device), texts, Sampling(0.8), max(counts))
        return [p.to("cpu") for one in rounds for _, p in sorted(one.round.drawn.items())]


def modules_of(proposer: Any) -> Iterator[nn.Module]:
    """The networks of a proposer, and of those within it."""
    for part in vars(proposer).values():
        if isinstance(part, nn.Module):
            yield part
        elif isinstance(part, Proposer):
            yield from modules_of(part)


RECORDED = (*gpu_counts.KINDS, "block, target's head")
SETTINGS = {
    "one temperature": Sampling(0.8),
    "greedy": Sampling(0.0),
    "cuts": gpu_counts.CUTS,
    "temperatures": gpu_counts.MIXED,
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:.*CUDA graphs failed")
@pytest.mark.parametrize(("kind", "settings"), [(kind, settings) for kind in RECORDED for settings in SETTINGS])
def test_a_gpu_writes_the_text_of_a_cpu(kind: str, settings: str) -> None:
    """In double precision, where no sum of another order decides a draw."""
    one, other = (decoded(kind, device, SETTINGS[settings], real=True) for device in ("cpu", "cuda"))
    assert one.tokens == other.tokens and one.stats.rows == other.stats.rows
    assert sum(other.stats.accepted)


DRAWN = [kind for kind in RECORDED if kinds.KINDS[kind].drawn and kind not in ("retrieval", "hybrid")]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", DRAWN)
def test_a_verdict_reads_the_same_drafts_from_recordings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts end one after the other, so later rounds are shorter than those that are recorded."""
    monkeypatch.setattr("inference.models.replay.WARMUP", 0)
    torch.testing.assert_close(expected_calls(kind, "cuda"), expected_calls(kind, "cpu"))


def drafts_of_turns(kind: str, device: str) -> list[tuple[Tensor, Tensor]]:
    """The drafts of a short text, of one that needs more slots, and of another short one, with their distributions."""
    seen: list[tuple[Tensor, Tensor]] = []
    with standin.device() if device == "cuda" else nullcontext():
        engine = engine_on(kind, device)
        propose = engine.propose

        def watched(round: DecodingRound) -> Proposal:
            proposal = propose(round)
            k = proposal.k[0]
            if proposal.q is not None and k:
                seen.append((proposal.x[:1, :k].to("cpu").clone(), proposal.q[:1, :k].to("cpu").clone()))
            return proposal

        engine.propose = watched  # type: ignore[method-assign]
        for length in (3, 30, 5):
            prompt = [(7 * i + length) % 30 + 1 for i in range(length)]
            engine.generate([prompt], max_new_tokens=8, sampling=Sampling(0.8), seed=2, ignore_eos=True)
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize("kind", RECORDED)
def test_no_recording_outlives_the_slots_that_it_reads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.models.replay.WARMUP", 0)
    monkeypatch.setattr("inference.models.replay.FEWEST", 8)
    for module in ("models.lm", "proposers.eagle"):
        monkeypatch.setattr(f"inference.{module}.FIRST_SLOTS", 8)
    torch.testing.assert_close(drafts_of_turns(kind, "cuda"), drafts_of_turns(kind, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DRAWN)
def test_a_verdict_on_a_gpu_reads_the_drafts_of_a_cpu(kind: str) -> None:
    torch.testing.assert_close(expected_calls(kind, "cuda", real=True), expected_calls(kind, "cpu"))


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:.*CUDA graphs failed")
@pytest.mark.parametrize("rule", ["block", "match", "coupled"])
def test_rules_on_a_gpu_write_the_text_of_a_cpu(rule: str) -> None:
    one, other = (decoded("quantised", device, gpu_counts.MIXED, rule, real=True) for device in ("cpu", "cuda"))
    assert one.tokens == other.tokens and one.stats.rows == other.stats.rows
