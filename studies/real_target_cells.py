"""Cells of the study of a real target: the plan and the figures of a draft in a regime, on a task, for some rows."""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir

from cotrain.bench.measurement import prepare
from cotrain.commands.served_pair import load_network, measurable_folder, refuse_pair
from cotrain.config.overrides import quote
from cotrain.config.settings import checked, register
from cotrain.data.conversations import Template
from cotrain.data.splits import Prompts, apart
from cotrain.paths import folder as shipped
from cotrain.planning.forecast import Forecast
from cotrain.planning.plan import Plan
from cotrain.planning.planner import (
    MeasuredCosts,
    choice_line,
    measured_costs,
    plain_texts,
    plan_draft,
    rounds_of,
)
from cotrain.training.assembly import initial
from inference import Sampling
from inference.drafts.draft_folder import Folder
from inference.measure.adaptive import Reached, Wanted, until_known
from inference.measure.arms import engine_arm
from inference.measure.costs import Costs, of_stats, spans_of
from inference.measure.timing import RESAMPLES, Interval, Timing, bootstrapped
from inference.output import Emitted
from studies.kinds_in_turn import Chosen, Draft, at, checks, exactness
from studies.proposers import trained

REGIMES = {
    "0": Sampling(temperature=0),
    "0.7": Sampling(temperature=0.7),
    "1": Sampling(),
    "card": Sampling(temperature=0.2, top_p=0.9),  # that of the model's card
}
PLANNED_ON = 4  # prompts of a task that plan its drafts; the others are timed
PLAN_TOKENS, PLAN_TEXTS = 40, 16  # tokens of each text that plans, and how many texts
COST_TOKENS = 16  # of each text that the costs of parts are scaled to
TIMED = 10  # batches that are timed, if there is time
PLANNING, TIMING = 0.3, 0.75  # of the seconds of a cell, when each part ends; checks have the rest
SIZES = ["prompt_tokens=1024", "new_tokens=64", "quick_prompts=1", "depths=[1,2,3,4,5,6,7,8]"]
Key = tuple[str, str, int, str]  # of a cell: draft, regime, rows, task


def settings(target: str, changes: Sequence[str]) -> Any:
    """Those of cotrain bench, with the sizes of this study."""
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        sizes = [f"bench.{one}" for one in SIZES]
        sizes += ["bench.draft_dtype=bfloat16"]
        given = quote([f"target.path={target}", "quantisation=none", *sizes, "verify=block", *changes])
        return checked("bench", compose("bench", overrides=given))


def prompts_of(file: Path, target: Any, tokenizer: Any) -> dict[str, Prompts]:
    """By task, as ids. A row has messages, which the target's chat template renders, and its task as domain."""
    template, found = Template(tokenizer, {}, ()), dict[str, list[list[int]]]()
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["domain"], []).append(template.ids(template.text(row["messages"], None, prompt=True)))
    return {task: apart(ids[:PLANNED_ON], ids[PLANNED_ON:], [], "own") for task, ids in found.items()}


def draft_of(name: str, asked: str, cfg: Any, target: Any, tokenizer: Any) -> Draft:
    """A draft folder, or a draft that settings of cotrain train begin. Raises ValueError or UserError for others."""
    path = str(cfg.target.path)
    if asked.startswith("draft="):
        with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
            train: Any = checked(
                "train", compose("train", overrides=quote([f"target.path={path}", *shlex.split(asked)]))
            )
        folder, network = Folder(train.draft.kind, None, Path()), initial(train, target).to(target.device)
    else:
        refuse_pair(asked, path)
        folder = measurable_folder(asked)
        network = load_network(folder, target, tokenizer)
    about = folder.metadata
    plan = Plan(
        target,
        tokenizer,
        network.eval(),
        Sampling(),
        cfg.verify,
        cfg.bench,
        (path, asked),
        about.objective if about else "sampled",
        kind=folder.kind,
    )
    plan = replace(plan, draft=plan.served)  # all cells share one network
    size = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
    return Draft(name, folder, plan, size, trained(folder) if about else None)


