"""init=transplant: an independent draft that begins with a small LM of another tokenizer."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from torch import Tensor
from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

import studies.transplant
from cotrain.cli import main
from cotrain.config.drafts import DRAFTS
from cotrain.data.corpora import records
from cotrain.students.base import KINDS
from cotrain.students.transplant import Pieces, transplanted
from cotrain.training import assembly
from inference import Engine, Sampling, load
from inference.models.pretrained import load_model
from inference.policy import Fixed
from studies.pretrain.tokenizer import train_tokenizer
from tests.draft_folders import bare
from tests.encoder_decoders import t5
from tests.folders import network, own_texts, target_folder, tokenizer
from tests.kinds import small as small_head
from tests.settings import composed

CHAT = "<|turn|>"
LICENSE = Path(__file__).parents[3] / "LICENSE"


@cache
def sentencepiece() -> PreTrainedTokenizerFast:
    return _with_chat(studies.transplant.sentencepiece([records(number) for number in range(4)], 479))


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Of other merges than the target's."""
    return _with_chat(train_tokenizer([LICENSE.read_text(encoding="utf-8")], 350, 128))


def _with_chat(made: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    made.add_special_tokens({"additional_special_tokens": [CHAT]})
    return made


def _merges(core: Tokenizer) -> list[Any]:
    return [tuple(pair) for pair in json.loads(core.to_str())["model"]["merges"]]


def shuffled(made: PreTrainedTokenizerFast) -> tuple[PreTrainedTokenizerFast, Tensor]:
    """The same tokens with other ids, and the old id of each new one."""
    order = list(range(len(made)))
    random.Random(3).shuffle(order)
    new = {old: place for place, old in enumerate(order)}
    core = Tokenizer(
        BPE({name: new[i] for name, i in made.get_vocab().items()}, _merges(made.backend_tokenizer), byte_fallback=True)
    )
    core.normalizer, core.decoder = made.backend_tokenizer.normalizer, made.backend_tokenizer.decoder
    if made.backend_tokenizer.pre_tokenizer:
        core.pre_tokenizer = made.backend_tokenizer.pre_tokenizer
    roles = {key: value for key, value in made.special_tokens_map.items() if isinstance(value, str)}
    return _with_chat(PreTrainedTokenizerFast(tokenizer_object=core, **roles)), torch.tensor(order)


def folder(path: Path, model: Any, words: PreTrainedTokenizerFast) -> Path:
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path


def donor(size: int, seed: int = 5) -> Any:
    model: Any = network(1, seed=seed)
    model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
    return model


def phi(size: int) -> Any:
    """A head of its own, with a bias."""
    config = PhiConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=size - 1,
    )
    model = PhiForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.bias.normal_()
    return model


def begun(place: Path, model: Any, words: PreTrainedTokenizerFast, target: Any, theirs: PreTrainedTokenizerFast) -> Any:
    return transplanted(bare("independent", path=str(folder(place / "donor", model, words))), target, theirs)


def text_of(words: PreTrainedTokenizerFast, i: int) -> str:
    """What an id adds to a text."""
    before = words("\n", add_special_tokens=False).input_ids
    return str(words.decode([*before, i])).removeprefix(str(words.decode(before)))


