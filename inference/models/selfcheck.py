"""Checks of a model's passes. For every model that an engine runs, passes over rows of different lengths must give the
model's own logits.

One pass stores two rows of fixed ids, of different lengths, and a second pass continues them. Their logits are compared
with the logits of the model's own forward over the whole rows, without a cache and without our attention masks. The
last logits of a row of `LATE` ids are compared too, since tables and caches may end before them. The result decides
which forward runs the model: `llama`'s if the model's classes are known and the logits agree, else transformers' own,
with the first form of attention mask that agrees. If no form agrees, the model is rejected with the reason.

Sliding windows are usually wider than the two short rows, so the check sets a narrow window in the model's config. A
model that reads its window from the config then uses the narrow one, and so must the attention masks.

States of layers and trees of drafts are compared in the same way when an engine first uses them.

B = 2 rows, T ids per row, N nodes of a tree, V vocabulary, W width.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from inference.models import packing
from inference.models.cache import SlotCache, Window, tree_window
from inference.models.checksum import checksum
from inference.models.encoder_decoder import CrossStore, EncoderDecoder, any_source, own_inputs
from inference.models.forward import FORMS, Forward, Lean, Stock
from inference.models.llama import SHORT, applies
from inference.models.passes import ALONE, LAST, Layers, Pass
from inference.models.pretrained import (
    biased_by_slots,
    cast,
    layers_of,
    own_logits,
    sliding_window,
    tapped,
    weights_quantisation,
)
from inference.source import Source
from inference.verify.tree import Tree, node_paths

NARROW = 4  # the window during the check
WINDOWS = ("sliding_window", "attention_chunk_size")  # config keys
LENGTH, LATER = 12, 5  # ids of a row, ids of its second pass
SOURCES = 5, 9  # ids of the sources of both rows
# ids of a longer row; its last ids, which occur nowhere before, so that a pass that misses them is detected
LATE, TAIL = 384, 96
HEAVY = 6e8  # parameters of a model whose pass over the longer row takes too long on a CPU
BRANCHES = (-1, -1, 0, 1, 0, 2, 5)  # parents of the checked tree, which is no deeper than the second pass is long

# The largest allowed difference, in standard deviations of the model's own logits at that position. In float32 and
# float64 only the order of sums differs: 1e-6 and 1e-14 measured, a thousand times below the bound, which leaves room
# for TF32. In half precision and with quantised weights correct forwards differ, mostly by .02, by .08 in a random
# model that amplifies every rounding. The bound there is FACTOR times the noise of the model's own passes, within
# limits; the noise is never measured with the forward under test. Wrong forwards differ more: attention scores times
# 1.5 by .15 in the bundled target and .3 to .6 in most random models, masks and positions that are off by one by .4 to
# 2. At some positions rounding alone may exceed the bound (.01 to .44 in five samples of one position, at most .06 at
# all others). These are allowed LOUD times their own noise if they are fewer than half of a layer's positions; correct
# forwards differed there by at most 2.1 times the noise. In 216 random and hardly trained models of 1 to 4 layers, one
# correct forward was rejected, and 6 forwards with scores times 1.5 were accepted (17 with one bound for all
# positions).
FINE, COARSE, MOST, FACTOR, SAMPLES, LOUD = 1e-3, 0.05, 0.2, 2.0, 4, 4.0

Make = Callable[[SlotCache], Forward]
Rows = list[Tensor]  # (n_b, V) or (n_b, W) of each


class Disagreement(UserWarning):
    """Warns that the forward of `models.llama` does not give the model's own logits."""


class CheckResult(NamedTuple):
    """The comparison of a forward with the model's own. difference: at the position nearest to its bound, or furthest
    past it. allowed: the bound at this position. Both are in standard deviations of the model's own numbers. error:
    what the forward raised, or None. what: names the compared numbers. late: whether short rows agree and a longer one
    does not."""

    difference: float
    allowed: float
    error: str | None = None
    what: str = "logits"
    late: bool = False  # short rows agree, a longer one does not

    @property
    def agrees(self) -> bool:
        return self.error is None and self.difference <= self.allowed

    def __str__(self) -> str:
        return self.error or (
            f"{self.what} differ from the model's own by {self.difference:.2g} of their deviation "
            f"(allowed {self.allowed:.2g})"
        )


