"""The recursion against the decoding process itself: every draft, outcome and text of a toy, enumerated."""

import itertools
import math
import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from cotrain import acceptance
from inference.verify import predict_chain

V, L = 2, 4
CALLS = {"token": predict_chain.expected_calls, "block": predict_chain.expected_calls_block}
REACH = {"token": predict_chain.reach, "block": predict_chain.reach_block}


def probs(*key):
    """A distribution on V tokens that is a function of its key."""
    return norm(np.array([random.Random(repr((key, v))).uniform(0.05, 1) for v in range(V)]))


def norm(a):
    return a / a.sum() if a.sum() > 0 else a


def token_outcomes(p, q, x):
    """(P(n accepted), distribution of the next token), n = 0..K: the token rule of Leviathan et al."""
    reached = 1.0
    for i, token in enumerate(x):
        a = min(1.0, p[i][token] / q[i][token])
        yield reached * (1 - a), norm(np.maximum(p[i] - q[i], 0))
        reached *= a
    yield reached, p[len(x)]


def block_outcomes(p, q, x):
    """The same for block verification (Sun et al.): n is the last i whose own coin h_i falls."""
    weight = [1.0]
    for i, token in enumerate(x):
        weight.append(min(1.0, weight[-1] * p[i][token] / q[i][token]))
    residual = [np.maximum(w * a - b, 0) for w, a, b in zip(weight[:-1], p[:-1], q, strict=True)]
    inner = [
        r.sum() / (r.sum() + 1 - w) if r.sum() + 1 - w > 0 else 1.0 for r, w in zip(residual, weight[:-1], strict=True)
    ]
    h = [1.0, *inner[1:], weight[-1]] if x else [1.0]
    for n in range(len(x) + 1):
        yield h[n] * math.prod(1 - later for later in h[n + 1 :]), norm(residual[n]) if n < len(x) else p[-1]


OUTCOMES = {"token": token_outcomes, "block": block_outcomes}


def process(rule, q, k, length):
    """Every text of `length` tokens -> (probability, mean calls, variance), from all rounds of the engine."""
    states = [defaultdict(lambda: np.zeros(3)) for _ in range(length + 1)]
    states[0][()] += [1, 0, 0]  # moments of the number of calls, times the probability of being here
    for at in range(length):
        for text, (m0, m1, m2) in states[at].items():
            called = np.array([m0, m1 + m0, m2 + 2 * m1 + m0])
            for x in itertools.product(range(V), repeat=k(text)):
                qs = [q(text + x[:i], i) for i in range(len(x))]
                ps = [probs("p", text + x[:i]) for i in range(len(x) + 1)]
                drafted = math.prod(qs[i][token] for i, token in enumerate(x))
                for n, (chance, after) in enumerate(OUTCOMES[rule](ps, qs, x)):
                    for y in range(V):
                        new = (*text, *x[:n], y)[:length]
                        states[len(new)][new] += drafted * chance * after[y] * called
    return {t: (m[0], m[1] / m[0], m[2] / m[0] - (m[1] / m[0]) ** 2) for t, m in states[length].items()}


def ratios(texts, q, depths=None):
    """l of each text's tokens: (B,T), or (B,T,K) with NaN where it must not be read; NaN past the end too."""
    out = np.full((len(texts), max(map(len, texts)), depths or 1), np.nan)
    for b, text in enumerate(texts):
        for t, token in enumerate(text):
            for j in range(min(depths or 1, t + 1)):
                out[b, t, j] = math.log(q(text[:t], j)[token] / probs("p", text[:t])[token])
    values = torch.from_numpy(out)
    return values if depths else values[..., 0]


def alike(prefix, depth):
    return probs("q", prefix)


