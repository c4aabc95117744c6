"""The check of a model's logits when an engine is made: wrong forwards are told from right ones in every dtype."""

import copy
import warnings

import pytest
import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from inference import Engine
from inference.models import forward, llama_weights, probe
from inference.models.forward import Lean, Stock
from inference.models.llama_weights import can_round
from inference.models.lm import LM, takes_int8
from inference.models.passes import Pass
from inference.models.probe import Found, Probe
from inference.models.selfcheck import Disagreement, lean_agrees
from inference.policy import Fixed
from inference.proposers.quantised import Quantised
from tests import late_faults
from tests.inference.test_families import HEADS, LLAMA4, build
from tests.tiny import tiny

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def wrong_scale(monkeypatch):
    right = llama_weights.shape_of
    monkeypatch.setattr(forward.llama_weights, "shape_of", lambda m: right(m)._replace(scale=1.5 * right(m).scale))


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
def test_wrong_forwards_are_caught_and_right_ones_pass(dtype):
    for make in (lambda: tiny(dtype=dtype), lambda: tiny(seed=5, layers=4, hidden=64, heads=4, dtype=dtype)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert isinstance(LM(make(), 2).run, Lean)
        for name, plant in WRONG.items():
            with pytest.MonkeyPatch.context() as monkeypatch:
                plant(monkeypatch)
                with pytest.warns(Disagreement, match="in few operations, logits differ"):
                    assert not lean_agrees(make(), 256), name


def test_what_disagrees_runs_through_transformers(monkeypatch):
    WRONG["scale"](monkeypatch)
    model, ids = tiny(), torch.arange(14).view(2, 7)
    with pytest.warns(Disagreement, match="LlamaForCausalLM: in few operations, .*transformers' own forward runs it"):
        lm = LM(model, 2)
    assert isinstance(lm.run, Stock)
    with torch.no_grad():
        torch.testing.assert_close(lm.forward(ids, [0, 0]).logits, model(input_ids=ids).logits)


def test_8_bits_are_not_asked_of_what_disagrees(monkeypatch):
    """The same whole numbers through transformers' own forward, with a message; nothing ends."""
    right, wrong = tiny(hidden=32, dtype=torch.bfloat16), tiny(hidden=32, seed=1, dtype=torch.bfloat16)
    assert takes_int8(right) and Quantised(right).int8
    WRONG["scale"](monkeypatch)
    with pytest.warns(Disagreement, match="transformers' own forward runs it"):
        assert can_round(wrong) and not takes_int8(wrong)
    with pytest.warns(Disagreement):
        drafting = Quantised(wrong)
        found = Engine(wrong, drafting, policy=Fixed(2)).generate([[1, 2, 3]], max_new_tokens=8, ignore_eos=True)
    assert not drafting.int8 and len(found.tokens[0]) == 8


def test_places_that_rounding_moves_far_say_nothing(monkeypatch):
    """As long as fewer than half are such: a wrong number at one of them is excused, at another it is not."""
    model = tiny(dtype=torch.bfloat16)
    right, looked = Probe(model, 256), Probe._noise
    ours = [row.clone() for row in right._rows([made.logits for made in right._passes(lambda c: Lean(model, c))])]
    ours[0][2] += torch.randn_like(ours[0][2]) * 0.4 * right.own.std()
    again = lambda: [*right._own(right.ids)]  # noqa: E731
    asked = ours, [*right.own], again, "logits"

    def noise(loud):
        return lambda self, *settings: torch.where(loud, 0.3, looked(self, *settings))

    found = {}
    for name, places in (("there", [2]), ("elsewhere", [3]), ("nowhere", []), ("half", range(0, 20, 2))):
        loud = torch.zeros(20, dtype=torch.bool)
        loud[[*places]] = True
        monkeypatch.setattr(Probe, "_noise", noise(loud))
        found[name] = right._judged(*asked).agrees
    assert found == {"there": True, "elsewhere": False, "nowhere": False, "half": False}


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
    assert not llama_weights.applies(model)


def test_a_patched_class_is_found_by_its_logits(monkeypatch):
    model = tiny()
    attention = type(model.model.layers[0].self_attn)
    right = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *a, **k: tuple(x if x is None else 2 * x for x in right(*a, **k)))
    with pytest.warns(Disagreement):
        assert isinstance(LM(model, 2).run, Stock)


