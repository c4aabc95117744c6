"""The schedule of draft lengths that `cotrain plan` writes, read by vLLM's own parser."""

import json
import os
import subprocess

import pytest

from cotrain.planning.outcome import schedules

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
READER = """
import json, sys
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as lookup
given = json.load(sys.stdin)
print(json.dumps([lookup(one["num_speculative_tokens_per_batch_size"], rows, one["num_speculative_tokens"])
                  for one, rows in given]))
"""


def test_every_batch_has_its_length_in_vllm() -> None:
    lengths = [{1: 4, 8: 2, 32: 0}, {1: 3}, {2: 0, 16: 5}, {1: 8, 64: 8}]
    given = [(schedules(one)["vllm"], max(one)) for one in lengths]
    answer = subprocess.run(
        [os.environ["COTRAIN_VLLM"], "-c", READER], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    read = json.loads(answer.stdout.splitlines()[-1])
    for one, (settings, most), table in zip(lengths, given, read, strict=True):
        ours = {
            rows: k
            for first, last, k in settings["num_speculative_tokens_per_batch_size"]
            for rows in range(first, last + 1)
        }
        assert table[1:] == [ours[rows] for rows in range(1, most + 1)]
        assert all(ours[rows] == k for rows, k in one.items())
