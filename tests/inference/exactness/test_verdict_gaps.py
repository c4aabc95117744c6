"""What planted bugs survived: rows told apart by min_p, the order of bias and penalty, decode-only figures."""

import pytest
import torch

from inference import Engine, Sampling
from inference.measure.timing import ArmResult, Timing
from inference.processors import process
from inference.report.build import build, table
from inference.sampling import probs
from tests.tiny import tiny


def test_rows_that_differ_in_min_p_alone_keep_their_own():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 3)
    regimes = [Sampling(min_p=0.5), Sampling(), Sampling(min_p=0.1)]
    found = probs(logits, regimes)
    assert (found > 0).sum(-1).tolist() == [1, 4, 3]
    for row, regime in zip(found, regimes, strict=True):
        assert torch.equal(row, probs(logits[:1], regime)[0])


def test_bias_comes_before_the_repetition_penalty_as_in_transformers():
    """A bias that turns the sign of a logit decides whether the penalty multiplies or divides it."""
    model, prompt = tiny(seed=1), [3, 1, 4, 1, 5]
    ids = torch.tensor([prompt])
    theirs = model.generate(
        ids, max_new_tokens=1, do_sample=False, pad_token_id=0, repetition_penalty=3.0,
        sequence_bias=[[[token], 2.0] for token in (1, 3, 4, 5)], output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    regime = Sampling(repetition_penalty=3.0, logit_bias={1: 2.0, 3: 2.0, 4: 2.0, 5: 2.0})
    ours = process(model(ids).logits[:, -1], [prompt], [0], regime)
    torch.testing.assert_close(ours, theirs.scores[0].to(ours.dtype), atol=1e-5, rtol=1e-5)


def test_decode_only_figures_are_without_prefill():
    def result(seconds, decode):
        return ArmResult([[1] * 10], seconds, decode)

    runs = [[{"fast": result(2.0, 1.0), "plain": result(6.0, 5.0)}] for _ in range(2)]
    timing = Timing([([[1]], [0])] * 2, runs)
    target = tiny(vocab=8, layers=1, hidden=8)
    report = build(timing, Engine(target), "fast", "plain", sampling=Sampling(), max_new_tokens=10, target="t")
    assert report["speedup"]["whole"]["value"] == pytest.approx(3)
    assert report["speedup"]["decode"]["value"] == pytest.approx(5)
    fast = report["arms"]["fast"]
    assert (fast["seconds"], fast["decode_seconds"]) == (4.0, 2.0)
    assert (fast["speed"], fast["decode_speed"]) == (5.0, 10.0)
    assert "3.000 [3.000, 3.000] with prefill, 5.000 [5.000, 5.000] decode only" in table(report)
