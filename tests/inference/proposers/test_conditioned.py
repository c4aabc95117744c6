"""Drafts conditioned on the temperature: each row drafts with the scale of its own, on every path of the engine."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference import Engine, Sampling
from inference.drafts.draft_folder import load_draft
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers.conditioned import KNOTS, TABLE, Conditioned, ConditionedNetwork, Scale, conditioned
from inference.sampling import one_hot
from tests import standin
from tests.kinds import conditioned_near
from tests.tiny import tiny
from tests.watched import Watched

KNOWN = [0.0, 0.7, 1.0]  # of `conditioned_near`
PROMPTS = [[(7 * i + 5 * n) % 30 + 1 for i in range(n)] for n in (3, 9, 2, 6, 14, 5, 11)]
SEVERAL = [Sampling(t) for t in (0.0, 0.35, 0.7, 1.0, 0.9, 1.6, 0.0)]
LIMITS = [6, 15, 9, 20, 12, 7, 10]
IDS = torch.randint(32, (3, 12), generator=torch.Generator().manual_seed(4))


def scale(network: Any, temperature: float) -> Tensor:
    """By hand (D,): between the rows of the table on either side, at the ends the first and the last."""
    table, t = network.get_parameter(TABLE).detach(), min(max(temperature, KNOWN[0]), KNOWN[-1])
    low = max(i for i, knot in enumerate(KNOWN[:-1]) if knot <= t)
    share = (t - KNOWN[low]) / (KNOWN[low + 1] - KNOWN[low])
    return 1 + (1 - share) * table[low] + share * table[low + 1]


def logits(network: Any, ids: Tensor, temperature: float) -> Tensor:
    """(B, T, V) by transformers' own forward."""
    with torch.no_grad():
        states = network.base_model(input_ids=ids).last_hidden_state
        return network.lm_head(states * scale(network, temperature).to(states))


def mismatches(watched: Watched, network: Any) -> int:
    """Distributions that are not those of the row's own temperature, of all that were drafted from; some must have
    been."""
    wrong = seen = 0
    for texts, heat, x, q, k in watched.rounds:
        for b, (text, t) in enumerate(zip(texts, heat, strict=True)):
            whole = torch.tensor([text + x[b, : k[b]].tolist()])
            for depth, row in enumerate(logits(network, whole, t)[0, len(text) - 1 : -1]):
                probs = (row / t).softmax(-1) if t else one_hot(row.argmax(-1), row)
                wrong += not torch.allclose(q[b, depth].cpu().to(probs), probs, atol=1e-6, rtol=1e-5)
                seen += 1
    assert seen > 60
    return wrong


def decoded(target: Any, proposer: Any, sampling: Any = None, graphs: bool = False, **settings: Any) -> Any:
    engine = Engine(target, proposer, policy=Fixed(3), rows=3, graphs=graphs, **settings)
    asked: dict[str, Any] = {"max_new_tokens": LIMITS, "sampling": sampling or SEVERAL, "ignore_eos": True, "seed": 2}
    return engine.generate(PROMPTS, **asked | {"ids": range(7)})


def test_scales_are_interpolated_between_temperatures() -> None:
    network = conditioned_near(tiny())
    asked = torch.tensor([0.0, 0.7, 1.0, 0.35, 0.9, 5.0])
    scales = Scale(network).at(asked)
    for one, t in zip(scales, asked.tolist(), strict=True):
        torch.testing.assert_close(one, scale(network, t), atol=1e-6, rtol=1e-6)
    table = network.get_parameter(TABLE)
    assert torch.equal(scales[:3], 1 + table) and torch.equal(scales[5], scales[2])
    each = Scale(network).at(asked.view(2, 3))
    assert torch.equal(each, scales.view(2, 3, -1))
    alone: Any = conditioned(tiny(), [0.5])
    assert torch.equal(Scale(alone).at(asked), torch.ones(6, 16, dtype=torch.float64))
    alone.temperature_scale.weight.data.normal_()
    assert torch.equal(Scale(alone).at(asked), 1 + alone.temperature_scale.weight.expand(6, -1))


