"""Whether a run was exact: five checks on the very prompts and texts that were measured.

(a) Coupled decoding, in which plain and speculative decoding share their noise, gives the plain text token
for token, up to ties: differences whose gap is below what rounding can move. At every token of a coupled text
plain decoding is asked what it chooses there, so the comparison goes on behind a tie. (b) The target calls of
the run are those that its texts must cost (`inference.verify.prediction`), within 4 sigma. (c) Drafts at depth 1 pass
no more often than sum_v min(p, q) allows, within 3 sigma. (b) and (c) read q at every token of a text: forced rounds
find it for any kind of proposer (`forced`), one teacher-forced pass for a language model (`side_by_side`). (d) Logits
of the engine's passes are those of transformers' own forward (`inference.exactness.agreement`). (e) The target's
surprise at the emitted tokens, by transformers' own forward too, is that at its own (`inference.exactness.surprise`).
(d) and (e) read whole texts, so that what goes wrong late in a text is seen. (a), (d) and forced rounds run the
very passes that were timed; teacher-forced passes are of the same weights, dtypes and rounding, in an engine of their
own.
"""

import copy
import math
from dataclasses import replace

from transformers import PreTrainedModel

from inference.engine import Engine
from inference.exactness.agreement import GAP, check_logits, most, step
from inference.exactness.side_by_side import Figures, expected, pair_figures, rare_rounds, rounded, started
from inference.exactness.surprise import check_surprise
from inference.exactness.teacher_forced import teacher_forced
from inference.exactness.ties import Difference, compare_passes, compare_text, excused, first_difference
from inference.exactness.tree_passes import Parents, tree_of
from inference.exactness.verdict import CallsCheck, DepthCheck, LogitsCheck, SurpriseCheck, TextCheck, Verdict
from inference.measure.timing import Emitted
from inference.sampling import Sampling
from inference.verify.rules import RULES, Rule

COMPARED = 1024  # tokens of (a): plain decoding of all that was timed would take as long again

__all__ = [
    "CallsCheck",
    "DepthCheck",
    "LogitsCheck",
    "SurpriseCheck",
    "TextCheck",
    "Verdict",
    "check",
    "check_calls",
    "check_coupled",
    "check_depth",
    "check_logits",
    "check_surprise",
    "check_text",
    "teacher_forced",
]


