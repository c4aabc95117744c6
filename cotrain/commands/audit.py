"""Command `cotrain audit`. It judges from texts alone whether a server samples from its target."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.bench.server_parity import served_calls
from cotrain.commands.served_pair import as_trained, measurable_folder, plan_of, prompts, refuse_pair, resolved
from cotrain.config.groups import Bench
from cotrain.config.settings import AuditConfig, sampling
from cotrain.console import answering, write_answer
from cotrain.data.sources import rows_in
from cotrain.errors import UserError, first_line, user_errors
from cotrain.page.html_page import document
from cotrain.page.rendering import Section, html_table
from cotrain.rollout.samplers import Ids, Remote
from cotrain.run_folder import claim, refuse_folder
from cotrain.training.job import models, objective, settle
from cotrain.training.preconditions import ids_of, outline, server
from inference.drafts.atomic import write_atomic
from inference.exactness.audit import Audit, ServedText, audit, from_target
from inference.measure.environment import environment
from inference.models.pretrained import longest_text
from inference.request import ends_of, require_text
from inference.sampling import Sampling
from inference.sampling.noise import row_ids
from inference.servers.openai_client import Client, stable_counters

TOP = 20  # likeliest tokens of which vLLM says the log-probabilities, without a setting of its own
OTHERS, FEW = 3, 4  # exit statuses: the texts are not the target's; they are too few to tell
ANSWERS = ("completion", "response", "text")  # columns of texts= with the new text


class Sample(NamedTuple):
    """Texts to audit. prompts, texts: token ids of each prompt, and the new ids after it. names: of each text, for
    error messages."""

    prompts: Ids
    texts: Ids
    names: list[str]


def run(cfg: AuditConfig) -> None:
    """Sample or read texts, audit them, write report.json and report.html to `output`, and print the result. Raises
    UserError with status `OTHERS` if the texts are not the target's, with `FEW` if they are too few to tell."""
    if (cfg.url is None) == (cfg.texts is None):
        raise UserError("set url= to the server, or texts= to a file of prompts and texts")
    if cfg.p == "server" and cfg.url is None:
        raise UserError("p=server: it asks the server for its own log-probabilities: set url=")
    with answering(cfg.as_json) as answer:
        audited = _audited(cfg)
        answer(asdict(audited) | {"passed": audited.passed}, "\n".join(audited.lines()))
    said = f"{cfg.url or f'texts={cfg.texts}'}: {audited.verdict}"
    if audited.passed is None:
        raise UserError(f"{said}: {'raise prompts= or new_tokens=' if cfg.url else 'give a file with more'}", FEW)
    if not audited.passed:
        raise UserError(f"{said} ({'; '.join(audited.wrong)})", OTHERS)


def _audited(cfg: AuditConfig) -> Audit:
    settle(cfg.threads, 0)
    open_tokens = not cfg.prompt_tokens
    refuse_folder(cfg.output, cfg.overwrite)
    folder_of_draft = measurable_folder(cfg.draft.path) if cfg.draft.path else None
    if folder_of_draft:
        refuse_pair(str(cfg.draft.path), resolved(cfg), cfg.target.trust_remote_code)
    elif cfg.target.path is None:
        raise UserError("target.path=null: set target.path= to the model that the server has")
    as_trained(cfg, folder_of_draft.metadata if folder_of_draft else None)
    regime = sampling(cfg.regime)
    if cfg.p == "server" and (regime != Sampling() or folder_of_draft):
        raise UserError(
            "p=server: servers say log-probabilities before the settings: leave out regime= and draft.path="
        )
    client = server("url", cfg.url, regime, cfg.model) if cfg.url else None
    with user_errors():
        load = outline(str(cfg.target.path), cfg.target.trust_remote_code) if cfg.p == "server" else models(cfg)
    target, tokenizer = load
    if target.config.is_encoder_decoder:
        raise UserError(f"target.path={cfg.target.path}: texts of a target with an encoder cannot be audited")
    source = cfg.url or f"texts={cfg.texts}"
    vocabulary, plan, counted = ids_of(tokenizer), None, None
    with claim(cfg.output, cfg.overwrite, command="audit") as folder:
        if folder_of_draft:
            others = {"objective": objective(cfg.objective)} if cfg.objective else {}
            size = Bench(rows=cfg.at_once, new_tokens=cfg.new_tokens)
            plan = plan_of(cfg, folder_of_draft, load, size, "token", **others)
        if client:
            before = stable_counters(client) if plan else None
            sample = _sampled(cfg, client, open_tokens, regime, *load)
            after = stable_counters(client) if before and client.sends_ids else None
            counted = after - before if before and after else None
        else:
            with user_errors():
                sample = _read(Path(str(cfg.texts)), tokenizer)
        _require_ids(source, sample, vocabulary, longest_text(target.config))
        if not any(sample.texts):
            raise UserError(f"{source}: there is no text to audit")
        if client and cfg.p == "server":
            served = _by_server(client, sample)
        else:
            draft = plan.proposer().language_model(1, vocabulary) if plan else None
            served = from_target(target, sample.prompts, sample.texts, regime, vocabulary, draft)
        calls = (
            served_calls(plan, counted, sample.prompts, sample.texts) if plan and counted and counted.rounds else None
        )
        audited = audit(served, [tuple(prompt) for prompt in sample.prompts], sample.texts, calls)
        _write(cfg, audited, folder.path)
        folder.finish()
    return audited


