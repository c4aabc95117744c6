"""Weights that are not finite are rejected wherever they stand among tensors of any dtype."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from inference.drafts.weight_files import require_finite

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool]


def model(tensors: dict[str, Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def of(dtype: torch.dtype) -> Tensor:
    return torch.ones(3, 2).to(dtype)


def test_finite_weights_of_any_dtype_pass() -> None:
    require_finite(model({f"t{i}": of(dtype) for i, dtype in enumerate(DTYPES)}), "here")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point])
def test_one_bad_number_is_named_behind_tensors_of_any_dtype(dtype: torch.dtype, value: float) -> None:
    if dtype == torch.float8_e4m3fn and math.isinf(value):
        pytest.skip("this dtype has no infinity")
    for first, last in itertools.product(DTYPES, DTYPES):
        bad = of(torch.float32)
        bad[2, 1] = value
        tensors = {"first": of(first), "bad": bad.to(dtype), "last": of(last)}
        with pytest.raises(ValueError, match="here: tensor bad holds NaN or infinity"):
            require_finite(model(tensors), "here")  # type: ignore[arg-type]
