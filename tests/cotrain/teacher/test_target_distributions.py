"""Top-k distributions: merged outside their tokens, the bounds of the loss, and training on them."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cotrain import losses
from cotrain.losses.spec import LossSpec, parse
from cotrain.teacher.target_distributions import TopKTeacher, completed, top_k
from cotrain.teacher.target_model import served
from cotrain.training.module import Distillation, Stage
from inference.sampling import keep_top_p
from tests.cotrain.commands.test_train import job, place, same, weights  # noqa: F401 - fixtures
from tests.cotrain.training.test_module import module_of
from tests.tiny import tiny

V, K = 40, 6
DIVERGENCES = ("kl", "rkl", "tv", "jsd")


def pair(n: int = 50) -> tuple[Tensor, Tensor]:
    """log p and the draft's logits, far apart and near."""
    g = torch.Generator().manual_seed(0)
    z, noise = torch.randn(2, n, V, generator=g, dtype=torch.float64)
    return (2 * z).log_softmax(-1), 2 * z + torch.linspace(0.1, 3, n)[:, None] * noise


def merged(logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """Both distributions with all tokens but p's top K merged into one: (n, K + 1), by hand."""
    ids = logp.argsort(-1, descending=True)
    return tuple(torch.cat([s[:, :K], s[:, K:].logsumexp(-1, keepdim=True)], -1)
                 for s in (logs.gather(-1, ids) for logs in (logp, logq)))  # type: ignore  # fmt: skip


@pytest.mark.parametrize("name", [*DIVERGENCES, "nla", "lk"])
def test_losses_are_those_of_merged_distributions_in_value_and_gradient(name: str) -> None:
    logp, z = pair()
    loss, slopes = vars(losses)[name], []
    values = []
    for whole in (True, False):
        z = z.detach().requires_grad_()
        logq = z.log_softmax(-1)
        both = (completed(top_k(logp, K), logq), logq) if whole else merged(logp, logq)
        value = loss(*both)
        slopes.append(torch.autograd.grad(value.sum(), z)[0])
        values.append(value.detach())
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-5, rtol=1e-5)


def test_divergences_are_at_most_the_whole_ones_and_alpha_at_most_the_mass_outside_too_high() -> None:
    logp, z = pair()
    logq, probs = z.log_softmax(-1), top_k(logp, K)
    cut = completed(probs, logq)
    for name in DIVERGENCES:
        gap = vars(losses)[name](logp, logq) - vars(losses)[name](cut, logq)
        assert gap.min() > -1e-6 and gap.max() > 1e-3, name
    besides = 1 - logq.exp().gather(-1, logp.topk(K, -1).indices).sum(-1)
    tail = 1 - logp.exp().topk(K, -1).values.sum(-1)
    torch.testing.assert_close(probs.rest.exp().double(), tail, atol=1e-6, rtol=0)
    high = losses.alpha(cut, logq) - losses.alpha(logp, logq)
    assert (high > -1e-6).all() and (high <= torch.minimum(tail, besides) + 1e-6).all() and high.max() > 1e-3


def test_completed_distributions_are_distributions() -> None:
    logp, z = pair()
    assert torch.allclose(
        completed(top_k(logp, K), z.log_softmax(-1)).exp().sum(-1), torch.ones(50).double(), atol=1e-6
    )
    torch.testing.assert_close(completed(top_k(logp, V), z.log_softmax(-1)), logp, atol=1e-5, rtol=1e-5)
    pruned = z.masked_fill(logp < logp.topk(K, -1).values[:, -1:], -math.inf).log_softmax(-1)
    probs = completed(top_k(logp, K), pruned)  # q has no mass outside, so the result has none
    assert not probs.isnan().any() and (probs.exp().sum(-1) < 1).all() and losses.kl(probs, pruned).isfinite().all()


