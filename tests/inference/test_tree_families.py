"""Trees on targets of twelve architectures: in float64, ragged, the greedy text is that of plain decoding, or a refusal
says why. Drafts that read the target's states or run its layers; a draft of its own is in `test_tree_drafts`."""

from typing import Any

import pytest

from inference import Engine, Sampling
from inference.policy import Fixed
from tests.inference import test_families as families
from tests.kinds import KINDS

TWELVE = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Phi3", "GPT2", "GPTNeoX", "OPT", "StableLm",
          "Olmo2"]  # fmt: skip
SETTINGS = {name: settings for name, settings, *_ in [*families.SUPPORTED, *families.BEHAVING] if name in TWELVE}
PROMPTS = [[3, 5, 7, 3, 5], [7, 7], [1], [12, 13, 14, 15, 16, 17, 18]]
SHAPE = (-1, -1, 0, 1, 0)


@pytest.mark.parametrize("name", TWELVE)
def test_greedy_text_of_families(name: str) -> None:
    """Three rows of four texts, over the edge of every window, whose ends differ."""
    target = families.build(name, SETTINGS[name])
    whole: dict[str, Any] = {"max_new_tokens": [8, 10, 5, 9], "sampling": Sampling(0), "ignore_eos": True}
    plain = Engine(target, rows=3).generate(PROMPTS, **whole)
    for kind in ("medusa", "early_exit"):
        proposer = KINDS[kind].proposer(target, shape=SHAPE)
        out = Engine(target, proposer, verify="tree", policy=Fixed(2), rows=3).generate(PROMPTS, **whole)
        assert out.tokens == plain.tokens, kind
        assert sum(out.stats.accepted) > 3, kind
