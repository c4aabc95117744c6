"""Counts of a round, ends of rows, distributions that a round reads, and errors of `generate`."""

import pytest
import torch
from transformers import LogitsProcessorList

from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.proposers.base import Proposal, Proposer
from studies.pretrain.tokenizer import train_tokenizer
from tests.often import often
from tests.tiny import continued, near, tiny

GREEDY = Sampling(0)
PROMPT = [3, 5, 7]


class Script(Proposer):
    """Proposes a known text, except at the positions `wrong`."""

    def __init__(self, text, wrong=()):
        self.text, self.wrong = text, wrong

    def propose(self, round):
        (text,), (k,) = round.texts, round.k
        places = range(len(text) - len(PROMPT), len(text) - len(PROMPT) + k)
        x = [self.text[i] ^ (i in self.wrong) for i in places]
        return Proposal(torch.tensor([x]), None, [k])


@pytest.fixture(scope="module")
def target():
    return tiny(hidden=32, seed=27)  # its greedy text below begins with nine different ids


@pytest.fixture(scope="module")
def plain(target):
    text = continued(target, PROMPT, 12)
    assert len(set(text[:9])) == 9
    return text


def scripted(target, text, wrong, **settings):
    engine = Engine(target, Script(text, wrong), rows=1)
    return engine.generate([PROMPT], max_new_tokens=12, sampling=Sampling(0, **settings))


def test_counts_of_known_rounds(target, plain):
    """Rounds at 0 (all 4 pass), 5 (the second errs), 7 (all pass, and the limit ends it)."""
    out = scripted(target, plain, {6})
    stats = out.stats
    assert (out.tokens, out.finish) == ([plain], ["length"])
    assert (stats.tokens, stats.target_calls, stats.tau) == (12, 3, 4.0)
    assert stats.rows[0].starts == [0, 5, 7]
    assert (stats.drafted, stats.accepted, stats.tried) == ([3, 3, 3, 3], [3, 2, 2, 2], [3, 3, 2, 2])


@pytest.mark.parametrize(
    ("last", "calls", "drafted", "accepted"),
    [
        (8, 3, [3, 3, 2, 2], [3, 2, 1, 1]),  # inside accepted drafts
        (6, 2, [2, 2, 1, 1], [2, 1, 1, 1]),  # the correction
        (4, 1, [1, 1, 1, 1], [1, 1, 1, 1]),  # the bonus
        (3, 1, [1, 1, 1, 1], [1, 1, 1, 1]),  # the last draft
        (0, 1, [1], [1]),
    ],
)
def test_drafts_beyond_the_last_token_do_not_count(target, plain, last, calls, drafted, accepted):
    out = scripted(target, plain, {6}, stop_ids=(plain[last],))
    assert (out.tokens, out.finish) == ([plain[: last + 1]], ["stop"])
    assert (out.stats.target_calls, out.stats.drafted, out.stats.accepted) == (calls, drafted, accepted)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6])
def test_no_draft_goes_past_the_limit(target, plain, limit):
    out = Engine(target, Script(plain), rows=1).generate([PROMPT], max_new_tokens=limit, sampling=GREEDY)
    assert (out.tokens, out.finish) == ([plain[:limit]], ["length"])
    assert len(out.stats.drafted) == min(4, limit - 1)


def test_plain_decoding_calls_once_a_token_and_tau_is_a_ratio_of_sums(target):
    stats = Engine(target).generate([PROMPT, [1]], max_new_tokens=[9, 4]).stats
    assert (stats.tokens, stats.target_calls, stats.tau, stats.drafted) == (13, 13, 1.0, [])
    stats = Engine(target, Independent(target), policy=Fixed(3)).generate([PROMPT, [1]], max_new_tokens=[9, 1]).stats
    assert [row.tau for row in stats.rows] == [3.0, 1.0] and stats.tau == 10 / 4


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat, the dog sat on the log. " * 4], 290, 128)


@pytest.fixture(scope="module")
def padded(tokenizer):
    """A target with more rows than the tokenizer has ids, on which much of the raw mass lies."""
    return tiny(vocab=len(tokenizer) + 40, eos=0, positions=128)


def test_stop_strings_and_ends_inside_accepted_drafts(padded, tokenizer):
    """A draft equal to the target, coupled: every round is accepted, so ends fall inside."""
    plain, drafted = (Engine(padded, p, verify="coupled", tokenizer=tokenizer) for p in (None, Independent(padded)))
    prompts, run = ["the cat", "sat on", " the dog", "log.", "on"], {"max_new_tokens": 21, "seed": 1}
    free = plain.generate(prompts, **run)
    stops = [text[7:10] for text in free.text]
    regimes = [Sampling(stop=(stop, "never seen"), stop_ids=(5,)) for stop in stops]
    wanted, out = plain.generate(prompts, sampling=regimes, **run), drafted.generate(prompts, sampling=regimes, **run)
    assert (out.tokens, out.text, out.finish) == (wanted.tokens, wanted.text, wanted.finish)
    assert wanted.finish.count("stop") > 2
    assert all(len(ids) < 21 and stop in text for ids, text, stop in zip(out.tokens, out.text, stops, strict=True))
    assert any(len(ids) % 5 for ids in out.tokens), "no end fell inside a round"
    for row in out.stats.rows:
        assert row.accepted == row.drafted and row.starts == list(range(0, row.tokens, 5))