def check(
    engine: Engine, texts: Emitted, sampling: Sampling, max_new_tokens: int, seed: int = 0, rows: int | None = None
) -> Verdict:
    """The verdict on a speculative engine, the very one that was timed, from what it emitted then (`Timing.texts`).

    The run ignored end tokens and had the limit max_new_tokens; seed: of the coupled run made here; rows: texts
    together in the passes of (b) and (c), those of the engine when None. A stream of the engine ends here.
    Raises ValueError when the counts are not those of the texts, or when the engine has no proposer.
    """
    if engine.proposer is None:
        raise ValueError("exactness: an engine without a proposer is plain decoding, there is nothing to check")
    if [row.tokens for row in texts.counts] != [len(text) for text in texts.tokens]:
        raise ValueError("exactness: the counts do not belong to these texts")
    prompts = dict(zip(texts.ids, texts.prompts, strict=True))  # without repeats
    keys = list(prompts)[: max(engine.rows, -(-COMPARED // max_new_tokens))]
    tree = tree_of(engine, max(texts.prompts[: engine.rows], key=len))
    logits = check_logits(engine.target, texts.prompts, texts.tokens, _width(engine, texts.prompts), tree)
    bound = GAP * min(max(logits.own, step(engine.target.model)), most(engine.target.model))
    text = check_coupled(engine, [prompts[key] for key in keys], keys, sampling, max_new_tokens, seed, bound, tree)
    text = replace(text, tokens=sum(len(one) for one in dict(zip(texts.ids, texts.tokens, strict=True)).values()))
    surprise = check_surprise(engine, texts, sampling)
    figures = pair_figures(engine, engine.proposer, texts, sampling, max_new_tokens, text.explained, rows)
    known = tree is None or engine.rule.branches is not None
    calls, depth = check_calls(figures, texts, engine.rule), check_depth(figures, texts) if known else None
    unknown = f"not applicable, acceptance under {engine.rule.name} is not known from the text alone"
    missing = {
        "calls": f"target calls: {unknown}",
        "depth": f"acceptance at depth 1: {'not applicable, no round drafted' if known else unknown}",
    }
    absent = {name: why for name, why in missing.items() if {"calls": calls, "depth": depth}[name] is None}
    lossy = None if engine.rule.exact else engine.rule.name
    return Verdict(text, calls, depth, logits, absent, surprise, lossy)


def check_coupled(
    engine: Engine,
    prompts: list[list[int]],
    ids: list[int],
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    bound: float,
    tree: Parents | None = None,
) -> TextCheck:
    """(a): decode the prompts with shared noise, by the engine itself, then ask its passes of one id for plain
    decoding's choice at every token (`ties.compare_text`). tree: the shape that it drafts, if it does not draft chains.
    bound: the largest gap that rounding may explain, in root mean squares of the logits: GAP times the rounding that
    they have in any case, which is the least noise."""
    coupled = copy.copy(engine)  # the same target and proposer, slots and compiled passes included
    coupled.rule = RULES["coupled"]
    out = coupled.generate(
        prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, ids=ids, ignore_eos=True
    )
    engine.slots.current = None
    made = out.whole().tokens  # a text that ends in an error is a part of the plain one, not equal to it
    found = compare_text(
        engine.target, prompts, made, sampling, width=_width(engine, prompts), noise_keys=(ids, seed), bound=bound,
        tree=tree,
    )  # fmt: skip
    equal = len(prompts) - len({difference.text for difference in found.differences})
    noise = max(found.noise, found.limit / GAP)  # short texts may show none: logits are rounded all the same
    ties, gap = _judged(found.differences, noise, sampling)
    unexplained = len(found.differences) - ties
    emitted = sum(map(len, made))
    return TextCheck(len(prompts), equal, ties, unexplained, noise, gap, found.limit, found.tokens, emitted)


def _width(engine: Engine, prompts: list[list[int]]) -> int:
    """Ids of a row in the engine's verifying passes."""
    return max(engine.policy.lengths(prompts)) + 1


def _judged(differences: list[Difference], noise: float, sampling: Sampling) -> tuple[int, float]:
    """How many are ties, and the largest gap of all."""
    ties = sum(excused(difference, noise, sampling) for difference in differences)
    return ties, max((difference.gap for difference in differences), default=0.0)


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
    """(a) for texts that were made elsewhere, of coupled decoding and plain ones made from the same noise, noise_keys =
    (ids, seed): their first differences, since what plain decoding chooses behind them is not known.

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
        bound=GAP * most(model),
    )
    ties, gap = _judged(found, noise, sampling)
    limit = max((difference.limit for difference in found), default=math.inf)
    return TextCheck(len(prompts), len(prompts) - len(differ), ties, len(differ) - ties, noise, gap, limit)


def check_calls(figures: Figures, texts: Emitted, rule: Rule | str) -> CallsCheck | None:
    """(b) for a run under `rule`; None where its calls hang on the noise that made the text."""
    found, kept = expected(figures, rule), rounded(figures, rule)
    if found is None or kept is None:
        return None
    near = figures.near
    rare, rare_expected = rare_rounds(figures, texts, kept)
    return CallsCheck(
        tokens=sum(map(len, texts.tokens)),
        measured=sum(row.target_calls for row in texts.counts),
        predicted=found.calls,
        sigma=math.sqrt(found.variance + near),
        near=near,
        prefix=found.prefix,
        conditional=found.conditional,
        rare=rare,
        rare_expected=rare_expected,
    )


def check_depth(figures: Figures, texts: Emitted) -> DepthCheck | None:
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
    alpha, near = figures.first(figures.alpha)[at], (figures.near_p | (figures.first(figures.near_q) > 0))[at]
    sigma = math.sqrt(float((alpha * (1 - alpha)).sum()) + int(near.sum())) / rounds
    accepted = sum(sum(row.accepted[:1]) for row in texts.counts)
    return DepthCheck(rounds, accepted, float(alpha.mean()), sigma)
