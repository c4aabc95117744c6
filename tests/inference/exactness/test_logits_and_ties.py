"""Cases that one token decides: the worst logit of wide passes, and a tie at the edge of the top k."""

import pytest

from inference.exactness.agreement import check_logits
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
