"""`cotrain rollout`: sample texts of the target, to train and to be judged on."""

from pathlib import Path

from cotrain.config import RolloutConfig
from cotrain.data import source_of
from cotrain.job import models, sampled, settle
from cotrain.regimes import sampling
from cotrain.rollouts import beside
from inference.engine import ends_of


def run(cfg: RolloutConfig) -> None:
    """One set, of the regime's temperature and the kind asked for, in `output`."""
    settle(cfg.threads, cfg.rollout.seed)
    target, tokenizer = models(cfg)
    texts = sampled(cfg, target, tokenizer, Path(cfg.output), cfg.draft.path)
    source = source_of(cfg.data, cfg.kind, tokenizer, ends_of(target))
    path = texts.sample(cfg.kind, sampling(cfg.regime), source)
    print(f"wrote {beside(path, 'parquet')}")
