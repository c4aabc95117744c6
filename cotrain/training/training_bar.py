"""The display of a training."""

from typing import Any

from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar

from cotrain.progress_display import Display
from cotrain.training.progress import Progress

REFRESH, SHOWN = 5, ("loss", "acceptance")  # steps; what is shown of a step


class Bar(ProgressBar):
    """One display for the whole training in steps, with time left; a resumed one begins where the run does. Validations
    have none of their own."""

    def __init__(self, progress: Progress | None = None) -> None:
        super().__init__()
        self.progress, self.hidden = progress, False
        self.display: Display | None = None

    def disable(self) -> None:
        """On all processes but the first."""
        self.hidden = True

    def enable(self) -> None:
        self.hidden = False

    def total(self, trainer: Any) -> int:
        """Steps that there will be."""
        return self.progress.expected(trainer.global_step) if self.progress else trainer.max_steps

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.display = Display("training", self.total(trainer), "steps", trainer.global_step, hidden=self.hidden)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        step, display = trainer.global_step, self.display
        if display and step > display.done and (step % REFRESH == 0 or step >= trainer.max_steps):
            display.to(step, self._note(trainer, module), self.total(trainer))

    def on_train_end(self, *_: Any) -> None:
        self._close()

    def on_exception(self, *_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.display:
            self.display.close()
        self.display = None

    def _note(self, trainer: Any, module: Any) -> str:
        found = {name: value for name, value in self.get_metrics(trainer, module).items() if name != "v_num"}
        found |= {name: value for name, value in getattr(module, "found", {}).items() if name in SHOWN}
        return ", ".join(f"{name} {value:.3f}" for name, value in found.items() if isinstance(value, float))
