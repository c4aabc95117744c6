"""Drafts that are served by an engine, each made once a session: in minutes on two cores, so that they are accepted at
all, not as often as they could be. Parity holds for a draft however little it learnt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cotrain.cli import main
from cotrain.rollout import training_texts
from cotrain.teacher.target_model import load_pair
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import METADATA, Metadata, load_draft, read, save
from inference.proposers import kind_of
from inference.proposers.eagle import EagleConfig, EagleNetwork
from inference.proposers.hybrid import Gate
from inference.proposers.retrieval import LookupConfig, LookupNetwork

ROOT = Path(__file__).parents[2]
FOLDER, DATA = ROOT / "outputs" / "engines" / "drafts", ROOT / "data"
K = 4
COMMON = f"verify=token measure=false policy.k={K} rollout.temperatures=[1.0] trainer.validations=1".split()
GREEDY = ["objective=greedy_draft", "loss.then=greedy_draft"]
TWO, FOUR = ["init.layers=[0,-1]", "trainer.steps=120"], ["init.layers=[0,1,-2,-1]", "trainer.steps=120"]
VOCABULARY, PRUNED = 4096, 1024  # tokens of the bundled target, and of a pruned draft
BLOCK = ["draft=block", f"draft.depths={K}", "trainer.steps=200"]
TRAINED = {  # name -> settings of `cotrain train`
    "two layers, sampled": TWO,
    "two layers, greedy": [*TWO, *GREEDY],
    "four layers, sampled": FOUR,
    "four layers, greedy": [*FOUR, *GREEDY],
    "parallel": [
        "draft=parallel",
        "init=pretrained",
        "draft.path=two layers, sampled",
        f"draft.depths={K}",
        "trainer.steps=150",
    ],
    "medusa": ["draft=medusa", f"draft.depths={K}", "trainer.steps=250", "optimizer.lr=6e-3"],
    "eagle": ["draft=eagle", f"draft.depths={K}", "trainer.steps=200"],
    "block": [*BLOCK, "draft.markov=32", "draft.head=target"],
    "block, causal": [*BLOCK, "draft.mask=causal", f"draft.vocabulary={PRUNED}"],
    "p_eagle": ["draft=p_eagle", "init=pretrained", "draft.path=eagle", f"draft.depths={K}", "trainer.steps=150"],
}
SHORTEST = 2  # ids of a match that look-up proposes behind


def draft_folder(name: str) -> Path:
    """The draft of that name, a folder as `cotrain train` leaves it."""
    made = FOLDER / name / "draft"
    if not (made / METADATA).is_file():
        MADE.get(name, _train)(name)
    return made


def load(name: str) -> tuple[Any, Metadata]:
    """Its network as it is kept, and what it says of itself."""
    made = draft_folder(name)
    network, _, metadata = load_draft(made, network=kind_of(read(made).kind).network_class)
    assert metadata is not None
    return network, metadata


def _train(name: str) -> None:
    """Without the measurement, which takes longer than so few steps."""
    settings = [_placed(setting) for setting in TRAINED[name]]
    assert main(["train", f"output={FOLDER / name}", "overwrite=true", *COMMON, *settings]) == 0


def _placed(setting: str) -> str:
    key, _, value = setting.partition("=")
    return f"{key}={draft_folder(value)}" if key == "draft.path" else setting


def _save(name: str, network: Any, kind: str, objective: str = "greedy") -> None:
    target, tokenizer = load_pair("bundled")
    metadata = Metadata({"name": "bundled", **hash_target(target.config, tokenizer)}, K, objective, kind=kind)
    save(network, tokenizer, FOLDER / name / "draft", metadata, None, replace=True)


def _pruned(name: str) -> None:
    """The draft "eagle", of the tokens alone that are most in shipped texts, with the rows that it learnt for them."""
    whole, metadata = load("eagle")
    network = EagleNetwork(EagleConfig(**whole.config.to_dict() | {"draft_vocab_size": PRUNED})).to(whole.dtype)
    rows = whole.lm_head.weight.detach()
    network.load_state_dict(whole.state_dict() | {"lm_head.weight": rows[:PRUNED]}, strict=False)
    network.know(sorted(_frequent().topk(PRUNED).indices.tolist()), rows)
    _save(name, network.eval(), "eagle", metadata.objective)


def _frequent() -> torch.Tensor:
    """How often each token is in texts that the target sampled."""
    texts = training_texts.padded(training_texts.read_rows(DATA / "rollouts" / "train_T1"))
    return torch.bincount(texts.ids[:, 1:][texts.predicted].long(), minlength=VOCABULARY)


def _retrieval(name: str) -> None:
    _save(name, LookupNetwork(LookupConfig({"shortest": SHORTEST})), "retrieval")


def _hybrid(name: str) -> None:
    network, _ = load("two layers, greedy")
    network.config.lookup = {"shortest": SHORTEST, "gate": Gate.uncalibrated().to_json()}
    _save(name, network, "hybrid")


MADE: dict[str, Callable[[str], None]] = {"eagle, pruned": _pruned, "retrieval": _retrieval, "hybrid": _hybrid}
