"""`cotrain rollout`: sample texts of the target, to train and to be judged on."""

from pathlib import Path

from cotrain.config import RolloutConfig
from cotrain.data import blocks_of
from cotrain.job import settle
from cotrain.regimes import sampling
from cotrain.rollout import Ask
from cotrain.rollouts import beside
from cotrain.sets import Sampled
from cotrain.teacher import load_pair


def run(cfg: RolloutConfig) -> None:
    """One set, of the regime's temperature and the kind asked for, in `output`."""
    settle(cfg.threads, cfg.rollout.seed)
    target, tokenizer = load_pair(
        cfg.target.path, cfg.quantisation.kind, cfg.target.dtype, cfg.target.trust_remote_code
    )
    ask = cfg.rollout
    wanted = Ask({"train": ask.texts, "held_out": ask.held_out_texts}, ask.prompt_tokens, ask.new_tokens)
    sampled = Sampled(target, tokenizer, Path(cfg.output), wanted, ask.rows, ask.seed,
                      cfg.data.path or "embedded")  # fmt: skip
    path = sampled.sample(cfg.kind, sampling(cfg.regime), blocks_of(cfg.data, cfg.kind, tokenizer))
    print(f"wrote {beside(path, 'parquet')}")
