"""The texts that a run learns from and is evaluated on: sampled from the target and stored for later runs, or
completions in the user's logs."""

import glob
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.data.fingerprints import identity, said_differences
from cotrain.data.prompt_rows import PromptRows, Row
from cotrain.data.texts import NO_ID, Texts, short_hash
from cotrain.errors import UserError, first_line
from cotrain.paths import folder
from cotrain.ranks import awaited, rank
from cotrain.rollout import samplers
from cotrain.run_folder import numbered
from inference import Engine, Sampling
from inference.drafts.atomic import new_file, write_json
from inference.drafts.gguf_target import sha256
from inference.drafts.weight_files import read_json
from inference.request import ends_of, source_limits

# (count, tokens, seed) -> pairs (domain, token ids of a prompt): at most `count` per domain, each with at most `tokens`
# tokens. seed: of the random choice
Asked = Callable[[int, int, int], list[tuple[str, list[int]]]]


FEATURES = datasets.Features(
    {
        "domain": datasets.Value("string"),
        "prompt": datasets.Sequence(datasets.Value("int32")),
        "completion": datasets.Sequence(datasets.Value("int32")),
    }
)


RESULTS = {"rows", "tokens", "prompts", "sha256"}  # in a manifest: what a set came to


Start = tuple[int, ...]  # the ids that texts of an encoder-decoder begin with


def start_of(target: PreTrainedModel) -> Start | None:
    """Return the token ids with which every decoder text begins if the target is an encoder-decoder, otherwise None.
    Raises ValueError if its encoder reads audio or image features instead of token ids, or if its generation config
    does not give the ids."""
    limits = source_limits(target)
    if limits is None:
        return None
    if limits.features:
        raise ValueError(
            f"target.path: the encoder of {type(target).__name__} reads audio or image features, not token ids: name "
            "another model"
        )
    if limits.start is None:
        raise ValueError(
            f"target.path: the ids that {type(target).__name__}'s decoder texts begin with are not known: in "
            "generation_config.json set decoder_start_token_id, and replace null in forced_decoder_ids by an id"
        )
    return limits.start


def logged(chats: PromptRows, ask: samplers.Ask, split: str, seed: int, start: Start | None = None) -> Texts:
    """Return texts of the user's logs: prompts with their completions, at most ask.texts[split] per domain, chosen at
    random. Prompts of more than ask.prompt_tokens tokens are left out; completions are cut to ask.new_tokens.

    chats: the rows of the split. split: "train" or "held_out". seed: of the choice. start: for an encoder-decoder, the
    ids with which decoder texts begin; the prompt is then the encoder input. Raises ValueError if no prompt has a
    completion.
    """
    rows = completed(chats, ask, split, seed)
    return padded([row | {"completion": row["completion"][: ask.new_tokens]} for row in rows], start)


def completed(chats: PromptRows, ask: samplers.Ask, split: str, seed: int) -> list[Row]:
    """Return the rows with a completion, at most ask.texts[split] per domain, chosen at random from those with at most
    ask.prompt_tokens tokens in the prompt. Completions are not cut. split: "train" or "held_out". seed: of the choice.
    Raises ValueError if no row has a completion."""
    rows = [row for row in chats.chosen(ask.texts[split], ask.prompt_tokens, seed) if row["completion"]]
    if not rows:
        raise ValueError(
            "data.path: its conversations have no completion of a prompt of at most "
            f"rollout.prompt_tokens={ask.prompt_tokens} tokens: to use the prompts alone, set trainer.corpus_steps=0 "
            "and data.on_target=false"
        )
    return rows