@pytest.mark.parametrize("wrong", [[], [0.3, 0.3], [1.0, 0.0]])
def test_temperatures_that_are_no_list_of_knots_raise(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one temperature, each once, in rising order"):
        conditioned(tiny(), wrong)
    with pytest.raises(ValueError, match=f"config.json .* under the key {KNOTS}"):
        Conditioned(conditioned_without(tiny()))


def conditioned_without(model: Any) -> Any:
    """With a scale, and without what it is of."""
    model = conditioned(model, [0.5])
    delattr(model.config, KNOTS)
    return model


def test_a_row_drafts_with_the_scale_of_its_own_temperature() -> None:
    """Rows enter, move and leave; one of them is greedy, and the scale decides its argmax."""
    target, network = tiny(), conditioned_near(tiny())
    watched = Watched(Conditioned(network))
    decoded(target, watched)
    assert mismatches(watched, network) == 0
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.temperature_scale.weight[0] = 0  # without it, greedy rows would have drafted otherwise
    assert mismatches(watched, other) > 3


def test_greedy_drafts_are_the_scaled_argmax() -> None:
    """For certain, whatever the row's temperature."""
    target, network = tiny(), conditioned_near(tiny())
    watched, seen = Watched(Conditioned(network, greedy=True)), 0
    decoded(target, watched)
    for texts, heat, x, q, k in watched.rounds:
        for b, (text, t) in enumerate(zip(texts, heat, strict=True)):
            row = logits(network, torch.tensor([text + x[b, : k[b]].tolist()]), t)[0, len(text) - 1 : -1]
            assert torch.equal(q[b, : k[b]].to(row), one_hot(row.argmax(-1), row))
            seen += k[b]
    assert seen > 60


@pytest.mark.parametrize("stock", [False, True])
def test_a_part_of_the_slots_is_read_with_its_own_scales(stock: bool) -> None:
    """Those of the slots that a pass is of, which need not begin at the first."""
    lm = LM(tiny(), 3, stock=stock, scaled=True)
    lm.scale.normal_()
    with torch.inference_mode():
        whole = lm.forward(IDS[:, :4], [0, 0, 0]).logits.clone()
        part = lm.forward(IDS[1:, :4], [0, 0], low=1).logits
    torch.testing.assert_close(part, whole[1:])
    assert not torch.allclose(part, whole[:2])


@pytest.mark.thorough
@pytest.mark.filterwarnings("error:.*CUDA graphs failed")
@pytest.mark.parametrize("cut", [0, 31])
def test_a_recorded_round_reads_the_scale_of_each_call(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shape, so one recording, at one temperature after another; and weights that learnt between two calls."""
    monkeypatch.setattr("inference.models.replay.WARMUP", 0)

    def texts(target: Any, graphs: bool) -> list[Any]:
        network = conditioned_near(target)
        engine = Engine(target, Conditioned(network), policy=Fixed(3), rows=2, graphs=graphs)
        outputs = []
        for t in (1.0, 0.7, 0.85, 1.0):
            out = engine.generate(
                PROMPTS[:2], max_new_tokens=16, sampling=Sampling(t, top_k=cut), seed=3, ids=range(2), ignore_eos=True
            )
            outputs.append((out.tokens, out.stats.accepted))
            if len(outputs) == 3:
                with torch.no_grad():
                    network.temperature_scale.weight[2] -= 0.3
        return outputs

    expected = texts(tiny(), False)
    with standin.device() as gpu:
        assert texts(tiny().to("cuda"), True) == expected and gpu.recordings
    assert expected[0] != expected[3]


def test_a_scale_is_written_once_for_rows_that_stay() -> None:
    target, written = tiny(), []
    proposer = Conditioned(conditioned_near(target))
    engine = Engine(target, proposer, policy=Fixed(3), rows=3)

    def counted(temperature: Tensor) -> Tensor:
        written.append(temperature.tolist())
        return at(temperature)

    run = engine.begin(PROMPTS[:3], 12, SEVERAL[:3], ignore_eos=True)
    at = proposer.scale_of.at
    proposer.scale_of.at = counted  # type: ignore[method-assign]
    assert len(list(engine.rounds(run))) > len(written) and written[0] == [0.0, 0.35, 0.7]


def test_a_folder_without_its_scale_raises(tmp_path: Path) -> None:
    network = conditioned_near(tiny(dtype=torch.float32))
    network.save_pretrained(tmp_path)
    again = ConditionedNetwork.from_pretrained(tmp_path)
    assert all(torch.equal(again.get_parameter(name), weight) for name, weight in network.named_parameters())
    file, tensors = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    for changed, message in (
        ({}, f"tensor {TABLE} is missing"),
        ({TABLE: torch.zeros(2, 16)}, rf"tensor {TABLE} has shape \(2, 16\), config.json says \(3, 16\)"),
        ({TABLE: torch.full((3, 16), torch.nan)}, f"tensor {TABLE} holds NaN"),
    ):
        save_file({name: one for name, one in tensors.items() if name != TABLE} | changed, file, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load_draft(tmp_path, network=ConditionedNetwork)
