"""A hybrid: an independent draft beside look-up, and a gate between the two that is counted on held-out text."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.independent import Independent
from inference import proposers
from inference.measure.gating import calibrate
from inference.proposers.hybrid import Hybrid as Serving
from inference.proposers.retrieval import Retrieval

if TYPE_CHECKING:
    from cotrain.bench.measurement import Plan


class Hybrid(Independent):
    """The student of `inference.proposers.hybrid`: it learns as an independent draft does. Its network's config says
    under `lookup` how it stands beside look-up, gate included once there is one."""

    kind = "hybrid"
    takes = ("datastore", "shortest")

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """The network before training. Raises as `Independent.initial`, and for a datastore that is none."""
        network = super().initial(draft, init, target)
        network.config.lookup = lookup(draft)
        return network

    def of(self, network: PreTrainedModel) -> "Hybrid":
        return Hybrid(network, vocabulary=self.vocabulary)

    def proposer(  # type: ignore[override]  # chains alone
        self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False
    ) -> Any:
        model = proposers.Independent(self.network, greedy, compile=compile, int8=int8)
        return Serving.of_settings(model, self.network.config.lookup)


def prepare(plan: "Plan") -> None:
    """Count a gate on the prompts that rank, none of which is timed later, and keep it in the draft's config."""
    config, size, replayed = plan.draft.config, plan.bench, plan.target.device.type == "cuda"
    timed = replace(plan, compiled=plan.compiled._replace(plain=replayed, target=replayed, draft=replayed))  # as served
    drafting = timed.proposer()
    assert isinstance(drafting, Serving)
    model = timed.engine(max(size.depths), proposer=drafting.model)
    prompts = plan.ranking(0, max(4 * size.quick_prompts, size.rows))
    gate = calibrate(model, timed.plain(), Retrieval.of_settings(config.lookup), prompts, sampling=plan.sampling,
                     new_tokens=size.new_tokens, seed=size.seed)  # fmt: skip
    print(f"gate: a draft of the model takes {gate.step:.3f} of a plain step, a column of the pass {gate.column:.3f}")
    for network in (plan.draft, plan.served, plan.running):
        network.config.lookup = config.lookup | {"gate": gate.to_json()}


def lookup(draft: Draft) -> dict[str, Any]:
    """What a config says of look-up. Raises FileNotFoundError or ValueError for a datastore that is none."""
    place = str(Path(draft.datastore).resolve()) if draft.datastore else None
    found = {"datastore": place, "shortest": draft.shortest}
    Retrieval.of_settings(found)
    return found
