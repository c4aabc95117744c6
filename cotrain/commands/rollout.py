"""Command `cotrain rollout`. It samples texts of the target, for training or for evaluation."""

import sys
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.commands.served_pair import refuse_pair
from cotrain.config.settings import RolloutConfig, from_target, sampling
from cotrain.data.prompt_rows import Source, prompt_tokens, said
from cotrain.data.sequence_tasks import LONGEST
from cotrain.data.sources import sources_of
from cotrain.errors import UserError, user_errors
from cotrain.rollout.training_texts import beside, start_of
from cotrain.run_folder import held
from cotrain.training.job import models, sample_prompts, sampled, settle, source, template_of
from cotrain.training.preconditions import fits, holds, outline, server
from inference.models.quantisation import refuse_quantisation


def run(cfg: RolloutConfig) -> None:
    """Sample the texts of one split, `cfg.kind`, at the regime's temperature, and write them to `output`."""
    if cfg.rollout.rounds > 1:
        raise UserError("rollout.rounds: only cotrain train reads it, because it trains a draft between samplings; "
                        "leave it out")  # fmt: skip
    settle(cfg.threads, cfg.rollout.seed)
    with held(cfg.output) as folder:
        asked, loaded, without_weights = cfg.rollout, None, _checked(cfg)
        if from_target(cfg.data):
            loaded = models(cfg)
            sample_prompts(cfg, *loaded, Path(asked.folder or folder))
        prompts = _prompts(cfg, *without_weights)
        prompts.prompts(asked.texts if cfg.kind == "train" else asked.held_out_texts, asked.prompt_tokens, asked.seed)
        target, tokenizer = loaded or models(cfg)
        texts = sampled(cfg, target, tokenizer, folder, cfg.draft.path)
        path = texts.sample(cfg.kind, sampling(cfg.regime), prompts)
    print(f"wrote {beside(path, 'parquet')}")


def _checked(cfg: RolloutConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the target without storage, and its tokenizer. Raises UserError if target, draft or server cannot be
    used."""
    with user_errors():
        target, tokenizer = outline(cfg.target.path, cfg.target.trust_remote_code)
        refuse_quantisation(cfg.target.path, cfg.quantisation.kind, target.config)
        if cfg.rollout.url:
            server("rollout.url", cfg.rollout.url, sampling(cfg.regime))
        if cfg.draft.path:
            refuse_pair(cfg.draft.path, cfg.target.path, cfg.target.trust_remote_code)
    return target, tokenizer


def _prompts(cfg: RolloutConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Source:
    """Return the source of the prompts. It is read before weights are loaded. target: without storage. Raises UserError
    if the data cannot be used."""
    with user_errors():
        asked, room = cfg.rollout, holds(target.config)
        if not asked.prompt_tokens and target.config.is_encoder_decoder and not cfg.data.path:
            asked.prompt_tokens = LONGEST
        splits = {"train": None, cfg.kind: None} if cfg.data.path else ()
        texts = sources_of(cfg.data, splits, template_of(cfg, target, tokenizer), target.config.is_encoder_decoder)
        if not asked.prompt_tokens:
            after = 0 if target.config.is_encoder_decoder else asked.new_tokens
            train = texts.get("train")
            asked.prompt_tokens = prompt_tokens(train, room - after, [texts[cfg.kind]] if train else [])
        fits("rollout.prompt_tokens", asked.prompt_tokens, "rollout.new_tokens", asked.new_tokens, room,
             start_of(target))  # fmt: skip
        prompts = texts.get(cfg.kind) or source(cfg, cfg.kind, target, tokenizer)
        if cfg.kind != "train":
            train = texts.get("train") or source(cfg, "train", target, tokenizer)
            prompts = prompts.without(train.each(asked.prompt_tokens), asked.prompt_tokens)
        print(*said({cfg.kind: prompts}, asked.prompt_tokens), sep="\n", file=sys.stderr)
        return prompts
