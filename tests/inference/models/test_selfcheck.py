"""The self-check of models: wrong forwards fail it and correct ones pass in every dtype; how much rounding
excuses at each position; a model that fails runs through transformers' own forward or not at all."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from inference import Engine
from inference.models import forward, llama, packing, selfcheck
from inference.models.forward import Lean, Stock
from inference.models.llama import can_round
from inference.models.lm import LM, takes_int8
from inference.models.passes import LAST, Pass
from inference.models.selfcheck import CheckResult, Disagreement, Probe, lean_agrees
from inference.policy import Fixed
from inference.proposers.quantised import Quantised
from tests import late_faults
from tests.inference.test_families import HEADS, LLAMA4, build
from tests.often import often
from tests.tiny import tiny

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def wrong_scale(monkeypatch):
    right = llama.shape_of
    monkeypatch.setattr(forward.llama, "shape_of", lambda m: right(m)._replace(scale=1.5 * right(m).scale))


def wrong_mask(change):
    def plant(monkeypatch):
        right = forward.seen_from
        monkeypatch.setattr(forward, "seen_from", lambda positions, slots, *more: change(right, positions, slots))

    return plant


def wrong_rotation(monkeypatch):
    right = Lean.rotation

    def late(self, window):
        other = copy.copy(window)
        if window.start is None:
            other.positions = (window.positions + 1).clamp(max=window.limit - 1)
        return right(self, other)

    monkeypatch.setattr(Lean, "rotation", late)


WRONG = {
    "scale": wrong_scale,
    "rotation": wrong_rotation,
    "sees_the_next": wrong_mask(lambda seen, at, slots: seen(at + 1, slots)),
    "not_itself": wrong_mask(lambda seen, at, slots: seen((at - 1).clamp(min=0), slots)),
    "last_four": wrong_mask(lambda seen, at, slots: seen(at, slots, 4)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_forwards_fail_and_correct_ones_pass(dtype):
    for make in (lambda: tiny(dtype=dtype), lambda: tiny(seed=5, layers=4, hidden=64, heads=4, dtype=dtype)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert isinstance(LM(make(), 2).run, Lean)
        for name, plant in WRONG.items():
            with pytest.MonkeyPatch.context() as monkeypatch:
                plant(monkeypatch)
                with pytest.warns(Disagreement, match="in that of inference.models.llama logits differ"):
                    assert not lean_agrees(make(), 256), name


def test_a_model_that_fails_runs_through_transformers(monkeypatch):
    WRONG["scale"](monkeypatch)
    model, ids = tiny(), torch.arange(14).view(2, 7)
    with pytest.warns(
        Disagreement,
        match="LlamaForCausalLM runs through transformers' own forward, since in that of inference.models.llama ",
    ):
        lm = LM(model, 2)
    assert isinstance(lm.run, Stock)
    with torch.no_grad():
        torch.testing.assert_close(lm.forward(ids, [0, 0]).logits, model(input_ids=ids).logits)


def test_a_draft_that_fails_has_no_8_bit_weights(monkeypatch):
    """The same whole numbers through transformers' own forward, with a message; nothing ends."""
    right, wrong = tiny(hidden=32, dtype=torch.bfloat16), tiny(hidden=32, seed=1, dtype=torch.bfloat16)
    assert takes_int8(right) and Quantised(right).int8
    WRONG["scale"](monkeypatch)
    with pytest.warns(Disagreement, match="runs through transformers' own forward"):
        assert can_round(wrong) and not takes_int8(wrong)
    with pytest.warns(Disagreement):
        drafting = Quantised(wrong)
        out = Engine(wrong, drafting, policy=Fixed(2)).generate([[1, 2, 3]], max_new_tokens=8, ignore_eos=True)
    assert not drafting.int8 and len(out.tokens[0]) == 8