@dataclass
class Cells:
    """Drafts and prompts by task, and what the cells share: the costs of each part, by draft, regime and
    rows; and texts of plain decoding that plans are made on, by regime and task. stored: drafts are
    measured as their folders were planned. seconds: of a cell."""

    drafts: Mapping[str, Draft]
    prompts: Mapping[str, Prompts]
    stored: bool
    seconds: float
    parts: dict[tuple[str, str, int], MeasuredCosts] = field(default_factory=dict)
    texts: dict[tuple[str, str], Emitted] = field(default_factory=dict)

    def cell(self, key: Key) -> dict[str, Any]:
        began = time.perf_counter()
        plan, costs, chosen = self.planned(key, self.seconds)
        one = Chosen(self.drafts[key[0]], plan, chosen.length, plan.engine(chosen.length), chosen.speedup)
        timing, reached = timed(one, began + TIMING * self.seconds)
        entry = dict(zip(("draft", "regime", "rows", "task"), key, strict=True))
        return entry | figures(one, costs, chosen, timing, reached) | {"seconds": time.perf_counter() - began}

    def ready(self, key: Key) -> Plan:
        """The plan of a cell, prepared as its kind wants (a gate is counted on prompts that are not timed)."""
        name, regime, rows, task = key
        draft = self.drafts[name]
        about = draft.folder.metadata if self.stored else None
        plan = replace(at(draft.plan, 1.0, rows), sampling=REGIMES[regime], given=self.prompts[task])
        if about:
            plan = replace(plan, planned=about.k, tree=about.tree, verify=about.served.verify)
        prepare(plan)
        return plan

    def planned(self, key: Key, seconds: float) -> tuple[Plan, Costs, Forecast]:
        """The plan of a cell, its costs, and the forecast of its draft length or tree, chosen in a share of the seconds
        from texts and rounds of prompts that are not timed."""
        until, (name, regime, rows, task) = time.perf_counter() + PLANNING * seconds, key
        whole = self.ready(key)
        plan = at(whole, 1.0, rows)  # of its own sizes
        plan.bench.new_tokens = min(PLAN_TOKENS, plan.bench.new_tokens)
        plan = replace(plan, sampling=whole.sampling)
        if (name, regime, rows) not in self.parts:
            few = at(plan, 1.0, rows)
            few.bench.new_tokens = min(COST_TOKENS, plan.bench.new_tokens)
            self.parts[name, regime, rows] = measured_costs(replace(few, sampling=plan.sampling, tree=None))
        if (regime, task) not in self.texts:
            self.texts[regime, task] = plain_texts(plan, PLAN_TEXTS)
        chains, alone = replace(plan, tree=None), self.parts[name, regime, rows].alone
        rounds = rounds_of(chains, (0, *spans_of(chains.proposer())), until)  # of this task
        timed_costs = MeasuredCosts(alone, alone, {}).at(rounds)
        plan, costs, chosen = plan_draft(plan, timed_costs, self.texts[regime, task], until)
        return replace(plan, bench=whole.bench), costs.costs, chosen


def timed(one: Chosen, until: float) -> tuple[Timing, Reached]:
    """Plain decoding and the draft in turn, `rows` prompts at a time."""
    plan, rows = one.plan, one.plan.bench.rows
    engines = {one.draft.name: one.engine, "plain": plan.plain()}
    arms = [engine_arm(name, engine, plan.sampling, plan.bench.new_tokens) for name, engine in engines.items()]
    prompts = plan.final(0, max(TIMED * rows, len(plan.prompts.final)))
    batches = Wanted(TIMED, until=until)
    return until_known(arms, prompts, rows, (one.draft.name, "plain"), batches, plan.bench.seed)


def figures(one: Chosen, costs: Costs, chosen: Forecast, timing: Timing, reached: Reached) -> dict[str, Any]:
    plan, name = one.plan, one.draft.name
    verdict, calls = checks(one, timing)
    drafted, plain = timing.stats(name), timing.stats("plain")
    assert drafted is not None and plain is not None
    speed, rounds = timing.ratio(name, "plain"), {"plain": of_stats(plain, 0), "draft": of_stats(drafted, one.k)}
    predicted = {"predicted": calls.tau, "z": calls.z, "relative": calls.relative} if calls else {}
    return {
        "kind": one.draft.folder.kind,
        "parameters": one.draft.parameters,
        "train_seconds": one.draft.seconds,
        "k": one.k,
        "tree": list(plan.tree.parents) if plan.tree else None,
        "rule": plan.rule,
        "planned": choice_line(chosen),
        "int8": plan.int8,
        # decode: without the prefill; expected: of that, at the tau that these very texts must have
        "speedup": {
            **speed._asdict(),
            "decode": timing.ratio(name, "plain", decode=True)._asdict(),
            "predicted": chosen.speedup,
            "expected": chosen.speedup * calls.tau / chosen.tau if calls else None,
        },
        "tau": {"measured": drafted.tau} | predicted,
        "tokens_per_second": {"plain": timing.speed("plain"), "draft": timing.speed(name)},
        "acceptance": {"measured": drafted.prefix, "predicted": calls.prefix if calls else None},
        "milliseconds": {
            "draft_step": 1e3 * costs.draft,
            "target_pass": 1e3 * costs.target[one.k],
            **{
                f"{side}_round": {part: 1e3 * seconds for part, seconds in vars(cost).items()}
                for side, cost in rounds.items()
            },
        },
        "new_tokens": plan.bench.new_tokens,
        "batches": reached.runs,
        "cores_of_others": reached.others,
        **exactness(verdict, calls),
    }


def speed_interval(timing: Timing, arm: str) -> Interval:
    """An arm's tokens per second, prefill included, with the 95 % interval of a bootstrap over batches."""
    paid = timing._paid(arm, False)  # (batches, 2): tokens, seconds

    def speed(at: np.ndarray) -> np.ndarray:
        tokens, seconds = np.moveaxis(paid[at].sum(-2), -1, 0)
        return np.asarray(tokens / seconds)

    return bootstrapped(speed, len(paid), RESAMPLES, 0)
