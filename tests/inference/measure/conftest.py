"""Models that tests of timing share."""

import pytest
from transformers import GenerationConfig

from tests.tiny import tiny


@pytest.fixture(scope="module")
def pair():
    """Target and draft that may end at once, with defaults that would change the distribution if they leaked."""
    models = tiny(vocab=12, layers=1, hidden=8, eos=0), tiny(vocab=12, layers=1, hidden=8, seed=1, eos=0)
    for model in models:
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=0.01, top_k=1, eos_token_id=list(range(6)), repetition_penalty=3.0
        )
    return models
