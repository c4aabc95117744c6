"""The `speculative_config` with which vLLM uses a draft."""

from typing import Any


def draft_model(
    folder: str, k: int, objective: str = "sampled", method: str = "draft_model", parallel: bool = False
) -> dict[str, Any]:
    """Return vLLM's speculative_config for a draft folder. method: vLLM's name for the kind of draft; "draft_model" is
    a causal LM. k: drafts per round. objective: "sampled" to draw drafts, "greedy" (vLLM's default) for the likeliest
    tokens. parallel: whether to draft all tokens in one pass, at the mask token of the draft's config.json."""
    sample = "probabilistic" if objective == "sampled" else "greedy"
    config = {"method": method, "model": folder, "num_speculative_tokens": k, "draft_sample_method": sample}
    return config | ({"parallel_drafting": True} if parallel else {})


def custom_class(k: int) -> dict[str, Any]:
    """Return vLLM's speculative_config for look-up with k drafts per round, with or without a model. vLLM's environment
    must name the draft folder in COTRAIN_DRAFT."""
    return {"method": "custom_class", "model": "inference.servers.vllm_lookup.Lookup", "num_speculative_tokens": k}
