"""What a run learns from and is judged on: corpus blocks and texts sampled from the target."""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.data.prompt_rows import PromptRows, TextStarts
from cotrain.data.sources import Blocks, SeededOrder
from cotrain.paths import folder
from cotrain.progress_display import Say
from cotrain.rollout import kept_texts, samplers
from cotrain.rollout.fingerprints import identity, said
from cotrain.training.ranks import rank
from inference import Engine, Sampling

Source = PromptRows | TextStarts


class Share(NamedTuple):
    """Every `of`-th text from `place` on."""

    place: int
    of: int


WHOLE = Share(0, 1)
DRAFTED = "on_draft"  # in a manifest: the share of its texts that a draft continued, which are nobody else's
FOUND = {"rows", "tokens", "prompts"}  # in a manifest: what a set came to


class Part(Dataset[dict[str, torch.Tensor]]):
    """Texts to learn from: ids (N, T), which positions count, predicted (N, T-1), and the temperature (N,) that each is
    learnt at, one number for all; `key` tells texts apart, from `first` on; position_ids (N, T) of packed texts;
    sampled (N, T-1): which the target sampled, by default those that count."""

    def __init__(
        self,
        ids: torch.Tensor,
        predicted: torch.Tensor,
        temperature: float | torch.Tensor = 1.0,
        first: int = 0,
        position_ids: torch.Tensor | None = None,
        sampled: torch.Tensor | None = None,
    ) -> None:
        self.ids, self.predicted, self.first, self.position_ids = ids, predicted, first, position_ids
        self.sampled = predicted if sampled is None else sampled
        self.temperature = torch.as_tensor(temperature, dtype=torch.float32).expand(len(ids))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        places = {} if self.position_ids is None else {"position_ids": self.position_ids[index].long()}
        return {"ids": self.ids[index].long(), "predicted": self.predicted[index], "sampled": self.sampled[index],
                "key": torch.tensor(self.first + index), "temperature": self.temperature[index]} | places  # fmt: skip


def blocks_texts(blocks: Blocks) -> kept_texts.Texts:
    """Corpus blocks as texts: every position counts, p is the target's whole law there too."""
    n, width = blocks.ids.shape
    domains = [blocks.domains[index] for index in blocks.domain.tolist()]
    first, length = torch.ones(n, dtype=torch.int64), torch.full((n,), width)
    return kept_texts.Texts(blocks.ids.long(), first, length, domains, blocks.position_ids)


def logged(chats: PromptRows, count: int, ask: samplers.Ask, seed: int) -> kept_texts.Texts:
    """Prompts with the completions that the logs hold, at most `count` a domain, as long as those asked for.

    Raises ValueError when there is none.
    """
    rows = [row for row in chats.chosen(count, ask.prompt_tokens, seed) if row["completion"]]
    if not rows:
        raise ValueError("data.path: its conversations hold no completion of a prompt of at most "
                         f"rollout.prompt_tokens={ask.prompt_tokens}; prompts alone: trainer.corpus_steps=0, "
                         "data.on_target=false")  # fmt: skip
    return kept_texts.texts([row | {"completion": row["completion"][: ask.new_tokens]} for row in rows])


def corpus_part(texts: kept_texts.Texts | None, temperature: float = 1.0) -> Part:
    """Texts as they were given, what is not prompt of them. None: no texts."""
    if texts is None:
        return Part(torch.empty(0, 2), torch.empty(0, 1))
    return Part(texts.ids, texts.predicted, temperature, position_ids=texts.position_ids)


def joined(parts: Sequence[Part], first: int) -> Part:
    """Parts laid end to end, padded on the right to one width, their keys from `first` on."""
    width = max(part.ids.shape[1] for part in parts)
    pads = [(0, width - part.ids.shape[1]) for part in parts]
    ids, predicted, sampled = (
        torch.cat([torch.nn.functional.pad(getattr(part, name), pad) for part, pad in zip(parts, pads, strict=True)])
        for name in ("ids", "predicted", "sampled")
    )
    return Part(ids, predicted, torch.cat([part.temperature for part in parts]), first, sampled=sampled)


def sampled_part(
    texts: kept_texts.Texts, shares: Mapping[str, float], temperature: float = 1.0, prompts: bool = True
) -> Part:
    """Sampled texts, every position of them and, with prompts, of their prompts; of a domain in `shares` only that
    share of them.

    Raises ValueError for a share outside [0, 1] and when nothing is left.
    """
    if not all(0 <= share <= 1 for share in shares.values()):
        raise ValueError(f"data.shares: {dict(shares)} must lie in [0, 1]")
    seen: Counter[str] = Counter()
    kept = []
    for row, domain in enumerate(texts.domain):
        seen[domain] += 1
        if seen[domain] <= shares.get(domain, 1.0) * texts.domain.count(domain):
            kept.append(row)
    if not kept:
        raise ValueError(f"data.shares: {dict(shares)} leave no text to learn from")
    inside = torch.arange(1, texts.ids.shape[1]) < texts.length.unsqueeze(1)
    predicted = inside if prompts else texts.predicted
    return Part(texts.ids[kept], predicted[kept], temperature, sampled=texts.predicted[kept])


class Strided(Sampler[int]):
    """One process's share of an endless order: of every batch of all `world` processes, the same number to each."""

    def __init__(self, order: Sampler[int], rank: int, world: int) -> None:
        self.order, self.rank, self.world = order, rank, world

    def __iter__(self) -> Iterator[int]:
        return islice(self.order, self.rank, None, self.world)


