"""Arguments of another type are rejected when they are handed in, with what to give instead."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TemperatureLogitsWarper

from inference import Engine, Sampling, load
from inference.policy import Fixed
from inference.proposers import Independent
from tests.often import often
from tests.tiny import tiny

MODEL = tiny()
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no target": ({"target": None}, "target must be a model, a folder or a hub id, not None"),
    "a number as target": ({"target": 5}, "target must be a model, a folder or a hub id, not 5"),
    "no such folder": ({"target": "/no/such/folder"}, "target: there is no folder"),
    "a folder as proposer": ({"proposer": "outputs/draft"}, r"inference.load\('outputs/draft'\)"),
    "a model as proposer": ({"proposer": MODEL}, "LlamaForCausalLM is no proposer; give inference.proposers"),
    "a length as policy": (
        {"policy": 4},
        r"policy: 4 has no method lengths; give a policy, such as inference.policy.Fixed\(4\)",
    ),
    "a name as policy": ({"policy": "planned"}, "policy: 'planned' has no method lengths"),
    **{
        f"{name}={value!r}": ({name: value}, f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("rows", "context")
        for value in (0, -5, 2.5, "8", True)
    },
    **{
        f"a class as {name}": (
            {name: value},
            rf"{name}: {value.__name__} is a class; give an object, {value.__name__}\(",
        )
        for name, value in (
            ("target", type(MODEL)),
            ("proposer", Independent),
            ("policy", Fixed),
            ("tokenizer", PreTrainedTokenizerFast),
            ("record", dict),
        )
    },
    "an unknown rule": ({"verify": "typical"}, "typical"),
    "room for no token": ({"context": 1}, "context=1 leaves no room .*; set context= to 2 or more"),
    "a folder as tokenizer": ({"tokenizer": "a/folder"}, "tokenizer must be an object, not a path"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_is_not_made_of_other_things(name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        Engine(**({"target": MODEL} | settings))


@pytest.mark.parametrize("seed", ["a", None, [1, 2], 1.5, True, 2**64, -(2**63) - 1])
def test_a_seed_is_a_whole_number_of_64_bits(seed: Any) -> None:
    engine = Engine(MODEL, Independent(MODEL), policy=Fixed(2))
    with pytest.raises(ValueError, match=r"seed must be a whole number from -2\*\*63 to 2\*\*64 - 1, not"):
        engine.generate([[1, 2]], max_new_tokens=3, seed=seed)
    with pytest.raises(ValueError, match=r"seed must be a whole number from -2\*\*63 to 2\*\*64 - 1, not"):
        next(iter(engine.stream([1, 2], max_new_tokens=3, seed=seed)))


def test_each_seed_is_a_text_of_its_own() -> None:
    engine = Engine(MODEL)
    seeds = [0, 1, 2**32, 2**63, 2**64 - 2, -2, -(2**63) + 1, torch.iinfo(torch.int64).max]
    texts = [
        engine.generate([[1, 2]], max_new_tokens=12, sampling=Sampling(1.5), seed=seed).tokens[0] for seed in seeds
    ]
    distinct = {tuple(text) for text in texts}
    assert texts[4] == texts[5] and len(distinct) == len(seeds) - 1  # of the same 64 bits


@pytest.mark.parametrize("k", [-1, 2.5, "4", None])
def test_a_draft_length_is_a_whole_number(k: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"policy.k must be a whole number of at least 0, not {k!r}")):
        Fixed(k)


@pytest.mark.parametrize("given", [None, 4, {0: 4}, "4", [True], [4, 4], [-1], [2.5]])
def test_a_policy_returns_a_list_of_lengths(given: Any) -> None:
    policy = SimpleNamespace(lengths=lambda texts: given)
    engine = Engine(MODEL, Independent(MODEL), policy=policy)
    with pytest.raises(ValueError, match=r"policy.lengths must return a list of 1 draft lengths of at least 0, not"):
        engine.generate([[1, 2]], max_new_tokens=3)
    engine.policy = Fixed(2)
    assert engine.generate([[1, 2]], max_new_tokens=3).finish == ["length"]


@pytest.mark.parametrize(
    ("times", "error"), [(0, KeyError("no such state")), (2, KeyboardInterrupt())], ids=["0-KeyError", "2-interrupt"]
)
@pytest.mark.parametrize(
    "part",
    often(
        [
            "policy.lengths",
            "proposer.admit",
            "proposer.propose",
            "proposer.commit",
            "target.forward",
            "rollback",
            "slots.leave",
        ],
        {"proposer.admit", "proposer.propose", "proposer.commit", "target.forward"}.__contains__,
    ),
)
def test_an_engine_goes_on_after_an_error_in_a_round(
    part: str, times: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first call of a part of the round, or in a later one, with rows in the slots and rows that wait."""
    engine = Engine(
        MODEL, Independent(tiny(seed=1)), policy=SimpleNamespace(lengths=lambda texts: [2] * len(texts)), rows=2
    )
    prompts: list[list[int]] = [[1, 2], [3], [4, 5, 6], [7], [8]]
    whole: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True}
    plain, calls = engine.generate(prompts, **whole), list[None]()
    *owner, name = part.split(".")
    holder = getattr(engine, owner[0]) if owner else engine
    kept = getattr(holder, name)

    def fails(*given: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) > times:
            raise error
        return kept(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(holder, name, fails)
        with pytest.raises(type(error)):
            engine.generate(prompts, **whole)
    again = engine.generate(prompts, **whole)
    assert len(calls) == times + 1 and again.tokens == plain.tokens and again.finish == ["length"] * 5
    assert again.stats.rows == plain.stats.rows


@pytest.mark.parametrize("shares", [True, False], ids=["its engine", "another engine"])
def test_a_processor_may_call_another_engine_only(shares: bool) -> None:
    """Its own would overwrite the slots of the round."""
    engine = Engine(MODEL, Independent(MODEL), policy=Fixed(2))
    other, texts = engine if shares else Engine(MODEL), []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        texts.append(other.generate([[3]], max_new_tokens=2, ignore_eos=True).tokens)
        return scores

    whole: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True}
    output = engine.generate([[1, 2], [4]], sampling=[Sampling(processors=(processor,)), Sampling()], **whole)
    plain = engine.generate([[1, 2], [4]], **whole)
    assert output.tokens[1] == plain.tokens[1] and output.finish[1] == "length"
    if shares:
        assert output.finish[0] == "error" and "called the engine during a round" in (output.errors[0] or "")
    else:
        assert output.tokens[0] == plain.tokens[0] and texts


