"""Arms of transformers with an assistant, or a number of rows, which engines are compared with."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from inference.measure.arms import (
    ENDS,
    UNTRANSLATED,
    Arm,
    ArmResult,
    generate,
    generating_by,
    generation_config,
    refuse,
    seeded,
)
from inference.output import pooled
from inference.sampling import Sampling


def assisted_arm(
    name: str,
    model: PreTrainedModel,
    sampling: Sampling,
    max_new_tokens: int,
    assistant: PreTrainedModel | None = None,
    k: int | None = None,
    rows: int | None = None,
    **settings: Any,
) -> Arm:
    """Return an arm like `arms.transformers_arm`, with more of what transformers can do.

    assistant: a draft for assisted generation, one prompt at a time. k: constant draft length, None for that of the
    assistant's generation_config. rows: number of prompts decoded together, None for all; there is no queue. settings:
    more arguments of generate, such as prompt_lookup_num_tokens.

    Raises ValueError for sampling settings that this arm cannot express.
    """
    refuse(sampling, *ENDS, *UNTRANSLATED)
    config = generation_config(sampling, max_new_tokens)
    single = assistant is not None or "prompt_lookup_num_tokens" in settings
    if assistant is not None:
        settings["assistant_model"] = assistant

    def run(prompts: Sequence[list[int]], ids: Sequence[int], seed: int) -> ArmResult:
        with ExitStack() as stack:
            stack.enter_context(seeded(model, seed))
            stack.enter_context(generating_by(model, config))
            if assistant is not None and assistant.can_generate():  # blocks of DFlash do not
                stack.enter_context(generating_by(assistant, _drafting(assistant, k)))
            size = 1 if single else rows or len(prompts)
            groups = [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]
            return _joined([generate(model, group, **settings) for group in groups])

    return Arm(name, run)


def _drafting(assistant: PreTrainedModel, k: int | None) -> GenerationConfig:
    """Return the assistant's settings, without end tokens, since it would stop drafting at them."""
    if k is None:
        config = copy.deepcopy(assistant.generation_config)
        config.eos_token_id = None
        return config
    return GenerationConfig(
        num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )


def _joined(parts: list[ArmResult]) -> ArmResult:
    """Return the results of several calls as one."""
    return ArmResult(
        [text for part in parts for text in part.tokens],
        sum(part.seconds for part in parts),
        sum(part.decode_seconds for part in parts),
        pooled([part.stats for part in parts if part.stats]),
        sum(part.paid(decode=True)[0] for part in parts),
    )
