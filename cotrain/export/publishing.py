"""The README of an exported draft, and its upload to the Hugging Face hub.

The token is HF_TOKEN, or the one that `hf auth login` stored. HF_ENDPOINT is the hub's address.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import HFValidationError, validate_repo_id

from cotrain.errors import UserError
from cotrain.export.engines import MARK, captured, caveats, engine_named, launch, place
from inference.drafts.bundled_target import resolve
from inference.drafts.draft_folder import REPORT, Metadata
from inference.drafts.gguf_target import gguf_file
from inference.drafts.moved_target import said
from inference.drafts.weight_files import json_if_any
from inference.measure.costs import Costs
from inference.report.table import table

QUANTITIES = {"sampled": "tau", "greedy": "tau_greedy_draft"}  # held-out figures under the token rule
LONGEST = 8  # the longest draft length for which tau is computed on held-out texts
FRONT = "---\nlibrary_name: transformers\ntags: [speculative-decoding, draft-model]\n---"


def card(
    metadata: Metadata,
    engine: str,
    draft_path: str,
    report: Mapping[str, Any] | None,
    remarks: list[str],
    layout: str = "hf",
) -> str:
    """Return the README in Markdown: launch command, caveats, remarks on the export, regime, table of measurements,
    licence note.

    metadata: the export's. engine: the serving engine. draft_path: the folder, or its name on the hub. report: the
    content of a valid report.json, or None. remarks: lines to add to the caveats. layout: the layout of the folder.
    """
    target, objective, k = str(metadata.target["name"]), metadata.objective, metadata.k
    learnt = metadata.learnt_from
    drafting, layers = (objective, layout, metadata.kind, metadata.tree), captured(metadata.origin)
    command = launch(engine, draft_path, served_from(target, engine), k, *drafting, layers)
    parts = [
        FRONT,
        f"# Draft for {learnt}",
        f"Drafts {k} token{'s' * (k > 1)} a round for speculative decoding; the target verifies them.",
        *_read_from(metadata),
        f"## Serve ({engine_named(engine).versions})",
        f"```sh\n{command}\n```",
        "\n".join(f"- {line}" for line in caveats(engine, objective, layout) + remarks),
        "## Trained for",
        "\n".join(f"- {key}: {value}" for key, value in {"objective": objective, **metadata.regime}.items()),
    ]
    if report is not None:
        parts += ["## Measured, before export", f"```text\n{table(report)}```"]
        parts += _predicted(report, metadata)
        lengths = tau_table(report, metadata)
        parts += ["## tau by draft length, predicted on held-out texts", lengths] if lengths else []
    parts += [
        "## Licence",
        f"The weights learnt from the outputs of {learnt}: its licence, and that of the training text, may "
        "bind them. Read both before passing this folder on.",
        MARK,
    ]
    return "\n\n".join(parts) + "\n"


def served_from(target: str, engine: str) -> str:
    """Return where a serving engine reads the target: llama.cpp its GGUF file if it came from one, other engines the
    folder or hub id. target: its name. engine: the serving engine's."""
    file = gguf_file(target) if engine == "llamacpp" else None
    return place(resolve(target)) if file is None else str(file.absolute())


def fetched(repo: str) -> tuple[str, list[str]]:
    """Return where llama.cpp's file lies after it was fetched from the hub, and a remark that says how to fetch it.
    repo: user/name."""
    folder = repo.split("/")[-1]
    return folder, [f"Fetch the file first: hf download {repo} --local-dir {folder}"]


def said_of(metadata: Metadata) -> list[str]:
    """Return what every README says of the draft, if it applies: that its measurement showed no speed-up, and that it
    learnt from other weights of the target."""
    advice, warning = metadata.origin.get("advice"), metadata.origin.get("warning")
    return [*filter(None, [advice and f"On the machine that measured it, {advice}.", warning])]