class Doubled(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out


def test_a_subclass_with_a_forward_of_its_own_is_not_bypassed():
    Doubled.__name__ = "LlamaForCausalLM"
    model, ids = tiny(), torch.arange(14).view(2, 7)
    model.__class__ = Doubled
    with torch.no_grad():
        torch.testing.assert_close(LM(model, 2).forward(ids, [0, 0]).logits, model(input_ids=ids).logits)


def test_a_part_of_another_class_is_not_bypassed():
    model = tiny()
    norm = model.model.layers[0].input_layernorm
    norm.__class__ = type("LlamaRMSNorm", (type(norm),), {"__module__": __name__})
    assert not llama.applies(model)


@pytest.mark.parametrize("heavy", [False, True])
def test_one_length_for_all_rows_is_rejected(heavy, monkeypatch):
    """Llama 4 scales attention by the cache's one length; within its first range by 1. Heavy models are not looked at
    late in a text, and short rows alone must show it."""
    if heavy:
        monkeypatch.setattr(selfcheck, "HEAVY", 0.0)
    model = build("Llama4Text", {**LLAMA4, "floor_scale": 16})
    assert LM(model, 2).context == 15
    monkeypatch.setattr("inference.models.lm.longest_text", lambda config: config.max_position_embeddings)
    with pytest.raises(
        ValueError, match="Llama4ForCausalLM: rows of different lengths cannot share its passes: logits"
    ):
        LM(model, 2)


def test_a_window_that_the_config_does_not_set_is_rejected():
    class Fixed(MistralForCausalLM):
        def forward(self, *args, **kwargs):
            said, self.config.sliding_window = self.config.sliding_window, 16
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.config.sliding_window = said

    settings = {**HEADS, "sliding_window": 16}
    model = Fixed(MistralConfig(**settings)).double().eval()
    with pytest.raises(ValueError, match="its window of 4 is not read|window of 16 is not read"):
        LM(model, 2)


def test_the_config_is_as_it_was():
    model = build("Gemma2", {**HEADS, "sliding_window": 8})
    LM(model, 2)
    assert model.config.sliding_window == 8


def test_it_draws_no_random_numbers_of_others():
    model, state = tiny(dtype=torch.bfloat16), torch.get_rng_state()
    LM(model, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_noise_that_excuses_is_bounded(monkeypatch):
    monkeypatch.setattr(Probe, "_noise", lambda self, lengths, *_: torch.full((sum(lengths),), 100.0))
    other = tiny(seed=9, dtype=torch.bfloat16)
    result = Probe(tiny(dtype=torch.bfloat16), 256).logits(lambda cache: Lean(other, cache))
    assert result.difference > result.allowed == selfcheck.MOST


def test_it_is_done_once_for_weights_that_stay(monkeypatch):
    checks = []
    right = Probe.logits
    monkeypatch.setattr(Probe, "logits", lambda self, make: checks.append(1) or right(self, make))
    model = tiny()
    LM(model, 1), LM(model, 3)
    assert len(checks) == 1
    model.lm_head.weight.data.mul_(2)
    LM(model, 1)
    assert len(checks) == 2


def test_logits_that_are_not_finite_decide_nothing():
    model = tiny()
    model.lm_head.weight.data[3] = torch.nan
    assert isinstance(LM(model, 2).run, Lean)
    assert not CheckResult(float("inf"), 1.0).agrees


def test_a_forward_that_is_wrong_at_one_position_fails(monkeypatch):
    """By less than all places together would show."""
    right = Lean.forward

    def last(self, ids, window, **settings):
        logits = right(self, ids, window, **settings).logits.clone()
        signs = torch.ones_like(logits[-1, -1])
        signs[::2] = -1
        logits[-1, -1] += 0.0025 * logits.std() * signs
        return Pass(logits)

    monkeypatch.setattr(Lean, "forward", last)
    with pytest.warns(Disagreement, match="logits differ"):
        assert not lean_agrees(tiny(dtype=torch.float32), 256)


@pytest.mark.parametrize("fault", [None, *late_faults.FAULTS], ids=lambda fault: getattr(fault, "__name__", "none"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_late_in_a_text_fail(dtype, fault, monkeypatch):
    model = late_faults.scaled(dtype)
    if fault:
        fault(monkeypatch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        agrees = lean_agrees(model, late_faults.LATE)
    assert agrees == (not fault) and bool(said) == bool(fault)


def test_a_model_in_half_precision_is_compared_in_float32() -> None:
    """As it is served: the rounding of its own forward neither excuses nor accuses."""
    model = tiny(dtype=torch.bfloat16)
    with packing.products_in_float32():
        result = Probe(selfcheck.reference(model), 256).logits(lambda cache: Lean(model, cache))
    assert result.allowed == selfcheck.FINE and result.agrees
    assert Probe(model, 256).logits(lambda cache: Lean(model, cache)).difference > selfcheck.FINE
    assert model.dtype == torch.bfloat16 and lean_agrees(model, 256)


def test_states_and_trees_in_half_precision_are_compared_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds, compared = [], Probe._compared
    monkeypatch.setattr(
        Probe, "_compared", lambda self, *given, **more: bounds.append(compared(self, *given, **more)) or bounds[-1]
    )
    check = LM(tiny(dtype=torch.bfloat16), 2).check
    check.states((0, LAST))
    check.trees()
    assert len(bounds) > 3 and {result.allowed for result in bounds} == {selfcheck.FINE}


def test_a_model_of_inference_mode_still_runs_by_its_own_forward() -> None:
    with torch.inference_mode():
        model, ids = tiny(), torch.arange(1, 9)[None]
        own = model(ids).logits
        LM(model, 2)
        torch.testing.assert_close(model(ids).logits, own)


POSITIONS = 20  # of both rows
TWO_DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)


def checked() -> tuple[Probe, list[Tensor]]:
    """A check of a model in half precision, and correct numbers of ours to spoil."""
    model = tiny(dtype=torch.bfloat16)
    probe = Probe(model, 256)
    with torch.no_grad():
        return probe, probe._rows([output.logits.clone() for output in probe._passes(lambda c: Lean(model, c))])


def compared(probe: Probe, ours: list[Tensor]) -> CheckResult:
    return probe._compared(ours, [*probe.own], lambda: [*probe._own(probe.ids)], "logits", probe._stepped)


def noises(monkeypatch: pytest.MonkeyPatch, loud: dict[int, float], parts: int = 1) -> None:
    """Rounding moves all positions by .04, some of each layer further."""
    noise = torch.full((parts, POSITIONS), 0.04)
    for position, one in loud.items():
        noise[:, position] = one
    monkeypatch.setattr(Probe, "_noise", lambda self, *settings: noise.flatten())


def shifted(row: Tensor, by: float) -> Tensor:
    """Numbers of a position that are `by` of their deviation away."""
    signs = torch.ones_like(row)
    signs[::2] = -1
    return row + by * row.float().std() * signs


@pytest.mark.parametrize(
    ("position", "by", "agrees"),
    [
        (2, 0.5, True),  # loud: 4 times its own noise are allowed
        (2, 0.9, False),
        (3, 0.07, True),  # all others: twice the noise of those that are not loud
        (3, 0.1, False),
        (2, float("nan"), False),
        (3, float("inf"), False),
    ],
)
def test_a_loud_position_has_a_bound_of_its_own(
    position: int, by: float, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, ours = checked()
    ours[0][position] = shifted(probe.own[0][position], by)
    noises(monkeypatch, {2: 0.18})
    assert compared(probe, ours).agrees is agrees


@pytest.mark.parametrize(("loud", "agrees"), [(9, True), (10, False), (20, False)])
def test_loud_positions_are_fewer_than_half(loud: int, agrees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    probe, ours = checked()
    ours[0][2] = shifted(probe.own[0][2], 0.3)
    noises(monkeypatch, dict.fromkeys(range(loud), 0.18))
    assert compared(probe, ours).agrees is agrees


def test_noise_is_the_largest_of_all_ways() -> None:
    """Of embeddings rounded once more, and of passes that are computed otherwise."""
    probe, ours = checked()
    lengths, own = [len(row) for row in ours], [*probe.own]
    again = lambda: [*probe._own(probe.ids)]  # noqa: E731
    rounded = probe._noise(lengths, own, again)
    assert float(rounded.max()) > 0
    assert (probe._noise(lengths, own, again, lambda: [row + 1 for row in own]) > rounded).all()


def wrong(row: int, change: Callable[[Pass, int], None]) -> type[Lean]:
    class Wrong(Lean):
        def forward(self, ids: Tensor, window: Any, *settings: Any, **more: Any) -> Pass:
            output = super().forward(ids, window, *settings, **more)
            output = Pass(output.logits.clone(), {layer: states.clone() for layer, states in output.states.items()})
            change(output, row)
            return output

    return Wrong


def last_states(output: Pass, row: int) -> None:
    if output.states:
        output.states[LAST][row, -1] = shifted(output.states[LAST][row, -1], 3.0)


def first_states(output: Pass, row: int) -> None:
    if output.states:
        output.states[0][row, -1] = shifted(output.states[0][row, -1], 3.0)


def logits(output: Pass, row: int) -> None:
    output.logits[row, -1] = shifted(output.logits[row, -1], 3.0)


@TWO_DTYPES
@pytest.mark.parametrize("row", often([0, 1], {1}.__contains__))
def test_each_row_is_compared(row: int, dtype: torch.dtype) -> None:
    """Of logits, of the states of the first and the last layer, and of trees."""
    model = tiny(dtype=dtype)
    own = selfcheck.reference(model)
    with torch.no_grad(), packing.products_in_float32():
        for compare, change in (
            (Probe.logits, logits),
            (Probe.states, last_states),
            (Probe.states, first_states),
            (Probe.trees, logits),
        ):
            assert compare(Probe(own, 256), lambda c: Lean(model, c)).agrees
            spoilt = wrong(row, change)
            result = compare(Probe(own, 256), lambda c, spoilt=spoilt: spoilt(model, c))  # type: ignore[misc]
            assert not result.agrees, (compare.__name__, change.__name__)
