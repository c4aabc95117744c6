"""Blocks of tokens, which the bundled target is pretrained on."""

from dataclasses import dataclass

import datasets
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from cotrain.data.sources import pack_blocks


@dataclass
class Blocks(Dataset[dict[str, torch.Tensor]]):
    """N blocks of T tokens each, cut from a stream of texts. A block may have parts of several texts (packed).

    ids (N, T): token ids. domain (N,): each block's index into `domains`. position_ids (N, T): the position of each
    token in its text; None if each block is one text.
    """

    ids: torch.Tensor
    domain: torch.Tensor
    domains: list[str]
    position_ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self.ids[index].long(), "domain": self.domain[index]}


def blocks_of(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Blocks:
    """Return rows (text, domain) as packed blocks of `length` tokens. Raises ValueError as `pack_blocks` does."""
    packed, domains = pack_blocks(texts, tokenizer, length), sorted(set(texts["domain"]))
    domain = torch.tensor([domains.index(name) for name in packed.domain])
    return Blocks(packed.ids.int(), domain, domains, packed.position_ids)
