"""What a look-up finds."""

from typing import NamedTuple


class Match(NamedTuple):
    """drafts: ids that followed before, at most as many as were asked for; length: tokens of the text's end that stood
    there before, 0 where none did; places: how many times they did; share: of those looked at, how many go on with
    the first draft, in (0, 1], 0 without drafts; stored: they stood in a datastore, not in the text itself."""

    drafts: list[int]
    length: int = 0
    places: int = 0
    share: float = 0.0
    stored: bool = False


NONE = Match([])
