"""CUDA graphs of a draft that reads states."""

from inference import Engine
from inference.policy import Fixed
from inference.proposers.eagle import Eagle
from tests import kinds, standin
from tests.tiny import tiny


def test_a_feature_draft_reads_all_of_a_text_that_grows() -> None:
    """Recorded rounds of few slots and of more, while the slots stay."""
    monkeys = [[i % 30 + 1 for i in range(n)] for n in (3, 9)]

    def text(device: str) -> list[list[int]]:
        target = tiny().to(device)
        engine = Engine(target, Eagle(kinds.eagle(target).to(device)), policy=Fixed(3), rows=2, compile=device != "cpu")
        return engine.generate(monkeys, max_new_tokens=50, seed=2, ignore_eos=True).tokens

    wanted = text("cpu")
    with standin.device():
        assert text("cuda") == wanted
