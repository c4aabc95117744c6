"""Command `cotrain rollout`. It samples texts of the target, for training or for evaluation."""

from cotrain.commands.served_pair import refuse_pair
from cotrain.config.settings import RolloutConfig, sampling
from cotrain.data.prompt_rows import prompt_tokens
from cotrain.errors import UserError
from cotrain.rollout.training_texts import Source, beside
from cotrain.run_folder import held
from cotrain.teacher.target_model import refuse_quantisation
from cotrain.training.job import models, sampled, settle, source
from cotrain.training.preconditions import fits, holds, outline, server


def run(cfg: RolloutConfig) -> None:
    """Sample the texts of one split, `cfg.kind`, at the regime's temperature, and write them to `output`."""
    if cfg.rollout.on_draft or cfg.rollout.rounds > 1:
        raise UserError(
            "rollout.rounds, rollout.on_draft: only cotrain train reads them, "
            "because it trains a draft between samplings; leave them out"
        )
    settle(cfg.threads, cfg.rollout.seed)
    with held(cfg.output) as folder:
        asked, prompts = cfg.rollout, _prompts(cfg)
        prompts.prompts(asked.texts if cfg.kind == "train" else asked.held_out_texts, asked.prompt_tokens, asked.seed)
        target, tokenizer = models(cfg)
        texts = sampled(cfg, target, tokenizer, folder, cfg.draft.path)
        path = texts.sample(cfg.kind, sampling(cfg.regime), prompts)
    print(f"wrote {beside(path, 'parquet')}")


def _prompts(cfg: RolloutConfig) -> Source:
    """Return the source of the prompts. It is read before weights are loaded. Raises UserError if data, target, draft
    or server cannot be used."""
    try:
        target, tokenizer = outline(cfg.target.path, cfg.target.trust_remote_code)
        refuse_quantisation(cfg.target.path, cfg.quantisation.kind, target.config)
        if cfg.rollout.url:
            server("rollout.url", cfg.rollout.url)
        if cfg.draft.path:
            refuse_pair(cfg.draft.path, cfg.target.path, cfg.target.trust_remote_code)
        asked, room = cfg.rollout, holds(target.config)
        if not asked.prompt_tokens:
            train = source(cfg, "train", target, tokenizer) if cfg.data.path else None
            asked.prompt_tokens = prompt_tokens(train, room - asked.new_tokens)
        fits("rollout.prompt_tokens", asked.prompt_tokens, "rollout.new_tokens", asked.new_tokens, room)
        return source(cfg, cfg.kind, target, tokenizer)
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error