# results of checks, by model and by everything they depend on: values, classes, settings
_RESULTS: WeakKeyDictionary[PreTrainedModel, dict[Any, Any]] = WeakKeyDictionary()


def lean_agrees(model: PreTrainedModel, context: int) -> bool:
    """Return whether `Lean` gives the model's own logits, for texts of up to `context` ids. If it does not, warn once
    per model."""

    def check() -> CheckResult:
        return Probe(reference(model), context).logits(lambda cache: Lean(model, cache))

    result: CheckResult = _once(model, ("lean", min(context, LATE)), check)
    if not result.agrees:
        warnings.warn(
            f"{type(model).__name__} runs through transformers' own forward, since in that of inference.models.llama "
            f"{result}",
            Disagreement,
            stacklevel=2,
        )
    return result.agrees


def reference(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model whose own forward `Lean` must agree with: a copy in float32 if packed weights are read in half
    precision and all else is computed in float32, else the model itself."""
    return cast(copy.deepcopy(model), torch.float32) if packing.widens(model) else model


def form_of(model: PreTrainedModel, context: int) -> str:
    """Return the first form of attention mask in `FORMS` with which `Stock` gives the model's own logits, for texts of
    up to `context` ids. Raises ValueError with the reason if there is no such form."""
    form, reason = _once(model, ("stock", context), lambda: _first_form(model, context))
    if form is None:
        raise ValueError(f"{type(model).__name__}: {reason}")
    return str(form)


def _first_form(model: PreTrainedModel, context: int) -> tuple[str | None, str]:
    """Return the first form of attention mask that agrees, and ""; or None, and the reason why none agrees."""
    config, results = model.config.get_text_config(), []
    with narrow(config, context) as narrowed:
        probe = Probe(model, context)
        for form in FORMS if narrowed else ("one",):
            result = probe.logits(partial(probe.stock, form=form))
            if (result.agrees or result.late) and form == "one" and narrowed and sliding_window(config):
                return None, f"its window of {sliding_window(config)} is not read from config.sliding_window"
            if result.agrees:
                return form, ""
            results.append(result)
        return None, probe.reason(min(results, key=lambda result: (result.error is not None, result.difference)))


class SelfCheck:
    """Checks of one model's states and trees, made when they are first used. context: the largest number of ids of a
    text. lean: whether `Lean` runs the model; otherwise `Stock` does."""

    def __init__(self, model: PreTrainedModel, context: int, lean: bool) -> None:
        self.model, self.context, self.lean = model, context, lean
        self.agreed: set[str | Layers] = {()}

    def states(self, layers: Layers) -> Layers:
        """Check the states of all layers at the first use of `layers`, and return `layers`. Raises ValueError for a
        layer that the model lacks, and if states differ from the model's own."""
        if layers not in self.agreed:
            depth, name = layers_of(self.model.config), type(self.model).__name__
            unknown = [layer for layer in layers if not LAST <= layer <= depth]
            if unknown:
                raise ValueError(
                    f"states: {name} has layers 0 to {depth}, and {LAST} for the input of its head, but no layer "
                    f"{unknown[0]}: name one of these"
                )
            self._check("states", Probe.states)
            self.agreed.add(layers)
        return layers

    def trees(self) -> None:
        """Check passes over trees at their first use. Raises ValueError with the reason if such a pass does not give
        the logits that each path of the tree gives alone."""
        if "trees" not in self.agreed:
            self._check("trees", Probe.trees)
            self.agreed.add("trees")

    def _check(self, feature: str, compare: "Callable[[Probe, Make], CheckResult]") -> None:
        model, context = self.model, self.context

        def check() -> CheckResult:
            form = "" if self.lean else form_of(model, context)
            with narrow(model.config.get_text_config(), context):
                probe = Probe(reference(model) if self.lean else model, context)
                return compare(probe, lambda c: Lean(model, c) if self.lean else probe.stock(c, form))

        result: CheckResult = _once(model, (f"{feature} {self.lean}", context), check)
        if not result.agrees:
            raise ValueError(
                f"{type(model).__name__}: its {feature} cannot be used here: {result}; use a draft without {feature}"
            )


def _once(model: PreTrainedModel, name: tuple[str, int], check: Callable[[], Any]) -> Any:
    """Return the result of `check`. The check runs again only if values, classes or settings of the model have changed.
    name: the check's name and the context. Raises ValueError for a model on the meta device."""
    elsewhere = getattr(model, "hf_device_map", None)  # accelerate brings the weights for a pass
    if not elsewhere and any(p.is_meta for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__}: its weights are on the meta device, so it cannot run; load it with weights"
        )
    with ALONE:
        results = _RESULTS.setdefault(model, {})
        key = (name, _settings(model), checksum(model))
        if key not in results:
            for old in [other for other in results if other[0] == name]:
                del results[old]  # results for weights that the model no longer has
            rounds = model.dtype == torch.bfloat16 and packing.can_pack(model) and applies(model)
            with packing.products_in_float32(rounds):
                results[key] = check()
        return results[key]


