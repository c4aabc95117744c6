"""Drafts that look up tokens, alone (`retrieval`, which is not trained) or together with a draft model (`hybrid`)."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from cotrain.config.drafts import Draft
from cotrain.config.groups import Init
from cotrain.students.base import Student, Trials
from cotrain.students.early_exit import EarlyExitStudent
from cotrain.students.independent import IndependentStudent
from cotrain.students.quantised import QuantisedStudent
from inference import proposers
from inference.measure.gating import calibrate
from inference.proposers import kind_of
from inference.proposers.base import Proposer
from inference.proposers.hybrid import Hybrid
from inference.proposers.retrieval import LookupConfig, LookupNetwork, Retrieval

LAYOUTS = {"vllm": "cotrain.export.lookup_layout"}  # for both kinds


class RetrievalStudent(Student):
    """The student for the draft that `inference.proposers.retrieval` serves. It is not trained."""

    kind = "retrieval"
    sourced = True
    layouts = LAYOUTS

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Return a network that has settings but no weights. Raises ValueError if draft.datastore= has no datastore."""
        return LookupNetwork(LookupConfig(lookup(draft)))

    def proposer(  # type: ignore[override]  # drafts no trees
        self, *, greedy: bool = False, int8: bool = False
    ) -> Any:
        return Retrieval.of_settings(self.network.config.lookup)


def lookup(draft: Draft) -> dict[str, Any]:
    """Return the look-up settings in `draft`, as an entry of the network's config. Raises ValueError if
    draft.datastore= has no datastore."""
    folder = str(Path(draft.datastore).resolve()) if draft.datastore else None
    settings = {"datastore": folder, "shortest": draft.shortest}
    try:
        Retrieval.of_settings(settings)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"draft.datastore={draft.datastore}: {error}") from error
    return settings


class _WithLookup(Student):
    """A kind of draft together with look-up. The entry `lookup` of its network's config has the settings of look-up
    and, after `calibrate`, the settings for the choice between look-up and the draft."""

    calibrated = True
    layouts = {}

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Return the network before training, with the settings of look-up in its config. Raises ValueError, which
        names the key to change, also if draft.datastore= has no datastore."""
        network = super().initial(draft, init, target)
        network.config.lookup = lookup(draft)
        return network

    def proposer(  # type: ignore[override]  # drafts no trees
        self, *, greedy: bool = False, int8: bool = False
    ) -> Any:
        return kind_of(self.kind).of_settings(self.alone(greedy, int8), self.network.config.lookup)

    def alone(self, greedy: bool, int8: bool) -> Proposer:
        """Return the proposer that drafts where look-up does not."""
        return super().proposer(greedy=greedy, int8=int8)

    def calibrate(self, proposer: Proposer, trials: Trials) -> dict[str, Any]:
        """Return the entry `lookup` for the network's config: the look-up settings with a gate, the measured figures by
        which each round chooses between look-up and the draft model. proposer: drafts with the network. trials: the
        engines and prompts for the measurement."""
        assert isinstance(proposer, Hybrid)
        settings: dict[str, Any] = self.network.config.lookup
        drafting = trials.drafting(proposer.model)
        gate = calibrate(
            drafting,
            trials.plain(),
            Retrieval.of_settings(settings),
            trials.prompts,
            sampling=trials.sampling,
            new_tokens=trials.new_tokens,
            seed=trials.seed,
        )
        print(
            f"{self.kind}: a token that the model drafts costs {gate.step:.3f} of a plain decoding step, and each more "
            f"token that the target checks {gate.column:.3f}; the model drafts where look-up would be slower"
        )
        return {"lookup": settings | {"gate": gate.to_json()}}


class HybridStudent(_WithLookup, IndependentStudent):
    """Trains the draft that `inference.proposers.hybrid` serves, as an independent draft."""

    kind = "hybrid"
    sourced = False
    begins_with = ("independent", "parallel")
    layouts = LAYOUTS

    def alone(self, greedy: bool, int8: bool) -> Proposer:
        return proposers.Independent(self.network, greedy, int8=int8)


class HybridExitStudent(_WithLookup, EarlyExitStudent):  # type: ignore[misc]  # drafts no trees
    """Trains an early exit, which drafts where look-up does not."""

    kind = "hybrid_exit"
    begins_with = ("early_exit",)


class HybridQuantisedStudent(_WithLookup, QuantisedStudent):  # type: ignore[misc]  # drafts no trees
    """The student for the target in fewer bits, which drafts where look-up does not. It is not trained."""

    kind = "hybrid_quantised"