def by_depth(prefix, depth):
    """A parallel head: its distribution depends on where the round began."""
    return probs("q", prefix, depth)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("q", "deep"), [(alike, False), (by_depth, True)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_calls_are_those_of_the_process(rule, q, deep, k):
    tables = [process(rule, q, lambda _: k, length) for length in (1, 3, L)]
    texts = [text for table in tables for text in table]
    truth = np.array([table[text] for table in tables for text in table])
    for text, (chance, _, _) in zip(texts, truth, strict=True):  # the oracle itself is exact
        assert chance == pytest.approx(math.prod(probs("p", text[:t])[x] for t, x in enumerate(text)), abs=1e-12)
    l = ratios(texts, q, k + 1 if deep else None)  # one depth more than is used
    lengths = torch.tensor([len(t) for t in texts])
    given = l if rule == "block" else l.clamp(max=0).exp()
    np.testing.assert_allclose(CALLS[rule](given, k, lengths), truth[:, 1], atol=1e-12)
    np.testing.assert_allclose(
        predict_chain.variance_from(REACH[rule](given, k, lengths), lengths), truth[:, 2], atol=1e-12
    )


def simulate(r, k, runs):
    """Rounds by throwing every coin: calls of each run, and (accepted, drafted, tried) counts by depth."""
    rng, total = np.random.default_rng(0), len(r)
    calls, counts = np.zeros(runs), np.zeros((3, k))
    at = np.zeros(runs, int)
    while (live := at < total).any():
        calls += live
        going = live.copy()
        start = at.copy()
        for j in range(k):
            inside = live & (start + j < total)
            tried = going & inside
            going = tried & (rng.random(runs) < r[np.minimum(start + j, total - 1)])
            counts[:, j] += going.sum(), inside.sum(), tried.sum()
            at += going
        at += live
    return calls, counts


def test_simulation_of_one_text():
    r, k, runs = torch.rand(40, generator=torch.Generator().manual_seed(3)).double() ** 0.5, 4, 20_000
    calls, (accepted, drafted, tried) = simulate(r.numpy(), k, runs)
    reach = predict_chain.reach(r[None], k)
    variance = predict_chain.variance_from(reach).item()
    assert abs(calls.mean() - predict_chain.expected_calls(r[None], k).item()) < 4 * math.sqrt(variance / runs)
    assert calls.var() == pytest.approx(variance, rel=4 * math.sqrt(2 / runs))
    prefix, conditional = predict_chain.depths_from(reach, k)
    np.testing.assert_allclose(prefix, accepted / drafted, atol=0.006)
    np.testing.assert_allclose(conditional, accepted / tried, atol=0.006)


def test_no_draft_costs_a_call_a_token():
    lengths = torch.tensor([2, 5])
    r = torch.rand(2, 5)
    assert predict_chain.expected_calls(r, 0, lengths).tolist() == [2, 5]
    assert predict_chain.variance_from(predict_chain.reach(r, 0, lengths), lengths).tolist() == [0, 0]
    assert predict_chain.tau(r, 0, lengths).item() == 1
    assert predict_chain.expected_calls(torch.zeros(2, 5), 4, lengths).tolist() == [2, 5]
    assert predict_chain.expected_calls(torch.ones(1, 11), 4).tolist() == [3]  # 5 + 5 + 1 tokens
    assert predict_chain.expected_calls(torch.ones(1, 3), 8).tolist() == [1]  # more drafts than tokens


def test_tau_is_a_ratio_of_sums():
    r, lengths = torch.rand(3, 20).double(), torch.tensor([4, 20, 11])
    calls = predict_chain.expected_calls(r, 3, lengths)
    assert predict_chain.tau(r, 3, lengths).item() == pytest.approx(35 / calls.sum().item())
    l = r.log()
    assert predict_chain.tau_from(predict_chain.reach_block(l, 3, lengths), lengths).item() == pytest.approx(
        predict_chain.tau(r, 3, lengths).item()
    )  # l <= 0


def test_constant_acceptance_gives_the_iid_formula():
    tau = predict_chain.tau(torch.full((1, 4000), 0.8).double(), 5).item()
    assert tau == pytest.approx((1 - 0.8**6) / (1 - 0.8), rel=1e-3)
    assert acceptance.iid_tau(0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert acceptance.iid_tau(1.0, 5) == 6
    assert acceptance.iid_tau(0.0, 5) == 1


def test_ratio_edges():
    inf = torch.inf
    logp = torch.tensor([-1.0, -1.0, -1.0, -inf, -inf])
    logq = torch.tensor([-2.0, -0.5, -inf, -1.0, -inf], requires_grad=True)
    r = acceptance.r_from(logp, logq)
    torch.testing.assert_close(r, torch.tensor([math.exp(-1), 1, 0, 1, 0]))
    r.sum().backward()
    torch.testing.assert_close(logq.grad, torch.tensor([math.exp(-1), 0, 0, 0, 0]))
    assert acceptance.l_from(logp, logq).tolist() == [-1, 0.5, -inf, inf, -inf]
    assert acceptance.r_from(logp.bfloat16(), logq.bfloat16()).dtype == torch.float32
    blocked = torch.tensor([[0.5, -inf, 2.0, 0.1]], dtype=torch.float64, requires_grad=True)
    calls = acceptance.expected_calls_block(blocked, 3)
    calls.sum().backward()
    assert calls.isfinite().all() and blocked.grad.isfinite().all()


def test_shapes_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match="K >= k = 3"):
        predict_chain.expected_calls(torch.rand(1, 5, 2), 3)
    with pytest.raises(ValueError, match="at most 5"):
        predict_chain.expected_calls(torch.rand(1, 5), 2, torch.tensor([6]))


def test_sequence_losses_by_hand():
    r = torch.tensor([[0.5, 0.25, 0.9, 0.7]]).double()
    # a round at 0; at 1 unless token 0 is kept; at 2 if token 1 is refused, by either round
    calls = 1 + 0.5 + (0.5 * 0.75 + 0.5 * 0.75)
    assert acceptance.expected_calls(r, 2, torch.tensor([3])).item() == pytest.approx(calls)


SEQUENCE = [acceptance.expected_calls, acceptance.expected_calls_block]


@pytest.mark.parametrize("loss", SEQUENCE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 3)])
def test_sequence_losses_differentiate(loss, shape):
    g = torch.Generator().manual_seed(0)
    r = torch.rand(shape, generator=g, dtype=torch.float64) * 0.8 + 0.1
    l = (r * 2).log() if "block" in loss.__name__ else r
    assert torch.autograd.gradcheck(lambda a: loss(a, 3, torch.tensor([6, 4])), l.requires_grad_())


