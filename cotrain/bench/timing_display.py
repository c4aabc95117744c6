"""The display of a timing, which ends when the interval of the speed-up is narrow, or time is over."""

import time
from math import inf

from cotrain.progress_display import Display


class TimingDisplay(Display):
    """In batches, or, with an end on the clock (until < inf), in seconds that it may take."""

    def __init__(self, batches: int, until: float) -> None:
        self.limited, self.near, self.first = until < inf, "no interval yet", time.perf_counter()
        self.seconds = max(until - self.first, 0.0)
        total, unit = (self.seconds, "s at most") if self.limited else (batches, "batches")
        super().__init__("bench: timing", total, unit)

    def known(self, _: int, within: float) -> None:
        """How near the ends of the interval are to the value, as a share of it."""
        if within < inf:
            self.near = f"interval within {100 * within:.0f} % of the speed-up"

    def turned(self, done: int) -> None:
        """So many batches were timed."""
        if not self.limited:
            self.to(done, self.near)
            return
        taken, note = time.perf_counter() - self.first, f"{done} batches, {self.near}"
        if taken > self.seconds:
            note += ", time is over: the fewest that tell something come all the same"
        self.to(min(taken, self.seconds), note)