@dataclass(frozen=True)
class Sampled:
    """Texts of the target. The shipped texts are used if they were sampled with the same settings; otherwise texts are
    sampled and stored. kind, in all methods: "train" or "held_out", the split of the prompts.

    Args:
        folder: where sampled sets are stored.
        ask: how much to sample.
        rows: how many prompts are continued at once.
        source: kind -> a JSON object that identifies the prompts (`sources.prompt_origin`).
        by: a function that returns the sampler; None for this engine.
        server: the server's URL, which is stored with a set; None without a server.
        identity: the target's fingerprint (`fingerprints.identity`); None: it is computed.
        minutes: the run's time limit, with which sets may have fewer texts; None without one.
        seconds: kind -> the most seconds for sampling one set; a kind without an entry has no limit.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    ask: samplers.Ask
    rows: int
    seed: int
    source: Mapping[str, Any]
    by: Callable[[], samplers.Sampler] | None = None
    server: str | None = None
    identity: Mapping[str, Any] | None = None
    minutes: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def texts(self, kind: str, sampling: Sampling, prompts: Asked) -> Texts:
        """Return the texts of a regime, stored ones if they fit the settings, otherwise new ones, which are stored too.

        sampling: the regime. prompts: a function that returns the prompts, called only if texts must be sampled. Raises
        UserError if all new texts are empty, and ValueError if a stored file is broken.
        """
        path = self.folder / name(kind, sampling)
        for place in (folder("data") / "rollouts" / path.name, path):
            if self._fits(place, kind, sampling):
                return padded(read_rows(place), start_of(self.target))
        if (stored := _origin(path)) is not None:
            other = said_differences(stored, self._manifest(kind, sampling))
            print(f"new texts are sampled, since the stored ones do not fit: {beside(path, 'parquet')}: {other}")
        return padded(read_rows(self.sample(kind, sampling, prompts)), start_of(self.target))

    def sample(self, kind: str, sampling: Sampling, prompts: Asked, keep: bool = False) -> Path:
        """Sample a set, store it as path.parquet and path.json, and return the path without an extension. If a call is
        interrupted, the next call continues.

        sampling: the regime. prompts: a function that returns the prompts. keep: True to use a stored set of the same
        settings instead, and to rename a stored set of other settings instead of replacing it.

        Only the first of several processes samples; the others wait for the file. Raises UserError if all texts are
        empty.
        """
        path, wanted = self.folder / name(kind, sampling), self._manifest(kind, sampling)
        if rank():
            awaited(lambda: self._fits(path, kind, sampling), "the process that samples texts")
            return path
        if keep and self._fits(path, kind, sampling):
            read_rows(path)  # which says if it is broken
            print(f"{beside(path, 'parquet')} has these texts already: nothing is sampled")
            return path
        partial = beside(path, f"{short_hash(wanted)}.partial.jsonl")  # of this very set
        asked = prompts(self.ask.texts[kind], self.ask.prompt_tokens, self.seed)
        if keep and len(asked) < self.ask.texts[kind]:  # a training says it before it begins
            print(
                f"rollout.{'held_out_' * (kind != 'train')}texts={self.ask.texts[kind]}: there are only {len(asked)} "
                "prompts, and each is continued once"
            )
        # a time limit may end the sampling: some of each domain come first
        order = _in_turn([domain for domain, _ in asked]) if self.minutes else range(len(asked))
        rows = samplers.collect(
            self.by() if self.by else samplers.Own(Engine(self.target, tokenizer=self.tokenizer, rows=self.rows)),
            [asked[i] for i in order],
            sampling,
            self.ask.new_tokens,
            self.seed,
            partial,
            order,
            self.seconds.get(kind),
            f"{'texts' if kind == 'train' else 'held-out texts'} at temperature {sampling.temperature:g}",
        )
        sampled, rows = len(rows), [row for row in rows if row["completion"]]
        if len(rows) < sampled:
            print(
                f"{self.server_key}: {sampled - len(rows)} of {sampled} texts are left out: they are empty, or the "
                "server sends no token ids and they change when they are decoded and encoded again"
            )
        ends = ends_of(self.target)
        empty = sum(ends.issuperset(row["completion"]) for row in rows)
        whose = f"{self.server_key}: the server's" if self.server else "target.path: the target's"
        if empty == len(rows):
            partial.unlink()  # else the next call would read these texts
        elif empty:
            print(f"{whose} texts: {empty} of {len(rows)} are empty, they end at their first token")
        if not rows:
            raise UserError(
                f"{self.server_key}: each of the server's texts is empty, or changes when it is decoded and encoded "
                "again: look at its answer to one of the prompts, or use a server that sends token ids, such as vLLM"
            )
        if empty == len(rows):
            raise UserError(
                f"{whose} texts are all empty ({empty}), so there is nothing to learn: they end at their "
                "first token: look at the answer to one of the prompts, or name another model"
            )
        if keep and beside(path, "parquet").is_file() and not _halfway(rows, path):
            earlier = numbered(path, ".parquet")
            there = [ending for ending in ("parquet", "json") if beside(path, ending).is_file()]
            for ending in there:
                beside(path, ending).rename(beside(earlier, ending))
            whose = "of other settings" if "json" in there else "without a .json, which says what they are,"
            print(f"the texts {whose} that {path} had are kept as {beside(earlier, 'parquet')}")
        save_rows(rows, path, wanted if sampled < len(asked) else _whole(wanted))
        partial.unlink()
        return path

    @property
    def server_key(self) -> str:
        """Return the setting that names the server, for messages."""
        return "teacher.url" if self.server == "teacher.url" else "rollout.url"

    def _manifest(self, kind: str, sampling: Sampling) -> dict[str, object]:
        manifest = (
            {
                "kind": kind,
                "regime": regime(sampling),
                "target": self.identity or identity(self.target, self.tokenizer),
                "seed": self.seed,
                "source": self.source[kind],
                "texts": self.ask.texts[kind],
                "prompt_tokens": self.ask.prompt_tokens,
                "new_tokens": self.ask.new_tokens,
            }
            | ({"minutes": self.minutes} if self.minutes else {})
            | ({"server": self.server} if self.server else {})
        )
        return dict(json.loads(json.dumps(manifest)))  # as it is read back

    def _fits(self, path: Path, kind: str, sampling: Sampling) -> bool:
        """Return whether the set at `path` (without an extension) was sampled from this target, in this regime, from
        these prompts."""
        stored, wanted = _origin(path), self._manifest(kind, sampling)
        return stored is not None and stored in (wanted, _whole(wanted))


def _whole(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a set with all its texts: `manifest` without the time limit, since a limit that was not
    reached makes no difference."""
    return {key: value for key, value in manifest.items() if key != "minutes"}


