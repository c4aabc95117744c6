"""A corpus on disk. Look-up finds the longest suffix of a text that occurs in the corpus, and drafts the most frequent
continuation.

A folder has three files. `datastore.json` describes it. `tokens.npy` has the corpus's ids in reverse order; an id that
no text has separates the documents. `order.npy` is the suffix array of `tokens.npy`. Because the ids are reversed, the
end of a text, read backwards, is the beginning of an entry of the suffix array. One binary search therefore finds the
longest suffix of the text that occurs anywhere. Both arrays are memory-mapped.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.drafts.atomic import new_folder, write_json
from inference.drafts.weight_files import read_json, wrong_keys
from inference.lookup.suffixes import NONE, Ids, Match, common_prefix, first_place, suffix_array

FORMAT = 1
ABOUT, TOKENS, ORDER = "datastore.json", "tokens.npy", "order.npy"
MOST = 64  # occurrences that are examined, evenly spread over all of them


@dataclass(frozen=True)
class About:
    """The contents of `datastore.json`. vocabulary: number of token ids. depth: the longest match that look-up can
    find, in tokens. documents, tokens: the corpus's numbers of documents and tokens. tokenizer: the tokenizer's hash
    (`compatibility.hash_tokenizer`), None if unknown. made: command, text files and date of the making."""

    vocabulary: int
    depth: int
    documents: int = 0
    tokens: int = 0
    tokenizer: str | None = None
    made: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(eq=False)
class Datastore:
    """A corpus from which drafts are retrieved (He et al. 2023, REST, 2311.08252). Drafts are chains: the most frequent
    continuation.

    tokens: the corpus's ids in reverse order, as in `tokens.npy`. order: the suffix array of `tokens` without the
    separators, as in `order.npy`. Both are arrays of an integer type that is large enough. about: the contents of
    `datastore.json`.
    """

    tokens: Ids
    order: NDArray[np.integer]
    about: About

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]], about: About) -> "Datastore":
        """Return a datastore in memory, built from documents of token ids. about: gives vocabulary, depth, tokenizer
        and making; the result's numbers of documents and tokens are counted. Raises ValueError for ids outside the
        vocabulary, and if the documents have no token."""
        border, flat, count = about.vocabulary, [about.vocabulary], 0
        for document in documents:
            if document and (min(document) < 0 or max(document) >= border):
                raise ValueError(
                    f"datastore: document {count} (0-based) has token ids outside [0, {border}): encode the texts "
                    "with the target's tokenizer"
                )
            flat += [*document, border]
            count += 1
        tokens = np.array(flat[::-1], dtype=_smallest(border))
        if len(tokens) == count + 1:
            raise ValueError("datastore: the texts have no token: give texts that are not empty")
        order = suffix_array(tokens, about.depth)
        order = order[tokens[order] != border].astype(_smallest(len(tokens)))
        return cls(tokens, order, replace(about, documents=count, tokens=len(order)))

    def save(self, folder: str | Path, replace: bool = False) -> Path:
        """Write the datastore's folder atomically, and return its path. Raises FileExistsError if the folder contains
        files and `replace` is off, and OSError naming the folder if the disk is full."""
        with new_folder(Path(folder), replace=replace) as new:
            np.save(new / TOKENS, self.tokens)
            np.save(new / ORDER, self.order)
            write_json(new / ABOUT, asdict(self.about), 2)
        return Path(folder)

    @classmethod
    def open(cls, folder: str | Path) -> "Datastore":
        """Return the datastore in a folder, memory-mapped. Raises FileNotFoundError if the folder has no datastore, and
        ValueError if the datastore is broken or has another format."""
        path = Path(folder)
        if not (path / ABOUT).is_file():
            raise FileNotFoundError(f"{path} is no datastore: it has no {ABOUT}; make one with `cotrain datastore`")
        about = _about(path / ABOUT)
        tokens, order = _mapped(path / TOKENS), _mapped(path / ORDER)
        if len(order) != about.tokens or len(tokens) != about.tokens + about.documents + 1:
            raise ValueError(
                f"{path}: by {ABOUT} it has {about.tokens} tokens in {about.documents} documents, but {ORDER} has "
                f"{len(order)} entries and {TOKENS} has {len(tokens)}: make the datastore again"
            )
        return cls(tokens, order, about)

    def look_up(self, text: Sequence[int], k: int, shortest: int = 1) -> Match:
        """Find the longest suffix of the text that occurs in the corpus, and return the match with at most k drafts.
        Return `NONE` if this suffix has fewer than `shortest` tokens. No match is longer than `about.depth` tokens.

        Each draft is the most frequent next token among the occurrences that agree with the drafts before it. Of
        equally frequent tokens, the smallest id is drafted.
        """
        if k < 1 or not text:
            return NONE
        backwards = list(reversed(text[-self.about.depth :]))
        length, near = self._longest(backwards)
        if length < max(shortest, 1):
            return NONE
        low = first_place(self.tokens, self.order, backwards[:length], 0, near + 1)
        high = first_place(self.tokens, self.order, backwards[:length], near, after=True)
        positions = self.order[low : high : -(-(high - low) // MOST)]
        drafts = _most_frequent([self._following(int(position), k) for position in positions], k)
        return Match(drafts, length, stored=True)

    def _longest(self, backwards: list[int]) -> tuple[int, int]:
        """Return the length of the longest suffix of a text that occurs in the corpus, and the index in `order` of one
        of its occurrences. backwards: the last ids of the text, in reverse order."""
        at = first_place(self.tokens, self.order, backwards)
        neighbours = [near for near in (at - 1, at) if 0 <= near < len(self.order)]
        return max((self._shared(backwards, int(self.order[near])), near) for near in neighbours)

    def _shared(self, backwards: list[int], position: int) -> int:
        return common_prefix(backwards, self.tokens[position : position + len(backwards)].tolist())

    def _following(self, position: int, k: int) -> list[int]:
        """Return at most k ids that follow a position, in the same document. position: an index of `tokens`."""
        ids: list[int] = self.tokens[max(0, position - k) : position][::-1].tolist()
        border = self.about.vocabulary
        return ids[: ids.index(border)] if border in ids else ids


def _most_frequent(followings: list[list[int]], k: int) -> list[int]:
    """Return at most k drafts. followings: the ids that follow each occurrence. Each draft is the most frequent next
    token among the occurrences that agree with the drafts before it."""
    drafts: list[int] = []
    for depth in range(k):
        votes = Counter(following[depth] for following in followings if len(following) > depth)
        if not votes:
            break
        token = min(votes, key=lambda one: (-votes[one], one))
        drafts.append(token)
        followings = [one for one in followings if len(one) > depth and one[depth] == token]
    return drafts


def _smallest(most: int) -> type[np.unsignedinteger]:
    return next(kind for kind in (np.uint16, np.uint32, np.uint64) if most <= np.iinfo(kind).max)


def _about(file: Path) -> About:
    values, names = read_json(file), {item.name for item in fields(About)}
    if values.get("format") != FORMAT:
        raise ValueError(
            f"{file}: format is {values.get('format')!r}, but this version of cotrain reads {FORMAT}: make the "
            "datastore again with this version, or use the version that wrote it"
        )
    if wrong := wrong_keys(values, names):
        raise ValueError(f"{file}: {wrong}: make the datastore again")
    return About(**values)


def _mapped(file: Path) -> NDArray[np.unsignedinteger]:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{file} cannot be read ({error}): make the datastore again") from error