class Curriculum(Sampler[int]):
    """Indices into two parts laid end to end: `first` samples of part one, shuffled, then part two without end.

    A pure function of (seed, start), so a resumed run sees the samples that an uninterrupted one would have.
    """

    def __init__(self, sizes: tuple[int, int], first: int, seed: int, start: int = 0) -> None:
        self.sizes, self.first, self.seed, self.start = sizes, first, seed, start

    def __iter__(self) -> Iterator[int]:
        one = iter(SeededOrder(self.sizes[0], self.seed, self.start))
        for _ in range(max(self.first - self.start, 0)):
            yield next(one)
        for index in SeededOrder(self.sizes[1], self.seed + 1, max(self.start - self.first, 0)):
            yield self.sizes[0] + index


@dataclass(frozen=True)
class Sampled:
    """Texts of the target: shipped ones when they are what would be sampled here, else sampled here and kept.

    kind: "train" or "held_out" (the split that the prompts come from). folder: where own sets are kept. source: what
    prompts are made from, see `inputs.made_from`, by kind. by: who samples, this engine when None; server: its model,
    as the set's manifest says it; on_draft: share of the texts of all parts but the first that the draft under training
    continues. identity: the target's, see `fingerprints.identity`, found out when None.
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
    on_draft: float = 0.0
    identity: Mapping[str, Any] | None = None

    def texts(
        self, kind: str, sampling: Sampling, source: Callable[[], Source], say: Say | None = None, part: Share = WHOLE
    ) -> kept_texts.Texts:
        """The texts of a regime; `source` gives prompts if they must be sampled, and is not called otherwise."""
        for place in (folder("data") / "rollouts", self.folder):
            path = place / name(kind, sampling, part)
            if self._fits(path, kind, sampling, part):
                return kept_texts.texts(kept_texts.read(path))
        if other := self._apart(self.folder / name(kind, sampling, part), kind, sampling, part):
            (say or print)(f"kept texts are not used, new ones are sampled: {other}")
        return kept_texts.texts(kept_texts.read(self.sample(kind, sampling, source(), say, part)))

    def sample(
        self, kind: str, sampling: Sampling, source: Source, say: Say | None = None, part: Share = WHOLE
    ) -> Path:
        """Sample a set and keep it; interrupted, the next call goes on where this one stopped."""
        path, made = self.folder / name(kind, sampling, part), self._manifest(kind, sampling, part)
        if rank():
            return self._awaited(path, kind, sampling, part)
        partial = kept_texts.beside(path, f"{_digest(made)}.partial.jsonl")  # of this very set
        asked = source.prompts(self.ask.texts[kind], self.ask.prompt_tokens, self.seed)
        mine = range(part.place, len(asked), part.of)  # of every domain
        rows = samplers.collect(self._sampler(), [asked[i] for i in mine], sampling, self.ask.new_tokens, self.seed,
                               partial, say, mine)  # fmt: skip
        kept_texts.save(rows, path, made)
        partial.unlink()
        return path

    def _awaited(self, path: Path, kind: str, sampling: Sampling, part: Share) -> Path:
        """Of several processes one samples. Raises RuntimeError when what started this one has gone."""
        parent = os.getppid()
        while not self._fits(path, kind, sampling, part):
            if os.getppid() != parent:
                raise RuntimeError("the process that samples texts has ended")
            time.sleep(1)
        return path

    def _sampler(self) -> samplers.Sampler:
        return self.by() if self.by else samplers.Own(Engine(self.target, tokenizer=self.tokenizer, rows=self.rows))

    def _target(self) -> Mapping[str, Any]:
        return self.identity or identity(self.target, self.tokenizer)

    def _manifest(self, kind: str, sampling: Sampling, part: Share) -> dict[str, object]:
        made = {"kind": kind, "regime": regime(sampling), "target": self._target(), "seed": self.seed,
                "source": self.source[kind], "texts": self.ask.texts[kind], "prompt_tokens": self.ask.prompt_tokens,
                "new_tokens": self.ask.new_tokens} | ({"server": self.server} if self.server else {}) | (
                {"part": list(part)} if part.of > 1 else {}) | (
                {DRAFTED: self.on_draft} if self.on_draft and part.place else {})  # fmt: skip
        return dict(json.loads(json.dumps(made)))  # as it is read back

    def _fits(self, path: Path, kind: str, sampling: Sampling, part: Share) -> bool:
        """Made by this very target in this regime from such prompts: any other set is no data for this run."""
        found = _made(kept_texts.manifest(path))
        return found is not None and found == self._manifest(kind, sampling, part)

    def _apart(self, path: Path, kind: str, sampling: Sampling, part: Share) -> str | None:
        """What keeps a kept set from being used, in words; None without one."""
        found = _made(kept_texts.manifest(path))
        if found is None:
            return None
        return f"{kept_texts.beside(path, 'parquet')}: {said(found, self._manifest(kind, sampling, part))}"


def _made(manifest: dict[str, Any] | None) -> dict[str, Any] | None:
    """What made a set, without what it came to."""
    return None if manifest is None else {key: value for key, value in manifest.items() if key not in FOUND}


def _digest(manifest: dict[str, object]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=6).hexdigest()


def regime(sampling: Sampling) -> dict[str, float]:
    """The settings that a set of texts is sampled in."""
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}


def name(kind: str, sampling: Sampling, part: Share = WHOLE) -> str:
    """train_T1, held_out_T0.5_p0.9, train_T1_2of3: the file of a set."""
    cuts = [f"_k{sampling.top_k}"] * (sampling.top_k > 0) + [f"_p{sampling.top_p:g}"] * (sampling.top_p < 1)
    cuts += [f"_{part.place + 1}of{part.of}"] * (part.of > 1)
    return f"{kind}_T{sampling.temperature:g}" + "".join(cuts)
