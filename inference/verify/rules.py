"""Verification rules as objects. The engine, its exactness checks and planners use them.

A rule verifies the drafts of a round (`verify`), and predicts how many drafts rounds accept, given the emitted text
(`reach`). The formulas are in `chain`, `tree`, `predict_chain` and `predict_tree`. A new rule is one more entry of
`RULES`, and its name in `cotrain.config.base`. A rows, N drafts, V vocabulary; B texts, T tokens, K drafts per round.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from inference.sampling import one_hot
from inference.verify import chain, predict_chain, predict_tree
from inference.verify.lossy_typical import lossy_typical
from inference.verify.tree import Tree, TreeVerification
from inference.verify.tree import coupled as coupled_tree
from inference.verify.tree import traversal as traversal_tree
from inference.verify.tree import tree as multi_round

Reach = Callable[[Tensor, Tensor, int | Tensor, Tensor | None], Tensor | None]
Branches = Callable[[Tensor, Tensor, Tensor, tuple[int, ...], Tensor, int], Tensor]
Verified = chain.Verification | TreeVerification


@dataclass(frozen=True)
class Rule:
    """A verification rule with its predictions. name: its name, for `Engine(verify=)`.

    verify(p, q, x, noise, k) -> `Verification`. p (A, N+1, V): target distributions; column 0 is before the first
    draft. q (A, N, V): draft distributions, None if all drafts were deterministic. x (A, N): drafts. k (A,): drafts per
    row. noise: Gumbel noise (A, N+1, V) for a rule that is `shared`, else uniforms (A, N+1). A rule with `trees` also
    accepts `tree=`, the shape of the drafts. Then column i + 1 of p is the distribution after node i, and the
    verification has a `path` (A, D), D levels: the accepted nodes, then -1.

    reach(logp, logq, k, lengths) -> (B, T, K+1): P(a round that starts at token t accepts at least n drafts | the
    text), or None if acceptance depends on the noise that generated the text. logp (B, T), logq (B, T) or (B, T, K):
    log p and log q of the text's tokens; entry (t, j) is for token t as draft j (0-based). k: drafts per round, an int,
    (B,) or (B, T). lengths (B,): tokens in each text, None for T.

    branches(p, q, x, parents, k, seed) -> (A, D+1), for one round per row with a tree of sampled children: entry n is
    P(the round accepts at least n nodes | the text). x (A, D): the text's next tokens. p, q (A, D, V): the target's and
    the draft's distributions of these tokens. k (A,): number of nodes in use. None if there is no such prediction.

    shared: whether drafts are drawn with the noise of the target's own tokens, keyed by position. trees: whether
    `verify` accepts trees. exact: whether the text's distribution is the target's; if not, reports say so whatever the
    checks measure.
    """

    name: str
    verify: Callable[..., Any]
    reach: Reach
    branches: Branches | None = None
    shared: bool = False
    trees: bool = False
    exact: bool = True

    def require(self, who: object, tree: object) -> None:
        """Raise ValueError if `tree` is a tree of drafts (not None) and this rule verifies only chains. who: the
        proposer, which the message names."""
        if tree is not None and not self.trees:
            others = ", ".join(name for name, rule in RULES.items() if rule.trees) or "no rule here"
            raise ValueError(
                f"verify={self.name} verifies only chains, but {type(who).__name__} drafts trees, which need "
                f"verify= one of {others}"
            )


def _token(p: Tensor, q: Tensor | None, x: Tensor, u: Tensor, k: Tensor) -> chain.Verification:
    return chain.token(p, _draft_probs(q, p, x), x, u[:, : x.shape[1]], k)


def _block(p: Tensor, q: Tensor | None, x: Tensor, u: Tensor, k: Tensor) -> chain.Verification:
    return chain.block(p, _draft_probs(q, p, x), x, u[:, : x.shape[1]], k)


def _match(p: Tensor, q: Tensor | None, x: Tensor, u: Tensor, k: Tensor) -> chain.Verification:
    return chain.match(p, x, u[:, : x.shape[1] + 1], k)


def _coupled(p: Tensor, q: Tensor | None, x: Tensor, g: Tensor, k: Tensor, tree: Tree | None = None) -> Verified:
    if tree is None:
        return chain.coupled(p, x, g[:, : x.shape[1] + 1], k)
    depths = tree.on(p.device).depths.clamp(max=g.shape[1] - 1).expand(len(x), -1)
    return coupled_tree(p, x, tree.shape, g.gather(1, depths.unsqueeze(-1).expand(-1, -1, g.shape[-1])), k)


def _tree(p: Tensor, q: Tensor | None, x: Tensor, u: Tensor, k: Tensor, tree: Tree | None = None) -> Verified:
    return _token(p, q, x, u, k) if tree is None else multi_round(p, q, x, tree.shape, _uniforms(u, x), k)


def _traversal(p: Tensor, q: Tensor | None, x: Tensor, u: Tensor, k: Tensor, tree: Tree | None = None) -> Verified:
    return _block(p, q, x, u, k) if tree is None else traversal_tree(p, q, x, tree.shape, _uniforms(u, x), k)


def _typical(p: Tensor, q: Tensor | None, x: Tensor, u: Tensor, k: Tensor, tree: Tree | None = None) -> Verified:
    if tree is not None:
        return lossy_typical(p, x, tree.shape, k)
    verification = lossy_typical(p, x, tuple(range(-1, x.shape[1] - 1)), k)
    return chain.Verification(verification.accepted, verification.probs)


def _uniforms(u: Tensor, x: Tensor) -> Tensor:
    """Return the uniforms u (A, n) as (A, N), with the N of x (A, N): cut, or with 1 for nodes that no row drafts."""
    return pad(u, (0, max(0, x.shape[1] - u.shape[1])), value=1.0)[:, : x.shape[1]]


def _draft_probs(q: Tensor | None, p: Tensor, x: Tensor) -> Tensor:
    """Return the draft's distributions q (A, N, V); if q is None, the one-hot distributions at x (A, N), in the dtype
    of p (A, N+1, V)."""
    return one_hot(x, p[:, :-1]) if q is None else q


def _token_reach(logp: Tensor, logq: Tensor, k: int | Tensor, lengths: Tensor | None) -> Tensor:
    return predict_chain.reach(predict_chain.r_from(_wide(logp, logq), logq), k, lengths)


def _block_reach(logp: Tensor, logq: Tensor, k: int | Tensor, lengths: Tensor | None) -> Tensor:
    return predict_chain.reach_block(predict_chain.l_from(_wide(logp, logq), logq), k, lengths)


def _match_reach(logp: Tensor, logq: Tensor, k: int | Tensor, lengths: Tensor | None) -> Tensor:
    """Return the reach (B, T, K+1) under `match`: P(a round that starts at token t accepts at least n drafts | the
    text). A draft is accepted if it is the target's own draw x, so with probability q(x). logq (B, T) or (B, T, K).
    logp is not used."""
    return predict_chain.reach(logq.exp(), k, lengths)


def _unknown_reach(*_: object) -> None:
    """Return None: acceptance depends on the noise that generated the text."""


def _wide(logp: Tensor, logq: Tensor) -> Tensor:
    """Return logp (B, T), or as (B, T, 1) if logq is (B, T, K)."""
    return logp.unsqueeze(-1) if logq.ndim > logp.ndim else logp


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("token", _token, _token_reach),
        Rule("block", _block, _block_reach),
        Rule("match", _match, _match_reach),
        Rule("coupled", _coupled, _unknown_reach, shared=True, trees=True),
        Rule("tree", _tree, _token_reach, predict_tree.by_levels, trees=True),
        Rule("traversal", _traversal, _block_reach, predict_tree.traversal_by_levels, trees=True),
        Rule("lossy_typical", _typical, _unknown_reach, trees=True, exact=False),
    )
}


def rule_of(verify: str | Rule) -> Rule:
    """Return the rule of this name, or `verify` itself if it is a rule. Raises ValueError for an unknown name."""
    if isinstance(verify, Rule):
        return verify
    if verify not in RULES:
        raise ValueError(f"verify: there is no rule {verify!r}; give one of {', '.join(RULES)}")
    return RULES[verify]
