"""Kinds of drafts, as small as a test can afford: every kind in this table passes the conformance suites."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from inference.drafts.published import fused
from inference.models.markov import MARKOV, put_markov_head
from inference.models.pretrained import decoder_layers, length_of
from inference.models.small_heads import RANK, VOCABULARY, fill, put_small_head
from inference.proposers import KINDS as REGISTERED
from inference.proposers import Independent, NGram, kind_of
from inference.proposers.base import Proposer
from inference.proposers.block import Block, BlockNetwork
from inference.proposers.conditioned import Conditioned, conditioned
from inference.proposers.eagle import Eagle, EagleNetwork
from inference.proposers.early_exit import EarlyExit, ExitNetwork, untrained_exit
from inference.proposers.heads import Hydra, HydraConfig, HydraNetwork, Medusa, MedusaConfig, MedusaNetwork
from inference.proposers.hybrid import LONGEST, Gate, Hybrid, HybridExit, HybridQuantised
from inference.proposers.p_eagle import PEagle, PEagleNetwork
from inference.proposers.parallel import Parallel
from inference.proposers.quantised import Quantised
from inference.proposers.retrieval import Retrieval
from inference.proposers.two_levels import TwoLevels
from tests.tiny import near

CONTRIBUTING = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"


@dataclass(frozen=True)
class Kind:
    """proposer: made for a tiny target, so that its drafts are often right and not always. Of a kind that drafts trees
    (`SHAPED`) it passes `shape` and `greedy` on. drawn: whether each draft is one draw of the round; others come out of
    a verification of the kind's own, whose distribution its own suite enumerates."""

    proposer: Callable[..., Proposer]
    drawn: bool = True