def _read_from(metadata: Metadata) -> list[str]:
    """Return lines of the README about the target, if they apply: that it came from a GGUF file, that joint training
    changed its weights, or that the draft learnt from other weights. [] if none applies."""
    gguf, moved = metadata.origin.get("gguf"), metadata.origin.get("moved")
    lines = [said(moved)] if moved else []
    lines += said_of(metadata)
    if not gguf:
        return lines
    return [
        *lines,
        "The target came from the GGUF file `{file}` ({name}, {quantisation}, SHA-256 {sha256}), "
        "dequantised to bfloat16.".format(**gguf),
    ]


def planned_anew(
    source: str | Path, measured: Metadata, written: Metadata, way: str, markov: bool = True
) -> tuple[Metadata, list[str]]:
    """Return the export's metadata, and remarks about it. The draft length is planned again if the engine draws drafts
    in another way (sampled or greedy), or verifies by another rule, than in the measurement of the draft.

    Args:
        source, measured: the trained folder and its metadata.
        written: the export's metadata so far.
        way: how the engine drafts, "sampled" or "greedy"; engines verify chains by the token rule.
        markov: False if the draft has a Markov head that the export leaves out.

    The new length has the least seconds per token, computed from the report's seconds of rounds and its tau on held-out
    texts. Without these figures the length stays, and a remark says what it was planned for.
    """
    rule, cold = measured.served.verify, written.regime.get("temperature", 1.0) == 0
    same = cold or way == measured.objective and (way == "greedy" or rule != "block")
    if same and markov:
        return written, []
    # a hybrid's report is of its model without look-up
    report = json_if_any(Path(source) / REPORT) if measured.kind != "hybrid" else {}
    costs = (report.get("extra") or {}).get("costs")
    seconds = Costs(**costs).rounds if costs else ()
    taus = _taus(report, written, way, markov)
    speeds = {k: seconds[0] * tau / seconds[k] for k, tau in taus.items() if k < len(seconds)}
    head = "" if markov else ", with the Markov head"
    before = f"was planned for {measured.objective} drafting and the rule {rule}{head}"
    now = f"{way} drafting and the token rule of this engine"
    if not speeds and same:
        return written, []  # that the head is left out is said elsewhere
    if not speeds:
        return written, [
            f"Its k = {written.k} {before}; the folder has no figures for {now}. Export it with k=1 to k={written.k} "
            f"and time each; cotrain serve_check k= objective={way}_draft compares acceptance with a prediction."
        ]
    k = max(speeds, key=speeds.__getitem__)
    gains = ", ".join(f"{speeds[one]:.2f}x with k = {one}" for one in sorted({k, written.k} & set(speeds)))
    slow = "" if speeds[k] > 1 else ", so plain decoding is expected to be faster"
    return changed(written, k=k, tree=None), [
        f"k = {k} is planned for {now}, from the report's costs and tau on held-out texts: {gains}{slow}. The folder's "
        f"k = {written.k} {before}."
    ]


def _has_markov(metadata: Metadata) -> bool:
    """Return whether the export has the draft's Markov head, if there is one."""
    return bool((metadata.origin.get("export") or {}).get("markov", True))


def _taus(report: Mapping[str, Any], metadata: Metadata, way: str, markov: bool) -> dict[int, float]:
    """Return the report's tau on held-out texts under the token rule, in the regime, keyed by draft length; lengths
    without a figure are left out. way: "sampled" or "greedy" drafting. markov: whether the draft uses its Markov head.
    """
    held, temperature = (report.get("extra") or {}).get("held_out") or {}, metadata.regime.get("temperature", 1.0)
    name = QUANTITIES[way] + ("" if markov else "_without_markov")
    known = {k: held.get(f"{name}_T{temperature:g}/all/{k}") for k in range(1, LONGEST + 1)}
    return {k: tau for k, tau in known.items() if tau is not None}