def test_a_class_is_no_processor() -> None:
    with pytest.raises(ValueError, match="Sampling.processors must be callables, not classes"):
        Sampling(processors=[TemperatureLogitsWarper])  # type: ignore[list-item]


def test_a_draft_is_a_model_or_its_path() -> None:
    with pytest.raises(ValueError, match="model must be a transformers model or its path, not None"):
        Independent(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="folder must be the path of a draft folder, not None"):
        load(None)  # type: ignore[arg-type]


def test_dtypes_and_devices_that_are_not_there(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path)
    vocabulary = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dtype must be auto, float32, .*, not 'bf16'"):
        Engine(tmp_path, dtype="bf16")
    for device in ("nowhere", "xpu:7"):
        with pytest.raises(ValueError, match=f"device='{device}': "):
            Engine(tmp_path, device=device)


WRONG_RESULTS: dict[str, tuple[Any, str]] = {
    "one row less": (lambda ids, scores: scores[0], rf"not shape \({MODEL.config.vocab_size},\)"),
    "one column": (lambda ids, scores: scores[:, :1], r"not shape \(1, 1\)"),
    "nothing": (lambda ids, scores: None, "not NoneType"),
}


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_what_a_processor_returns_is_not_broadcast(name: str) -> None:
    processor, message = WRONG_RESULTS[name]
    output = Engine(MODEL).generate(
        [[1, 2], [3, 4]], max_new_tokens=3, ignore_eos=True, sampling=[Sampling(processors=(processor,)), Sampling()]
    )
    assert output.finish == ["error", "length"]
    assert re.search(message, output.errors[0] or "") and output.errors[1] is None
