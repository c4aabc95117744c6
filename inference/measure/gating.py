"""A gate between look-up and a model, counted and timed in real calls on prompts that are held out."""

from collections.abc import Sequence

from inference.engine import Engine
from inference.measure.real_costs import of_stats
from inference.output import Output
from inference.policy import Fixed
from inference.proposers.gate import Gate, Place, calibrated
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
    """The gate of a model that `drafting` drafts with at a fixed length, beside `retrieval`, under settings to be
    served. Its texts and rounds are counted, and what rounds take is what they took there, beside those of `plain`.

    Raises ValueError for an engine without a fixed draft length of at least 1, or without prompts.
    """
    policy = drafting.policy
    if not isinstance(policy, Fixed) or policy.k < 1 or not prompts:
        raise ValueError(f"calibrate: {len(prompts)} prompts and {policy}; wanted are some, and Fixed(k) of k >= 1")
    k, settings = policy.k, {"max_new_tokens": new_tokens, "sampling": sampling, "ignore_eos": True}
    for engine in (drafting, plain):  # the first call warms up
        engine.generate(prompts[:1], seed=seed, **settings)  # type: ignore[arg-type]
    slow = of_stats(plain.generate(prompts, seed=seed, **settings).whole().stats, 0)  # type: ignore[arg-type]
    out = drafting.generate(prompts, seed=seed, **settings).whole()  # type: ignore[arg-type]
    fast = of_stats(out.stats, k)
    places = [place for b, prompt in enumerate(prompts) for place in places_of(retrieval, prompt, out, b, k)]
    column = (fast.target + fast.rest - slow.seconds) / slow.seconds / k
    return calibrated(places, k, fast.draft / slow.seconds / k, max(column, 0.0))


def places_of(retrieval: Retrieval, prompt: list[int], out: Output, row: int, k: int) -> list[Place]:
    """What look-up finds at each token of a row's text, and what the model's rounds came to where they began, of those
    that drafted k: near the text's end fewer are drafted. The text is as long as was asked for."""
    text, starts = out.tokens[row], out.stats.rows[row].starts
    ends = zip(starts, [*starts[1:], len(text)], strict=True)
    accepted = {start: end - start - 1 for start, end in ends if start + k < len(text)}
    found = retrieval.along(prompt, text, k)
    return [Place(match, _right(match.drafts, text[t:]), accepted.get(t)) for t, match in enumerate(found)]


def _right(drafts: list[int], text: list[int]) -> int:
    """How many drafts in a row are the text's tokens."""
    return next((n for n, (x, y) in enumerate(zip(drafts, text, strict=False)) if x != y), min(len(drafts), len(text)))
