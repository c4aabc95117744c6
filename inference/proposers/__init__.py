"""Proposer kinds: found by name in `KINDS`, and most of them imported when they are asked for."""

from importlib import import_module

from inference.proposers.base import Proposer
from inference.proposers.independent import Independent
from inference.proposers.parallel import Parallel
from inference.proposers.retrieval import NGram

__all__ = ["KINDS", "Independent", "NGram", "Parallel", "kind_of"]

KINDS = {  # as the metadata of a draft folder names them -> module:class
    "independent": "inference.proposers.independent:Independent",
    "conditioned": "inference.proposers.conditioned:Conditioned",
    "hydra": "inference.proposers.hydra:Hydra",
    "eagle": "inference.proposers.eagle:Eagle",
    "p_eagle": "inference.proposers.p_eagle:PEagle",
    "early_exit": "inference.proposers.early_exit:EarlyExit",
    "medusa": "inference.proposers.medusa:Medusa",
    "quantised": "inference.proposers.quantised:Quantised",
    "two_levels": "inference.proposers.two_levels:TwoLevels",
    "parallel": "inference.proposers.parallel:Parallel",
    "ngram": "inference.proposers.retrieval:NGram",
    "retrieval": "inference.proposers.retrieval:Retrieval",
    "hybrid": "inference.proposers.hybrid:Hybrid",
    "other_tokenizer": "inference.proposers.other_tokenizer:OtherTokenizer",
}


def kind_of(name: str) -> type[Proposer]:
    """The class of a kind. Raises ValueError for an unknown one."""
    if name not in KINDS:
        raise ValueError(f"kind: there is no {name!r} proposer; there are {', '.join(KINDS)}")
    module, _, found = KINDS[name].partition(":")
    kind: type[Proposer] = getattr(import_module(module), found)
    return kind
