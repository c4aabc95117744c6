"""Drafts of another vocabulary: shared tokens alone, distributions renormalised over them, texts exactly the
target's."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cotrain.bundled.tokenizer import train_tokenizer
from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers.other_tokenizer import OtherTokenizer, Told
from inference.proposers.retelling import WINDOW, Retelling, Shared, byte_strings
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


def test_byte_strings_are_what_tokens_stand_for(theirs: PreTrainedTokenizerFast) -> None:
    for tokenizer in (theirs, sentencepiece()):
        found = byte_strings(tokenizer)
        ids = tokenizer("the cat sat on the mat")["input_ids"]
        assert b"".join(found[number] for number in ids) == b"the cat sat on the mat"
        assert not set(tokenizer.all_special_ids) & found.keys()
    ids = theirs(TEXT)["input_ids"]
    assert b"".join(byte_strings(theirs)[number] for number in ids).decode() == TEXT


def test_shared_tokens_are_those_of_equal_bytes(theirs: PreTrainedTokenizerFast, ours: PreTrainedTokenizerFast) -> None:
    shared = dict(Shared.of(theirs, ours).pairs)
    left, right = byte_strings(theirs), byte_strings(ours)
    equal = {(a, b) for a in left for b in right if left[a] == right[b]} | {(0, 0)}  # and the end
    assert set(shared.items()) == equal and 256 < len(equal) < min(len(theirs), len(ours))
    spaced = dict(Shared.of(theirs, sentencepiece()).pairs)
    assert sentencepiece().convert_ids_to_tokens(spaced[theirs.convert_tokens_to_ids("Ġthe")]) == "▁the"


def test_tokenizers_that_part_no_bytes_are_refused(theirs: PreTrainedTokenizerFast) -> None:
    core = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="no byte strings.*WordPiece"):
        Shared.of(theirs, PreTrainedTokenizerFast(tokenizer_object=core))


def test_a_text_is_told_as_the_drafts_tokenizer_writes_it(
    theirs: PreTrainedTokenizerFast, ours: PreTrainedTokenizerFast
) -> None:
    retelling, text = Retelling(theirs, ours), []
    told = []
    for number in theirs(TEXT * 3 + "語 cat", verbose=False)["input_ids"]:
        text.append(number)
        told.append(retelling(text))
        if retelling.whole(text):
            assert told[-1][1:] == ours(theirs.decode(text))["input_ids"]
    assert not all(retelling.whole(text[:n]) for n in range(len(text)))
    assert len(text) > 2 * WINDOW and retelling.settled[id(text)][1] > 0  # some of it was kept
    retelling.keep([])
    assert not retelling.settled


class Regime:
    """A round whose distributions are softmax(logits), and whose draws are the likeliest tokens."""

    def probs(self, logits: torch.Tensor, drafted: list[torch.Tensor]) -> torch.Tensor:
        return logits.softmax(-1)

    def draw(self, probs: torch.Tensor, depth: int) -> torch.Tensor:
        return probs.argmax(-1)


def test_distributions_are_the_drafts_over_shared_tokens_renormalised() -> None:
    shared = Shared(((0, 3), (2, 0), (4, 2)))
    to_target, to_draft = shared.tables(6, 5, torch.device("cpu"))
    round = Told(Regime(), [], [], to_target, to_draft)
    logits = torch.randn(7, 5, dtype=torch.float64)
    q, found = logits.softmax(-1), round.probs(logits, [])
    wanted = torch.zeros(7, 6, dtype=torch.float64)
    wanted[:, [0, 2, 4]] = q[:, [3, 0, 2]] / q[:, [3, 0, 2]].sum(1, keepdim=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-15)
    assert torch.equal(to_target[round.draw(found, 0)], wanted.argmax(-1))


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


class AsItIs:
    """Tells a text in its own tokens."""

    def keep(self, texts: list[list[int]]) -> None: ...

    def whole(self, text: list[int]) -> bool:
        return True

    def __call__(self, text: list[int]) -> list[int]:
        return list(text)


def test_a_draft_with_the_targets_own_tokens_and_weights_is_accepted(theirs: PreTrainedTokenizerFast) -> None:
    """No hole in the draft's slots, and distributions of its own."""
    target = tiny(len(theirs), seed=3)
    proposer = OtherTokenizer(target, Shared.of(theirs, theirs), AsItIs())
    engine = Engine(target, proposer, policy=Fixed(3), tokenizer=theirs)
    stats = engine.generate(["the cat", "the dog sat on"], max_new_tokens=16, sampling=Sampling(0.7)).stats
    assert stats.tau == 4


class Fickle(AsItIs):
    """Tells a text's last token as the next id, until another follows."""

    def __call__(self, text: list[int]) -> list[int]:
        return [*text[:-1], (text[-1] + 1) % 300]


def test_distributions_are_those_after_the_text_as_it_is_told(theirs: PreTrainedTokenizerFast) -> None:
    """In every round, though what was stored is told in other tokens once the text goes on."""
    target = tiny(len(theirs), seed=3, positions=128)
    draft = near(target)
    proposer, rounds = OtherTokenizer(draft, Shared.of(theirs, theirs), Fickle()), []
    propose = proposer.propose

    def watched(round):
        made = propose(round)
        for text, q, k in zip(round.texts, [] if made.q is None else made.q, made.k, strict=False):
            if k:
                with torch.no_grad():
                    logits = draft(torch.tensor([Fickle()(text)])).logits[0, -1]
                logits[1] = -torch.inf  # the pad token, which is not shared
                torch.testing.assert_close(q[0], logits.softmax(-1), rtol=0, atol=1e-9)
                rounds.append(k)
        return made

    proposer.propose = watched
    engine = Engine(target, proposer, rows=2, policy=Fixed(2), tokenizer=theirs)
    engine.generate(["the cat", "a mat and", "ba"], max_new_tokens=24, seed=1)
    assert len(rounds) > 20
