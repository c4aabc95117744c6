"""The kinds of draft, by the name in a draft folder's metadata. Each kind is imported on first use."""

from importlib import import_module
from typing import Any

KINDS = {  # name -> module:class
    "independent": "inference.proposers.independent:Independent",
    "conditioned": "inference.proposers.conditioned:Conditioned",
    "hydra": "inference.proposers.heads:Hydra",
    "eagle": "inference.proposers.eagle:Eagle",
    "p_eagle": "inference.proposers.p_eagle:PEagle",
    "block": "inference.proposers.block:Block",
    "early_exit": "inference.proposers.early_exit:EarlyExit",
    "medusa": "inference.proposers.heads:Medusa",
    "quantised": "inference.proposers.quantised:Quantised",
    "two_levels": "inference.proposers.two_levels:TwoLevels",
    "parallel": "inference.proposers.parallel:Parallel",
    "ngram": "inference.proposers.retrieval:NGram",
    "retrieval": "inference.proposers.retrieval:Retrieval",
    "hybrid": "inference.proposers.hybrid:Hybrid",
    "hybrid_exit": "inference.proposers.hybrid:HybridExit",
    "hybrid_quantised": "inference.proposers.hybrid:HybridQuantised",
}


def kind_of(name: str) -> Any:
    """Return the class for a kind of draft, a subclass of `proposers.base.Proposer`. name: a key of `KINDS`. Raises
    ValueError for an unknown kind."""
    if name == "other_tokenizer":
        raise ValueError("kind: other_tokenizer is no longer supported; give a draft with the target's tokenizer")
    if name not in KINDS:
        raise ValueError(f"kind: there is no kind of draft {name!r}; give one of {', '.join(KINDS)}")
    module, _, name = KINDS[name].partition(":")
    return getattr(import_module(module), name)