def _settings(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return everything that decides how the model runs, except the values of its weights."""
    classes = tuple((type(m), vars(m).get("forward"), len(m._forward_hooks)) for m in model.modules())
    config = model.config.get_text_config()
    return classes, repr(vars(config)), model.device, config._attn_implementation


@contextmanager
def narrow(config: PreTrainedConfig, context: int) -> Iterator[bool]:
    """Within the `with` block, set windows in a config to at most `NARROW` tokens. Yields whether the config has a
    window that is shorter than a text of `context` ids can be; only such windows are set."""
    widths = ((key, getattr(config, key, None)) for key in WINDOWS)
    wide = {key: width for key, width in widths if isinstance(width, int) and 0 < width < context}
    try:
        config.update({key: min(width, NARROW) for key, width in wide.items()})
        yield bool(wide)
    finally:
        config.update(wide)


class Claiming(SlotCache):
    """A cache that always reports the longest possible length. Rows differ in length, so a model whose code computes
    with one length of the cache cannot run here. With this cache the logits of such a model differ, and the check
    rejects it."""

    claimed = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.claimed


class Probe:
    """The check of one model. The model's own logits are computed once for all forwards under test. context: the
    largest number of ids of a text."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self.model, self.context = model, context
        T = min(LENGTH, context)
        self.later = min(LATER, T // 2)
        self.starts = max(1, (T - self.later) // 2), T - self.later
        self.size = model.config.get_text_config().vocab_size
        sourced = model.config.is_encoder_decoder
        self.sources = [any_source(model, length, length) for length in SOURCES] if sourced else None
        mixed = torch.arange(2 * T, device=model.device).view(2, T) * 7919 + 31
        self.ids = mixed % 1009 % self.size
        self.own = self._own(self.ids)
        heavy = model.device.type == "cpu" and sum(p.numel() for p in model.parameters()) > HEAVY
        self.late = context > LENGTH and not heavy

    def stock(self, cache: SlotCache, form: str) -> Stock:
        """Return transformers' forward with a form of attention mask. If the model has an encoder, the sources of both
        rows are encoded. cache: for the keys and values of the pass. form: an entry of `FORMS`."""
        if self.sources is None:
            return Stock(self.model, cache, self.context, form)
        run = EncoderDecoder(self.model, cache, CrossStore(len(cache.stores), len(self.sources)), self.context)
        with torch.no_grad():
            run.store_source(0, run.encode(self.sources))
        return run

    def logits(self, make: Make) -> CheckResult:
        """Compare the logits of a forward under test with the model's own. make: returns the forward for a cache."""
        try:
            ours = self._rows([one.logits for one in self._passes(make)])
        except Exception as error:  # a model's code may raise anything for arguments that it does not accept
            return CheckResult(0.0, 0.0, f"with one mask per row its forward raises {_first_line(error)}")
        short = self._compared(ours, [*self.own], lambda: [*self._own(self.ids)], "logits", self._stepped)
        return self._late(make) if short.agrees and self.late else short

    def _late(self, make: Make) -> CheckResult:
        """Compare the logits at the end of a longer row: angles, masks and caches may be wrong past some position.
        make: returns the forward under test for a cache."""
        T, size = min(LATE, self.context), self.size
        count = torch.arange(T, device=self.ids.device)[None]
        mixed = (count * 7919 + 31) % 1009
        ids = torch.where(
            count < T - min(TAIL, T // 2), mixed % (size - size // 2), size - 1 - mixed % max(1, size // 2)
        )

        def own() -> Rows:
            inputs = own_inputs(self.model, ids, self.sources[0] if self.sources else None)
            return [own_logits(self.model, list(range(T - LATER, T)), **inputs).float()]

        cache = self._cache(T)
        begin = T - LATER
        try:
            forward = make(cache)
            # prompts are read in half precision where passes are not
            at_once = SHORT if isinstance(forward, Lean) and forward.dtype != forward.model.dtype else begin
            for low, high in pairwise((*range(0, begin, at_once), begin)):
                window = Window(0, 1, torch.arange(low, high, device=ids.device)[None], low, high)
                cache.aim(window)
                with torch.no_grad():
                    forward.store(ids[:, low:high], window)
            last = Window(0, 1, torch.arange(begin, T, device=ids.device)[None], begin, T)
            ours = self._pass(forward, cache, ids[:, begin:], last).logits[0]
        except Exception as error:
            return CheckResult(0.0, 0.0, f"late in a text its forward raises {_first_line(error)}", late=True)
        return self._compared([ours], own(), own, f"logits after {T} ids")._replace(late=True)

    def _compared(
        self, ours: Rows, own: Rows, again: Callable[[], Rows], what: str, *more: Callable[[], Rows], parts: int = 1
    ) -> CheckResult:
        """Compare our numbers with the model's own. The result is about the position that is nearest to its bound or
        furthest past it.

        ours, own: for each row, our numbers and the model's own, (positions, V) or (positions, W). again: computes the
        model's own numbers once more. what: names the numbers. more: other correct ways to compute them. parts: number
        of layers in the rows, with equally many positions each.
        """
        apart, fine = _apart(ours, own), _fine(self.model)
        if fine or apart.max() <= COARSE:
            return CheckResult(float(apart.max()), FINE if fine else COARSE, what=what)
        noise = self._noise([len(row) for row in ours], own, again, *more)
        quiet = (LOUD * noise <= MOST).view(parts, -1)
        loud = (~quiet & (quiet.float().mean(1, keepdim=True) > 0.5)).flatten()
        shared = min(MOST, max(COARSE, FACTOR * float(noise[~loud].max())))
        allowed = torch.where(loud, LOUD * noise.double(), shared)
        at = int((apart / allowed).argmax())
        return CheckResult(float(apart[at]), float(allowed[at]), what=what)

    def reason(self, result: CheckResult) -> str:
        """Return the reason why a model cannot be run. result: the result for the form of attention mask that came
        nearest."""
        low = self.starts[0]
        alone = self._own(self.ids[:, :low])
        if float((alone - self.own[:, :low]).abs().max()) > MOST * float(self.own.std()):
            return "it is not causal: logits change with the tokens after them"
        base, config = self.model.base_model, self.model.config.get_text_config()
        if result.error and (getattr(config, "alibi", False) or hasattr(base, "build_alibi_tensor")):
            return f"its ALiBi is computed from a 2-d padding mask, which cannot differ between rows: {result}"
        return f"rows of different lengths cannot share its passes: {result}"

    def _own(self, ids: Tensor, row: int | None = None) -> Tensor:
        """Return the model's own logits (B, n, V). ids (B, n): the texts. row: for a model with an encoder, the row
        whose source all texts have; None if text b has the source of row b. Each source is encoded alone. Raises
        ValueError if the model's own forward raises."""
        parts: list[tuple[Tensor, Source | None]] = [(ids, None)]
        if self.sources is not None:
            parts = [(ids, self.sources[row])] if row is not None else [*zip(ids.split(1), self.sources, strict=True)]
        try:
            with torch.no_grad():
                each = [self.model(**own_inputs(self.model, *part), use_cache=False).logits for part in parts]
                logits = torch.cat(each)
        except (RuntimeError, TypeError, AttributeError) as error:  # such as a dtype that an expert's kernel lacks
            name = type(self.model).__name__
            raise ValueError(
                f"{name}: the model's own forward raises {_first_line(error)}; load it in another dtype"
            ) from error
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _noise(self, lengths: list[int], own: Rows, again: Callable[[], Rows], *more: Callable[[], Rows]) -> Tensor:
        """Return the noise (P,) of the model's own numbers at each position: how much they differ when computed in
        other correct ways (`more`), or from embeddings that are rounded once more. The model amplifies this rounding as
        it amplifies every layer's rounding. lengths: for each row, how many of its first positions count. own: the
        model's own numbers. again: computes them once more."""
        ways: list[Callable[[], Rows]] = [*more, *(partial(self._rounded, again, seed) for seed in range(SAMPLES))]
        cut = [[row[:length] for row, length in zip(way(), lengths, strict=True)] for way in ways]
        return torch.stack([_apart(rows, own) for rows in cut]).amax(0).clamp(max=MOST * LOUD)

    def _rounded(self, again: Callable[[], Rows], seed: int) -> Rows:
        """Return the result of `again` with embeddings that are rounded once more, each by up to half a unit of
        bfloat16. seed: of this rounding."""
        generator = torch.Generator().manual_seed(seed)

        def rounded(_: Any, __: Any, states: Tensor) -> Tensor:
            signs = torch.rand(states.shape, generator=generator).to(states.device) - 0.5
            return (states.float() * (1 + signs * torch.finfo(torch.bfloat16).eps)).to(states.dtype)

        body: Any = self.model.get_decoder() if self.sources else self.model
        with body.get_input_embeddings().register_forward_hook(rounded):
            return again()

    def _stepped(self) -> list[Tensor]:
        """Return the model's own logits of each row, (positions, V), computed in two passes like those under test, with
        the model's own cache and masks."""
        rows = []
        for row, start in enumerate(self.starts):
            source = self.sources[row] if self.sources else None
            cache = (
                EncoderDecoderCache(DynamicCache(), DynamicCache())
                if self.sources
                else (DynamicCache(config=self.model.config))
            )
            ids = self.ids[row : row + 1, : start + self.later]
            with torch.no_grad():
                inputs = [own_inputs(self.model, part, source) for part in (ids[:, :start], ids[:, start:])]
                parts = [self.model(**part, past_key_values=cache, use_cache=True).logits for part in inputs]
            rows.append(torch.cat(parts, 1)[0])
        return rows

    def states(self, make: Make) -> CheckResult:
        """Compare the states of all layers with the states of the model's own forward. make: returns the forward under
        test for a cache."""
        layers = (*range(layers_of(self.model.config) + 1), LAST)

        def own() -> Rows:
            each = []
            parts = [(self.ids, None)] if self.sources is None else [*zip(self.ids.split(1), (0, 1), strict=True)]
            for part in parts:
                with tapped(self.model, layers) as states:
                    self._own(*part)
                each.append(states)
            return [row for layer in layers for states in each for row in states[layer]]

        try:
            whole, passes = own(), self._passes(make, layers)
        except Exception as error:
            return CheckResult(0.0, 0.0, _first_line(error))
        ours = [row for layer in layers for row in self._rows([one.states[layer] for one in passes])]
        return self._compared(ours, whole, own, "states", parts=len(layers))

    def trees(self, make: Make) -> CheckResult:
        """Compare the logits after each node of a tree with the logits after that node's path alone. make: returns the
        forward under test for a cache."""
        if biased_by_slots(self.model.config):
            return CheckResult(0.0, 0.0, "its biases by distance (ALiBi) count slots, which are no positions in a tree")
        parents = BRANCHES if self.later == LATER else BRANCHES[: 2 * (self.later > 1)]
        if not parents:
            return CheckResult(0.0, FINE, what="trees")  # no text has room for a tree
        count = torch.arange(len(parents), device=self.ids.device)
        nodes = (self.ids[:, :1] + 3 * count + 1) % self.size
        try:
            ours = self._of_tree(make, parents, nodes)
        except Exception as error:
            return CheckResult(0.0, 0.0, f"with a mask of a tree its forward raises {_first_line(error)}")
        own = partial(self._of_paths, node_paths(parents), nodes)
        return self._compared([*ours], own(), own, "logits of a tree")

    def _of_tree(self, make: Make, parents: Sequence[int], nodes: Tensor) -> Tensor:
        """Return the logits (2, N, V) of both rows' trees. The first two nodes run in a separate pass. parents: the
        parent of each node, -1 for the text. nodes (2, N): their ids. make: returns the forward under test for a cache.
        """
        cache, prompt = self._cache(), self._prompt()
        forward, starts = make(cache), torch.tensor(self.starts, device=nodes.device)
        self._pass(forward, cache, self.ids[:, : prompt.limit], prompt)
        ids, logits = torch.cat((self.ids.gather(1, starts.unsqueeze(1)), nodes), 1), []
        for low, high in ((0, 3), (3, ids.shape[1]))[: 1 + (len(parents) > 2)]:
            tree = Tree(parents[: high - 1]).on(nodes.device)
            window = tree_window(tree, high - low, starts, max(self.starts))
            logits.append(self._pass(forward, cache, ids[:, low:high], window).logits)
        return torch.cat(logits, 1)[:, 1:]

    def _of_paths(self, paths: Sequence[Sequence[int]], nodes: Tensor) -> Rows:
        """Return the model's own logits (N, V) for each of the two rows: after each node, with the node's path as a
        text. paths: for each node, the nodes on the path down to it. nodes (2, N): the nodes' ids."""
        logits = []
        for row, start in enumerate(self.starts):
            texts = [torch.cat((self.ids[row, : start + 1], nodes[row, list(path)])) for path in paths]
            ends = torch.tensor([len(text) - 1 for text in texts], device=nodes.device)
            whole = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
            logits.append(self._own(whole, row)[torch.arange(len(texts), device=nodes.device), ends])
        return logits

    def _rows(self, parts: list[Tensor]) -> list[Tensor]:
        """Return, for each row, the values (positions, W) at all its positions, joined from the two passes. parts: the
        values (2, n, W) of each pass."""
        return [torch.cat((parts[0][b, :start], parts[1][b])) for b, start in enumerate(self.starts)]

    def _passes(self, make: Make, layers: Layers = ()) -> list[Pass]:
        cache, device, high = self._cache(), self.ids.device, self.starts[1]
        begins = torch.tensor(self.starts, device=device).unsqueeze(1)
        second = begins + torch.arange(self.later, device=device)
        forward, windows = make(cache), (self._prompt(), Window(0, 2, second, None, high + self.later))
        return [self._pass(forward, cache, self.ids.gather(1, window.positions), window, layers) for window in windows]

    def _cache(self, slots: int | None = None) -> SlotCache:
        cache = Claiming(layers_of(self.model.config), 2, slots or self.ids.shape[1])
        cache.claimed = self.context - self.starts[1]
        return cache

    def _prompt(self) -> Window:
        """Return the window of the first pass. It stores as many columns of both rows as the longer row needs."""
        high = self.starts[1]
        return Window(0, 2, torch.arange(high, device=self.ids.device).expand(2, high), 0, high)

    def _pass(self, forward: Forward, cache: SlotCache, ids: Tensor, window: Window, layers: Layers = ()) -> Pass:
        cache.aim(window)
        with torch.no_grad():
            return forward.forward(ids, window, layers=layers)


def _apart(rows: Rows, whole: Rows) -> Tensor:
    """Return the difference (P,) at each position: the root mean square over the vocabulary or the width, in standard
    deviations of the model's own numbers at this position. rows, whole: for each row, our numbers and the model's own
    (n, V or W). The rows of `whole` may be longer.

    The difference is infinite if only the model's own numbers are finite, and 0 if they are not. Columns in which all
    numbers are -inf, the model's own and ours, are omitted.
    """
    parts = []
    for row, own in zip(rows, whole, strict=True):
        own = own[: len(row)].to(torch.promote_types(own.dtype, torch.float32))
        never = (own == -torch.inf).all(0)  # tokens that a pruned head does not have
        if bool(never.any()):
            same = bool((row[:, never] == -torch.inf).all())
            row, own = row[:, ~never] if same else torch.full_like(row[:, ~never], torch.nan), own[:, ~never]
        known = own.isfinite().all(-1)
        error = (row.to(own.dtype) - own).square().mean(-1).sqrt()
        parts.append(torch.where(known, error / own.std(-1).clamp(min=1e-9), 0.0).nan_to_num(nan=torch.inf))
    return torch.cat(parts)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _fine(model: PreTrainedModel) -> bool:
    """Return whether a model computes in float32 or more throughout."""
    dtypes = {p.dtype for p in model.parameters()}
    return not weights_quantisation(model.config) and all(
        d.is_floating_point and torch.finfo(d).bits >= 32 for d in dtypes
    )
