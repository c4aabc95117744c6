"""Verification of the drafts of one round, a chain or a tree. It applies the rule, draws the next token, and fills the
table that the host reads.

A rows, N drafts per row, D drafts on the longest path (D = N for a chain), V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference.models.replay import Replay
from inference.proposers.base import Proposal
from inference.round import DecodingRound
from inference.sampling.distributions import is_missing, wide
from inference.trace import COLUMNS, trace
from inference.verify.logprobs import logprobs
from inference.verify.rules import RULES
from inference.verify.tree import usable_lengths


class RoundResult(NamedTuple):
    """The result of a round. path (A, D): the accepted nodes of a tree from the top down, then -1; None for a chain.
    table (A, COLUMNS + D), int64: one line per row, with the columns

    - number of drafts accepted
    - the token after them
    - number of drafts that have distributions; for a tree, the number of its levels that have some
    - 1 if the token after the drafts has no distribution (then the second column is no token)
    - 1 if a position of the target's pass has no distribution
    - 1 if a draft was rejected after the accepted ones
    - D drafts: all of a chain, or the accepted path of a tree
    - in a recorded round, the columns of `trace.trace`

    logprobs (A, 2, 2, D+1, 1+m): those of the tokens (`verify.logprobs`), or None if no row asks for them.
    """

    table: Tensor
    path: Tensor | None = None
    logprobs: Tensor | None = None


def verify(
    replay: Replay,
    round: DecodingRound,
    logits: Tensor,
    proposal: Proposal,
    asked: Tensor,
    traced: bool = False,
    top: int | None = None,
) -> RoundResult:
    """Verify the drafts of a round, and return the result. `replay` computes it: as a CUDA graph, or directly.

    logits (A, N+1, V): the target's; column 0 comes after each row's anchor (the last token of its text), column i + 1
    after draft i. asked (A,): number of drafts of each row. traced: whether to append the columns of `trace.trace` to
    the table. top: number of likeliest tokens in the result's `logprobs`, None for no `logprobs`. proposal: the drafts,
    N per row.
    """
    tree, k, given = proposal.tree, proposal.k, {"logits": logits, "x": proposal.x, "length": asked}
    given |= {} if proposal.q is None else {"q": proposal.q}

    def run(round: DecodingRound, given: Mapping[str, Any], _: int) -> RoundResult:
        drafts = Proposal(given["x"], given.get("q"), k, tree)
        return verified(round, given["logits"], drafts, given["length"], traced, top)

    name = "verify", traced, top, None if tree is None else tree.shape
    return replay.of_round(round, name, given, run, reads={"tree": tree})


def verified(
    round: DecodingRound,
    logits: Tensor,
    proposal: Proposal,
    asked: Tensor,
    traced: bool = False,
    top: int | None = None,
) -> RoundResult:
    """Verify the drafts of a round by tensor operations only, and return the result. The arguments are those of
    `verify`."""
    x, q, tree, rule = proposal.x, proposal.q, proposal.tree, round.rule
    if tree is None and not traced and top is None and (table := _by_operator(round, logits, proposal, asked)).numel():
        return RoundResult(table)
    p = round.target_probs(logits, x, proposal.k, tree)
    length = usable_lengths(p, q, asked, tree)
    shape = {} if tree is None else {"tree": tree}
    verification = rule.verify(p, q, x, round.test_noise, length, **shape)
    last = round.last(verification.probs)
    result = round_result(p, proposal, verification, last, length, asked)
    if top is not None:
        accepted, token, drafts = result.table[:, :1], result.table[:, 1:2], result.table[:, COLUMNS:]
        result = result._replace(logprobs=logprobs(logits, p, result.path, drafts, accepted, token, top))
    if not traced:
        return result
    u = None if rule.shared else round.test_noise
    return result._replace(table=torch.cat((result.table, trace(p, proposal, u, length, result.path)), 1))


def _by_operator(round: DecodingRound, logits: Tensor, proposal: Proposal, asked: Tensor) -> Tensor:
    """Return the table of a round with a chain by an operator of `kernels.cpp`. It is empty if the operator is not
    loaded, for other rules than `token` and `block`, if the target's distributions depend on more than temperature and
    top-p, and if one is missing."""
    x, rule, regimes = proposal.x, round.rule, round.batch.regimes
    q = logits[:, :0] if proposal.q is None else proposal.q
    plain = not (round.batch.penalties or regimes.max_top_k or regimes.any_min_p)
    floats = logits.dtype == q.dtype == torch.float32 and logits.device.type == "cpu"
    if not (plain and floats and rule in (RULES["token"], RULES["block"]) and hasattr(torch.ops.inference, "verified")):
        return x[:0]
    given, u = (logits, q, x, asked, regimes.temperature, regimes.tails), (round.test_noise, round.last_noise)
    return torch.ops.inference.verified(*given, *u, rule.name == "block")


def round_result(
    p: Tensor, proposal: Proposal, verification: Any, last: Tensor, length: Tensor, asked: Tensor
) -> RoundResult:
    """Return the result of a round, with its table filled.

    p (A, N+1, V): the target's distributions. proposal: the drafts, x (A, N). verification: the rule's result, with a
    `path` if the proposal is a tree. last (A,): the token after the accepted drafts. length (A,): number of each row's
    drafts that have distributions. asked (A,): number of each row's drafts.
    """
    missing, accepted = is_missing(p), verification.accepted.unsqueeze(1)  # (A, N+1), (A, 1)
    stains = missing.any(1, keepdim=True)
    if proposal.tree is None:
        k = length.unsqueeze(1)
        columns = accepted, last.unsqueeze(1), k, missing.gather(1, accepted), stains, accepted < k
        return RoundResult(torch.cat((*columns, proposal.x), 1))
    path, end = verification.path, (verification.path + 1).amax(1, keepdim=True)  # a node comes after its ancestors
    used = torch.arange(p.shape[1], device=p.device) <= length.unsqueeze(1)
    depth = (proposal.tree.on(p.device).depths * used).amax(1, keepdim=True)
    stains = stains | (length < asked).unsqueeze(1)
    rejected = (used[:, 1:] & (proposal.tree.on(p.device).parents + 1 == end)).any(1, keepdim=True)
    columns = accepted, last.unsqueeze(1), depth, missing.gather(1, end), stains, rejected
    return RoundResult(torch.cat((*columns, proposal.x.gather(1, path.clamp(min=0))), 1), path)


def reason(round: DecodingRound, row: int, logits: Tensor, path: Tensor | None, n: int) -> str:
    """Return a message that says why a row has no distribution after its n accepted drafts. row: index among the active
    rows. logits (A, N+1, V): of the target pass; column 0 comes after the anchor, column i + 1 after draft i. path (A,
    D): the accepted nodes of a tree, None for a chain. This reads from the device."""
    if row in round.messages:
        return round.messages[row]
    position = f"after {len(round.texts[row])} tokens"
    if not bool(wide(logits[row, column_of(path, row, n)]).amax().isfinite()):
        return (
            f"{position}: the target's logits are NaN, infinite or all -inf; load it in float32, or check its weights"
        )
    return (
        f"{position}: no token is left: Sampling.banned, banned_first, logit_bias, min_new_tokens or processors "
        "forbid every token whose logit is finite; allow one of them"
    )


def column_of(path: Tensor | None, slot: int, n: int) -> int:
    """Return the column of the target pass that comes after the last accepted draft of a row: 0 for the anchor, i + 1
    for draft i. slot: index among the active rows. path (A, D): the accepted nodes of a tree, None for a chain. n:
    number of accepted drafts of the row. This reads from the device if there is a path."""
    return n if path is None else int(path[slot].amax()) + 1
