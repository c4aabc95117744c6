"""Drafts of another vocabulary: only shared tokens, distributions renormalised over them, and exactly the target's
texts."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cotrain.bundled.tokenizer import train_tokenizer
from inference import Engine, Sampling, load
from inference.policy import Fixed
from inference.proposers.other_tokenizer import (
    WINDOW,
    DraftVocabularyRound,
    OtherTokenizer,
    SharedTokens,
    TextConverter,
    byte_strings,
)
from tests.draft_folders import draft_folder
from tests.folders import target_folder
from tests.tiny import near, tiny

TEXT = "the cat sat on the mat and the dog ran to the red barn, naïve café 日本 über; " * 3


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    return train_tokenizer([TEXT], 320, 256)


@pytest.fixture(scope="module")
def ours() -> PreTrainedTokenizerFast:
    return train_tokenizer(["a cat and a mat: the dog, the barn " * 3], 300, 256)


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's, with marks for spaces."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>", "</s>"]))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


def test_byte_strings_are_those_of_the_tokens(theirs: PreTrainedTokenizerFast) -> None:
    for tokenizer in (theirs, sentencepiece()):
        strings = byte_strings(tokenizer)
        ids = tokenizer("the cat sat on the mat")["input_ids"]
        assert b"".join(strings[number] for number in ids) == b"the cat sat on the mat"
        assert not set(tokenizer.all_special_ids) & strings.keys()
    ids = theirs(TEXT)["input_ids"]
    assert b"".join(byte_strings(theirs)[number] for number in ids).decode() == TEXT


def test_shared_tokens_are_those_of_equal_bytes(theirs: PreTrainedTokenizerFast, ours: PreTrainedTokenizerFast) -> None:
    shared = dict(SharedTokens.of(theirs, ours).pairs)
    left, right = byte_strings(theirs), byte_strings(ours)
    equal = {(a, b) for a in left for b in right if left[a] == right[b]} | {(0, 0)}  # and the end
    assert set(shared.items()) == equal and 256 < len(equal) < min(len(theirs), len(ours))
    spaced = dict(SharedTokens.of(theirs, sentencepiece()).pairs)
    assert sentencepiece().convert_ids_to_tokens(spaced[theirs.convert_tokens_to_ids("Ġthe")]) == "▁the"


def test_tokenizers_without_byte_strings_raise(theirs: PreTrainedTokenizerFast) -> None:
    core = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="no byte strings.*WordPiece"):
        SharedTokens.of(theirs, PreTrainedTokenizerFast(tokenizer_object=core))


def test_texts_convert_to_what_the_drafts_tokenizer_gives(
    theirs: PreTrainedTokenizerFast, ours: PreTrainedTokenizerFast
) -> None:
    convert, text = TextConverter(theirs, ours), []
    for number in theirs(TEXT * 3 + "語 cat", verbose=False)["input_ids"]:
        text.append(number)
        ids = convert(text)
        if convert.whole(text):
            assert ids[1:] == ours(theirs.decode(text))["input_ids"]
    assert not all(convert.whole(text[:n]) for n in range(len(text)))
    assert len(text) > 2 * WINDOW and convert.cache[id(text)][1] > 0  # a part was cached
    convert.keep([])
    assert not convert.cache


class StubRound:
    """A round whose distributions are softmax(logits), and whose draws are the likeliest tokens."""

    def probs(self, logits: torch.Tensor, drafted: list[torch.Tensor]) -> torch.Tensor:
        return logits.softmax(-1)

    def draw(self, probs: torch.Tensor, depth: int) -> torch.Tensor:
        return probs.argmax(-1)


def test_distributions_are_the_drafts_over_shared_tokens_renormalised() -> None:
    shared = SharedTokens(((0, 3), (2, 0), (4, 2)))
    to_target, to_draft = shared.tables(6, 5, torch.device("cpu"))
    round = DraftVocabularyRound(StubRound(), [], [], to_target, to_draft)
    logits = torch.randn(7, 5, dtype=torch.float64)
    q, probs = logits.softmax(-1), round.probs(logits, [])
    wanted = torch.zeros(7, 6, dtype=torch.float64)
    wanted[:, [0, 2, 4]] = q[:, [3, 0, 2]] / q[:, [3, 0, 2]].sum(1, keepdim=True)
    torch.testing.assert_close(probs, wanted, rtol=0, atol=1e-15)
    assert torch.equal(to_target[round.draw(probs, 0)], wanted.argmax(-1))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.8)])
def test_coupled_texts_are_those_of_plain_decoding(
    theirs: PreTrainedTokenizerFast, ours: PreTrainedTokenizerFast, sampling: Sampling
) -> None:
    target = tiny(len(theirs), seed=3, positions=128)
    prompts = ["the cat", "naïve café", "日", " the dog ran to the red barn and the cat sat", "a"]
    settings = {"max_new_tokens": [9, 20, 7, 30, 12], "sampling": sampling, "seed": 2}
    proposer = OtherTokenizer.between(tiny(len(ours), seed=4, positions=512), ours, theirs)
    plain = Engine(target, verify="coupled", rows=2, tokenizer=theirs).generate(prompts, **settings)
    engine = Engine(target, proposer, verify="coupled", rows=2, policy=Fixed(3), tokenizer=theirs)
    fast = engine.generate(prompts, **settings)
    assert fast.tokens == plain.tokens and fast.stats.drafted[2] > 10


class Identity:
    """Converts a text to its own tokens."""

    def keep(self, texts: list[list[int]]) -> None: ...

    def whole(self, text: list[int]) -> bool:
        return True

    def __call__(self, text: list[int]) -> list[int]:
        return list(text)


def test_a_draft_with_the_targets_own_tokens_and_weights_is_accepted(theirs: PreTrainedTokenizerFast) -> None:
    """The draft's slots have no gap, and its distributions are its own."""
    target = tiny(len(theirs), seed=3)
    proposer = OtherTokenizer(target, SharedTokens.of(theirs, theirs), Identity())
    engine = Engine(target, proposer, policy=Fixed(3), tokenizer=theirs)
    stats = engine.generate(["the cat", "the dog sat on"], max_new_tokens=16, sampling=Sampling(0.7)).stats
    assert stats.tau == 4


