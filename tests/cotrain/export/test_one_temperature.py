"""Exports of a conditioned draft at one temperature."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from cotrain.cli import main
from cotrain.errors import UserError
from cotrain.export.fitting import fold_conditioning, measured_elsewhere, refuse_temperature
from cotrain.export.hf import export, folder_problems
from inference.drafts.draft_folder import Metadata, read
from inference.proposers.conditioned import KNOTS, TABLE, ConditionedNetwork
from tests.draft_folders import draft_folder
from tests.folders import target_folder
from tests.inference.proposers.test_conditioned import IDS, logits
from tests.kinds import conditioned_near
from tests.tiny import TARGET, tiny


@pytest.mark.parametrize("t", [0.0, 0.35])
def test_an_export_drafts_as_the_folder_does_at_its_temperature(t: float) -> None:
    network = conditioned_near(tiny())
    expected, other = (logits(network, IDS, one) for one in (t, 0.7))
    independent = fold_conditioning(copy.deepcopy(network), t)
    with torch.no_grad():
        torch.testing.assert_close(independent(IDS).logits, expected)
        assert not torch.allclose(independent(IDS).logits, other)
    assert TABLE not in independent.state_dict() and not hasattr(independent.config, KNOTS)


def test_a_final_norm_that_takes_no_scale_raises() -> None:
    class Capped(LlamaForCausalLM):
        def forward(self, *given: Any, **settings: Any) -> Any:
            out = super().forward(*given, **settings)
            out.logits = torch.tanh(out.logits)
            return out

    network = conditioned_near(tiny())
    network.__class__ = Capped
    with pytest.raises(ValueError, match="temperature: the final norm of Capped cannot be scaled"):
        fold_conditioning(network, 0.3)


def test_an_exported_folder_is_an_independent_draft_of_one_temperature(tmp_path: Path, capsys: Any) -> None:
    target = target_folder(tmp_path / "target")
    draft, output = draft_folder(tmp_path / "draft", target, "conditioned"), tmp_path / "out"
    network = ConditionedNetwork.from_pretrained(draft)
    with torch.no_grad():
        network.temperature_scale.weight.normal_(std=0.4, generator=torch.Generator().manual_seed(0))
    network.save_pretrained(draft)
    words = ["export", f"draft.path={draft}", f"output={output}"]
    assert main(words) == 1
    assert (
        "set the one that you serve at, for example temperature=0.7" in capsys.readouterr().err and not output.exists()
    )
    assert main([*words, "temperature=0.35"]) == 0
    assert folder_problems(output) == []
    metadata = read(output).metadata
    assert metadata and (metadata.kind, metadata.regime["temperature"]) == ("independent", 0.35)
    card = (output / "README.md").read_text()
    assert "Made for temperature 0.35" in card and "measured at" not in card  # nothing was measured
    ids, plain = torch.arange(2, 12).unsqueeze(0), AutoModelForCausalLM.from_pretrained(output)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, logits(network, ids, 0.35), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="temperature=null: .* depends on the temperature"):
        export(draft, tmp_path / "other", "vllm")
    with pytest.raises(
        UserError, match="temperature=0.3: .* does not depend on the temperature: leave temperature= out"
    ):
        refuse_temperature(output, 0.3)


def test_an_export_says_where_it_was_measured() -> None:
    metadata = Metadata(TARGET, 4, regime={"temperature": 1.0}, kind="conditioned", report="0" * 64)
    warning = measured_elsewhere(metadata, 0.7)
    assert warning and "measured at temperature 1, not at 0.7: cotrain bench regime.temperature=0.7" in warning
    assert measured_elsewhere(metadata, 1.0) is None and measured_elsewhere(replace(metadata, report=None), 0.7) is None
