"""A part of the page: what is shown, or why there is nothing to show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cotrain.page.loaded_run import Run
from cotrain.page.markup import Html, joined, tag


@dataclass(frozen=True)
class Section:
    """name: its anchor; body: None where the runs lack what it is of; lacking: why, and what would bring it."""

    name: str
    title: str
    body: Html | None
    lacking: str = ""

    def html(self) -> Html | None:
        if self.body is None:
            return None
        return tag("section", tag("h2", self.title), self.body, id=self.name, aria_label=self.title)


def by_run(runs: Sequence[Run], part: Callable[[Run], Html | None]) -> Html | None:
    """A part of each run that has it, under the run's name where there are several; None where no run has it."""
    found = [(run, body) for run in runs if (body := part(run)) is not None]
    if not found:
        return None
    heads = [tag("h3", run.name) if len(runs) > 1 else None for run, _ in found]
    return joined([tag("div", head, body, class_="run") for head, (_, body) in zip(heads, found, strict=True)])