def example_code() -> str:
    """The code of CONTRIBUTING.md."""
    (code,) = re.findall(r"```python\n(# inference/.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), re.S)
    return str(code)


@cache
def example() -> dict[str, Any]:
    """What it defines."""
    found: dict[str, Any] = {}
    exec(compile(example_code(), str(CONTRIBUTING), "exec"), found)
    return found


def next_head(target: LlamaForCausalLM) -> Proposer:
    """A head for the token after the next, from the target's own: enough to be right now and then."""
    sizes = target.config.hidden_size, target.config.vocab_size
    head = torch.nn.Linear(*sizes, bias=False, dtype=target.dtype, device=target.device)
    with torch.no_grad():
        head.weight.copy_(0.5 * target.lm_head.weight)
    return example()["NextHead"](head)


def hybrid(target: LlamaForCausalLM) -> Hybrid:
    """Look-up drafts behind ends of one, three and more tokens that stood earlier, the model elsewhere."""
    found = [[float(n not in (0, 2))] * 4 for n in range(LONGEST + 1)]
    gate = Gate([found, found], [[[0.5] * 4] * (LONGEST + 1)] * 2, 0.1, 0.0)
    return Hybrid(Independent(near(target, 0.15)), Retrieval(shortest=1), gate)


def hybrid_exit(target: LlamaForCausalLM) -> HybridExit:
    return HybridExit(EarlyExit(exit_network(target), target), Retrieval(shortest=1), hybrid(target).gate)


def hybrid_quantised(target: LlamaForCausalLM) -> HybridQuantised:
    return HybridQuantised(Quantised(target), Retrieval(shortest=1), hybrid(target).gate)


def eagle(target: LlamaForCausalLM, noise: float = 0.1, made: Any = EagleNetwork, **settings: Any) -> Any:
    """Near to the target's last layer, norm and head. made: the class of the network."""
    torch.manual_seed(7)
    config = target.config
    network: EagleNetwork = (
        made(
            made.config_class(
                hidden_size=config.hidden_size,
                num_attention_heads=2,
                head_dim=config.hidden_size // 2,
                vocab_size=config.vocab_size,
                max_position_embeddings=length_of(config),
                **{"depths": 3, "eagle_aux_hidden_state_layer_ids": list(fused(config.num_hidden_layers)), **settings},
            )
        )
        .to(target.dtype)
        .eval()
    )
    with torch.no_grad():
        for weight in network.parameters():
            weight += noise * torch.randn_like(weight)
        network.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
        ids = torch.arange(0, config.vocab_size, 2)[: network.config.draft_vocab_size]
        if network.pruned:
            network.know(ids.tolist())
        if network.lm_head is not None:
            fill(network.lm_head, target.get_output_embeddings().weight[ids if network.pruned else slice(None)])
    return network.to(target.device)


def p_eagle(target: LlamaForCausalLM, noise: float = 0.1, **settings: Any) -> PEagleNetwork:
    """As `eagle`, whose last id is read as a mask."""
    return eagle(target, noise, PEagleNetwork, pard_token=target.config.vocab_size - 1, **settings)


def block(target: LlamaForCausalLM, noise: float = 0.1, **settings: Any) -> BlockNetwork:
    """As `eagle`, of two layers, changed at random; the Markov head too. The mask is the target's last id but one."""
    mask = {"mask_token_id": target.config.vocab_size - 2}
    network: BlockNetwork = eagle(
        target, noise, BlockNetwork, **{"num_hidden_layers": 2, "dflash_config": mask, **settings}
    )
    if network.markov_head is not None:
        with torch.no_grad():
            network.markov_head.markov_w2.weight += 0.5 * torch.randn_like(network.markov_head.markov_w2.weight)
    return network


def exit_network(target: LlamaForCausalLM, rank: int = 2, bits: int | None = None) -> ExitNetwork:
    """An exit behind the first layer but the last, changed at random, or in 4 bits."""
    torch.manual_seed(4)
    layers, changed = max(len(decoder_layers(target)) - 1, 1), 0 if bits else rank
    network = untrained_exit(target, layers, changed, 3, bits).to(target.device, target.dtype)
    with torch.no_grad():
        for weight in network.layers.parameters():
            weight += 0.1 * torch.randn_like(weight) if bits else 0.2 * torch.randn_like(weight) - weight
    return network


def medusa(target: LlamaForCausalLM, noise: float = 0.1, **settings: int) -> MedusaNetwork:
    """Two blocks a head, of which all heads say nearly what the target's own says."""
    torch.manual_seed(7)
    network = MedusaNetwork(MedusaConfig(**_sizes(target), num_hidden_layers=2, **settings))
    return _noisy(network, target, noise)


def hydra(target: LlamaForCausalLM, noise: float = 0.1) -> HydraNetwork:
    torch.manual_seed(7)
    network = HydraNetwork(HydraConfig(**_sizes(target)))
    return _noisy(network, target, noise)


def _sizes(target: LlamaForCausalLM) -> dict[str, int]:
    return {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size, "num_heads": 3}


def _noisy(network: Any, target: LlamaForCausalLM, noise: float) -> Any:
    network = network.to(target.dtype)
    with torch.no_grad():
        for weight in network.parameters():
            weight += noise * torch.randn_like(weight)
    return network.eval().to(target.device)


def masked(target: LlamaForCausalLM, noise: float = 0.15, depths: int = 4) -> LlamaForCausalLM:
    """A model near the target that reads its last id as a mask: at depth 0 often right, behind it now and then."""
    model = near(target, noise)
    model.config.pard_token, model.config.pard_depths = target.config.vocab_size - 1, depths
    return model


def conditioned_near(target: LlamaForCausalLM, noise: float = 0.15, spread: float = 0.4) -> LlamaForCausalLM:
    """A model near the target, told three temperatures, each with a scale of its own."""
    network: Any = conditioned(near(target, noise), [0.0, 0.7, 1.0])
    torch.manual_seed(9)
    with torch.no_grad():
        network.temperature_scale.weight.copy_(spread * torch.randn_like(network.temperature_scale.weight))
    return network


def parallel(target: LlamaForCausalLM, greedy: bool = False, **settings: Any) -> Parallel:
    return Parallel(masked(target), greedy, **settings)


def small(network: Any, tokens: int | None = None, rank: int | None = None) -> Any:
    """The causal LM itself with a small head, from its own; of a pruned vocabulary, every other token."""
    rows = network.get_output_embeddings().weight.detach()
    network.config.update({VOCABULARY: tokens, RANK: rank})
    head = put_small_head(network)
    head.begin(rows)
    if tokens:
        head.know(range(0, 2 * tokens, 2))
    return network


def chained(network: Any, rank: int = 3) -> Any:
    """The causal LM itself with a Markov head, changed at random."""
    network.config.update({MARKOV: rank})
    torch.manual_seed(8)
    head = put_markov_head(network)
    with torch.no_grad():
        head.markov_w2.weight += 0.5 * torch.randn_like(head.markov_w2.weight)
    return network


def lower(target: LlamaForCausalLM) -> int:
    """A rank at which a head is near the whole one: all directions but two."""
    return max(min(int(target.config.hidden_size), half(target)) - 2, 1)


def half(target: LlamaForCausalLM) -> int:
    """Tokens that a pruned draft knows: every other one."""
    return int(target.config.vocab_size) // 2


def of(proposer: Callable[..., Proposer], network: Callable[..., Any], **fixed: Any) -> Kind:
    """A kind that drafts with a network made for the target."""
    return Kind(lambda target, **settings: proposer(network(target, **fixed), **settings))


KINDS = {
    "eagle": of(Eagle, eagle),
    "eagle, pruned": of(Eagle, lambda target: eagle(target, draft_vocab_size=half(target))),
    "eagle, low rank": of(Eagle, lambda target: eagle(target, head_rank=lower(target))),
    "p_eagle": of(PEagle, p_eagle),
    "p_eagle, pruned": of(PEagle, lambda target: p_eagle(target, draft_vocab_size=half(target))),
    "p_eagle, markov": of(PEagle, p_eagle, markov_rank=3),
    "block": of(Block, block),
    "block, causal": of(Block, block, causal=True, markov_rank=3),
    "block, pruned": of(Block, lambda target: block(target, draft_vocab_size=half(target), markov_rank=3)),
    "block, target's head": of(Block, block, target_head=True),
    "independent": of(Independent, near, noise=0.15),
    "independent, pruned": of(Independent, lambda target: small(near(target, 0.15), half(target))),
    "independent, low rank": of(Independent, lambda target: small(near(target, 0.15), rank=lower(target))),
    "conditioned": of(Conditioned, conditioned_near),
    "conditioned, greedy": Kind(lambda target: Conditioned(conditioned_near(target), greedy=True)),
    "early_exit": Kind(lambda target, **settings: EarlyExit(exit_network(target), target, **settings)),
    "early_exit, 4 bits": Kind(lambda target, **settings: EarlyExit(exit_network(target, bits=4), target, **settings)),
    "independent, greedy": Kind(lambda target: Independent(near(target, 0.15), greedy=True)),
    "medusa": of(Medusa, medusa),
    "medusa, markov": of(Medusa, medusa, noise=0.2, markov_rank=3),
    "medusa, greedy": Kind(lambda target: Medusa(medusa(target), greedy=True)),
    "hydra": of(Hydra, hydra),
    "quantised": Kind(Quantised),
    "two_levels": Kind(lambda target: TwoLevels(Quantised(target), Independent(near(target, 0.15))), drawn=False),
    "parallel": Kind(parallel),
    "parallel, pruned": of(Parallel, lambda target: small(masked(target), half(target))),
    "parallel, low rank": of(Parallel, lambda target: small(masked(target), rank=lower(target))),
    "parallel, low rank, pruned": of(Parallel, lambda target: small(masked(target), half(target), lower(target))),
    "parallel, markov": of(Parallel, lambda target: chained(masked(target))),
    "parallel, markov, pruned": of(Parallel, lambda target: chained(small(masked(target), half(target)))),
    "parallel, greedy": Kind(lambda target: parallel(target, greedy=True)),
    "ngram": Kind(lambda target: NGram()),
    "retrieval": Kind(lambda target: Retrieval(shortest=1)),
    "hybrid": Kind(hybrid),
    "hybrid_exit": Kind(hybrid_exit),
    "hybrid_quantised": Kind(
        lambda target: HybridQuantised(Quantised(target), Retrieval(shortest=1), hybrid(target).gate)
    ),
    "example": Kind(next_head),
}


SHAPED = [name for name in KINDS if name.split(", ")[0] in REGISTERED and kind_of(name.split(", ")[0]).drafts_trees]
SHAPED = [name for name in SHAPED if not name.endswith("greedy")]  # `greedy=` makes these of the others
