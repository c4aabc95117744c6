"""What an encoder-decoder reads and refuses: sources in every form, first ids, suppressed tokens, look-up, folders."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5ForConditionalGeneration

from inference import Engine, Sampling, load
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Metadata, save
from inference.measure.arms import engine_arm
from inference.measure.costs import measure_costs
from inference.models.encoder_decoder import same_encoder
from inference.models.lm import LM, store_prompts
from inference.models.pretrained import load_model
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.proposers.early_exit import untrained_exit
from inference.proposers.retrieval import NONE, NGramIndex, Retrieval
from inference.source import BETWEEN, SourcedText
from studies.assisted import assisted_arm
from tests import folders
from tests.encoder_decoders import FRAMES, MELS, VOCABULARY, bart, generated, sources, t5, whisper, with_encoder_of
from tests.tiny import near, tiny

TEXTS = ["a cab", "abba", "b"]
COLD = Sampling(0.0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(folders.tokenizer())
    tokenizer.add_special_tokens({"pad_token": "<pad>", "eos_token": "</s>"})
    return tokenizer


@pytest.fixture(scope="module")
def engine(tokenizer: PreTrainedTokenizerFast) -> Engine:
    return Engine(t5(vocab=len(tokenizer), eos=None), tokenizer=tokenizer)


FORMS: dict[str, Any] = {
    "ids": lambda t: [t(text)["input_ids"] for text in TEXTS],
    "arrays": lambda t: [np.array(t(text)["input_ids"]) for text in TEXTS],
    "the tokenizer's output": lambda t: t(TEXTS),
    "padded": lambda t: t(TEXTS, padding=True, return_tensors="pt"),
    "a dict each": lambda t: [t(text, return_tensors="pt") for text in TEXTS],
    "with the start token": lambda t: [dict(t(text)) | {"decoder_input_ids": [0]} for text in TEXTS],
    "with starts of a batch": lambda t: dict(t(TEXTS)) | {"decoder_input_ids": torch.zeros(3, 1, dtype=torch.int64)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_sources_gives_the_same_tokens(
    engine: Engine, tokenizer: PreTrainedTokenizerFast, form: str
) -> None:
    wanted = engine.generate(TEXTS, max_new_tokens=6, seed=2)
    prompts = FORMS[form](tokenizer)
    assert engine.generate(prompts, max_new_tokens=6, seed=2).tokens == wanted.tokens
    assert engine.generate(engine.starts(prompts), max_new_tokens=6, seed=2).tokens == wanted.tokens
    assert wanted.text == [tokenizer.decode(tokens) for tokens in wanted.tokens]


def test_the_decoders_text_begins_as_asked() -> None:
    """With the start token before it, as in transformers."""
    engine = Engine(t5(eos=None))
    for given, begins in (([5, 6], [0, 5, 6]), ([0, 5], [0, 5])):
        (start,) = engine.starts([{"input_ids": [7, 8, 9], "decoder_input_ids": given}])
        assert start == begins
        out = engine.generate([start], max_new_tokens=5, sampling=COLD)
        assert out.tokens == [generated(engine.target.model, start, 5)]


def test_forms_of_features() -> None:
    model = whisper()
    engine = Engine(model)
    batch = torch.randn(3, MELS, FRAMES)
    wanted = engine.generate([{"input_features": one} for one in batch], max_new_tokens=6, seed=2).tokens
    for prompts in (
        {"input_features": batch},
        [{"input_features": one.unsqueeze(0).numpy()} for one in batch],
        [{"input_features": one, "decoder_input_ids": [2, 5, 7]} for one in batch],
    ):
        assert engine.generate(prompts, max_new_tokens=6, seed=2).tokens == wanted
    other = [{"input_features": one, "decoder_input_ids": [2, 9]} for one in batch]
    assert engine.generate(other, max_new_tokens=6, seed=2).tokens != wanted


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "an id that the encoder lacks": (t5, [[3, 40]], "prompt 0: its source ids go from 3 to 40"),
    "the first id that the encoder lacks": (
        t5,
        [[3, VOCABULARY]],
        f"prompt 0: its source ids go from 3 to {VOCABULARY}",
    ),
    "nothing": (t5, [[]], "prompt 0: the source is empty"),
    "a source that is too long": (bart, [[3], [4] * 65], "prompt 1: its source has 65 tokens, .* at most 64"),
    "ids for a sound": (whisper, [[3, 4]], "prompt 0: it has token ids, but the encoder reads sound"),
    "features for a text": (t5, [{"input_features": torch.zeros(MELS, FRAMES)}], "prompt 0: its features have"),
    "features that are none": (whisper, [{"input_features": "x"}], "prompt 0: input_features must be numbers"),
    "other features": (whisper, [{"input_features": torch.zeros(MELS, 9)}], rf"\({MELS}, 9\); the encoder .*{FRAMES}"),
    "starts of other rows": (
        t5,
        {"input_ids": [[3], [4]], "decoder_input_ids": [[0]]},
        "decoder_input_ids has 1 rows for 2 sources",
    ),
    "a foreign first id": (t5, [{"input_ids": [3], "decoder_input_ids": [0, 77]}], "ids go from 0 to 77"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_sources_are_refused_by_name(case: str) -> None:
    made, prompts, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        Engine(made()).generate(prompts)


@pytest.mark.parametrize("draft", ["ids", "positions"])
def test_a_draft_whose_encoder_reads_less_drafts_and_changes_nothing(draft: str) -> None:
    """It lacks ids of the source, or is too short for it."""
    target = bart(eos_token_id=None)
    small = bart(5, vocab_size=20) if draft == "ids" else bart(5, positions=32)
    prompts, settings = [[31] * 50, [4, 5, 6], [3, 30]], {"max_new_tokens": 9, "sampling": COLD}
    plain = Engine(target, rows=2).generate(prompts, **settings)  # type: ignore[arg-type]
    out = Engine(target, Independent(small), rows=2, policy=Fixed(2)).generate(prompts, **settings)  # type: ignore[arg-type]
    assert out.tokens == plain.tokens and out.stats.drafted[0] > 6


def test_ids_beside_absent_features_are_the_source() -> None:
    engine = Engine(t5())
    assert engine.starts([{"input_ids": [3, 4], "input_features": None}])[0].source == (3, 4)  # type: ignore[attr-defined]


def test_an_encoder_of_another_dtype_is_not_run_for_both() -> None:
    target = t5()
    other = copy.deepcopy(target).float()
    with torch.no_grad():
        for one in (target, other):
            for weight in one.get_encoder().parameters():
                weight.copy_(weight.bfloat16())  # the same numbers in both dtypes
    assert not same_encoder(other, target) and same_encoder(other, target, as_run=False)


def test_a_match_that_ends_with_the_source_leaves_the_turn_to_the_datastore() -> None:
    """It drafts nothing, however long it is."""
    proposer = Retrieval(shortest=2)
    proposer.open(type("Host", (), {"vocabulary": 32}))
    text = SourcedText([0, 9, 4, 1], TEXT.source)  # the source's end
    asked: list[int] = []

    class Store:
        about = type("About", (), {"depth": 9})

        def look_up(self, text: Any, k: int, shortest: int) -> Any:
            asked.append(shortest)
            return NONE

    proposer.datastore = Store()  # type: ignore[assignment]
    proposer.along(text, [3], 2)
    assert asked == [2]


def test_sources_at_the_limits_are_read() -> None:
    """The last id, the longest source of learned positions, and any length of relative ones."""
    assert Engine(bart()).generate([[VOCABULARY - 1] * 64], max_new_tokens=2).tokens[0]
    assert Engine(t5()).generate([[3] * 700], max_new_tokens=2).tokens[0]


def test_first_ids_follow_the_generation_config_and_the_start_token() -> None:
    """The generation config goes before the model's; a prompt's own first ids get the start token unless they have
    it, even if they contain it elsewhere; forced ids with a gap name no beginning."""
    model = bart()
    model.config.forced_bos_token_id, model.generation_config.forced_bos_token_id = 4, 5
    engine = Engine(model)
    start = model.generation_config.decoder_start_token_id
    assert engine.starts([[3]]) == [[start, 5]]
    for given, wanted in (([7, start], [start, 7, start]), ([start, 7], [start, 7])):
        assert engine.starts([{"input_ids": [3], "decoder_input_ids": given}]) == [wanted]
    gap = whisper()
    gap.generation_config.forced_decoder_ids = [[1, 5], [3, 7]]
    with pytest.raises(ValueError, match="forced_decoder_ids"):
        Engine(gap).generate(sources(gap, 1))


def test_a_draft_whose_encoder_reads_other_sources_is_refused() -> None:
    for target, draft, says in (
        (t5(), whisper(), rf"Independent: .*Whisper.* reads \({MELS}, {FRAMES}\), but the target's reads token ids"),
        (whisper(), t5(), rf"Independent: .*T5.* reads token ids, but the target's reads \({MELS}, {FRAMES}\)"),
        (tiny(), t5(), "Independent: T5ForConditionalGeneration has an encoder, but the target has none"),
    ):
        with pytest.raises(ValueError, match=says):
            Engine(target, Independent(draft)).generate(sources(target, 1))
        with pytest.raises(ValueError, match="a folder: .*encoder"):
            Independent.fits(draft, target, "a folder")


def test_what_is_missing_is_said() -> None:
    model = whisper()
    model.generation_config.forced_decoder_ids = [[1, None], [2, 7]]  # the language is to be detected
    prompts = sources(model, 1)
    with pytest.raises(ValueError, match=r"prompt 0: .*null in forced_decoder_ids \(such as the language"):
        Engine(model).generate(prompts)
    assert Engine(model).generate([prompts[0] | {"decoder_input_ids": [2, 3, 7]}], max_new_tokens=2).tokens[0]
    with pytest.raises(ValueError, match="prompt 0: it has a source, but the target has no encoder"):
        Engine(tiny()).generate([SourcedText([1], (3, 4))])
    with pytest.raises(ValueError, match="a text has no source; give texts that `Engine.starts`"):
        store_prompts(LM(t5(), 1), 0, [[0]])


def test_what_cannot_work_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="min_length=10 has no counterpart"):
        Sampling.of(GenerationConfig(min_length=10))
    with pytest.raises(
        ValueError, match="T5ForConditionalGeneration is an encoder-decoder, but an early exit needs a causal LM"
    ):
        untrained_exit(t5(), 1, 2, 3)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration: int8 weights"):
        LM(t5(), 1, int8=True)


TEXT = SourcedText([0, 7, 8], (5, 7, 8, 9, 4, 1))


@pytest.mark.parametrize("kind", [NGram(), Retrieval(shortest=2)])
def test_look_up_reads_the_source(kind: Any) -> None:
    """It drafts what followed there, and not past its end into the text."""

    def drafted(text: SourcedText, k: int) -> list[int]:
        return list(NGramIndex(text, 3).look_up(k) if isinstance(kind, NGram) else kind.along(text, [3], k)[0].drafts)

    class Seen:
        texts, k = [TEXT], [2]

    kind.open(type("Host", (), {"vocabulary": 32}))
    kind.admit(0, [SourcedText(TEXT[:1], TEXT.source)], {})
    assert kind.propose(Seen()).x.tolist() == [[9, 4]]
    Seen.k = [9]
    assert kind.propose(Seen()).x.tolist() == [[9, 4, 1]]
    Seen.texts = [SourcedText([0, 4, 1], TEXT.source)]
    proposal = kind.propose(Seen())
    assert proposal.k == [0] and BETWEEN not in proposal.x.flatten().tolist()
    assert drafted(TEXT, 2) == [9, 4]
    kind.open(type("Host", (), {"vocabulary": 9}))  # the source may have ids that are never emitted
    kind.admit(0, [SourcedText(TEXT[:1], (7, 8, 5, 9))], {})
    Seen.texts = [SourcedText(TEXT, (7, 8, 5, 9))]
    assert kind.propose(Seen()).x.tolist() == [[5]]


def test_draft_folders_of_encoder_decoders_load(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """As plain folders that transformers loads too, with an encoder of their own or the target's."""
    target = t5(vocab=len(tokenizer)).float()
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    assert isinstance(load_model(str(tmp_path / "target")), T5ForConditionalGeneration)
    about = {"name": str(tmp_path / "target"), **hash_target(target.config, tokenizer)}
    for name, draft in (("own", near(target)), ("shared", with_encoder_of(target))):
        save(draft, tokenizer, tmp_path / name, Metadata(about, 3), None)
        engine = load(tmp_path / name, rows=2)
        ours = engine.generate(TEXTS, max_new_tokens=8, sampling=COLD)
        assert ours.tokens == Engine(target).generate(engine.starts(TEXTS), max_new_tokens=8, sampling=COLD).tokens
        assert engine.proposer.shares_encoder == (name == "shared")  # type: ignore[union-attr]
        plain = T5ForConditionalGeneration.from_pretrained(tmp_path / name)
        ids = torch.tensor([[3, 4, 5]])
        with torch.no_grad():
            assert torch.equal(*(m.eval()(input_ids=ids, decoder_input_ids=ids).logits for m in (plain, draft)))
        assert plain.generation_config.decoder_start_token_id == 0


def test_timing_has_the_encoder() -> None:
    """In the table of costs and in the arms, whose prompts carry their sources."""
    target = t5(eos=None)
    costs = measure_costs(LM(target, 2), Independent(near(target)), 3, context=16, repeats=1, warmup=0)
    assert 0 < costs.encoder and costs.encoder not in (*costs.target, *costs.rest)
    read: list[int] = []
    lm, encode = LM(target, 2), LM.encode
    lm.encode = lambda low, given, *rest: read.extend(map(len, given)) or encode(lm, low, given, *rest)  # type: ignore[method-assign,func-returns-value]
    measure_costs(lm, Independent(near(target)), 2, context=5, source=21, repeats=1, warmup=0)
    assert {*read} == {21}
    engine = Engine(target, Independent(near(target)), rows=2)
    starts = engine.starts(sources(target, 3))
    ours = engine_arm("ours", engine, COLD, 6).run(starts, [0, 1, 2], 0)
    for settings in ({}, {"assistant": near(target), "k": 3}):
        theirs = assisted_arm("theirs", target, COLD, 6, **settings).run(starts, [0, 1, 2], 0)
        assert ours.tokens == theirs.tokens
