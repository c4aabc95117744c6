"""Costs of untrained shapes: coins accept as they should, and what is printed says that nothing else is real."""

import json
from pathlib import Path

import pytest
import torch

from cotrain.acceptance import iid_tau
from cotrain.cli import main
from inference.measure.random_weights import Synthetic, random_model
from inference.policy import Fixed
from inference.proposers import Independent
from tests.tiny import tiny


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_coins_accept_at_the_given_rate(alpha: float) -> None:
    engine = Synthetic(tiny(), alpha=alpha, proposer=Independent(tiny(layers=1, seed=3)), policy=Fixed(3), rows=16)
    out = engine.generate([[i, 1] for i in range(16)], max_new_tokens=120, seed=1, ignore_eos=True)
    assert out.stats.tau == pytest.approx(iid_tau(alpha, 3), rel=0.05)
    with pytest.raises(ValueError, match="alpha"):
        Synthetic(tiny(), alpha=1.5)


def test_only_the_shape_is_read(tmp_path: Path) -> None:
    tiny().config.save_pretrained(tmp_path / "a")
    model = random_model(str(tmp_path / "a"), torch.float32)
    assert {n: w.shape for n, w in model.state_dict().items()} == {n: w.shape for n, w in tiny().state_dict().items()}
    logits = model(torch.ones(1, 4, dtype=torch.int64)).logits
    assert logits.dtype == torch.float32 and bool(torch.isfinite(logits).all())


def test_the_command_prints_that_it_is_synthetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, layers in (("target", 2), ("draft", 1)):
        tiny(layers=layers).config.save_pretrained(tmp_path / name)
    paths = [f"{name}.path={tmp_path / name}" for name in ("target", "draft")]
    sizes = "bench.new_tokens=12 bench.prompt_tokens=6 bench.prompts=2 bench.depths=[2] matrix.batches=[1,2]".split()
    assert main(["bench", "synthetic=0.5", f"output={tmp_path / 'out'}", *paths, *sizes]) == 0
    assert capsys.readouterr().out.count("SYNTHETIC, random weights, acceptance 0.5 by coins") == 2
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["synthetic"] is True and [cell["rows"] for cell in report["cells"]] == [1, 2]
    for cell in report["cells"]:
        assert cell["measured"]["value"] > 0 and 0 < cell["round_share"] and cell["k"] in (1, 2)
