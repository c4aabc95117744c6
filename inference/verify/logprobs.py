"""Log-probabilities of the tokens that a round emits, as one tensor.

A rows, N drafts per row, D drafts on the longest path (D = N for a chain), V vocabulary, m likeliest tokens.
"""

import torch
from torch import Tensor

from inference.sampling import wide
from inference.verify.tree import likeliest


def logprobs(
    logits: Tensor, p: Tensor, path: Tensor | None, x: Tensor, accepted: Tensor, last: Tensor, m: int
) -> Tensor:
    """Return the log-probabilities of the tokens that a round may emit, (A, 2, 2, D+1, 1+m), float64: raw and
    processed; for each, ids and their log-probabilities; for each position, the emitted token and the m likeliest.

    logits, p (A, N+1, V): of the target pass, and after the settings; column 0 comes after the anchor, column i + 1
    after draft i. path (A, D): the accepted nodes of a tree, then -1; None for a chain, whose drafts are all on the
    path. x (A, D): the drafts on the path. accepted (A, 1): number of accepted drafts. last (A, 1): the token after
    them. Entries after a row's last token have no meaning.
    """
    if path is not None:
        columns = torch.nn.functional.pad(path.clamp(min=0) + 1, (1, 0)).unsqueeze(-1).expand(-1, -1, p.shape[-1])
        logits, p = logits.gather(1, columns), p.gather(1, columns)
    tokens = torch.cat((x, last), 1).scatter(1, accepted, last).clamp(0, p.shape[-1] - 1)  # (A, D+1)
    parts = [_with_likeliest(scores, tokens, m) for scores in (wide(logits).log_softmax(-1), p.log())]
    return torch.stack(parts, 1)


def _with_likeliest(scores: Tensor, tokens: Tensor, m: int) -> Tensor:
    """Return ids and scores of the tokens (A, D+1) and of the m likeliest at each position, (A, 2, D+1, 1+m). scores
    (A, D+1, V)."""
    ids = tokens.unsqueeze(-1)
    if m:
        lowest = torch.finfo(scores.dtype).min  # `likeliest` marks the tokens that it has returned by -inf
        ids = torch.cat((ids, likeliest(scores.clamp(min=lowest), m)), -1)
    return torch.stack((ids.double(), scores.gather(-1, ids).double()), 1)
