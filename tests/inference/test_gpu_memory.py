"""What lies in a GPU's memory while texts are decoded, on the stand-in device."""

import gc
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.models.cache import FIRST_SLOTS, cache_bytes
from inference.policy import Fixed
from inference.sampling.noise import Uniforms
from tests import standin
from tests.inference.test_gpu_kinds import modules_of
from tests.kinds import KINDS
from tests.often import often
from tests.tiny import tiny


@pytest.mark.parametrize("kind", often([kind for kind in KINDS if "," not in kind], {"eagle"}.__contains__))
def test_keys_and_values_have_the_dtype_of_the_weights(kind: str) -> None:
    """A CPU keeps those of half-precision weights in float32. Noise is float64, of as many starts as a GPU fills at
    once."""
    with standin.device():
        target: Any = tiny()
        proposer = KINDS[kind].proposer(target)
        for module in (target, *modules_of(proposer)):
            module.to("cuda", torch.bfloat16)
        engine = Engine(target, proposer, policy=Fixed(2), rows=2, graphs=False)
        engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=4, sampling=Sampling(0.8), ignore_eos=True)
        there = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type == "cuda"]
        slots = [one for one in there if one.dim() == 4 and one.shape[2] == FIRST_SLOTS]
        assert slots and {one.dtype for one in slots} == {torch.bfloat16}
        noise = [one for one in there if one.dtype == torch.float64 and one.dim() == 4]
        assert noise and {one.shape[2] for one in noise} == {Uniforms.STARTS_ON_GPU}
        stores = [part for store in engine.target.cache.stores for part in (store.keys, store.values)]
        assert sum(part.nbytes for part in stores) == cache_bytes(target.config, 2, 8, torch.bfloat16)
