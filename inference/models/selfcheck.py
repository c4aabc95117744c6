"""Whether passes over rows of different lengths give a model's own logits: asked of every model that an engine runs.

Two rows of known ids are stored in one pass up to different lengths and continued in another, and every logit is
compared with that of the model's own forward over the whole rows, without a cache and without our masks. So are the
last logits of a row of `LATE` ids, past positions where tables and caches may end. That decides
what runs the model: few operations (`llama`) where its classes are known and the logits agree, else transformers' own
forward under the first form of mask that agrees, else nothing: the model is refused with the reason.

Windows that slide are wider than two short rows, so while the check runs the model's config says a narrow one: a model
that reads it there follows, and the masks must follow with it.

What an engine asks of a model beside logits is compared in the same way when it is first asked for: states of layers,
and trees of drafts.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedConfig, PreTrainedModel

from inference.models.cache import sliding_window
from inference.models.checksum import fingerprint
from inference.models.forward import FORMS, Lean, Stock
from inference.models.passes import ALONE, LAST, Layers
from inference.models.probe import LATE, Found, Make, Probe

NARROW = 4  # the window while the check runs
WINDOWS = ("sliding_window", "attention_chunk_size")  # config keys


class Disagreement(UserWarning):
    """Logits of the forward in few operations are not the model's own."""


# what was found, by model and by what it depends on: values, classes, settings
_FOUND: WeakKeyDictionary[PreTrainedModel, dict[Any, Any]] = WeakKeyDictionary()


def lean_agrees(model: PreTrainedModel, context: int) -> bool:
    """Whether `Lean` gives the model's own logits; warns once a model when it does not."""
    found: Found = _kept(
        model, ("lean", min(context, LATE)), lambda: Probe(model, context).found(lambda c: Lean(model, c))
    )
    if not found.agrees:
        message = f"{type(model).__name__}: in few operations, {found}; transformers' own forward runs it"
        warnings.warn(message, Disagreement, stacklevel=2)
    return found.agrees


def form_of(model: PreTrainedModel, context: int) -> str:
    """The form of mask, of `FORMS`, under which `Stock` gives the model's own logits in texts of up to `context` ids.

    Raises ValueError with the reason when there is none.
    """
    form, reason = _kept(model, ("stock", context), lambda: _form(model, context))
    if form is None:
        raise ValueError(f"{type(model).__name__}: {reason}")
    return str(form)


class Asked:
    """What is asked of a model beside logits, compared with the model's own when it is first asked for; lean: of
    `Lean`, else of `Stock`."""

    def __init__(self, model: PreTrainedModel, context: int, lean: bool) -> None:
        self.model, self.context, self.lean = model, context, lean
        self.agreed: set[str | Layers] = {()}

    def states(self, layers: Layers) -> Layers:
        """The layers. Raises ValueError for one that is not there, and where states are not the model's own."""
        if layers not in self.agreed:
            depth, name = self.model.config.get_text_config().num_hidden_layers, type(self.model).__name__
            unknown = [layer for layer in layers if not LAST <= layer <= depth]
            if unknown:
                raise ValueError(f"states: {name} has layers 0 .. {depth}, and {LAST} for what its head reads; "
                                 f"not {unknown[0]}")  # fmt: skip
            self._check("states", Probe.states)
            self.agreed.add(layers)
        return layers

    def trees(self) -> None:
        """Raises ValueError with the reason where a pass over a tree does not give what each of its paths gives."""
        if "trees" not in self.agreed:
            self._check("trees", Probe.trees)
            self.agreed.add("trees")

    def _check(self, asked: str, look: Callable[[Probe, Make], Found]) -> None:
        found: Found = _kept(self.model, (f"{asked} {self.lean}", self.context), lambda: self._found(look))
        if not found.agrees:
            raise ValueError(f"{type(self.model).__name__}: its {asked} cannot be used here: {found}")

    def _found(self, look: Callable[[Probe, Make], Found]) -> Found:
        model, context = self.model, self.context
        form = "" if self.lean else form_of(model, context)
        with narrow(model.config.get_text_config(), context):
            probe = Probe(model, context)
            return look(probe, lambda c: Lean(model, c) if self.lean else Stock(model, c, context, form))


def _kept(model: PreTrainedModel, asked: tuple[str, int], find: Callable[[], Any]) -> Any:
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(f"{type(model).__name__}: its weights are on the meta device: there is nothing to run")
    with ALONE:
        kept = _FOUND.setdefault(model, {})
        key = (asked, _setting(model), fingerprint(model))
        if key not in kept:
            for old in [other for other in kept if other[0] == asked]:
                del kept[old]  # of weights that are no more
            kept[key] = find()
        return kept[key]


def _setting(model: PreTrainedModel) -> tuple[Any, ...]:
    """What decides how the model runs, beside its values."""
    classes = tuple((type(m), vars(m).get("forward"), len(m._forward_hooks)) for m in model.modules())
    config = model.config.get_text_config()
    return classes, repr(vars(config)), model.device, config._attn_implementation


def _form(model: PreTrainedModel, context: int) -> tuple[str | None, str]:
    """The first form that agrees, or None and why."""
    config, reasons = model.config.get_text_config(), []
    with narrow(config, context) as shrunk:
        probe = Probe(model, context)
        for form in FORMS if shrunk else ("one",):
            found = probe.found(lambda cache, form=form: Stock(model, cache, context, form))  # type: ignore[misc]
            if (found.agrees or found.late) and form == "one" and shrunk and sliding_window(config):
                return None, f"its window of {sliding_window(config)} is not read from config.sliding_window"
            if found.agrees:
                return form, ""
            reasons.append(found)
        return None, probe.reason(min(reasons, key=lambda found: (found.error is not None, found.difference)))


@contextmanager
def narrow(config: PreTrainedConfig, context: int) -> Iterator[bool]:
    """While it lasts, windows of a config that are wider than the rows of the check are narrow; whether it has any that
    a text of `context` ids can leave."""
    found = ((key, getattr(config, key, None)) for key in WINDOWS)
    wide = {key: width for key, width in found if isinstance(width, int) and 0 < width < context}
    try:
        for key, width in wide.items():
            setattr(config, key, min(width, NARROW))
        yield bool(wide)
    finally:
        for key, width in wide.items():
            setattr(config, key, width)
