"""Command `cotrain serve_check`. It compares a draft's acceptance in a running server with two figures: a prediction,
and the acceptance in this engine."""

from typing import Any

from cotrain.bench import server_parity
from cotrain.commands.served_pair import measurable_folder, plan_of, prompts, refuse_pair, resolved, room_of
from cotrain.config.groups import Bench
from cotrain.config.settings import ServeCheckConfig, sampling
from cotrain.console import answering, write_answer
from cotrain.errors import UserError
from cotrain.run_folder import claim, refuse_folder
from cotrain.training.job import models, objective, settle
from cotrain.training.preconditions import server
from inference.measure.environment import environment


def run(cfg: ServeCheckConfig) -> None:
    """Query the server, write report.json to `output`, and print the comparison. Raises UserError if the server's texts
    are not texts of the target, or if its acceptance is too far from the prediction or from this engine's
    acceptance."""
    if cfg.url is None or cfg.draft.path is None:
        raise UserError("set url= to the server, and draft.path= to the draft folder that it serves")
    with answering(cfg.as_json) as answer:
        report, figures = _compared(cfg, cfg.url, cfg.draft.path)
        answer(report, f"{cfg.url}: {figures.line()}")
    if figures.unlike:
        raise UserError(
            f"{cfg.url}: the server's texts do not look sampled from this target in this regime "
            f"({figures.unlike}): check that it serves this target and uses the settings of each request"
        )
    if not figures.passed:
        raise UserError(
            f"{cfg.url}: the server's acceptance differs by more than {server_parity.TOLERANCE:.0%} from this engine's "
            f"or the prediction: check that it uses this draft, {report['objective']} drafting and k={report['k']}"
        )


def _compared(cfg: ServeCheckConfig, url: str, draft_path: str) -> tuple[dict[str, Any], server_parity.Parity]:
    """Measure the server at `url`, write report.json, and return the report and the comparison. draft_path: the draft
    folder, whose draft the server and this engine use."""
    settle(cfg.threads, 0)
    open_tokens = not cfg.prompt_tokens
    refuse_folder(cfg.output, cfg.overwrite)
    path, client = resolved(cfg), server("url", url, sampling(cfg.regime), cfg.model)
    draft_folder = measurable_folder(draft_path)
    pair = refuse_pair(draft_path, path, cfg.target.trust_remote_code)
    (target, tokenizer), metadata = models(cfg), draft_folder.metadata
    k = cfg.k or (metadata.k if metadata else None)
    if k is None:
        raise UserError(f"draft.path={draft_path} names no draft length: set k= to the draft length of the server")
    others = {"objective": objective(cfg.objective)} if cfg.objective else {}
    size = Bench(
        prompts=cfg.prompts,
        new_tokens=cfg.new_tokens,
        rows=cfg.at_once,
        depths=[k],
        minutes=0,
        draft_dtype="auto",
        draft_int8=False,
    )
    size.prompt_tokens, size.quick_prompts, size.parity_tokens = cfg.prompt_tokens, 0, 0  # none are used
    room = room_of(pair) - cfg.new_tokens if open_tokens else None
    given = prompts(cfg.data, size, target, tokenizer, room, draft_folder.path, "prompt_tokens")
    # a server verifies chains by the token rule, with the weights of the folder
    plan = plan_of(cfg, draft_folder, (target, tokenizer), size, "token", given=given, **others)
    with claim(cfg.output, cfg.overwrite, command="serve_check") as folder:
        parity = server_parity.server_parity(plan, server_parity.over_http(client, plan), k, cfg.at_once)
        report = {
            "environment": environment(),
            "url": url,
            "kind": draft_folder.kind,
            "k": k,
            "objective": plan.objective,
            "parity": parity.report(),
        }
        write_answer(folder.path / "report.json", report)
        folder.finish()
    return report, parity
