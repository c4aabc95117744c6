"""Training on the stand-in device: every kind of draft by cotrain's own trainer, callbacks, losses and evaluation; what
a step reads; commands from texts to a draft that decodes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning
import pytest
import torch

from cotrain.cli import main
from cotrain.errors import NotFinite
from cotrain.losses.chunked import chunk_positions
from inference import Engine, Sampling
from inference.models.selfcheck import CheckResult, Probe
from inference.policy import Fixed
from tests import standin
from tests.folders import target_and_texts
from tests.gpu_counts import TRAINED, Training, logging_soon, training_counts
from tests.often import often

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "error:.*CUDA graphs failed")

# launches of a step that is not logged, with some to spare for another version of torch: to be lowered
MOST = {
    "independent": 517,
    "conditioned": 547,
    "hybrid": 517,
    "medusa": 573,
    "hydra": 632,
    "early_exit": 1150,
    "eagle, pruned": 1293,
    "p_eagle, markov": 912,
    "block, causal": 1371,
    "parallel": 1104,
}


def trained(training: Training) -> None:
    """The draft is trained, judged and decodes, on the device."""
    module, network = training.module, training.module.student.network
    module.to("cuda").eval()
    assert all(bool(weight.isfinite().all()) for weight in network.parameters())
    training.trainer.validate(module, torch.utils.data.DataLoader([torch.zeros(1)]), verbose=False)  # type: ignore[arg-type]
    assert 0 < module.scores()[1.0].alpha < 1
    module.to("cuda")
    agrees = dict.fromkeys(("logits", "states"), lambda *_: CheckResult(0.0, 1.0))  # the commands below check
    with patch.multiple(Probe, **agrees):
        engine = Engine(training.target, module.student.proposer(), policy=Fixed(2), rows=1, graphs=False)
        found = engine.generate([[1, 2, 3]], max_new_tokens=3, sampling=Sampling(1.0), ignore_eos=True)
    assert len(found.tokens[0]) == 3 and found.stats.drafted


# a model of its own, and layers of the target; heads are trained by the commands below
@pytest.mark.parametrize("kind", often(TRAINED, {"independent", "early_exit"}.__contains__))
def test_a_draft_of_every_kind_trains_and_decodes(kind: str) -> None:
    """Bounds that may only be lowered. A step that is logged reads its loss, acceptance, norm and speed besides."""
    counts = training_counts(kind, then=trained)
    step, logged = counts["step"], counts["logged"]
    assert not counts["places"] and step["reads"] == 0 and step["blocking"] <= 1, counts
    assert step["launches"] <= 1.1 * MOST[kind] and logged["reads"] <= 5, counts
    assert 0 < logged["launches"] - step["launches"] < 90, counts


class Broken(lightning.Callback):
    """The loss is not finite from the first step on."""

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 0:
            next(module.draft.parameters()).data.fill_(torch.nan)


def test_a_loss_that_is_not_finite_ends_the_training_at_a_logged_step_and_is_never_saved(tmp_path: Path) -> None:
    with standin.device(), logging_soon():
        training = Training("medusa", tmp_path, (Broken(),))
        assert training.module.chunk == chunk_positions(32, "cuda") > chunk_positions(32, "cpu")
        with pytest.raises(NotFinite, match="the loss of step 1 is nan, on texts .*, "):
            training.trainer.fit(training.module, training.loader)
        assert training.trainer.global_step == 1
        training.module.unread = [
            (1, torch.tensor(torch.inf).to("cuda"), {"key": torch.arange(1), "ids": torch.ones(1)})
        ]
        with pytest.raises(NotFinite, match="the loss of step 1 is inf"):
            training.trainer.save_checkpoint(tmp_path / "last.ckpt")
        assert not (tmp_path / "last.ckpt").exists()


def test_commands_train_a_draft_that_decodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the prompts are sampled as texts of temperature 0, which a loss treats otherwise. The same command goes
    on from its checkpoint, which is read to the CPU."""
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)
    target_and_texts(tmp_path, 60)
    paths = [f"target.path={tmp_path / 'target'}", f"data.path={tmp_path / 'own.jsonl'}"]
    sizes = """data.block=64 rollout.texts=2 rollout.held_out_texts=2 rollout.prompt_tokens=8 rollout.new_tokens=4
    rollout.rows=2 rollout.temperatures=[0.0,1.0] trainer.batch=2 trainer.validations=1
    draft=medusa draft.depths=2 measure=false""".split()
    with standin.device() as gpu:
        for steps in (1, 2):
            whole = [*sizes, f"trainer.steps={steps}", f"output={tmp_path / 'run'}"]
            assert main(["train", *paths, *whole]) == 0
        gpu.clear()
        words = ["generate", paths[0], f"draft.path={tmp_path / 'run' / 'draft'}", "prompt=abc", "max_new_tokens=4"]
        assert main(words) == 0 and sum(gpu.launches.values()) > 100 and gpu.recordings
    assert "error" not in capsys.readouterr().err


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "a mask on the CPU": lambda x: torch.where(torch.ones(3, dtype=torch.bool), x, 0.0),
    "another card": lambda x: x + torch.ones(3, device="cuda:1"),
    "an operand of a product": lambda x: x @ torch.ones(3, 2),
    "a part of a list": lambda x: torch.cat([x, torch.ones(1)]),
    "a sum on the CPU": lambda x: torch.zeros(()).add_(x.sum()),
    "foreach": lambda x: torch._foreach_add_([x], [torch.ones(3)]),
    "out=": lambda x: torch.add(x, x, out=torch.ones(3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_mixed_devices_raise_as_on_cuda(name: str) -> None:
    with standin.device(), pytest.raises(RuntimeError, match="device"):
        WRONG[name](torch.arange(3.0).to("cuda"))


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0]),
    "a mask": lambda x: x[x > 0],
    "where": lambda x: torch.where(x > 0),
    "print": str,
    "allclose": lambda x: torch.allclose(x, x),
    "equal": lambda x: torch.equal(x, x),
    "cpu": lambda x: x.cpu(),
    "unique": lambda x: x.unique(),
    "put at a mask": lambda x: x.index_put((x > 0,), x[0]),
    "range": lambda x: torch.arange(x[1].long()),
    "repeat": lambda x: x.repeat_interleave(torch.ones_like(x).long()),
    "list": lambda x: torch.tensor([x[0], 1.0], device=x.device),
    "bincount": lambda x: x.long().bincount(),
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_counted_with_their_line(name: str) -> None:
    with standin.device() as gpu:
        x = torch.arange(3.0, device="cuda")
        READS[name](x)
        assert sum(gpu.d2h.values()) == 1
        ((_, what, place),) = [site for site in gpu.sites if site[1] == "d2h"]
        assert place.startswith("training/test_on_a_device.py:")


