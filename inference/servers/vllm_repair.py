"""A patch for a bug of vLLM 0.32 on a CPU. It imports nothing of this project, because vLLM lives in its own
environment.
"""

from typing import Any


def repair() -> None:
    """On a CPU, replace a function of vLLM. The original writes each token's sampling settings into a copy and discards
    the copy, so verification reads uninitialised memory. On a GPU nothing is replaced."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x: Any, ends: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return values.repeat_interleave(counts, output_size=num_tokens)

    if not torch.cuda.is_available():
        rejection_sampler.expand_batch_to_tokens = expand
