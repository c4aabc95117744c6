"""What a person sees while a command runs: its own words, no chatter of libraries."""

import logging
import warnings


def quiet() -> None:
    """Silence progress bars and tips of libraries."""
    import datasets
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    datasets.disable_progress_bars()
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed",
                 "lightning.pytorch.trainer.connectors.checkpoint_connector"):  # fmt: skip
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
