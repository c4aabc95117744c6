"""A report as aligned plain text. `table` writes the whole report, `comparison` one line per report."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def table(report: Mapping[str, Any]) -> str:
    """Return the report as aligned plain text, with the formulas of its terms at the end."""
    parts = [
        headline(report),
        _head(report),
        _speeds(report),
        _speedup(report),
        _depths(report),
        _phases(report),
        _exactness(report),
    ]
    return "\n\n".join([part for part in parts if part] + [FORMULAS]) + "\n"


def comparison(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table that compares reports about one target, one line per report. reports: by name. A line has the
    draft length or tree; tokens per target call, measured and predicted; the speed-up over plain decoding in the same
    run, with its 95 % interval; and whether decoding is exact."""
    rows = [["draft", "drafting", "tau", "predicted", "speed-up", "", "exact"]]
    for name, report in reports.items():
        tau = (report["acceptance"] or {"tau": {"measured": None, "predicted": None}})["tau"]
        speedup, exact = report["speedup"], report["exactness"]
        value, interval = _whole(speedup["whole"]) if speedup else ("-", "")
        verdict = "not checked" if exact is None else "yes" if exact["passed"] else "NO"
        rows.append(
            [name, _drafting(report), _number(tau["measured"]), _number(tau["predicted"]), value, interval, verdict]
        )
    return aligned(rows, left=2)


def _whole(interval: Mapping[str, float | None]) -> tuple[str, str]:
    low, high = interval["low"], interval["high"]
    return f"{interval['value']:.2f}x", "" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"


def headline(report: Mapping[str, Any]) -> str:
    """Return the result of a report in one line: the speed-up, the temperature, the draft length or tree, and whether
    the engine is exact."""
    speedup, exact = report["speedup"], report["exactness"]
    verdict = (
        "exactness was not checked" if exact is None else "exact" if exact["passed"] else "NOT EXACT: do not serve it"
    )
    if exact and exact["passed"] and (moved := report.get("extra", {}).get("moved")) and moved["kl"]:
        verdict = f"exact for the moved target, {moved['kl']:.4f} nats per token from {moved['original']}"
    if speedup is None:
        return f"verdict: no speed-up was measured; {verdict}"
    whole, over = speedup["whole"], speedup["over"]
    low, high = whole["low"], whole["high"]
    speed = " ".join(filter(None, (*_whole(whole), f"the speed of {over} decoding")))
    speed += f" at temperature {report['settings']['sampling']['temperature']:g}, {_drafting(report)}"
    if low is None or high is None:
        shown = "too few batches for an interval"
    else:
        shown = "faster" if low > 1 else "SLOWER" if high < 1 else "no speed-up is shown"
    return f"verdict: {shown}, {speed}; {verdict}"


FORMULAS = """\
tau (acceptance length in vLLM) = sum of new tokens / sum of target calls over rows, with the token emitted after the
  accepted ones
prefix acceptance at i = rounds that accepted drafts 1..i / rounds that drafted i
conditional acceptance at i = rounds that accepted draft i / rounds that drafted i and accepted 1..i-1
speed-up = tokens per wall second / those of the other arm, end tokens ignored so that all arms emit as many"""


def _drafting(report: Mapping[str, Any]) -> str:
    """Return the drafting of a report in words: its policy, or the number of nodes of its tree."""
    tree = (report.get("extra") or {}).get("planned_shape")
    return f"trees of {len(tree)} nodes" if tree else str(report["settings"]["policy"])