def _write(cfg: AuditConfig, audited: Audit, folder: Path) -> None:
    report = {"environment": environment(), "url": cfg.url, "texts": cfg.texts, "regime": cfg.regime.model_dump()}
    report["audit"] = asdict(audited) | {"passed": audited.passed, "lines": audited.lines()}
    write_answer(folder / "report.json", report, 1)
    write_atomic(folder / "report.html", audit_page(audited, str(cfg.url or cfg.texts)))


def _sampled(
    cfg: AuditConfig,
    client: Client,
    open_tokens: bool,
    regime: Sampling,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Sample:
    """Let the server continue the prompts, each `repeats` times with other seeds. Texts may end before new_tokens. If
    the server sends no token ids, texts that do not encode to themselves are left out. open_tokens: whether prompts may
    be longer than prompt_tokens=, if most are."""
    size = Bench(prompts=cfg.prompts, prompt_tokens=cfg.prompt_tokens, new_tokens=cfg.new_tokens)
    room = longest_text(target.config) - cfg.new_tokens if open_tokens else None
    final = prompts(cfg.data, size, target, tokenizer, room, key="prompt_tokens").final
    asked = [list(final[i % len(final)]) for i in range(cfg.prompts) for _ in range(cfg.repeats)]
    sampler = Remote(client, tokenizer, cfg.at_once, ends_of(target))
    texts = sampler(asked, regime, cfg.new_tokens, cfg.seed, [key % 2**30 for key in row_ids(asked)])
    if not client.sends_ids:
        print(f"{client.root} sends no token ids: {_again(len(texts), sum(not text for text in texts))}")
    answered = [(prompt, text) for prompt, text in zip(asked, texts, strict=True) if text]
    names = [f"text {number}" for number in range(1, 1 + len(answered))]
    return Sample([prompt for prompt, _ in answered], [text for _, text in answered], names)


def _again(texts: int, lost: int) -> str:
    return (
        f"{texts} texts are tokenized here, {lost} are left out; where the sampled tokens were others, an audit may "
        "fail in the end: use a server or a file with token ids"
    )


def _require_ids(source: str, sample: Sample, vocabulary: int, longest: int) -> None:
    """Raise UserError, which names the row, for a prompt or text that the target cannot read. vocabulary: number of
    ids. longest: the most tokens of prompt and text. source: names the file or server."""
    for prompt, text, name in zip(*sample, strict=True):
        wrong = [one for one in [*prompt, *text] if type(one) is not int or not 0 <= one < vocabulary]
        if wrong:
            raise UserError(f"{source}, {name} has {wrong[0]!r}, which is no token id of the target")
        if not prompt:
            raise UserError(f"{source}, {name} has an empty prompt: its first token has no distribution")
        if len(prompt) + len(text) > longest:
            raise UserError(f"{source}, {name} has {len(prompt) + len(text)} tokens, the target reads {longest}")


def _read(file: Path, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Read a parquet file of `cotrain rollout`, or JSON lines with prompt, and completion, response or text: token ids,
    or texts that are tokenized here. Raises ValueError, which names the line, for others."""
    sample, again = Sample([], [], []), 0
    for place, row in rows_in({f"texts={file}": file}):
        if isinstance(row, Exception):
            raise UserError(f"{place}: {first_line(row)}")
        values = row if isinstance(row, Mapping) else {}
        answer = next((values[name] for name in ANSWERS if name in values), None)
        prompt = values.get("prompt")
        if type(prompt) is not type(answer) or not isinstance(prompt, str | list):
            raise UserError(f"{place} needs prompt, and {', '.join(ANSWERS)}: ids, or text")
        if isinstance(prompt, str):
            again += 1
            require_text(place, prompt + str(answer))
            ids = list(tokenizer(prompt)["input_ids"])
            whole = list(tokenizer(prompt + str(answer))["input_ids"])
            if whole[: len(ids)] != ids:  # the border is within a token
                continue
            prompt, answer = ids, whole[len(ids) :]
        sample.prompts.append(prompt)
        sample.texts.append(list(answer or []))
        sample.names.append(place.removeprefix(f"texts={file}, "))
    if again:
        print(f"texts={file}: {_again(again, again - len(sample.texts))}")
    return sample


def _by_server(client: Client, sample: Sample) -> Iterator[tuple[int, ServedText]]:
    """Yield (index of the text, its tokens) with the server's own log-probabilities. The outcomes are its likeliest
    tokens and one for all others."""
    for row, (prompt, text) in enumerate(zip(sample.prompts, sample.texts, strict=True)):
        steps = client.prompt_logprobs(prompt + text, TOP)[len(prompt) - 1 :]
        p, x = torch.zeros(len(text), TOP + 1, dtype=torch.float64), torch.full((len(text),), TOP)
        for i, (step, token) in enumerate(zip(steps, text, strict=True)):
            likeliest = sorted(step, key=step.__getitem__, reverse=True)[:TOP]
            p[i, : len(likeliest)] = torch.tensor([step[one] for one in likeliest], dtype=torch.float64).exp()
            if token in likeliest:
                x[i] = likeliest.index(token)
        p[:, TOP] = (1 - p.sum(-1)).clamp(min=0)
        yield row, ServedText(x, p, named=TOP)


def audit_page(audited: Audit, source: str) -> str:
    """Return the HTML page about an audit. source: the server or file, for the heading."""
    rows = [[name, f"{z:+.2f}", f"{audited.limit:.2f}"] for name, z in audited.scores.items()]
    rows.append(["impossible tokens", str(audited.impossible), str(audited.allowed)])
    sections = [Section("scores", "Standard scores", html_table(["", "found", "limit"], rows))]
    if audited.power:
        sections.append(Section("power", "What would have been seen", html_table(["", ""], [[audited.power, ""]])))
    return document([(source, False, audited.lines()[0])], sections, "cotrain audit")
