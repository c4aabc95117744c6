"""The order of settings is that of transformers."""

import torch

from inference import Sampling
from inference.sampling.penalties import process
from tests.tiny import tiny


def test_bias_comes_before_the_repetition_penalty_as_in_transformers():
    """A bias that turns the sign of a logit decides whether the penalty multiplies or divides it."""
    model, prompt = tiny(seed=1), [3, 1, 4, 1, 5]
    ids = torch.tensor([prompt])
    theirs = model.generate(
        ids, max_new_tokens=1, do_sample=False, pad_token_id=0, repetition_penalty=3.0,
        sequence_bias=[[[token], 2.0] for token in (1, 3, 4, 5)], output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    regime = Sampling(repetition_penalty=3.0, logit_bias={1: 2.0, 3: 2.0, 4: 2.0, 5: 2.0})
    ours = process(model(ids).logits[:, -1], [prompt], [0], regime)
    torch.testing.assert_close(ours, theirs.scores[0].to(ours.dtype), atol=1e-5, rtol=1e-5)