@pytest.mark.parametrize("heavy", [False, True])
def test_one_length_for_all_rows_is_refused(heavy, monkeypatch):
    """Llama 4 scales attention by the cache's one length; within its first range by 1. Heavy models are not looked at
    late in a text, and short rows alone must show it."""
    if heavy:
        monkeypatch.setattr(probe, "HEAVY", 0.0)
    model = build("Llama4Text", {**LLAMA4, "floor_scale": 16})
    assert LM(model, 2).context == 15
    monkeypatch.setattr("inference.models.lm.positions_of", lambda config: config.max_position_embeddings)
    with pytest.raises(
        ValueError, match="Llama4ForCausalLM: rows of different lengths cannot share its passes: logits"
    ):
        LM(model, 2)


def test_a_window_that_the_config_does_not_rule_is_refused():
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


def test_random_numbers_of_others_are_left_alone():
    model, state = tiny(dtype=torch.bfloat16), torch.get_rng_state()
    LM(model, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_noise_that_excuses_is_bounded(monkeypatch):
    monkeypatch.setattr(Probe, "_noise", lambda self, lengths, *_: torch.full((sum(lengths),), 100.0))
    found = Probe(tiny(dtype=torch.bfloat16), 256).found(lambda cache: Lean(tiny(seed=9, dtype=torch.bfloat16), cache))
    assert found.difference > found.allowed == probe.MOST


def test_it_is_done_once_for_weights_that_stay(monkeypatch):
    made = []
    right = Probe.found
    monkeypatch.setattr(Probe, "found", lambda self, make: made.append(1) or right(self, make))
    model = tiny()
    LM(model, 1), LM(model, 3)
    assert len(made) == 1
    model.lm_head.weight.data.mul_(2)
    LM(model, 1)
    assert len(made) == 2


def test_logits_that_are_not_finite_decide_nothing():
    model = tiny()
    model.lm_head.weight.data[3] = torch.nan
    assert isinstance(LM(model, 2).run, Lean)
    assert not Found(float("inf"), 1.0).agrees


def test_a_forward_that_is_wrong_at_one_place_is_caught(monkeypatch):
    """By less than all places together would show."""
    right = Lean.forward

    def last(self, ids, window, **settings):
        found = right(self, ids, window, **settings).logits.clone()
        signs = torch.ones_like(found[-1, -1])
        signs[::2] = -1
        found[-1, -1] += 0.0025 * found.std() * signs
        return Pass(found)

    monkeypatch.setattr(Lean, "forward", last)
    with pytest.warns(Disagreement, match="logits differ"):
        assert not lean_agrees(tiny(dtype=torch.float32), 256)


@pytest.mark.parametrize("fault", [None, *late_faults.FAULTS], ids=lambda fault: getattr(fault, "__name__", "none"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_goes_wrong_late_in_a_text_is_seen_when_an_engine_is_made(dtype, fault, monkeypatch):
    model = late_faults.scaled(dtype)
    if fault:
        fault(monkeypatch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        agrees = lean_agrees(model, late_faults.LATE)
    assert agrees == (not fault) and bool(said) == bool(fault)


def test_a_model_made_in_inference_mode_runs_by_its_own_forward_afterwards() -> None:
    with torch.inference_mode():
        model, ids = tiny(), torch.arange(1, 9)[None]
        own = model(ids).logits
        LM(model, 2)
        torch.testing.assert_close(model(ids).logits, own)