def spelling(words: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of a text that stands behind another."""
    before = "\n" if words.backend_tokenizer.normalizer else ""
    ids = words(before + text, add_special_tokens=False).input_ids
    return list(ids[len(words(before, add_special_tokens=False).input_ids) :])


@pytest.mark.parametrize(
    ("theirs", "ours"), [(tokenizer, sentencepiece), (sentencepiece, byte_level), (tokenizer, byte_level)]
)
def test_a_row_is_that_of_the_same_token_or_the_mean_of_its_pieces(theirs: Any, ours: Any, tmp_path: Path) -> None:
    """By what both tokenizers decode and encode, instead of how they write a token."""
    theirs, ours = theirs(), ours()
    model, target = donor(len(ours) + 10), donor(300)
    target.resize_token_embeddings(len(theirs) + 3, mean_resizing=False)
    old = model.get_input_embeddings().weight.detach().clone()
    made = begun(tmp_path, model, ours, target, theirs)
    rows, mean = made.get_input_embeddings().weight.detach(), old[: len(ours)].mean(0)
    special = set(theirs.all_special_ids)
    words = {text_of(ours, i): i for i in range(len(ours)) if i not in ours.all_special_ids}  # a piece before a byte
    counts = [0, 0, 0]
    for i in range(len(theirs)):
        text = text_of(theirs, i)
        if i in special or "\ufffd" in text:
            continue
        pieces = [words[text]] if text in words else spelling(ours, text)
        counts[min(len(pieces), 2)] += 1
        torch.testing.assert_close(rows[i], old[pieces].mean(0), msg=f"{i} {text!r}")
        assert len(pieces) > 1 or torch.equal(rows[i], old[pieces[0]])
    assert not counts[0] and counts[1] > 90 and counts[2] > 10
    assert torch.equal(rows[theirs.eos_token_id], old[ours.eos_token_id])
    if theirs.bos_token_id != theirs.eos_token_id:  # one token of two roles is the end
        assert torch.equal(rows[theirs.bos_token_id], old[ours.bos_token_id])
    if theirs is sentencepiece():
        assert torch.equal(rows[theirs.convert_tokens_to_ids(CHAT)], old[ours.convert_tokens_to_ids(CHAT)])
    torch.testing.assert_close(rows[len(theirs) :], mean.expand(3, -1))  # ids without a token


def test_bytes_of_broken_characters_have_the_row_of_the_same_byte(tmp_path: Path) -> None:
    """Both ways; a byte that the LM has a piece for, too."""
    for place, (theirs, ours) in enumerate([(tokenizer(), sentencepiece()), (sentencepiece(), tokenizer())]):
        model, target = donor(len(ours)), network()
        target.resize_token_embeddings(len(theirs), mean_resizing=False)
        old = model.get_input_embeddings().weight.detach().clone()
        rows = begun(tmp_path / str(place), model, ours, target, theirs).get_input_embeddings().weight
        for byte, letter in ((0xC3, "\u00c3"), (0xFF, "\u00ff"), (0x0A, "\u010a"), (0x20, "\u0120")):
            names = {tokenizer(): letter, sentencepiece(): f"<0x{byte:02X}>"}
            if ours is sentencepiece():
                names[ours] = {0x20: "\u2581", 0x0A: "\n"}.get(byte, names[ours])
            assert torch.equal(
                rows[theirs.convert_tokens_to_ids(names[theirs])], old[ours.convert_tokens_to_ids(names[ours])]
            )
    for words, spelt in (
        (sentencepiece(), ["a", "<0xE2>", "<0x96>", "b"]),
        (tokenizer(), ["a", "\u00e2", "\u0138", "b"]),
    ):
        assert Pieces(words, 999, "here").spell(b"a\xe2\x96b") == words.convert_tokens_to_ids(spelt)


@pytest.mark.parametrize("words", [byte_level, sentencepiece])
@pytest.mark.parametrize("family", [donor, phi])
def test_of_a_permuted_vocabulary_logits_are_those_of_the_lm_permuted(words: Any, family: Any, tmp_path: Path) -> None:
    model = family(len(words()))
    theirs, old = shuffled(words())
    target = network(layers=3)
    target.resize_token_embeddings(len(theirs), mean_resizing=False)
    made = begun(tmp_path, model, words(), target, theirs).eval()
    ids = torch.randint(len(theirs), (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(made(ids).logits, model(old[ids]).logits[..., old])
    assert made.config.vocab_size == len(theirs) and made.config.pad_token_id == target.config.pad_token_id
    assert made.get_input_embeddings().padding_idx == target.config.pad_token_id


def test_a_trained_folder_decodes_as_the_target_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = target_folder(tmp_path / "target", layers=3)
    own_texts(tmp_path / "own.jsonl", 60)
    small = folder(tmp_path / "donor", donor(len(sentencepiece())), sentencepiece())
    settings = """rollout.texts=4 rollout.held_out_texts=2 rollout.new_tokens=16 rollout.prompt_tokens=8 trainer.steps=4
    init=transplant measure=false rollout.temperatures=[1] draft.vocabulary=90""".split()
    given = [
        f"target.path={target}",
        f"data.path={tmp_path / 'own.jsonl'}",
        f"output={tmp_path / 'run'}",
        f"draft.path={small}",
    ]
    assert main(["train", *given, *settings]) == 0
    out = capsys.readouterr()
    assert out.err.count("init=transplant: of the target's 300 tokens, ") == 1
    assert "the draft's vocabulary has 90 tokens" in out.out
    engine = load(str(tmp_path / "run" / "draft"), verify="coupled", policy=Fixed(3), dtype=torch.float64)
    plain = Engine(load_model(str(target)).double(), tokenizer=tokenizer(), verify="coupled")
    for temperature in (0.0, 1.0):
        asked: Any = {"max_new_tokens": 24, "sampling": Sampling(temperature), "ignore_eos": True}
        drafted, alone = (one.generate(["ab", '{"id": 4'], **asked) for one in (engine, plain))
        assert drafted.tokens == alone.tokens and drafted.stats.drafted[0]


def test_what_cannot_begin_so_is_refused_by_name(tmp_path: Path) -> None:
    target = target_folder(tmp_path / "target", layers=3)
    small = str(folder(tmp_path / "donor", donor(len(sentencepiece())), sentencepiece()))
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    other = str(folder(tmp_path / "words", donor(2), PreTrainedTokenizerFast(tokenizer_object=words)))
    t5().save_pretrained(tmp_path / "t5")
    headed = donor(len(sentencepiece()))
    folder(tmp_path / "headed", headed, sentencepiece())
    small_head(headed, 20).save_pretrained(tmp_path / "headed")

    def refused(kind: str = "independent", of: Any = None, **settings: Any) -> str:
        cfg = composed(f"draft={kind}", "init=transplant")
        cfg.target.path, cfg.draft = str(target), bare(kind, **settings)
        with pytest.raises(ValueError) as error:
            assembly.initial(cfg, of or load_model(str(target)))
        return str(error.value)

    for kind in KINDS:
        if not DRAFTS[kind].trained:
            assert f"init=transplant: {kind} drafts are not trained" in refused(kind)
        elif kind != "independent":
            assert f"not {kind} drafts: set draft=independent; conditioned, parallel, hybrid drafts" in refused(
                kind, path=small
            )
    assert "init=transplant: it takes its weights from a folder or hub id: name one with draft.path=" in refused()
    assert "init=transplant: draft.path=" in (own := refused(path=str(target))) and "set init=pretrained" in own
    assert "init=transplant: target.path is an encoder-decoder" in refused(of=t5(), path=small)
    assert f"init=transplant: draft.path={tmp_path / 't5'} is an encoder-decoder" in refused(path=str(tmp_path / "t5"))
    assert "is of neither family" in (said := refused(path=other)) and said.startswith(f"draft.path={other}: ")
    assert "cannot rebuild its small head" in refused(path=str(tmp_path / "headed"))
