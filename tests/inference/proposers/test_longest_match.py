"""Look-up in a text and in a datastore."""

from inference.lookup.corpus import About, Datastore
from inference.lookup.suffixes import SuffixAutomaton
from inference.proposers.retrieval import Retrieval


def test_the_longer_match_wins_in_either_source() -> None:
    """Of a text's own end of three tokens, and one of two in the datastore."""
    retrieval = Retrieval(Datastore.of([[7, 8, 30]], About(32, 8)), shortest=1)
    retrieval.rows = [SuffixAutomaton()]
    (own,) = retrieval.find([[6, 7, 8, 9, 6, 7, 8]], [2])
    assert not own.stored and own.drafts[0] == 9 and own.length == 3
    (stored,) = retrieval.find([[8, 9, 7, 8]], [2])
    assert stored.stored and stored.drafts == [30] and stored.length == 2