def _head(report: Mapping[str, Any]) -> str:
    s, e = report["settings"], report["environment"]
    sampling = ", ".join(f"{name} {s['sampling'][name]}" for name in ("temperature", "top_k", "top_p"))
    commit = f"commit {e['commit'][:12]}{' + changes' if e['dirty'] else ''}" if e["commit"] else "no commit"
    weights = (report.get("extra") or {}).get("target_quantisation") or "none"
    named = weights == "none" or s["target_dtype"].startswith(weights)  # 8-bit kernels name int8 alone
    dtype = s["target_dtype"] if named else f"{weights}, {s['target_dtype']}"
    models = f"target {s['target']} ({dtype}), draft {s['draft'] or s['proposer'] or 'none'}"
    return "\n".join(
        [
            models + (f" ({s['draft_dtype']})" if s["draft_dtype"] else ""),
            f"{s['verify']} verification, {_drafting(report)}, {sampling}",
            f"{s['prompts']} prompts, {s['rows']} rows, {s['max_new_tokens']} new tokens each, {s['repeats']} times",
            f"{e['accelerator'] or e['cpu']}, {e['cores']} cores, {e['threads']} threads",
            f"torch {e['torch']}, transformers {e['transformers']}, {e['date']}, {commit}",
        ]
    )


def _speeds(report: Mapping[str, Any]) -> str:
    rows = [["arm", "tokens/s", "decode only", "tau", "tokens", "seconds"]]
    for name, arm in report["arms"].items():
        speeds = [f"{arm['speed']:.1f}", f"{arm['decode_speed']:.1f}", _number(arm["tau"])]
        rows.append([name, *speeds, str(arm["tokens"]), f"{arm['seconds']:.2f}"])
    return aligned(rows)


def _speedup(report: Mapping[str, Any]) -> str:
    s = report["speedup"]
    if s is None:
        return ""
    line = (
        f"speed-up of {s['of']} over {s['over']}: {_range(s['whole'])} with prefill, {_range(s['decode'])} "
        f"decode only (95 % bootstrap intervals over batches)"
    )
    return "\n".join([line, *_words(s), *report["extra"].get("said", [])])


def _words(speedup: Mapping[str, Any]) -> list[str]:
    """Return a list with one sentence if the speed-up's interval is below 1 or contains 1, else []."""
    whole, (of, over) = speedup["whole"], (speedup["of"], speedup["over"])
    low, high = whole["low"], whole["high"]
    if low is None or high is None:
        return []
    if high < 1:
        return [f"a slow-down: {over} decoding is faster than {of}, {1 / whole['value']:.2f} times"]
    return [f"no speed-up is shown: {of} may be as fast as {over}, the interval contains 1"] if low <= 1 else []


def _range(interval: Mapping[str, float | None]) -> str:
    if interval["low"] is None:
        return f"{interval['value']:.3f} (no interval: too few batches)"
    return f"{interval['value']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _depths(report: Mapping[str, Any]) -> str:
    a = report["acceptance"]
    if a is None or not a["drafted"]:
        return ""
    tau = f"tau: measured {_number(a['tau']['measured'])}, predicted {_number(a['tau']['predicted'])}"
    rows = [["acceptance at depth", "", *(str(i + 1) for i in range(len(a["drafted"])))]]
    for name in ("prefix", "conditional"):
        for side in ("measured", "predicted"):
            rows.append([name, side, *map(_number, a[name][side] or [None] * len(a["drafted"]))])
    return tau + "\n" + aligned(rows, left=2)


def _phases(report: Mapping[str, Any]) -> str:
    """Return a table of the phases in milliseconds per round, for all rows of a round together. Prefill is not part of
    the rounds, so its total is shown."""
    counted = {name: arm for name, arm in report["arms"].items() if arm["phases"]}
    if not counted:
        return ""
    names = [phase for phase in next(iter(counted.values()))["phases"] if phase != "prefill"]
    rows = [["milliseconds per round", *names, "rounds", "total prefill"]]
    for name, arm in counted.items():
        spent = [f"{1000 * arm['phases'][phase] / arm['rounds']:.3f}" for phase in names]
        rows.append([name, *spent, str(arm["rounds"]), f"{1000 * arm['phases']['prefill']:.1f}"])
    return aligned(rows)


def _exactness(report: Mapping[str, Any]) -> str:
    verdict = report["exactness"]
    return "\n".join(verdict["lines"]) if verdict else "exactness: not checked"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return the rows as text with columns two spaces apart. The first `left` columns are flush left, the others flush
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides: list[Callable[[str, int], str]] = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    lines = ("  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