class Fickle(Identity):
    """Converts a text's last token to the next id, until another token follows."""

    def __call__(self, text: list[int]) -> list[int]:
        return [*text[:-1], (text[-1] + 1) % 300]


def test_distributions_are_those_after_the_converted_text(theirs: PreTrainedTokenizerFast) -> None:
    """In every round, although stored tokens convert to other ids once the text goes on."""
    target = tiny(len(theirs), seed=3, positions=128)
    draft = near(target)
    proposer, rounds = OtherTokenizer(draft, SharedTokens.of(theirs, theirs), Fickle()), []
    propose = proposer.propose

    def watched(round):
        proposal = propose(round)
        for text, q, k in zip(round.texts, [] if proposal.q is None else proposal.q, proposal.k, strict=False):
            if k:
                with torch.no_grad():
                    logits = draft(torch.tensor([Fickle()(text)])).logits[0, -1]
                logits[1] = -torch.inf  # the pad token, which is not shared
                torch.testing.assert_close(q[0], logits.softmax(-1), rtol=0, atol=1e-9)
                rounds.append(k)
        return proposal

    proposer.propose = watched
    engine = Engine(target, proposer, rows=2, policy=Fixed(2), tokenizer=theirs)
    engine.generate(["the cat", "a mat and", "ba"], max_new_tokens=24, seed=1)
    assert len(rounds) > 20


def test_a_draft_folder_of_heads_is_no_draft_with_another_tokenizer(tmp_path: Path) -> None:
    """The folder's kind is checked before its weights are read."""
    target = target_folder(tmp_path / "target")
    folder = draft_folder(tmp_path / "draft", target, "medusa")
    with pytest.raises(ValueError, match=r"cotrain\.json: kind is 'medusa', whose folder holds weights of MedusaNet"):
        load(folder, kind="other_tokenizer")
    folder = draft_folder(tmp_path / "small", target, "independent")
    assert isinstance(load(folder, kind="other_tokenizer").proposer, OtherTokenizer)
