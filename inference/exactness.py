"""Whether a run was exact: three checks on the very prompts and texts that were measured.

(a) Coupled decoding, in which plain and speculative decoding share their noise, gives the plain text token
for token, up to ties: first differences whose gap is below what rounding can move. (b) The target calls of
the run are those that its texts must cost (`inference.predict`), within 4 sigma. (c) Drafts at depth 1 pass
no more often than sum_v min(p, q) allows, within 3 sigma. (b) and (c) need q at every token of a text, so a
draft that is a model of its own.
"""

import math

from transformers import PreTrainedModel

from inference.engine import Engine
from inference.forced import teacher_forced
from inference.measure import Texts
from inference.parity import Figures, expected, pair_figures, started
from inference.proposers import Independent
from inference.sampling import Sampling
from inference.ties import compare_passes, first_difference, is_tie
from inference.verdict import CallsCheck, DepthCheck, TextCheck, Verdict

__all__ = [
    "CallsCheck",
    "DepthCheck",
    "TextCheck",
    "Verdict",
    "check",
    "check_calls",
    "check_coupled",
    "check_depth",
    "check_text",
    "teacher_forced",
]


def check(engine: Engine, texts: Texts, sampling: Sampling, max_new_tokens: int, seed: int = 0) -> Verdict:
    """The verdict on a speculative engine, from what it emitted in a timed run (`Timing.texts`).

    The run ignored end tokens and had the limit max_new_tokens; seed: of the two coupled runs made here.
    Raises ValueError when the counts are not those of the texts, or when the engine has no proposer.
    """
    if engine.proposer is None:
        raise ValueError("exactness: an engine without a proposer is plain decoding, there is nothing to check")
    if [row.tokens for row in texts.counts] != [len(text) for text in texts.tokens]:
        raise ValueError("exactness: the counts do not belong to these texts")
    prompts = dict(zip(texts.ids, texts.prompts, strict=True))  # without repeats
    text = check_coupled(engine, list(prompts.values()), list(prompts), sampling, max_new_tokens, seed)
    if not isinstance(engine.proposer, Independent):
        why = f"not applicable, {type(engine.proposer).__name__} has no law for every token of a text"
        return Verdict(text, missing={"calls": f"target calls: {why}", "depth": f"acceptance at depth 1: {why}"})
    figures = pair_figures(engine, engine.proposer, texts, sampling, max_new_tokens, text.noise)
    calls, depth = check_calls(figures, texts, engine.rule), check_depth(figures, texts)
    missing = {
        "calls": "target calls: not applicable, the coupled rule has no coins of its own",
        "depth": "acceptance at depth 1: not applicable, no round drafted",
    }
    absent = {name: why for name, why in missing.items() if {"calls": calls, "depth": depth}[name] is None}
    return Verdict(text, calls, depth, absent)


def check_coupled(
    engine: Engine,
    prompts: list[list[int]],
    ids: list[int],
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
) -> TextCheck:
    """(a): decode the prompts plainly and speculatively with the same noise, then `check_text`."""
    target, wanted = engine.target, engine.policy.lengths(prompts)
    plain, coupled = (
        Engine(
            target.model,
            proposer,
            verify="coupled",
            policy=engine.policy,
            tokenizer=engine.tokenizer,
            rows=engine.rows,
            context=target.context,
        )
        .generate(prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, ids=ids, ignore_eos=True)
        .tokens
        for proposer in (None, engine.proposer)
    )
    return check_text(
        target.model,
        prompts,
        plain,
        coupled,
        (ids, seed),
        sampling,
        target.vocabulary,
        max(wanted),
        engine.rows,
    )


def check_text(
    model: PreTrainedModel,
    prompts: list[list[int]],
    plain: list[list[int]],
    coupled: list[list[int]],
    noise_keys: tuple[list[int], int],
    sampling: Sampling,
    vocabulary: int,
    k: int,
    rows: int = 8,
) -> TextCheck:
    """(a) for texts of coupled decoding and plain ones made from the same noise, noise_keys = (ids, seed).

    The noise is measured on the texts that differ and on the first `rows` ones.
    """
    differ = [i for i in range(len(prompts)) if first_difference(plain[i], coupled[i]) is not None]
    chosen = sorted({*range(min(rows, len(prompts))), *differ})
    noise, found = compare_passes(
        model,
        [prompts[i] for i in chosen],
        [plain[i] for i in chosen],
        sampling,
        vocabulary=vocabulary,
        width=k + 1,
        rows=rows,
        noise_keys=([noise_keys[0][i] for i in chosen], noise_keys[1]),
        others=[coupled[i] for i in chosen],
    )
    ties = sum(is_tie(difference, noise, sampling) for difference in found)
    gap = max((difference.gap for difference in found), default=0.0)
    return TextCheck(len(prompts), len(prompts) - len(differ), ties, len(differ) - ties, noise, gap)


def check_calls(figures: Figures, texts: Texts, rule: str) -> CallsCheck | None:
    """(b) for a run under `rule`; None for the coupled one."""
    found = expected(figures, rule)
    if found is None:
        return None
    near = int(figures.near_q.sum())
    return CallsCheck(
        tokens=sum(map(len, texts.tokens)),
        measured=sum(row.target_calls for row in texts.counts),
        predicted=found.calls,
        sigma=math.sqrt(found.variance + near),
        near=near,
        prefix=found.prefix,
        conditional=found.conditional,
    )


def check_depth(figures: Figures, texts: Texts) -> DepthCheck | None:
    """(c): alpha = sum_v min(p, q) where rounds began, sigma^2 = sum alpha (1 - alpha) / rounds^2, plus one
    coin for each of those positions that rounding decides. None when no round drafted.

    Raises ValueError when the counts are not those of the texts.
    """
    at = started(figures, texts)
    rounds = int(at.sum())
    if rounds != sum(sum(row.drafted[:1]) for row in texts.counts):
        raise ValueError("exactness: the counts do not belong to these texts under this policy and limit")
    if rounds == 0:
        return None
    alpha, near = figures.alpha[at], (figures.near_p | figures.near_q)[at]
    sigma = math.sqrt(float((alpha * (1 - alpha)).sum()) + int(near.sum())) / rounds
    accepted = sum(sum(row.accepted[:1]) for row in texts.counts)
    return DepthCheck(rounds, accepted, float(alpha.mean()), sigma)