def test_padded_vocabulary_rows_have_no_mass_on_either_side(padded, tokenizer):
    cut = near(padded, noise=0)
    cut.resize_token_embeddings(len(tokenizer))
    run = {"prompts": ["the cat", "on"], "max_new_tokens": 30, "ignore_eos": True}
    whole = Engine(padded, verify="coupled").generate(
        [tokenizer(t)["input_ids"] for t in run["prompts"]], max_new_tokens=30, ignore_eos=True
    )
    assert max(map(max, whole.tokens)) >= len(tokenizer), "no mass to take away"
    wanted = Engine(cut, verify="coupled", tokenizer=tokenizer).generate(**run)
    for rule in ("coupled", "token"):
        out = Engine(padded, Independent(padded), verify=rule, tokenizer=tokenizer).generate(**run)
        assert max(map(max, out.tokens)) < len(tokenizer)
        assert out.stats.drafted == out.stats.accepted  # both sides cut alike
        assert rule == "token" or out.tokens == wanted.tokens


@pytest.mark.parametrize("vocab", [20, 44])
@pytest.mark.parametrize("greedy", often([False, True], lambda greedy: not greedy))
def test_a_draft_with_another_vocabulary(target, vocab, greedy):
    proposer = Independent(tiny(vocab=vocab, seed=3), greedy)
    prompts = [PROMPT, [31, 30], [25]]
    run = {"max_new_tokens": 25, "sampling": Sampling(0.8)}
    plain = Engine(target, verify="coupled").generate(prompts, **run)
    out = Engine(target, proposer, verify="coupled").generate(prompts, **run)
    assert out.tokens == plain.tokens
    assert any(token >= 20 for tokens in plain.tokens for token in tokens)


def test_a_draft_with_a_shorter_context_stops_drafting_there(target):
    short = near(target, noise=0)
    short.config.max_position_embeddings = 20
    prompts = [PROMPT, [1] * 19, [2] * 30]
    plain = Engine(target, verify="coupled").generate(prompts, max_new_tokens=40)
    out = Engine(target, Independent(short), verify="coupled").generate(prompts, max_new_tokens=40)
    assert out.tokens == plain.tokens
    near_end, full, over = out.stats.rows
    assert near_end.drafted == near_end.accepted == [4, 4, 3, 3]  # rounds at 3, 8, 13 and 18 tokens
    assert full.drafted == [1] and over.drafted == []


@pytest.mark.parametrize(
    "sampling",
    often(
        [Sampling(presence_penalty=2.0), Sampling(0.7, frequency_penalty=1.0)], lambda one: bool(one.frequency_penalty)
    ),
)
def test_penalties_on_the_text_see_the_accepted_drafts(target, sampling):
    for proposer in (Independent(target), Independent(near(target)), NGram()):
        plain = Engine(target, verify="coupled").generate([PROMPT, [1, 1]], max_new_tokens=30, sampling=sampling)
        out = Engine(target, proposer, verify="coupled").generate(
            [PROMPT, [1, 1]], max_new_tokens=30, sampling=sampling
        )
        assert out.tokens == plain.tokens


SORTED = [*range(1, 32, 2), *range(0, 32, 2)]  # what follows an id here may not follow it in the text


class Grammar:
    """Even and odd ids alternate, and nothing follows the end id 6; for any other text it raises."""

    def __call__(self, ids, logits):
        text = ids[0, len(SORTED) :].tolist()
        assert 6 not in text and all((a + b) % 2 for a, b in zip(text, text[1:], strict=False)), text
        if text:
            logits[0, text[-1] % 2 :: 2] = -torch.inf
        return logits


@pytest.mark.parametrize("proposer", [NGram(), None], ids=["ngram", "independent"])
def test_a_grammar_is_called_on_possible_texts_only(target, proposer):
    proposer, grammar, impossible = proposer or Independent(near(target)), Grammar(), []

    def asked(ids, logits):
        try:
            return grammar(ids, logits)
        except Exception:
            impossible.append(ids.tolist())  # which would only be that row's, and go unseen where it is not read
            raise

    sampling = Sampling(1.0, processors=LogitsProcessorList([asked]), stop_ids=(6,))
    prompts, run = [SORTED] * 6, {"max_new_tokens": 30, "sampling": sampling}
    plain = Engine(target, verify="coupled").generate(prompts, **run)
    out = Engine(target, proposer, verify="coupled").generate(prompts, **run)
    assert (out.tokens, out.finish) == (plain.tokens, plain.finish)
    assert "stop" in out.finish and sum(out.stats.accepted) < sum(out.stats.drafted) and not impossible


def test_the_context_bounds_a_row(target):
    engine = Engine(target, Independent(target), context=12)
    out = engine.generate([[1] * 11, [2] * 4], max_new_tokens=20)
    assert [len(tokens) for tokens in out.tokens] == [1, 8] and out.finish == ["length"] * 2
    with pytest.raises(ValueError, match="prompt 1: its 12 tokens leave no room for new ones in a context of 12"):
        engine.generate([[1], [1] * 12])


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"prompts": [[1, 32]]}, "prompt 0: its token ids"),
        ({"prompts": [[-1]]}, "prompt 0: its token ids"),
        ({"prompts": ["text"]}, "tokenizer"),
        ({"prompts": [[1]], "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompts": [[1]], "max_new_tokens": [3, 4]}, "max_new_tokens"),
        ({"prompts": [[1]], "sampling": [Sampling()] * 2}, "sampling"),
        ({"prompts": [[1]], "sampling": Sampling(stop=("x",))}, "stop"),
    ],
)
def test_errors_of_generate_name_the_argument(target, settings, names):
    with pytest.raises(ValueError, match=names):
        Engine(target).generate(**settings)
