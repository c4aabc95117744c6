"""Training on the stand-in device: every kind of draft, by cotrain's own trainer, callbacks, loss and evaluation; what
a step reads; and every command that uses a device."""

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cotrain.cli import main
from cotrain.errors import NotFinite
from inference import Engine, Sampling
from inference.policy import Fixed
from tests import standin
from tests.folders import own_texts, target_folder
from tests.gpu_counts import PLACES, STEPS, TRAINED, Training, training_counts

pytestmark = pytest.mark.filterwarnings("error:.*CUDA graphs failed", "ignore::UserWarning")
