"""Settings that read the text: equal to transformers' generate; presence and frequency by hand."""

from dataclasses import replace

import pytest
import torch

from inference import Engine, Sampling
from inference.proposers import NGram
from inference.sampling.penalties import process
from tests.tiny import tiny

PROMPT = [3, 1, 4, 1, 5]


def greedy(model, sampling: Sampling, tokens: int) -> list[int]:
    ids = list(PROMPT)
    for new in range(tokens):
        logits = model(torch.tensor([ids])).logits[:, -1]
        ids.append(process(logits, [ids], [new], sampling).argmax(-1).item())
        if ids[-1] in sampling.stop_ids:
            break
    return ids[len(PROMPT) :]


def keep_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """An own processor that also works in place, as some do."""
    scores[:, 1::2] -= 2.0 + ids.shape[1] % 3
    return scores


SETTINGS = [
    (Sampling(repetition_penalty=1.7), {"repetition_penalty": 1.7}),
    (Sampling(logit_bias={7: 3.5, 11: -20}), {"sequence_bias": [[[7], 3.5], [[11], -20.0]]}),
    (Sampling(min_new_tokens=6), {"min_new_tokens": 6}),
    (Sampling(banned_first=(3, 11)), {"begin_suppress_tokens": [3, 11]}),
    (Sampling(processors=(keep_even,)), {"logits_processor": [keep_even]}),
]


@pytest.mark.parametrize(("sampling", "theirs"), SETTINGS)
def test_greedy_text_is_that_of_transformers_generate(sampling, theirs):
    model = tiny(seed=1)
    plain = greedy(model, Sampling(), 14)
    eos = plain[2]  # without min_new_tokens the text would end here
    theirs_ids = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=14, do_sample=False, eos_token_id=eos, pad_token_id=0, **theirs
    )
    ours = greedy(model, replace(sampling, stop_ids=(eos,)), 14)
    assert ours == theirs_ids[0, len(PROMPT) :].tolist()
    assert ours != plain[:3]


def test_banned_words_are_those_of_transformers_and_include_the_end_token():
    model = tiny(seed=1)
    plain = greedy(model, Sampling(), 12)
    words = [plain[1:3], [plain[0]], plain[4:7]]
    theirs_ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, bad_words_ids=words)
    assert greedy(model, Sampling(banned=words), 12) == theirs_ids[0, len(PROMPT) :].tolist()
    assert plain[0] not in greedy(model, Sampling(banned=[[plain[0]]], stop_ids=plain[:1]), 12)


def test_presence_and_frequency_count_generated_tokens_only():
    logits, history = torch.zeros(1, 6), [0, 0, 5, 2, 2, 3]  # the prompt is [0, 0, 5]
    penalised = process(logits, [history], [3], Sampling(presence_penalty=0.5, frequency_penalty=0.25))
    assert penalised.tolist() == [[0, 0, -1.0, -0.75, 0, 0]]
    assert process(logits, [history], [0], Sampling(presence_penalty=0.5)).tolist() == logits.tolist()


def test_impossible_settings_are_rejected():
    logits = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="row 1 has no token left"):
        process(logits, [[0], [1]], [0, 0], Sampling(banned=((1, 0), (1, 1), (1, 2))))
    with pytest.raises(ValueError, match="vocabulary size is 3"):
        process(logits, [[0], [0]], [0, 0], Sampling(logit_bias={3: 1.0}))


def test_a_banned_word_may_begin_in_the_prompt() -> None:
    """The only id that greedy decoding would emit first is banned after the prompt's last id."""
    sampling = Sampling(0.0)
    first = Engine(tiny()).generate([[3, 5]], max_new_tokens=1, sampling=sampling, ignore_eos=True).tokens[0][0]
    banned = Sampling(0.0, banned=((3, 5, first),))
    for proposer in (None, NGram()):
        out = Engine(tiny(), proposer).generate([[3, 5]], max_new_tokens=1, sampling=banned, ignore_eos=True)
        assert out.tokens[0][0] != first


def test_own_processors_act_one_after_the_other() -> None:
    def only(*allowed: int):  # type: ignore[no-untyped-def]
        mask = torch.tensor([id in allowed for id in range(32)])
        return lambda ids, x: x.masked_fill(~mask, -torch.inf)

    sampling = Sampling(1.0, processors=(only(4, 7, 9), only(7, 11)))
    for proposer in (None, NGram()):
        out = Engine(tiny(), proposer).generate([[3, 5]] * 4, max_new_tokens=6, sampling=sampling, ignore_eos=True)
        assert {id for text in out.tokens for id in text} == {7}