def test_gradient_where_a_draft_is_never_accepted():
    """A product with a zero factor keeps its slope; entries that no round reads get none, not NaN."""
    r = torch.full((1, 4, 2), torch.nan, dtype=torch.float64)
    r[0, :, 0], r[0, 1:, 1] = torch.tensor([0.0, 0.5, 0.5, 0.5]), 0.5
    acceptance.expected_calls(r.requires_grad_(), 2).sum().backward()
    assert r.grad.isfinite().all() and r.grad[0, 0, 0] < -0.1 and r.grad[0, 0, 1] == 0


def test_call_weights_are_calls_saved():
    r = torch.rand(2, 12, dtype=torch.float64) * 0.9
    weights = acceptance.call_weights(r, 4)
    assert not weights.requires_grad and (weights >= 0).all()
    for t in (0, 5, 10):
        more = r.clone()
        more[:, t] += 1e-6
        saved = (acceptance.expected_calls(r, 4) - acceptance.expected_calls(more, 4)) / 1e-6
        torch.testing.assert_close(weights[:, t], saved, atol=1e-5, rtol=0)
    assert (weights[:, -1] == 0).all()  # the last token comes with a call whether drafted or not


def test_the_histogram_of_a_short_text_is_that_of_the_text_alone() -> None:
    """Whatever stands after its end beside a longer text."""
    r = torch.rand(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    padded = predict_chain.reach(torch.nn.functional.pad(r, (0, 9), value=0.5), 3, torch.tensor([4]))
    alone = predict_chain.histogram_from(predict_chain.reach(r, 3))
    torch.testing.assert_close(predict_chain.histogram_from(padded, torch.tensor([4])), alone)