def test_what_is_no_read_is_not_counted() -> None:
    """Shapes, scalars of the CPU, and copies of pinned memory that are asked to run by themselves."""
    with standin.device() as gpu:
        x = torch.arange(3.0, device="cuda")
        x = x * torch.tensor(2.0) + x.sum() * len(x)
        x = torch.where(x > 0, x, 0.0).masked_fill(x > 1, torch.tensor(1.0)).clamp(max=x.shape[0])
        x += torch.ones(3).pin_memory().to("cuda", non_blocking=True)
        assert not gpu.d2h and gpu.blocking == 0 and sum(gpu.h2d.values()) == 1
        x += torch.ones(3).to("cuda", non_blocking=True)
        assert gpu.blocking == 1
        assert x[torch.tensor([0, 1])].shape == (2,) and gpu.blocking == 2  # indices of the CPU are sent


def test_mixed_precision_is_that_of_cuda() -> None:
    """Products in bfloat16, softmax and losses in float32, gradients in the weights' dtype; double stays."""
    with standin.device():
        linear, x = torch.nn.Linear(4, 4).to("cuda"), torch.ones(2, 4, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            y = linear(x)
            assert torch.is_autocast_enabled("cuda") and y.dtype == (x @ x.T).dtype == torch.bfloat16
            assert y.softmax(-1).dtype == y.log_softmax(-1).dtype == y.exp().dtype == torch.float32
            assert (x.double() @ x.double().T).dtype == torch.float64
            with torch.autocast("cuda", enabled=False):
                assert linear(x).dtype == torch.float32
        y.float().square().sum().backward()
        assert linear.weight.grad.dtype == torch.float32
        assert linear(x).dtype == torch.float32
