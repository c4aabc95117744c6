"""A configured regime as the engine and the losses take it."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from cotrain.config.groups import Regime, ServedRegime
from cotrain.config.settings import TrainConfig
from inference import Sampling
from inference.sampling import keep_top_k, keep_top_p


def sampling(regime: Regime | ServedRegime, temperature: float | None = None) -> Sampling:
    """The regime as the engine takes it, at its own temperature or another; a served one as `served_pair.as_trained`
    filled it in."""
    temperature = regime.temperature if temperature is None else temperature
    assert temperature is not None and regime.top_k is not None and regime.top_p is not None
    return Sampling(temperature, regime.top_k, regime.top_p)


def learnt(cfg: TrainConfig) -> list[float]:
    """Temperatures that a run learns at, as many texts of each: those that are asked for, else those that a draft is
    told, else the regime's."""
    return list(cfg.rollout.train_temperatures) or list(cfg.draft.temperatures) or [cfg.regime.temperature]


def judged(cfg: TrainConfig) -> list[float]:
    """Temperatures that a run is judged at, rising: wherever it learns, and in the regime, which ranks checkpoints."""
    return sorted({*cfg.rollout.temperatures, *learnt(cfg), cfg.regime.temperature})


def truncation(regime: Regime) -> Callable[[Tensor], Tensor] | None:
    """What the regime cuts from a distribution, logits (n, V) -> (n, V), or None."""
    cuts: list[Callable[[Tensor], Tensor]] = [partial(keep_top_k, k=regime.top_k)] if regime.top_k else []
    cuts += [partial(keep_top_p, p=regime.top_p)] if regime.top_p < 1 else []
    if not cuts:
        return None
    return cuts[0] if len(cuts) == 1 else lambda logits: cuts[1](cuts[0](logits))