def _in_turn(domains: Sequence[str]) -> list[int]:
    """Return the indices of `domains` in turn: the first of each domain, then the second of each, and so on."""
    count: Counter[str] = Counter()
    turns = []
    for place, domain in enumerate(domains):
        turns.append((count[domain], place))
        count[domain] += 1
    return [place for _, place in sorted(turns)]


def _origin(path: Path) -> dict[str, Any] | None:
    """Return the entries of the manifest in path.json that say how the set was sampled, without those about its
    results. None without a manifest."""
    manifest = read_manifest(path)
    return None if manifest is None else {key: value for key, value in manifest.items() if key not in RESULTS}


def regime(sampling: Sampling) -> dict[str, float]:
    """Return the sampling settings as a JSON object, in the form in which a manifest stores them."""
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}


def name(kind: str, sampling: Sampling) -> str:
    """Return the file name of a set, without an extension, for example train_T1 or held_out_T0.5_p0.9.
    kind: "train" or "held_out". sampling: the regime."""
    cuts = [f"_k{sampling.top_k}"] * (sampling.top_k > 0) + [f"_p{sampling.top_p:g}"] * (sampling.top_p < 1)
    return f"{kind}_T{sampling.temperature:g}" + "".join(cuts)


def beside(path: Path, ending: str) -> Path:
    """Return the path with `.ending` appended. `Path.with_suffix` would replace the .5 in `held_out_T0.5`."""
    return path.with_name(f"{path.name}.{ending}")


def save_rows(rows: list[Row], path: Path, manifest: dict[str, Any]) -> None:
    """Write rows of FEATURES to path.parquet, and the manifest to path.json. Each file is complete or absent."""
    table = datasets.Dataset.from_list(rows, features=FEATURES)
    with new_file(beside(path, "parquet")) as new:
        table.to_parquet(str(new))
        beside(path, "json").unlink(missing_ok=True)  # stopped between both, the set before would vouch for these rows
    tokens = sum(len(row["completion"]) for row in rows)
    results = {"rows": len(rows), "tokens": tokens, "sha256": sha256(beside(path, "parquet"))}
    write_json(beside(path, "json"), manifest | results, 2)


def _halfway(rows: list[Row], path: Path) -> bool:
    """Return whether path.parquet has these rows and no path.json: a process wrote it, and ended before the other."""
    if beside(path, "json").is_file():
        return False
    try:
        return read_rows(path).to_list() == datasets.Dataset.from_list(rows, features=FEATURES).to_list()
    except ValueError:
        return False


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest in path.json; None if path.json or path.parquet is missing. Raises ValueError if path.json is
    broken."""
    file = beside(path, "json")
    return read_json(file) if file.is_file() and beside(path, "parquet").is_file() else None


def read_rows(path: Path) -> datasets.Dataset:
    """Return the rows in path.parquet. Raises ValueError if the file is missing or broken, or if it is not the one that
    path.json was written with."""
    file = beside(path, "parquet")
    if not file.is_file():
        raise ValueError(f"there is no file {file}: sample it with cotrain rollout")
    try:
        if (read_manifest(path) or {}).get("sha256", whole := sha256(file)) != whole:
            raise ValueError("its checksum is wrong")  # Parquet has none of its own
        return datasets.Dataset.from_parquet(glob.escape(str(file)), keep_in_memory=True)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{file} cannot be read ({first_line(error)}): delete it and {beside(path, 'json').name}, and the same "
            "command samples the texts again"
        ) from error


def padded(rows: Iterable[Mapping[str, Any]], start: Start | None = None) -> Texts:
    """Return rows as `Texts`, padded to the longest row. rows: mappings with domain, prompt and completion (token ids).

    start: for an encoder-decoder, the ids with which decoder texts begin; a row's prompt is then its encoder input, and
    its text is `start` followed by the completion. None for other models: the text is the prompt followed by the
    completion.
    """
    rows = list(rows)
    begins = [row["prompt"] if start is None else start for row in rows]
    ids = [
        torch.tensor([*begin, *row["completion"]], dtype=torch.int64) for begin, row in zip(begins, rows, strict=True)
    ]
    prompt, length = (torch.tensor([len(one) for one in part]) for part in (begins, ids))
    texts = Texts(pad_sequence(ids, batch_first=True), prompt, length, [row["domain"] for row in rows])
    if start is None:
        return texts
    sources = [torch.tensor(row["prompt"], dtype=torch.int64) for row in rows]
    return replace(texts, source=pad_sequence(sources, batch_first=True, padding_value=NO_ID))