def test_a_mass_outside_too_small_for_float32_is_stored() -> None:
    logits = torch.tensor([[0.0, *torch.linspace(-21, -30, V - 1)]], dtype=torch.float64)
    logp, logq = logits.log_softmax(-1), (0.5 * logits).log_softmax(-1)
    probs = top_k(logp.float(), K)
    torch.testing.assert_close(
        probs.rest.exp().double(), logp.exp().topk(V - K, largest=False).values.sum(-1), atol=0, rtol=1e-4
    )
    whole, cut = (losses.rkl(one, logq) for one in (logp, completed(probs, logq)))
    assert 0.5 * whole < cut <= whole + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_stored_distributions_are_those_served(temperature: float) -> None:
    target = tiny()
    read, head = served(target)
    ids = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(0))
    cut = TopKTeacher(read, head, 5, 32, temperature, lambda logits: keep_top_p(logits, 0.8), chunk=4).read(ids)
    with torch.no_grad():
        logits = target(ids).logits
    if temperature:
        expected = keep_top_p((logits / temperature).log_softmax(-1), 0.8).softmax(-1)
        torch.testing.assert_close(cut["logs"].exp().double(), expected.topk(5, -1).values, atol=1e-6, rtol=1e-6)
    else:
        assert torch.equal(cut["logs"][..., 0], torch.zeros(3, 9)) and (cut["logs"][..., 1:] == -math.inf).all()
    assert torch.equal(cut["ids"][..., 0].long(), logits.argmax(-1))
    for wrong in (0, 33):
        with pytest.raises(ValueError, match=f"trainer.top: {wrong} tokens, but the target has 32"):
            TopKTeacher(read, head, wrong, 32, 1.0, None, 4)


def learnt(module: Distillation) -> Tensor:
    module._trainer = SimpleNamespace(global_step=0, max_steps=1, world_size=1)  # type: ignore[assignment]
    ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = {"ids": ids, "predicted": torch.ones(2, 8, dtype=torch.bool), "key": torch.tensor([0, 1]),
             "temperature": torch.ones(2)}  # fmt: skip
    module.draft.zero_grad()
    module.training_step(batch, 0).backward()
    return torch.cat([p.grad.flatten() for p in module.draft.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", ["kl", "0.1*kl+0.9*tv"])
def test_with_every_token_stored_a_step_is_that_of_hidden_states(name: str) -> None:
    target, stages = tiny(), [Stage(1.0, parse(name))]
    whole, cut, few = (learnt(module_of(target, tiny(layers=1, seed=3), stages, 1, top=top)) for top in (0, 32, 4))
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-4)
    assert (few - whole).abs().max() > 1e-4


def test_losses_undefined_for_merged_distributions_raise() -> None:
    for name in ("calls", "calls_tv", "match", "greedy_draft", "kl+length"):
        with pytest.raises(ValueError, match="trainer.top: the loss is not one of kl, tv"):
            module_of(tiny(), tiny(layers=1), [Stage(1.0, parse(name))], 1, top=4)
    with pytest.raises(ValueError, match="trainer.top: .* init.cosine=0"):
        module_of(tiny(), tiny(layers=1), [Stage(1.0, LossSpec(losses.kl, merged=True))], 1, cosine=1.0, top=4)


def test_runs_share_distributions_on_disk_of_one_regime(place: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    texts, cache = f"rollout.folder={place / 'top texts'}", f"trainer.cache={place / 'distributions'}"
    settings = [texts, cache, "trainer.top=8", "init.cosine=0", "loss=kl", "trainer.corpus_steps=0", "measure=false",
                "trainer.steps=8", "rollout.temperatures=[1.0]"]  # fmt: skip
    assert job(place, "distributions first", *settings) == 0
    assert "0.00 GiB for" in capsys.readouterr().out
    files = sorted((place / "distributions").iterdir())
    assert job(place, "distributions second", *settings) == 0 and sorted((place / "distributions").iterdir()) == files
    ours, theirs = (torch.load(place / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
                    for name in ("distributions first", "distributions second"))  # fmt: skip
    assert same(ours, theirs)
    capsys.readouterr()
    others = (
        ("trainer.top=4", "distributions"),
        ("regime.top_p=0.9", "distributions"),
        ("target.dtype=bfloat16", "dtype, weights"),
    )
    for other, key in others:
        assert job(place, "distributions third", *settings, other, "overwrite=true") == 1
        assert f"made with another target (differences: {key})" in capsys.readouterr().err
    assert job(place, "distributions third", *settings, "rollout.train_temperatures=[0.5,1]", "overwrite=true") == 1
    assert "trainer.top: distributions are cached at one temperature" in capsys.readouterr().err
    never = place / "never sampled"
    assert job(place, "distributions fourth", *settings, f"rollout.folder={never}", "loss.first=calls") == 1
    assert "trainer.top: the loss is not one of" in capsys.readouterr().err and not never.exists()
