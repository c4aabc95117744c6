"""Training curves from a run's TensorBoard event files."""

from collections.abc import Iterator
from pathlib import Path

Curve = list[tuple[int, float]]  # (step, value), steps ascending
MOST = 400  # points of a curve that are drawn


def read(folder: Path) -> dict[str, Curve]:
    """Every scalar by its tag, of a run that was resumed too, under another name perhaps: of a step that was made
    twice, what came last. Nothing where there are no event files, and what was written of one that ends in the middle
    of a record."""
    files = sorted(folder.rglob("*tfevents*"), key=lambda file: file.name)  # in the order of time
    if not files:
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, {}).update({event.step: event.value for event in events.Scalars(name)})
    return {name: list(_finite(values)) for name, values in found.items()}


def _finite(values: dict[int, float]) -> Iterator[tuple[int, float]]:
    """In the order of steps, without NaN and infinity, which are no places on an axis."""
    return ((step, value) for step, value in sorted(values.items()) if abs(value) < float("inf"))


def thinned(curve: Curve, most: int = MOST) -> Curve:
    """At most so many points, evenly, the last one among them."""
    every = -(-len(curve) // most)
    return curve[::-1][:: max(every, 1)][::-1]
