"""Drafts from look-up, without a model. Look-up finds an earlier occurrence of the text's last tokens, in the text
itself or in a corpus, and drafts the tokens that followed there."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from inference.drafts.weight_files import CONFIG, read_json
from inference.lookup.corpus import Datastore
from inference.lookup.suffixes import NONE, Match, SuffixAutomaton
from inference.proposers.base import Host, LoadArguments, Proposal, Proposer, Round, SettingsNetwork, States
from inference.source import like, searched, until_foreign


def chains(drafts: Sequence[list[int]], texts: Sequence[list[int]]) -> Proposal:
    """Return a proposal of deterministic chains. drafts: the ids drafted for each row. texts: the rows' texts; a
    shorter row is padded with its text's last id."""
    lengths = [len(draft) for draft in drafts]
    width = max(lengths)
    whole = [draft + text[-1:] * (width - len(draft)) for draft, text in zip(drafts, texts, strict=True)]
    return Proposal(torch.tensor(whole, dtype=torch.int64).view(len(drafts), width), None, lengths)


class NGram(Proposer):
    """A proposer that drafts by n-gram look-up in the row's own text (Saxena 2023, prompt lookup decoding), and in its
    source's ids if it has a source.

    For n = max_n, ..., 1 it searches for an earlier occurrence of the text's last n tokens, and drafts the tokens that
    followed the most recent one. Drafts are deterministic. Raises ValueError if max_n < 1.
    """

    def __init__(self, max_n: int = 3) -> None:
        if max_n < 1:
            raise ValueError(f"NGram.max_n must be at least 1, not {max_n}")
        self.max_n = max_n
        self.vocabulary = inf
        self.indexes: dict[int, NGramIndex] = {}  # by id() of a row's text; the index references the text

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "NGram":
        """Return a proposer with default settings, since the folder holds none."""
        return cls()

    def open(self, host: Host) -> None:
        self.vocabulary, self.indexes = host.vocabulary, {}

    def propose(self, round: Round) -> Proposal:
        self.indexes = {id(text): self._index(text) for text in round.texts}
        rows = zip(round.texts, round.k, strict=True)
        return chains([self.indexes[id(text)].look_up(k, self.vocabulary) for text, k in rows], round.texts)

    def _index(self, text: list[int]) -> "NGramIndex":
        index = self.indexes.get(id(text))
        return index if index and index.text is text else NGramIndex(text, self.max_n)


class NGramIndex:
    """The latest position of each n-gram of a growing text. Each look-up first adds the n-grams of new tokens. text:
    the row's ids; this list grows as the row does. max_n: the largest n."""

    def __init__(self, text: list[int], max_n: int) -> None:
        self.text, self.max_n = text, max_n
        self.begins: dict[tuple[int, ...], int] = {}
        self.length = 1  # tokens whose n-grams are in the index, except n-grams that end in the last token

    def look_up(self, k: int, vocabulary: float = inf) -> list[int]:
        """Return at most k tokens: those that followed the most recent earlier occurrence of the text's longest suffix
        that has one, up to the first outside [0, vocabulary). [] if there is none."""
        text = searched(self.text)
        for end in range(self.length, len(text)):  # n-grams of tokens before `end`
            for n in range(1, min(self.max_n, end) + 1):
                self.begins[tuple(text[end - n : end])] = end - n
        self.length = len(text)
        for n in range(min(self.max_n, len(text) - 1), 0, -1):
            start = self.begins.get(tuple(text[-n:]))
            if start is not None:
                return until_foreign(text[start + n : start + n + k], vocabulary)
        return []


class LookupConfig(PretrainedConfig):
    """The config of look-up. lookup: its settings, with the keys `shortest`, the least length of a match in tokens, and
    `datastore`, a folder or None."""

    model_type = "lookup"

    def __init__(self, lookup: Mapping[str, Any] | None = None, **other: Any) -> None:
        super().__init__(**other)
        self.lookup = dict(lookup or {})


class LookupNetwork(SettingsNetwork):
    """The network of a look-up's folder. It has only a `LookupConfig`, since look-up has no weights."""

    config_class = LookupConfig


