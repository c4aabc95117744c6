"""The operator that verifies a round on a CPU does what the rules in Python do."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference import Engine, Sampling, verification
from inference.models import packing
from inference.proposers.independent import Independent
from inference.proposers.retrieval import Retrieval
from inference.sampling import draw, one_hot, probs
from inference.trace import COLUMNS
from inference.verify import chain
from inference.verify.rules import RULES
from tests.inference.models.test_packing import needs_kernels
from tests.inference.test_every_proposer import Uneven
from tests.tiny import tiny

A, K = 8, 3
OTHERS = [Sampling(0.8, top_k=5), Sampling(0.8, min_p=0.2), Sampling(repetition_penalty=1.3)]
SAMPLING = [Sampling(t, top_p=p) for t in (1.0, 0.3, 0.0, 2.0) for p in (1.0, 0.8)]


@needs_kernels
@pytest.mark.parametrize("size", [5, 33, 1031, 4096])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("depths", [0, 1, K])
@pytest.mark.parametrize("certain", [False, True])
def test_tables_are_those_of_the_rules(rule: str, size: int, depths: int, certain: bool) -> None:
    """Also of drafts that are likely to be accepted, and of rows with fewer drafts than others."""
    assert packing.has_kernels()
    random = torch.Generator().manual_seed(size + depths)
    temperature, tails = (torch.tensor([getattr(s, n) for s in SAMPLING]).double() for n in ("temperature", "top_p"))
    lines = []
    for scale in (0.1, 1.0, 4.0) * 4:
        logits = scale * torch.randn(A, depths + 1, size, generator=random)
        logits[4:6] = logits[4:6].round()  # several maxima at temperature 0
        near = logits[:, :-1] + 0.3 * torch.randn(A, depths, size, generator=random)
        near[4:6, :1], near[4:6, 1:] = logits[4:6, :-1][:, :1], -near[4:6, 1:]  # nothing is left of p - q, then all
        p, q = (torch.stack([*map(probs, each, SAMPLING)]) for each in (logits, near))
        x = torch.multinomial(q.flatten(0, 1), 1, generator=random).view(A, depths) if depths else q[..., 0].long()
        k, u = torch.randint(depths + 1, (A,), generator=random), torch.rand(A, depths + 2, generator=random).double()
        u[1::2] = 0  # no token without mass may pass
        q = one_hot(x, q) if certain else q
        given = logits, q[:, :0] if certain else q, x, k, temperature, 1 - tails, u[:, 1:], u[:, 0].contiguous()
        table = torch.ops.inference.verified(*given, rule == "block")
        if not table.numel():  # a tail of broad distributions that a sort decides
            continue
        accepted, last = getattr(chain, rule)(p, q, x, u[:, 1 : depths + 1], k)
        expected = (accepted, draw(last, u[:, 0]), k, 0 * k, 0 * k, (accepted < k).long())
        assert torch.equal(table, torch.cat((torch.stack(expected, 1), x), 1))
        lines.append(accepted)
    assert len(lines) > 3
    assert not depths or {*torch.cat(lines).tolist()} == {*range(depths + 1)}


@needs_kernels
@pytest.mark.parametrize("part", ["nan", "-inf", "q", "none"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_without_a_distribution_the_table_is_empty(part: str, temperature: int) -> None:
    logits, u = torch.zeros(2, 3, 9), torch.zeros(2, 3).double()
    q, x, k = torch.full((2, 2, 9), 1 / 9), torch.zeros(2, 2).long(), torch.tensor([2, 2])
    if packing.has_kernels() and part == "q":
        q[1, 1] = math.nan
    elif part == "nan":
        logits[1, 2, 8] = math.nan
    elif part == "-inf":
        logits[1, 2] = -math.inf
    table = torch.ops.inference.verified(logits, q, x, k, u[:, 0] + temperature, u[:, 0], u, u[:, 0], True)
    assert table.numel() == (16 if part == "none" else 0)


@needs_kernels
@pytest.mark.parametrize("rule", ["token", "block", "match", replace(RULES["block"], verify=RULES["match"].verify)])
@pytest.mark.parametrize("sampling", [Sampling(1.0), SAMPLING[:3], *OTHERS, Sampling(0.0)])
@pytest.mark.parametrize("looked_up", [False, True])
def test_an_engine_decodes_the_same_with_and_without_it(
    rule: Any, sampling: Any, looked_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It applies to the rules and settings that it knows."""
    assert packing.has_kernels()
    target, draft = tiny(layers=2).float(), tiny(layers=1, seed=4).float()
    met, operator = [], verification._by_operator
    outs = []
    for used in (True, False):
        proposer = Retrieval() if looked_up else Independent(draft)
        engine = Engine(target, proposer, verify=rule, policy=Uneven(), rows=2)

        def noted(*given: Any, used: bool = used) -> Any:
            met.append(operator(*given))
            return met[-1] if used else given[2].x[:0]

        monkeypatch.setattr(verification, "_by_operator", noted)
        out = engine.generate([[1, 2, 3], [4], [5, 6]], max_new_tokens=20, sampling=sampling, seed=3, ignore_eos=True)
        outs.append((out.tokens, out.stats.target_calls, out.stats.accepted))
    assert outs[0] == outs[1]
    applies = rule in ("token", "block") and sampling not in OTHERS
    assert {bool(table.numel()) for table in met} == {applies}


@needs_kernels
@pytest.mark.parametrize("certain", [False, True])
def test_a_draft_outside_the_vocabulary_is_refused(certain: bool) -> None:
    """One that no row drafts is not read."""
    assert packing.has_kernels()
    u, k = torch.zeros(1, 3).double(), torch.ones(1).long()
    given = torch.zeros(1, 3, 9), torch.full((1, 0 if certain else 2, 9), 1 / 9)
    for drafts, fits in (([1, 9], True), ([9, 1], False), ([-1, 1], False)):
        with nullcontext() if fits else pytest.raises(RuntimeError, match="no id of the vocabulary"):
            torch.ops.inference.verified(*given, torch.tensor([drafts]), k, u[:, 0] + 1, u[:, 0], u, u[:, 0], True)


@needs_kernels
def test_a_rejected_draft_of_the_targets_own_distribution_leaves_that() -> None:
    assert packing.has_kernels()
    p = torch.tensor([0.5, 0.3, 0.2])
    q, u = (p * (1 + 2**-22)).view(1, 1, 3), torch.tensor([[1 - 2**-40]]).double()
    given = (
        p.log().expand(1, 2, 3),
        q,
        torch.tensor([[1]]),
        torch.ones(1).long(),
        u * 0 + 1,
        u[0] * 0,
        u,
        u[0] * 0 + 0.6,
    )
    for block in (False, True):
        assert torch.ops.inference.verified(*given, block)[0, :2].tolist() == [0, 1]


@needs_kernels
def test_recorded_rounds_are_verified_in_python() -> None:
    assert packing.has_kernels()
    tables: list[Any] = []
    record: Any = SimpleNamespace(begin=lambda *_: None, note=lambda *given: tables.extend(given[-1]))
    Engine(tiny(dtype=torch.float32), record=record).generate([[1]], max_new_tokens=3)
    assert min(map(len, tables)) > COLUMNS
