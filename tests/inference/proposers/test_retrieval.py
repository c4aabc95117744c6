"""The suffix automaton and the datastore, compared with searches by brute force."""

import random
from pathlib import Path

import numpy as np
import pytest

from inference.lookup.corpus import About, Datastore
from inference.lookup.suffixes import CLIMB, SuffixAutomaton, suffix_array
from inference.proposers.retrieval import Retrieval


def texts(count: int, seed: int = 0) -> list[list[int]]:
    """Random texts of few ids, some with long repeats."""
    draw = random.Random(seed)
    many = []
    for _ in range(count):
        text = [draw.randrange(draw.choice((2, 3, 6))) for _ in range(draw.randrange(1, 40))]
        start = draw.randrange(len(text))
        many.append(text + text[start : start + draw.randrange(20)])
    return many


def ends(text: list[int], length: int) -> list[int]:
    """Where the text's last `length` tokens ended earlier."""
    return [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]


def longest(text: list[int]) -> int:
    """Length of the longest end that occurred earlier."""
    return max((length for length in range(1, len(text)) if ends(text, length)), default=0)


def test_the_automaton_has_the_longest_end_that_occurred_earlier_at_every_token() -> None:
    for text in texts(150):
        automaton = SuffixAutomaton()
        for n, token in enumerate(text, 1):
            automaton.extend([token])
            seen, length = text[:n], longest(text[:n])
            match = automaton.look_up(4)
            assert match.length == automaton.match == length
            assert bool(match.drafts) == (length > 0)
            if length:
                positions = ends(seen, length)
                assert automaton.end == positions[-1] or (automaton.end in positions and length > CLIMB)
                period = seen[automaton.end :]
                assert match.drafts == (period * 4)[:4]
        assert len(automaton.link) <= 2 * len(text) + 1


def test_drafts_follow_the_latest_occurrence() -> None:
    assert SuffixAutomaton([7, 1, 5, 7, 2, 5, 7]).look_up(2).drafts == [2, 5]
    assert SuffixAutomaton([7, 1, 7, 2, 7]).look_up(2).drafts == [2, 7]
    assert SuffixAutomaton([1, 2, 3, 1, 2]).look_up(7).drafts == [3, 1, 2, 3, 1, 2, 3]
    assert SuffixAutomaton([1, 2, 3, 1, 2]).look_up(3, shortest=3).drafts == []
    assert SuffixAutomaton([1, 2, 3]).look_up(3).drafts == []


def test_an_automaton_follows_a_longer_text_and_another_one() -> None:
    automaton = SuffixAutomaton([1, 2, 1])
    automaton.follow([1, 2, 1, 2])
    assert automaton.look_up(1).drafts == [1]
    automaton.follow([3, 4, 3])
    assert automaton.look_up(1).drafts == [4]
    automaton.follow([3])
    assert len(automaton) == 1 and not automaton.look_up(1).drafts


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 50])
def test_a_suffix_array_sorts_by_its_depth_then_by_position(depth: int) -> None:
    for text in [*texts(30), [], [3], [2] * 20]:
        wanted = sorted(range(len(text)), key=lambda at: (text[at : at + depth], at))
        assert suffix_array(np.array(text, dtype=np.uint16), depth).tolist() == wanted


def continuation(corpus: list[list[int]], text: list[int], k: int, depth: int) -> tuple[int, int, list[int]]:
    """Length, occurrences and drafts by brute force."""
    for length in range(min(len(text), depth), 0, -1):
        places = [
            (one, end)
            for one in corpus
            for end in range(length, len(one) + 1)
            if one[end - length : end] == text[-length:]
        ]
        if places:
            drafts: list[int] = []
            for _ in range(k):
                following = [
                    one[end + len(drafts)]
                    for one, end in places
                    if len(one) > end + len(drafts) and one[end : end + len(drafts)] == drafts
                ]
                if not following:
                    break
                drafts.append(min(set(following), key=lambda token: (-following.count(token), token)))
            return length, len(places), drafts
    return 0, 0, []


@pytest.mark.parametrize("depth", [4, 16])
def test_a_datastore_drafts_what_followed_most_often(depth: int) -> None:
    corpus = texts(4, seed=1)
    store = Datastore.of(corpus, About(vocabulary=8, depth=depth))
    for text in texts(60, seed=2):
        length, count, drafts = continuation(corpus, text, 5, depth)
        match = store.look_up(text, 5)
        assert match.length == length
        if count <= 64:
            assert match.drafts == drafts
    assert store.look_up([7], 3).drafts == [] == store.look_up([], 3).drafts


def test_no_draft_and_no_match_crosses_documents() -> None:
    store = Datastore.of([[1, 2, 3], [4, 5]], About(vocabulary=6, depth=8))
    assert store.look_up([1, 2], 5).drafts == [3]
    assert store.look_up([2, 3, 4], 5) == ([5], 1, True)
    assert store.look_up([9, 3], 5) == ([], 1, True)


def test_a_datastore_on_disk_is_the_one_that_was_saved(tmp_path: Path) -> None:
    corpus = texts(3, seed=3)
    store = Datastore.of(corpus, About(vocabulary=8, depth=8, tokenizer="hash", made={"command": "x"}))
    store.save(tmp_path / "store")
    mapped = Datastore.open(tmp_path / "store")
    assert isinstance(mapped.tokens, np.memmap) and isinstance(mapped.order, np.memmap)
    assert mapped.about == store.about and mapped.about.tokens == sum(map(len, corpus))
    assert [mapped.look_up(text, 4) for text in corpus] == [store.look_up(text, 4) for text in corpus]
    with pytest.raises(FileExistsError):
        store.save(tmp_path / "store")


def test_a_folder_without_a_valid_datastore_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="cotrain datastore"):
        Datastore.open(tmp_path)
    place = Datastore.of([[1, 2]], About(vocabulary=8, depth=8)).save(tmp_path / "store")
    np.save(place / "order.npy", np.zeros(5, dtype=np.uint16))
    with pytest.raises(ValueError, match="2 tokens in 1 documents, but order.npy has 5 entries"):
        Datastore.open(place)
    (place / "tokens.npy").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"tokens\.npy cannot be read"):
        Datastore.open(place)
    (place / "datastore.json").write_text('{"format": 9}')
    with pytest.raises(ValueError, match="format is 9"):
        Datastore.open(place)
    with pytest.raises(ValueError, match=r"document 0 \(0-based\) has token ids outside \[0, 2\)"):
        Datastore.of([[1, 2]], About(vocabulary=2, depth=8))
    with pytest.raises(ValueError, match="no token"):
        Datastore.of([[]], About(vocabulary=2, depth=8))


def test_the_longer_match_wins_in_either_source() -> None:
    """Of a text's own end of three tokens, and one of two in the datastore."""
    retrieval = Retrieval(Datastore.of([[7, 8, 30]], About(32, 8)), shortest=1)
    retrieval.rows = [SuffixAutomaton()]
    (own,) = retrieval.find([[6, 7, 8, 9, 6, 7, 8]], [2])
    assert not own.stored and own.drafts[0] == 9 and own.length == 3
    (stored,) = retrieval.find([[8, 9, 7, 8]], [2])
    assert stored.stored and stored.drafts == [30] and stored.length == 2
