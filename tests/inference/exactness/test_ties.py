"""Check (a): differences from plain text, and which of them are ties."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness import ties, verdict
from inference.exactness.teacher_forced import TextLogits
from inference.exactness.ties import Difference, TextCheck, check_text, compare_passes, excused, is_tie
from inference.output import Counts, Emitted
from inference.policy import Fixed
from inference.proposers import Independent
from inference.sampling import probs
from inference.sampling.noise import row_ids
from tests.inference.exactness.test_verdict import PROMPTS, V
from tests.inference.exactness.test_verdict_figures import LOGITS
from tests.tiny import near, tiny


@pytest.mark.parametrize("own", [0.0, 1e-5, 0.5])
def test_a_gap_is_excused_by_the_rounding_that_logits_have(own: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny(dtype=torch.float32), []
    engine = Engine(model, Independent(near(model)), policy=Fixed(2), rows=1)

    def coupled(*given: Any) -> None:
        calls.append(given)
        raise KeyError

    monkeypatch.setattr(verdict, "check_logits", lambda *_: replace(LOGITS, own=own))
    monkeypatch.setattr(verdict, "check_coupled", coupled)
    prompts = [[n, 2] for n in range(3)]
    texts = Emitted([*prompts, prompts[0]], [4, 5, 6, 4], [[1] * 9] * 4, [Counts(9)] * 4)
    with pytest.raises(KeyError):
        verdict.check(engine, texts, Sampling(0.5), 600, seed=11)
    ((_, chosen, ids, sampling, limit, seed, bound, tree),) = calls
    assert (chosen, ids) == (prompts[:2], [4, 5])  # 1,024 tokens, each prompt once
    assert (sampling, limit, seed, tree) == (Sampling(0.5), 600, 11, None)
    assert bound == pytest.approx(8 * min(max(own, torch.finfo(torch.float32).eps), 1e-3))


def test_what_stands_past_a_texts_end_is_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap changes by a quarter at the text's token, by 9 after it."""

    def passes(*_: Any, width: int, **__: Any) -> Any:
        logits = torch.tensor([[[2.0, 1.0], [2.0, 1.0]]]) + (width > 1) * torch.tensor([[[0.25, 0.0], [9.0, 0.0]]])
        x, valid = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[True, False]])
        yield TextLogits([0], 0, logits, x, valid, torch.ones(1, 2))

    monkeypatch.setattr(ties, "teacher_forced", passes)
    assert compare_passes(tiny(), [[1]], [[0]], Sampling(), vocabulary=2, width=2)[0] == 0.25


def test_one_changed_token_is_unexplained(pair):
    target, keys, seed, prompts = pair[0], row_ids(PROMPTS[:4]), 2, PROMPTS[:4]
    engine = Engine(target, verify="coupled")
    plain = engine.generate(prompts, max_new_tokens=6, seed=seed, ids=keys, ignore_eos=True).tokens
    planted = [list(text) for text in plain]
    planted[1][4] = (planted[1][4] + 1) % V
    shorter = [*plain[:3], plain[3][:-1]]
    same, other, cut = (
        check_text(target, prompts, plain, texts, (keys, seed), Sampling(), V, k=3, rows=2)
        for texts in (plain, planted, shorter)
    )
    assert same.passed and (same.equal, same.ties, same.unexplained) == (4, 0, 0)
    said = "with shared noise the texts of {} prompts are plain decoding's, token for token{} (largest score gap "
    ties, wrong = ", but for 4 ties that rounding decides", ", but for 2 tokens that it does not explain"
    assert same.line().startswith(said.format(4, ""))
    assert TextCheck(8, 5, 4, 0, 0.1, 0.2).line().startswith(said.format(8, f"{ties}, in 3 of them"))
    assert TextCheck(8, 5, 4, 2, 0.1, 0.2).line().startswith(said.format(8, f"{ties}{wrong}, in 3 of them"))
    assert not other.passed and (other.equal, other.ties, other.unexplained) == (3, 0, 1)
    assert other.gap > 1000 * other.noise
    assert cut.unexplained == 1


@pytest.mark.parametrize(
    ("sampling", "logits", "tie"),
    [
        (Sampling(0), [1.0, 0.99, 0.0], True),
        (Sampling(0), [1.0, 0.97, 0.0], False),
        (Sampling(top_k=1), [1.0, 0.99, 0.0], True),
        (Sampling(top_k=1), [1.0, 0.97, 0.0], False),
        (Sampling(min_p=0.5), [1.0, 0.31, 0.0], True),  # log .5 = -.693: the edge is at .307, inside
        (Sampling(min_p=0.5), [1.0, 0.30, 0.0], True),  # outside
        (Sampling(min_p=0.5), [1.0, 0.25, 0.0], False),
    ],
)
def test_a_tie_is_a_gap_or_an_edge_within_the_noise(sampling, logits, tie):
    """Token 1 stands against token 0; its Gumbel noise is far ahead wherever there is a temperature."""
    logits, g = torch.tensor(logits), torch.tensor([0.0, 5.0, 0.0])
    scores = logits + sampling.temperature * g
    emitted = int((probs(logits, sampling).log() + g).argmax())
    difference = Difference(abs(float(scores[1] - scores[0])), logits, g, emitted, 1 - emitted)
    assert is_tie(difference, 0.02, sampling) == tie


def test_noise_is_what_wide_passes_change(pair):
    """A model whose logit of token 0 depends on the width of the pass, by .25."""

    def nudge(module, args, kwargs, out):
        out.logits[..., 0] += 0.25 * (kwargs["input_ids"].shape[1] > 1)

    hook = pair[0].register_forward_hook(nudge, with_kwargs=True)
    texts = [[0, 1, 2, 3, 4, 5]] * 4
    noise, result = compare_passes(pair[0], PROMPTS[:4], texts, Sampling(), vocabulary=V, width=3)
    hook.remove()
    assert noise == pytest.approx(0.25, abs=1e-9) and result == []


def test_a_gap_beyond_the_dtype_is_no_tie_however_noisy_the_passes():
    logits = torch.tensor([1.0, 0.5, 0.0])
    tie = Difference(0.5, logits, torch.zeros(3), 0, 1, limit=0.6)
    assert excused(tie, 0.3, Sampling(0)) and not excused(tie, 0.2, Sampling(0))
    assert not excused(tie._replace(limit=0.4), 0.3, Sampling(0))