class Retrieval(Proposer):
    """A proposer that drafts the tokens that followed an earlier occurrence of the text's suffix. A suffix automaton
    finds the longest suffix that occurs earlier in the row's text or in its source's ids (Hu et al. 2024, SAM decoding,
    2411.10666). A datastore may have a longer match (He et al. 2023, REST, 2311.08252). The longer match is used; if
    both are equally long, the row's own. Drafts are deterministic.

    datastore: a `Datastore`, or its folder; None to search only the text. shortest: least length of a match, in tokens.
    Raises ValueError if shortest < 1 or if the datastore is broken, and FileNotFoundError if the folder has none.
    """

    network_class = LookupNetwork

    def __init__(self, datastore: Datastore | str | Path | None = None, shortest: int = 2) -> None:
        if shortest < 1:
            raise ValueError(f"Retrieval.shortest must be at least 1, not {shortest}")
        self.datastore = Datastore.open(datastore) if isinstance(datastore, str | Path) else datastore
        self.shortest, self.vocabulary = shortest, inf
        self.rows: list[SuffixAutomaton] = []
        self.staged: dict[int, SuffixAutomaton] = {}

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "Retrieval":
        """Return a proposer for a draft folder, with the settings under the key `lookup` of its config.json."""
        return cls.of_settings(read_json(folder / CONFIG).get("lookup") or {})

    @classmethod
    def fits(cls, network: PreTrainedModel, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError if the config's datastore is missing, cannot be opened, or has ids that the target lacks.
        where: the start of the message."""
        try:
            retrieval = cls.of_settings(getattr(network.config, "lookup", None) or {})
        except FileNotFoundError as error:
            raise ValueError(
                f"{where}: lookup.datastore in its {CONFIG} names a folder that is missing ({error}): correct the path"
            ) from error
        retrieval.check_vocabulary(target.config.get_text_config().vocab_size, where)

    @classmethod
    def of_settings(cls, lookup: Mapping[str, Any]) -> "Retrieval":
        """Return a proposer with these settings. lookup: may have the keys `shortest`, the least length of a match in
        tokens, and `datastore`, a folder or None. Raises ValueError if shortest < 1 or if the datastore is broken, and
        FileNotFoundError if the folder has none."""
        return cls(lookup.get("datastore"), lookup.get("shortest", 2))

    def open(self, host: Host) -> None:
        """Drop the state of earlier calls. Raises ValueError for a datastore with ids that the target lacks."""
        self.check_vocabulary(host.vocabulary, "Retrieval")
        self.vocabulary, self.rows, self.staged = host.vocabulary, [], {}

    def check_vocabulary(self, vocabulary: int, where: str) -> None:
        """Raise ValueError if the datastore has ids outside [0, vocabulary). where: the start of the message."""
        if self.datastore and self.datastore.about.vocabulary > vocabulary:
            raise ValueError(
                f"{where}: its datastore was made for {self.datastore.about.vocabulary} ids, but the target has "
                f"{vocabulary}; make another with the target's tokenizer: cotrain datastore target.path=..."
            )

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        self.rows[low:] = map(SuffixAutomaton, map(searched, prompts))

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        self.staged |= {slot: SuffixAutomaton(searched(prompt)) for slot, prompt in enumerate(prompts, low)}

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        self.rows.append(self.staged.pop(source))

    def move(self, source: int, target: int) -> None:
        last = self.rows.pop()
        if target < len(self.rows):
            self.rows[target] = last

    def propose(self, round: Round) -> Proposal:
        return chains([match.drafts for match in self.find(round.texts, round.k)], round.texts)

    def find(self, texts: Sequence[list[int]], k: Sequence[int]) -> list[Match]:
        """Return, for each row's text, the longest match with an earlier occurrence. texts: the ids of each row's text.
        k: for each row, the largest number of drafts."""
        return [self.of_row(row, text, most) for row, text, most in zip(self.rows, texts, k, strict=True)]

    def of_row(self, row: SuffixAutomaton, text: list[int], k: int) -> Match:
        """Return the match for a text, with at most k drafts. row: the automaton of the text or of its beginning; it is
        extended to the whole text, in place."""
        row.follow(searched(text))
        own = row.look_up(k, self.shortest)
        own = own._replace(drafts=until_foreign(own.drafts, self.vocabulary))
        own = own if own.drafts else NONE
        if not self.datastore or own.length >= self.datastore.about.depth:
            return own
        stored = self.datastore.look_up(text, k, max(self.shortest, own.length + 1))
        return stored if stored.drafts else own

    def along(self, prompt: list[int], text: Sequence[int], k: int) -> list[Match]:
        """Return one match for each token of `text`: what look-up finds there, in `prompt` and the tokens before this
        one. k: the largest number of drafts of a match."""
        row, whole, matches = SuffixAutomaton(), like(prompt, prompt), []
        for token in text:
            matches.append(self.of_row(row, whole, k))
            whole.append(token)
        return matches