def tau_table(report: Mapping[str, Any], metadata: Metadata) -> str:
    """Return a Markdown table of the report's predicted tau by draft length, for sampled and greedy drafting, in the
    regime; "" if the report has no held-out figures. metadata: the draft's, whose draft length is marked."""
    taus = {way: _taus(report, metadata, way, _has_markov(metadata)) for way in QUANTITIES}
    lengths = sorted(set.intersection(*map(set, taus.values())))
    if not lengths:
        return ""
    head = ["drafts a round", *(f"**{k}**" if k == metadata.k else str(k) for k in lengths)]
    rows = [[way, *(f"{one[k]:.2f}" for k in lengths)] for way, one in taus.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def without_markov(source: Path, metadata: Metadata) -> str:
    """Return a remark for the README that the export leaves out the draft's Markov head. source: the trained folder; if
    its report has tau with and without the head, the remark compares them."""
    report, k = json_if_any(source / REPORT), metadata.k
    whole, without = (_taus(report, metadata, metadata.objective, markov).get(k) for markov in (True, False))
    lost = "The Markov head of the draft is left out, since the engine has none."
    if whole is None or without is None:
        return lost
    return f"{lost} Predicted on held-out texts, tau at {k} drafts is {whole:.2f} with it, {without:.2f} without it."


def _predicted(report: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """Return a title and a Markdown table of the acceptance and tau predicted on held-out texts, for sampled and greedy
    drafting, in the regime; [] if the report has no held-out figures of what was exported."""
    held, at = (report.get("extra") or {}).get("held_out") or {}, f"T{metadata.regime.get('temperature', 1.0):g}/all"
    rows = []
    for drafting, alpha, tau in (("sampled", "alpha", "tau"), ("greedy", "alpha_greedy_draft", "tau_greedy_draft")):
        figures = held.get(f"{alpha}_{at}"), held.get(f"{tau}_{at}/{metadata.k}")
        if None not in figures and _has_markov(metadata):
            rows.append("| {} | {:.3f} | {:.2f} |".format(drafting, *figures))
    if not rows:
        return []
    head = f"| drafting | acceptance at a token | tau at {metadata.k} drafts |\n|---|---|---|"
    return ["## Predicted for an engine, by how it drafts", "\n".join([head, *rows])]


def require_hub(repo: str) -> None:
    """Raise UserError if `repo` is not user/name, or if the hub does not answer or rejects the token. Only `push`
    detects that the user may not write to `repo`."""
    with _one_line(repo):
        if repo.count("/") != 1:
            raise HFValidationError("it must be user/name")
        validate_repo_id(repo)
        HfApi().whoami()


def push(folder: Path, repo: str) -> str:
    """Upload all files in the folder to the hub's repository `repo` (user/name), and return its address. A missing
    repository is created as a public one. Raises UserError if the hub rejects the upload."""
    with _one_line(repo, f"; {folder} is complete, and `hf upload {repo} {folder}` uploads it"):
        hub = HfApi()
        address = hub.create_repo(repo, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Draft exported by cotrain")
    return str(address)


def local(target: str) -> bool:
    """Return whether the target is a folder on this machine, which other people do not have."""
    return Path(resolve(target)).is_dir()


@contextmanager
def _one_line(repo: str, then: str = "") -> Iterator[None]:
    """Turn errors of the hub's client in the block into a UserError of one line. then: advice to append to the
    message."""
    try:
        yield
    except HFValidationError as error:
        raise UserError(f"push_to_hub={repo}: {error}") from error
    except LocalTokenNotFoundError as error:
        raise UserError(
            f"push_to_hub={repo}: there is no token of the hub: log in with `hf auth login`, or set HF_TOKEN"
        ) from error
    except OfflineModeIsEnabled as error:
        raise UserError(
            f"push_to_hub={repo}: HF_HUB_OFFLINE is set, so nothing is uploaded: unset HF_HUB_OFFLINE{then}"
        ) from error
    except (HTTPError, OSError, RuntimeError) as error:  # hf_xet, which uploads large files, raises RuntimeError
        raise UserError(f"push_to_hub={repo}: {' '.join(str(error).split())}{then}") from error
