"""Tokenizer of the bundled target. It is a byte-level BPE, trained on the embedded corpora."""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END, PAD = "<|endoftext|>", "<|pad|>"


def train_tokenizer(texts: Iterable[str], size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `size` tokens. Id 0 ends a text and id 1 is padding."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, PAD],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the number of UTF-8 bytes of each id, (V,) int64. Special tokens have 0. The tokenizer must be a
    byte-level BPE."""
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    # the byte-level alphabet writes one character per byte
    return torch.tensor([0 if i in special else len(name) for i, name in enumerate(names)])
