"""`cotrain rollout`: sample texts of the target, to train and to be judged on."""

from pathlib import Path

from cotrain.config import RolloutConfig
from cotrain.errors import UserError
from cotrain.job import models, sampled, settle, source
from cotrain.regimes import sampling
from cotrain.rollouts import beside


def run(cfg: RolloutConfig) -> None:
    """One set, of the regime's temperature and the kind asked for, in `output`."""
    if cfg.rollout.on_draft or cfg.rollout.rounds > 1:
        raise UserError("rollout.rounds, rollout.on_draft: for cotrain train, whose draft learns meanwhile")
    settle(cfg.threads, cfg.rollout.seed)
    target, tokenizer = models(cfg)
    texts = sampled(cfg, target, tokenizer, Path(cfg.output), cfg.draft.path)
    path = texts.sample(cfg.kind, sampling(cfg.regime), source(cfg, cfg.kind, target, tokenizer))
    print(f"wrote {beside(path, 'parquet')}")
