"""Look-up with a model that drafts all of its tokens in one compiled pass."""

from inference import Engine
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.hybrid import Hybrid
from inference.proposers.retrieval import Retrieval
from tests.inference.proposers.test_hybrid import gate, prompts
from tests.inference.test_drafting import calls  # noqa: F401 - a fixture
from tests.tiny import tiny


def test_drafts_of_look_up_do_not_count_as_stored(calls: list[int]) -> None:  # noqa: F811
    """A draft that makes all of its tokens at once makes them for rows, too, that look-up drafts for."""
    outputs, target = [], tiny(seed=3)
    for compile in (False, True):
        beside = Hybrid(Independent(target, compile=compile), Retrieval(shortest=1), gate({1, 2, 3, 5}))
        engine = Engine(target, beside, rows=7, policy=Fixed(4))
        outputs.append(engine.generate(prompts(), max_new_tokens=80, seed=3, ignore_eos=True))
    assert calls and outputs[0].tokens == outputs[1].tokens and outputs[0].stats.rows == outputs[1].stats.rows
