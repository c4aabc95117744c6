"""Cases that one token decides: the worst logit of wide passes, and a tie at the edge of the top k."""

import pytest
import torch

from inference import Sampling
from inference.exactness.agreement import check_logits
from inference.exactness.ties import Difference, is_tie
from inference.models.lm import LM
from tests.tiny import tiny


def test_a_wrong_token_of_wide_passes_alone_is_compared_with_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = tiny(), LM.forward

    def wrong(self, ids, start, *rest, **settings):  # type: ignore[no-untyped-def]
        output = right(self, ids, start, *rest, **settings)
        if ids.shape[1] == 1:
            return output
        spoilt = output.logits.clone()
        spoilt[:, -1, 3] += 5.0
        return output._replace(logits=spoilt)

    monkeypatch.setattr(LM, "forward", wrong)
    logits = check_logits(LM(model, 2), [[3, 5], [4]], [[1, 2, 3, 4], [5, 6, 7, 8]], 4)
    assert logits.worst > logits.worst_limit and not logits.passed and logits.worst > 10 * logits.one


def test_a_token_that_leaves_the_top_k_is_a_tie() -> None:
    """Plain decoding's own token is the last of the top k; moved down it is cut, and the other is emitted."""
    logits, g = torch.tensor([3.0, 1.0, 0.99]), torch.tensor([0.0, 5.0, -5.0])
    assert is_tie(Difference(3.0, logits, g, 1, 0), 0.02, Sampling(top_k=2))
    assert not is_tie(Difference(3.0, logits, g, 1, 0), 0.001, Sampling(top_k=2))
