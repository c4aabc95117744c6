"""What passes over two rows of different lengths, and at the end of a longer row, give beside the model's own forward.

B = 2 rows, T ids a row, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from inference.models.cache import SlotCache, Window, tree_window
from inference.models.dtypes import quantised
from inference.models.forward import Forward
from inference.models.limits import biased_by_slots
from inference.models.output_head import own_logits
from inference.models.passes import LAST, Layers, Pass, Tree
from inference.models.taps import tapped

LENGTH, LATER = 12, 5  # ids of a row, ids of its second pass
LATE, TAIL = (
    384,
    96,
)  # ids of a longer row; its last ones, which are others than those before: a pass that misses them shows
HEAVY = 6e8  # parameters of a model whose pass over the longer row takes too long on a CPU
BRANCHES = (-1, -1, 0, 1, 0, 2, 5)  # on which nodes those of the checked tree hang: no deeper than the second pass

# Largest difference, in standard deviations of the model's own logits at that place: in a dtype of many digits nothing
# but the order of sums differs (1e-6 measured in float32 and 1e-14 in float64, a thousand times less than the bound,
# which leaves room for TF32). In half precision and with quantised weights correct forwards differ: by .02 mostly, by
# .08 in a random model that amplifies every rounding. What is allowed there is FACTOR times the noise of the model's
# own passes, within bounds: the noise is never measured with the forward that is judged. Scores times 1.5 differ by .15
# in the bundled target and by .3 to .6 in most random models, masks and positions that are off by one by .4 to 2.
# Places that rounding alone may move further than the bound (.01 to .44 in five samples of one, where all others had
# .06 at most) are allowed LOUD times their own noise, as long as they are fewer than half of a layer's; right forwards
# were seen to differ there by 2.1 times. In 216 random and hardly taught models of 1 to 4 layers one right forward was
# refused and 6 with scores times 1.5 were not, 17 where one bound was for all places.
FINE, COARSE, MOST, FACTOR, SAMPLES, LOUD = 1e-3, 0.05, 0.2, 2.0, 4, 4.0


Make = Callable[[SlotCache], Forward]
Rows = list[Tensor]  # (n_b, V) or (n_b, W) of each


class Found(NamedTuple):
    """What was found of a model: the largest difference to its own logits, what is allowed, or what it raised."""

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


class Claiming(SlotCache):
    """A cache that says at all times that as much is stored as can be. Rows have lengths of their own, so a model that
    computes with the one length that a cache gives has other logits than its own."""

    claimed = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.claimed


class Probe:
    """The check of one model: its own logits are computed once for all forwards that are tried."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self.model, self.context = model, context
        T = min(LENGTH, context)
        self.later = min(LATER, T // 2)
        self.starts = max(1, (T - self.later) // 2), T - self.later
        size = model.config.get_text_config().vocab_size
        mixed = torch.arange(2 * T, device=model.device).view(2, T) * 7919 + 31
        self.ids = mixed % 1009 % size
        self.own = self._own(self.ids)
        heavy = model.device.type == "cpu" and sum(p.numel() for p in model.parameters()) > HEAVY
        self.late = context > LENGTH and not heavy

    def found(self, make: Make) -> Found:
        """How the logits of a forward over the cache that it is given compare with the model's own."""
        try:
            ours = self._rows([made.logits for made in self._passes(make)])
        except Exception as error:  # whatever a model's code raises at arguments that it does not take
            return Found(0.0, 0.0, f"with a mask a row its forward raises {_first_line(error)}")
        short = self._judged(ours, [*self.own], lambda: [*self._own(self.ids)], "logits", self._stepped)
        return self._late(make) if short.agrees and self.late else short

    def _late(self, make: Make) -> Found:
        """How logits at the end of a longer row compare: angles, masks and caches may go wrong past some position."""
        T = min(LATE, self.context)
        size = self.model.config.get_text_config().vocab_size
        count = torch.arange(T, device=self.ids.device)[None]
        mixed = (count * 7919 + 31) % 1009
        ids = torch.where(
            count < T - min(TAIL, T // 2), mixed % (size - size // 2), size - 1 - mixed % max(1, size // 2)
        )

        def own() -> Rows:
            return [own_logits(self.model, list(range(T - LATER, T)), input_ids=ids).float()]

        cache = self._cache(T)
        begin = T - LATER
        try:
            forward = make(cache)
            first = Window(0, 1, torch.arange(begin, device=ids.device)[None], 0, begin)
            second = Window(0, 1, torch.arange(begin, T, device=ids.device)[None], begin, T)
            cache.aim(first)
            with torch.no_grad():
                forward.store(ids[:, :begin], first)
            ours = self._pass(forward, cache, ids[:, begin:], second).logits[0]
        except Exception as error:
            return Found(0.0, 0.0, f"late in a text its forward raises {_first_line(error)}", late=True)
        return self._judged([ours], own(), own, f"logits after {T} ids")._replace(late=True)

    def _judged(
        self, ours: Rows, own: Rows, again: Callable[[], Rows], what: str, *more: Callable[[], Rows], parts: int = 1
    ) -> Found:
        """How our numbers compare with the model's own, which `again` computes once more: at the place that is nearest
        to what is allowed there, or furthest past it. more: other right ways; parts: layers, of as many places each."""
        apart, fine = _apart(ours, own), _fine(self.model)
        if fine or apart.max() <= COARSE:
            return Found(float(apart.max()), FINE if fine else COARSE, what=what)
        noise = self._noise([len(row) for row in ours], own, again, *more)
        quiet = (LOUD * noise <= MOST).view(parts, -1)
        loud = (~quiet & (quiet.float().mean(1, keepdim=True) > 0.5)).flatten()
        shared = min(MOST, max(COARSE, FACTOR * float(noise[~loud].max())))
        allowed = torch.where(loud, LOUD * noise.double(), shared)
        at = int((apart / allowed).argmax())
        return Found(float(apart[at]), float(allowed[at]), what=what)

    def reason(self, found: Found) -> str:
        """Why a model cannot be run, where `found` is the best that was."""
        low = self.starts[0]
        alone = self._own(self.ids[:, :low])
        if float((alone - self.own[:, :low]).abs().max()) > MOST * float(self.own.std()):
            return "it is not causal: logits change with the tokens after them"
        base, config = self.model.base_model, self.model.config.get_text_config()
        if found.error and (getattr(config, "alibi", False) or hasattr(base, "build_alibi_tensor")):
            return f"its ALiBi is computed from a 2-d padding mask, which cannot be one a row: {found}"
        return f"rows of different lengths cannot share its passes: {found}"

    def _own(self, ids: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        except (RuntimeError, TypeError, AttributeError) as error:  # as of a dtype that an expert's kernel lacks
            name = type(self.model).__name__
            raise ValueError(f"{name}: the model's own forward raises {_first_line(error)}") from error
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _noise(self, lengths: list[int], own: Rows, again: Callable[[], Rows], *more: Callable[[], Rows]) -> Tensor:
        """How far the model's own numbers are from each other at each place, by other right ways and by embeddings with
        one rounding more: its weights amplify it as they do those of every layer."""
        ways: list[Callable[[], Rows]] = [*more, *(partial(self._rounded, again, seed) for seed in range(SAMPLES))]
        cut = [[row[:length] for row, length in zip(way(), lengths, strict=True)] for way in ways]
        return torch.stack([_apart(rows, own) for rows in cut]).amax(0).clamp(max=MOST * LOUD)

    def _rounded(self, again: Callable[[], Rows], seed: int) -> Rows:
        """What `again` gives with embeddings that are rounded once more, each by up to half a unit."""
        generator = torch.Generator().manual_seed(seed)

        def rounded(_: Any, __: Any, states: Tensor) -> Tensor:
            signs = torch.rand(states.shape, generator=generator).to(states.device) - 0.5
            return (states.float() * (1 + signs * torch.finfo(torch.bfloat16).eps)).to(states.dtype)

        hook = self.model.get_input_embeddings().register_forward_hook(rounded)
        try:
            return again()
        finally:
            hook.remove()

    def _stepped(self) -> list[Tensor]:
        """The model's own passes by the same two steps, row by row, its own cache and masks."""
        rows = []
        for row, start in enumerate(self.starts):
            cache = DynamicCache(config=self.model.config)
            ids = self.ids[row : row + 1, : start + self.later]
            with torch.no_grad():
                parts = [self.model(input_ids=part, past_key_values=cache, use_cache=True).logits
                         for part in (ids[:, :start], ids[:, start:])]  # fmt: skip
            rows.append(torch.cat(parts, 1)[0])
        return rows

    def states(self, make: Make) -> Found:
        """How the states of all layers compare with those that the model's own forward has there."""
        count = self.model.config.get_text_config().num_hidden_layers
        layers = (*range(count + 1), LAST)

        def own() -> Rows:
            with tapped(self.model, layers) as states:
                self._own(self.ids)
            return [row for layer in layers for row in states[layer]]

        try:
            whole, passes = own(), self._passes(make, layers)
        except Exception as error:
            return Found(0.0, 0.0, _first_line(error))
        ours = [row for layer in layers for row in self._rows([made.states[layer] for made in passes])]
        return self._judged(ours, whole, own, "states", parts=len(layers))

    def trees(self, make: Make) -> Found:
        """How the logits of all nodes of a tree compare with those of their paths alone."""
        if biased_by_slots(self.model.config):
            return Found(0.0, 0.0, "its biases by distance (ALiBi) count slots, where a tree has no positions")
        parents = BRANCHES if self.later == LATER else BRANCHES[: 2 * (self.later > 1)]
        if not parents:
            return Found(0.0, FINE, what="trees")  # no text has room for one
        count = torch.arange(len(parents), device=self.ids.device)
        nodes = (self.ids[:, :1] + 3 * count + 1) % self.model.config.get_text_config().vocab_size
        try:
            ours = self._of_tree(make, parents, nodes)
        except Exception as error:
            return Found(0.0, 0.0, f"with a mask of a tree its forward raises {_first_line(error)}")
        own = partial(self._of_paths, Tree(parents).ancestors[0], nodes)
        return self._judged([*ours], own(), own, "logits of a tree")

    def _of_tree(self, make: Make, parents: Sequence[int], nodes: Tensor) -> Tensor:
        """(2, N, V) of both rows' trees, the first two nodes in a pass of their own."""
        cache, prompt = self._cache(), self._prompt()
        forward, starts = make(cache), torch.tensor(self.starts, device=nodes.device)
        self._pass(forward, cache, self.ids[:, : prompt.limit], prompt)
        ids, made = torch.cat((self.ids.gather(1, starts.unsqueeze(1)), nodes), 1), []
        for low, high in ((0, 3), (3, ids.shape[1]))[: 1 + (len(parents) > 2)]:
            tree = Tree(parents[: high - 1]).on(nodes.device)
            window = tree_window(tree, high - low, starts, max(self.starts))
            made.append(self._pass(forward, cache, ids[:, low:high], window).logits)
        return torch.cat(made, 1)[:, 1:]

    def _of_paths(self, ancestors: Tensor, nodes: Tensor) -> Rows:
        """The model's own logits (N, V) of both rows, after every node's path as a text."""
        found = []
        for row, start in enumerate(self.starts):
            texts = [torch.cat((self.ids[row, : start + 1], nodes[row, path.to(nodes.device)])) for path in ancestors]
            ends = torch.tensor([len(text) - 1 for text in texts], device=nodes.device)
            whole = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
            found.append(self._own(whole)[torch.arange(len(texts), device=nodes.device), ends])
        return found

    def _rows(self, parts: list[Tensor]) -> list[Tensor]:
        """Of two passes, (start_b + later, W) of each row b."""
        return [torch.cat((parts[0][b, :start], parts[1][b])) for b, start in enumerate(self.starts)]

    def _passes(self, make: Make, layers: Layers = ()) -> list[Pass]:
        cache, device, high = self._cache(), self.ids.device, self.starts[1]
        begins = torch.tensor(self.starts, device=device).unsqueeze(1)
        second = begins + torch.arange(self.later, device=device)
        forward, windows = make(cache), (self._prompt(), Window(0, 2, second, None, high + self.later))
        return [self._pass(forward, cache, self.ids.gather(1, window.positions), window, layers) for window in windows]

    def _cache(self, slots: int | None = None) -> SlotCache:
        count = self.model.config.get_text_config().num_hidden_layers
        cache = Claiming(count, 2, slots or self.ids.shape[1])
        cache.claimed = self.context - self.starts[1]
        return cache

    def _prompt(self) -> Window:
        """Of the first pass: as much of both rows as is stored of the longer."""
        high = self.starts[1]
        return Window(0, 2, torch.arange(high, device=self.ids.device).expand(2, high), 0, high)

    def _pass(self, forward: Forward, cache: SlotCache, ids: Tensor, window: Window, layers: Layers = ()) -> Pass:
        cache.aim(window)
        with torch.no_grad():
            return forward.forward(ids, window, layers=layers)


def _apart(rows: Rows, whole: Rows) -> Tensor:
    """The differences of all places (P,), each the root mean square over the vocabulary, or the width, in standard
    deviations of the model's own numbers there, `whole`, whose rows may be longer; infinite where only one of the two
    is finite. Places where the model's own are not finite say nothing."""
    found = []
    for row, own in zip(rows, whole, strict=True):
        own = own[: len(row)].to(torch.promote_types(own.dtype, torch.float32))
        known = own.isfinite().all(-1)
        error = (row.to(own.dtype) - own).square().mean(-1).sqrt()
        found.append(torch.where(known, error / own.std(-1).clamp(min=1e-9), 0.0).nan_to_num(nan=torch.inf))
    return torch.cat(found)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _fine(model: PreTrainedModel) -> bool:
    """Whether a model computes in float32 or more throughout."""
    dtypes = {p.dtype for p in model.parameters()}
    return not quantised(model.config) and all(d.is_floating_point and torch.finfo(d).bits >= 32 for d in dtypes)
