"""Command `cotrain rollout`. It samples texts of the target, for training or for evaluation."""

import sys
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.commands.served_pair import refuse_pair
from cotrain.config.settings import RolloutConfig, from_target, sampling, truncation
from cotrain.data.prompt_rows import Source, said_of_rows
from cotrain.data.sources import sources_apart
from cotrain.errors import user_errors
from cotrain.evaluation.held_out import held_out
from cotrain.rollout.training_texts import beside, padded, read_rows, start_of
from cotrain.run_folder import held
from cotrain.teacher.target_model import served
from cotrain.training.assembly import CHECKED, warn_of_other_target
from cotrain.training.job import models, sample_prompts, sampled_texts, settle, template_of
from cotrain.training.preconditions import fill_prompt_tokens, fits, ids_of, outline, server
from inference.models.pretrained import longest_text
from inference.models.quantisation import refuse_quantisation


def run(cfg: RolloutConfig) -> None:
    """Sample texts for the split `cfg.kind` at the regime's temperature, and write them to `output`. With rollout.url=,
    warn if the server's texts do not look like texts of the target."""
    settle(cfg.threads, cfg.rollout.seed)
    with held(cfg.output) as folder:
        asked, loaded, without_weights = cfg.rollout, None, _checked(cfg)
        if from_target(cfg.data):
            loaded = models(cfg)
            sample_prompts(cfg, *loaded, Path(asked.folder or folder))
        prompts = _prompts(cfg, *without_weights)
        prompts.prompts(asked.texts if cfg.kind == "train" else asked.held_out_texts, asked.prompt_tokens, asked.seed)
        target, tokenizer = loaded or models(cfg)
        texts = sampled_texts(cfg, target, tokenizer, folder, cfg.draft.path)
        path = texts.sample(cfg.kind, sampling(cfg.regime), prompts.prompts, keep=True)
        if asked.url:
            read, head = served(target, ids_of(tokenizer))
            some = padded(read_rows(path), start_of(target)).spread(CHECKED)
            held_out_texts = held_out(read, some, cfg.regime.temperature, truncation(cfg.regime))
            warn_of_other_target(held_out_texts, head, target.device, asked.url)
    print(f"texts: {beside(path, 'parquet')}")


def _checked(cfg: RolloutConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the target without storage (no weights), and its tokenizer. Raises UserError if the target, the draft or
    the server cannot be used."""
    with user_errors():
        target, tokenizer = outline(cfg.target.path, cfg.target.trust_remote_code)
        refuse_quantisation(cfg.target.path, cfg.quantisation.kind, target.config)
        if cfg.rollout.url:
            server("rollout.url", cfg.rollout.url, sampling(cfg.regime))
        if cfg.draft.path:
            refuse_pair(cfg.draft.path, cfg.target.path, cfg.target.trust_remote_code)
    return target, tokenizer


def _prompts(cfg: RolloutConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Source:
    """Read the data before weights are loaded, and return the source of the prompts. target: without storage. If
    rollout.prompt_tokens is 0, it is set in `cfg`. Raises UserError if the data cannot be used."""
    with user_errors():
        asked, template, encoder = cfg.rollout, template_of(cfg, target, tokenizer), target.config.is_encoder_decoder
        limit = partial(fill_prompt_tokens, cfg, target, 0)
        prompts = sources_apart(cfg.data, {"train": None, cfg.kind: None}, template, encoder, limit)[cfg.kind]
        fits(
            "rollout.prompt_tokens",
            asked.prompt_tokens,
            "rollout.new_tokens",
            asked.new_tokens,
            longest_text(target.config),
            start_of(target),
        )
        print(*said_of_rows({cfg.kind: prompts}, asked.prompt_tokens), sep="\n", file=sys.stderr)
        return prompts
