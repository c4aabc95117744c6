"""A parallel draft served by a real vLLM: accepted as often as here and as predicted, and the target's text."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm import plain  # noqa: F401 - a fixture
from tests.engines.test_vllm import test_a_draft_is_accepted_as_here as accepted

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_a_parallel_draft_is_accepted_as_here(plain: dict[str, Any], found: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    accepted("parallel", "sampled", plain, found, tmp_path)
