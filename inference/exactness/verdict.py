"""The verdict: whether a run was exact. Five checks decide it, on the same prompts and texts that were measured.

(a) Plain and speculative decoding that share their noise must give the same text token for token, except at ties:
differences that rounding can cause. The choice of plain decoding is computed at every token of the coupled text, so the
comparison continues after a tie (`ties`).

(b) The number of target calls must be the number expected for the texts (`inference.verify.predict_chain`), within 4
sigma. (c) First drafts are accepted with probability sum_v min(p, q); the number that were accepted must not be too
high (`figures`). Checks (b) and (c) need q at every token of a text. If the proposer has a `language_model`, q comes
from one teacher-forced pass (`side_by_side`), else from forced rounds (`forced`).

(d) The logits of the engine's passes must agree with transformers' own forward (`agreement`). (e) The emitted tokens
must be as likely under transformers' own forward as tokens drawn from it (`likelihood`). Checks (d) and (e) read whole
texts, so they detect faults late in a text.

Checks (a) and (d) and forced rounds run the passes that were timed. Teacher-forced passes run in a separate `LM` with
the same weights, dtypes and rounding.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from inference.engine import Engine
from inference.exactness.agreement import GAP, LogitsCheck, check_logits, most, step
from inference.exactness.figures import CallsCheck, DepthCheck, check_calls, check_depth
from inference.exactness.likelihood import LikelihoodCheck, check_likelihood
from inference.exactness.side_by_side import pair_figures
from inference.exactness.teacher_forced import tree_of
from inference.exactness.ties import TextCheck, check_coupled, verifying_width
from inference.output import Emitted
from inference.sampling import Sampling

PROPERTIES = {"calls": ("z", "z_rare", "relative", "tau"), "depth": ("measured",)}  # figures that checks compute
COMPARED = 1024  # tokens of (a): plain decoding of all timed texts would take as long as the timing


@dataclass(frozen=True)
class Verdict:
    """The results of the five checks, (a) text, (b) calls, (c) depth, (d) logits and (e) surprise. missing: by the
    check's name, the reason why a check is None. lossy: the name of the verification rule if it changes the text's
    distribution, else None."""

    text: TextCheck
    calls: CallsCheck | None = None
    depth: DepthCheck | None = None
    logits: LogitsCheck | None = None
    missing: dict[str, str] = field(default_factory=dict)
    surprise: LikelihoodCheck | None = None
    lossy: str | None = None

    @property
    def checks(self) -> dict[str, Any]:
        """Return the result of each check by name, None if it does not apply."""
        return {name: getattr(self, name) for name in ("text", "calls", "depth", "logits", "surprise")}

    @property
    def passed(self) -> bool:
        """Return whether every check that applies has passed and the rule is exact."""
        return not self.lossy and all(check.passed for check in self.checks.values() if check)

    @property
    def figures(self) -> dict[str, Any]:
        """Return all numbers of the checks by name, for a report. A check that does not apply is None."""
        figures = {
            name: one and asdict(one) | {key: getattr(one, key) for key in (*PROPERTIES.get(name, ()), "passed")}
            for name, one in self.checks.items()
        }
        return {"passed": self.passed, **figures, "missing": dict(self.missing)}

    def lines(self) -> list[str]:
        """Return the lines for the report: a summary, then one line per check that says whether it passed."""
        whole = f"no, {self.lossy} changes the text's distribution" if self.lossy else _word(self.passed)
        lines = [f"exactness: {whole}"]
        for letter, (name, one) in zip("abcde", self.checks.items(), strict=True):
            line = f"{one.line()}: {_word(one.passed)}" if one else self.missing.get(name, f"{name}: not checked")
            lines.append(f"  ({letter}) {line}")
        return lines


def _word(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def check(
    engine: Engine, texts: Emitted, sampling: Sampling, max_new_tokens: int, seed: int = 0, rows: int | None = None
) -> Verdict:
    """Return the verdict on a speculative engine. texts: those that it emitted while it was timed (`Timing.texts`).

    engine: the same object that was timed; its run ignored end tokens and had the limit `max_new_tokens`. A stream of
    this engine cannot continue afterwards. sampling: the settings of the run. seed: of the coupled run of (a). rows:
    number of texts per pass in (b) and (c), None for the engine's number of rows. Raises ValueError if the counts do
    not belong to the texts, or if the engine has no proposer.
    """
    if engine.proposer is None:
        raise ValueError(
            "exactness: an engine without a proposer decodes plainly, so there is nothing to check; give it a proposer"
        )
    if [row.tokens for row in texts.counts] != [len(text) for text in texts.tokens]:
        raise ValueError("exactness: the counts and the texts are of different runs; give those of one timing")
    prompts = dict(zip(texts.ids, texts.prompts, strict=True))  # without repeats
    keys = list(prompts)[: max(engine.rows, -(-COMPARED // max_new_tokens))]
    tree = tree_of(engine, max(texts.prompts[: engine.rows], key=len))
    logits = check_logits(engine.target, texts.prompts, texts.tokens, verifying_width(engine, texts.prompts), tree)
    bound = GAP * min(max(logits.own, step(engine.target.model)), most(engine.target.model))
    text = check_coupled(engine, [prompts[key] for key in keys], keys, sampling, max_new_tokens, seed, bound, tree)
    text = replace(text, tokens=sum(len(one) for one in dict(zip(texts.ids, texts.tokens, strict=True)).values()))
    likelihood = check_likelihood(engine, texts, sampling)
    figures = pair_figures(engine, engine.proposer, texts, sampling, max_new_tokens, text.explained, rows)
    predictable = tree is None or engine.rule.branches is not None
    calls, depth = check_calls(figures, texts, engine.rule), check_depth(figures, texts) if predictable else None
    unknown = f"not applicable, since acceptance under verify={engine.rule.name} does not follow from the text alone"
    reasons = {
        "calls": f"target calls: {unknown}",
        "depth": f"acceptance at depth 1: {'not applicable, since no round drafted' if predictable else unknown}",
    }
    missing = {name: why for name, why in reasons.items() if {"calls": calls, "depth": depth}[name] is None}
    lossy = None if engine.rule.exact else engine.rule.name
    return Verdict(text, calls, depth, logits, missing, likelihood, lossy)
