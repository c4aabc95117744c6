"""Calibration of the gate between look-up and a draft model, from real calls on held-out prompts."""

from collections.abc import Sequence

from inference.engine import Engine
from inference.lookup.suffixes import common_prefix
from inference.measure.costs import of_stats
from inference.output import Output
from inference.policy import Fixed
from inference.proposers.hybrid import Gate, HeldOutPosition, calibrated_gate
from inference.proposers.retrieval import Retrieval
from inference.sampling import Sampling


def calibrate(
    drafting: Engine,
    plain: Engine,
    retrieval: Retrieval,
    prompts: Sequence[list[int]],
    *,
    sampling: Sampling,
    new_tokens: int,
    seed: int = 0,
) -> Gate:
    """Return the gate between `retrieval` and the draft model of the engine `drafting`. sampling: the settings to be
    served. `drafting` must have the policy `Fixed`. Acceptance and seconds per round come from calls of `drafting`;
    `plain`, an engine without a proposer, gives the seconds of a plain step. prompts: token ids of held-out prompts.
    new_tokens: number of new tokens of each prompt.

    Raises ValueError without prompts, and for another policy or a draft length of 0.
    """
    policy = drafting.policy
    if not isinstance(policy, Fixed) or policy.k < 1 or not prompts:
        raise ValueError(
            f"calibrate needs prompts and an engine with the policy Fixed(k), k >= 1, not {len(prompts)} prompts and "
            f"{policy}"
        )
    k, settings = policy.k, {"max_new_tokens": new_tokens, "sampling": sampling, "ignore_eos": True}
    for engine in (drafting, plain):  # the first call warms up
        engine.generate(prompts[:1], seed=seed, **settings)  # type: ignore[arg-type]
    slow = of_stats(plain.generate(prompts, seed=seed, **settings).whole().stats, 0)  # type: ignore[arg-type]
    out = drafting.generate(prompts, seed=seed, **settings).whole()  # type: ignore[arg-type]
    fast = of_stats(out.stats, k)
    records = [record for b, prompt in enumerate(prompts) for record in gate_records(retrieval, prompt, out, b, k)]
    column = (fast.target + fast.rest - slow.seconds) / slow.seconds / k
    return calibrated_gate(records, k, fast.draft / slow.seconds / k, max(column, 0.0))


def gate_records(retrieval: Retrieval, prompt: list[int], out: Output, row: int, k: int) -> list[HeldOutPosition]:
    """Return one record for each token of a row's text: look-up's match there, and how many of its drafts are right. If
    a round of k drafts started there, the record also has the number of drafts that the round accepted; rounds near the
    text's end draft fewer and have no such number. out: the result of a call. row: index of the prompt in it. The text
    must have the full length. prompt: its token ids. k: the number of drafts per round."""
    text, starts = out.tokens[row], out.stats.rows[row].starts
    ends = zip(starts, [*starts[1:], len(text)], strict=True)
    accepted = {start: end - start - 1 for start, end in ends if start + k < len(text)}
    matches = retrieval.along(prompt, text, k)
    return [
        HeldOutPosition(match, common_prefix(match.drafts, text[t:]), accepted.get(t))
        for t, match in enumerate(matches)
    ]
