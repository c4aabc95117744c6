"""Cases of the engine and of plans: inputs that failed once."""

from inference import Engine
from inference.adaptive_policy import INPUTS, Adaptive, Estimates
from tests.cases import case
from tests.tiny import tiny


@case("policy without proposer")
def test_an_adaptive_policy_without_a_proposer_decodes_plainly() -> None:
    policy = Adaptive({1: (1.0, 1.1)}, Estimates(0.9, (0.0,) * INPUTS, (0.0,) * INPUTS))
    target, given = tiny(), {"prompts": [[1, 2], [3]], "max_new_tokens": 9, "seed": 1}
    output = Engine(target, policy=policy).generate(**given)
    assert output.tokens == Engine(target).generate(**given).tokens and not output.stats.drafted
