"""Any Hugging Face causal LM behind one forward on ragged rows."""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference.models import llama_weights
from inference.models.cache import SlotCache, Window, tree_window
from inference.models.checksum import Stamp, unchanged
from inference.models.compiled import Compiled
from inference.models.cuda_graphs import Captured
from inference.models.dtypes import quantisation_of, widened
from inference.models.forward import Forward, Lean, Stock
from inference.models.limits import positions_of, refuse_unsupported
from inference.models.llama_weights import applies, can_round
from inference.models.passes import ALONE, Layers, Pass, States, Tree
from inference.models.selfcheck import Asked, form_of, lean_agrees

if TYPE_CHECKING:
    from inference.proposers.base import Round

FIRST_SLOTS = 256


def takes_int8(model: PreTrainedModel) -> bool:
    """Whether `LM` runs it with weights in 8 bits here; warns once a model whose forward in few operations is not its
    own, which alone can."""
    return can_round(model.eval()) and lean_agrees(model, positions_of(model.config.get_text_config()))


class LM:
    """A causal LM with slots for `rows` sequences; used as it is, never cast or moved.

    vocabulary: ids in [0, V) have mass; logits past V are cut (padded vocabulary rows), missing ones are -inf,
    and ids that the model has no row for are read as its last one (a draft's guess is worse, never wrong).
    context: most tokens a row may hold, at most the model's `max_position_embeddings`. stock: always run
    transformers' own forward, also for models that `llama` runs in fewer operations. compile: compile what `llama`
    runs, see `compiled`, on a GPU replay it, see `cuda_graphs`; None: on a GPU alone. int8: weights rounded to 8 bits,
    for a draft: a rounded target has another distribution. spare: slots after those of the rows, where prompts wait.
    cache: that of an LM of which this one is the first layers, which share its keys and values. scaled: the head reads
    each row's states times its row of `scale` (rows and spare ones, D), ones until somebody writes others there. Raises
    ValueError for an attention implementation or a state that rows of different lengths cannot use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        vocabulary: int | None = None,
        context: int | None = None,
        *,
        stock: bool = False,
        compile: bool | None = False,
        int8: bool = False,
        spare: int = 0,
        cache: SlotCache | None = None,
        scaled: bool = False,
    ) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        refuse_unsupported(model, config)
        self.size = config.vocab_size
        self.vocabulary = vocabulary or self.size
        positions = positions_of(config)
        self.context = min(context or positions, positions)
        slots = min(FIRST_SLOTS, self.context)
        self.cache = cache or SlotCache(config.num_hidden_layers, rows + spare, slots, self.context)
        self.rows, self.spare, self.depth = rows, spare, config.num_hidden_layers
        with ALONE, unchanged(model):
            self.run = self._forward(stock, compile, int8)
            lean = isinstance(self.run, Lean)
            copies = lean and (int8 or llama_weights.can_pack(model))
            self.stamp = Stamp(model, addresses=lean, values=copies)
        self.asked = Asked(model, self.context, lean)
        self.device, self.dtype = model.device, model.dtype
        self.scale = self.run.scale = self._ones(rows + spare, config.hidden_size) if scaled else None
        self.offsets = torch.arange(0, device=self.device)  # 0, 1, ...: as many as a pass had ids
        held, dtype = quantisation_of(model.config), str(model.dtype).removeprefix("torch.")
        self.weights = "int8" if int8 else dtype if held == "none" else f"{held}, {dtype}"

    @property
    def stale(self) -> bool:
        """Whether the model was changed in a way that only a new LM knows: weights, adapters, hooks, modules, config.
        Asked once a call of an engine: of 135 M parameters 2 ms, and where copies are packed a third of a pass."""
        if any(module.training for module in self.model.modules()):
            self.model.eval()
        return not self.stamp.holds(self.model)

    @property
    def compiled(self) -> bool:
        """Whether short passes are compiled or replayed, so that all drafts of a round may be made at once."""
        return isinstance(self.run, Captured | Compiled)

    @property
    def replayed(self) -> bool:
        """Whether short passes are replayed as CUDA graphs."""
        return isinstance(self.run, Captured)

    def _ones(self, rows: int, width: int) -> Tensor:
        with torch.inference_mode(False):  # written to in inference mode and outside it
            return torch.ones(rows, width, dtype=self.dtype, device=self.device)

    def _forward(self, stock: bool, compile: bool | None, int8: bool) -> Forward:
        if int8 and (stock or not can_round(self.model)):
            raise ValueError(
                f"{type(self.model).__name__}: int8 weights need a bfloat16 model of a known family on a CPU, "
                f"widths multiples of 16"
            )
        on_gpu = self.model.device.type == "cuda"
        wanted = on_gpu if compile is None else compile
        if not stock and applies(self.model) and lean_agrees(self.model, self.context):
            fast = Captured if on_gpu else Compiled
            return fast(self.model, self.cache, int8, self.rows) if wanted else Lean(self.model, self.cache, int8)
        if int8:
            raise ValueError(f"{type(self.model).__name__}: int8 weights need the forward in few operations")
        if wanted and not stock:
            kind = "replayed as CUDA graphs" if on_gpu else "compiled"
            warnings.warn(
                f"{type(self.model).__name__}: its passes cannot be {kind} and run through transformers' own forward, "
                f"which takes longer; compile=False asks for that without this warning",
                stacklevel=4,
            )
        return Stock(self.model, self.cache, self.context, form_of(self.model, self.context))

    @property
    def held(self) -> torch.dtype:
        """What keys and values are held in."""
        return self.run.shape.held if isinstance(self.run, Lean) else self.dtype

    def forward(
        self,
        ids: Tensor,
        start: Sequence[int],
        low: int = 0,
        only: Tensor | None = None,
        at: Tensor | None = None,
        *,
        states: Layers = (),
        tree: Tree | None = None,
    ) -> Pass:
        """One pass: ids (A, n) of slots [low, low + A) at positions start_b, start_b + 1, ...

        Its logits are (A, n, V), or (A, 1, V) after id `only` (A,) of each row; its states (A, n, D) those of the
        layers `states`, see `passes`. at (A,): `start` where it is on the device already. Where passes are replayed,
        the next pass of this LM overwrites both: copy what must last. Entries of a row past its real tokens are
        computed from whatever ids stand there and overwritten by its next pass.
        tree: ids are the anchor and the nodes of a tree of drafts (Miao et al. 2023, 2305.09781), or the last n of
        these, where passes before stored the others. Node i is written at slot start_b + 1 + i, stands at the position
        of its depth, start_b + 1 for the anchor's children, and sees the text up to the anchor, its ancestors and
        itself; `keep` makes a path of it a text.
        Raises ValueError for a layer that the model has not, and for states or trees that its code cannot give.
        """
        asked = only if ids.shape[1] > 1 else None  # of one id there is nothing to choose
        window = self._aimed(ids, start, low, at, tree)
        found = self.run.forward(self._known(ids), window, asked, self.asked.states(states))
        return Pass(self._fitted(found.logits), found.states)

    def _fitted(self, logits: Tensor) -> Tensor:
        """Logits (..., size) -> (..., V) of the vocabulary."""
        missing = self.vocabulary - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
        return logits[..., : self.vocabulary]

    def draft(
        self,
        tails: Tensor,
        ends: Sequence[int],
        u: Tensor,
        temperature: Tensor,
        greedy: bool = False,
        at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """All drafts of a round in one call, where passes are compiled: None where they are not.

        tails (A, n): the last ids, one or two, of texts of ends_b tokens in slots [0, A), stored but for these; u
        (A, k) uniforms, temperature (A,) above 0. Returns drafts (A, k) and their distributions (A, k, V); greedy: the
        likeliest tokens, one-hot distributions. at (A,): `ends` where it is on the device already. Where passes are
        replayed, the next call overwrites them.
        """
        if not isinstance(self.run, Lean) or self.vocabulary != self.size:
            return None
        at = torch.tensor(ends, device=self.device) if at is None else at
        window = self._ahead(ends, at, u.shape[1])
        even = u.reshape(-1).view(u.shape)  # one stride for every number of uniforms that were made
        return self.run.draft(tails, at, even, temperature, greedy, window)

    def draft_for(
        self, round: "Round", k: int, greedy: bool, tails: Tensor, ends: Sequence[int], at: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """As `draft`, k drafts with the round's own distributions and draws, where passes are replayed: None where they
        are not, or where drafts are ids that the model has no row for."""
        if not isinstance(self.run, Captured) or self.vocabulary > self.size:
            return None
        return self.run.draft_for(round, k, greedy, tails, at, self._ahead(ends, at, k), self._fitted)

    def _ahead(self, ends: Sequence[int], at: Tensor, k: int) -> Window:
        """Where k drafts of texts of `ends` tokens go."""
        window = Window(0, len(ends), at.unsqueeze(1), None, max(ends) + k - 1)
        self.cache.aim(window)
        return window

    def store(self, ids: Tensor, start: Sequence[int], low: int = 0, *, states: Layers = ()) -> States:
        """As forward, without the head: prompts are stored, nothing is predicted."""
        return self.run.store(self._known(ids), self._aimed(ids, start, low, None), self.asked.states(states))

    def hidden(
        self,
        ids: Tensor,
        start: Sequence[int],
        layers: int,
        low: int = 0,
        at: Tensor | None = None,
        *,
        tree: Tree | None = None,
    ) -> Tensor:
        """As forward, left behind the first `layers` decoder layers (early exit: Elhoushi et al. 2024, 2404.16710): the
        residual stream (A, n, D) there, whose keys and values are stored; what the other layers hold of these
        positions is stale until a whole pass writes them.
        """
        if not 0 < layers <= self.depth:
            raise ValueError(f"layers={layers}: {type(self.model).__name__} has {self.depth} decoder layers; 1 or more")
        self.asked.states((layers,))
        return self.run.hidden(self._known(ids), self._aimed(ids, start, low, at, tree), layers)

    def keep(self, start: Sequence[int], path: Tensor, at: Tensor | None = None) -> None:
        """After a pass over a tree with anchors at `start`: the nodes path (A, m) of each row, parents before children,
        are moved to the slots after its anchor, one after the other, so that slots hold a plain text again; -1 where a
        row has no more. at (A,): `start` where it is on the device already."""
        self.run.keep(torch.tensor(start, device=self.device) if at is None else at, path)

    def head(self, states: Tensor) -> Tensor:
        """States (..., D) behind the final norm -> logits (..., V) of the vocabulary."""
        return self._fitted(self.run.head(states.to(self.dtype)))

    def embedded(self, ids: Tensor) -> Tensor:
        """ids (...) -> the model's embeddings (..., D)."""
        found: Tensor = self.model.get_input_embeddings()(self._known(ids))
        return found

    def no_states(self, rows: int, layers: Layers) -> States:
        """States of no token, (rows, 0, D) each."""
        width = self.model.config.get_text_config().hidden_size
        return {layer: torch.empty(rows, 0, width, dtype=self.dtype, device=self.device) for layer in layers}

    def _known(self, ids: Tensor) -> Tensor:
        """Ids that the model has no row for, as its last one."""
        return ids.clamp(max=self.size - 1) if self.vocabulary != self.size else ids

    def _aimed(
        self, ids: Tensor, start: Sequence[int], low: int, at: Tensor | None, tree: Tree | None = None
    ) -> Window:
        window = self._window(ids, start, low, at) if tree is None else self._branching(ids, start, low, at, tree)
        self.cache.aim(window)
        return window

    def _branching(self, ids: Tensor, start: Sequence[int], low: int, at: Tensor | None, tree: Tree) -> Window:
        self.asked.trees()
        at = torch.tensor(start, device=self.device) if at is None else at
        return tree_window(tree.on(self.device), ids.shape[1], at, max(start), low)

    def _window(self, ids: Tensor, start: Sequence[int], low: int, at: Tensor | None) -> Window:
        first, width = max(start), ids.shape[1]
        if width > len(self.offsets):
            self.offsets = torch.arange(width, device=self.device)
        offsets = self.offsets[:width]
        if first == min(start):
            positions = (offsets + first).expand(len(start), width)
            return Window(low, low + len(start), positions, first, first + width)
        at = torch.tensor(start, device=self.device) if at is None else at
        positions = at.unsqueeze(1) + offsets
        return Window(low, low + len(start), positions, None, first + width)

    def wait(self) -> None:
        """Wait for the device, so that a clock sees the work and not its launch; draws on the host do so anyway."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy slot `source` (its first `length` tokens) to slot `target`."""
        self.cache.move(source, target, length)

    def clear(self, slot: int) -> None:
        """Zero a slot in which NaN may stand: what is masked is multiplied by 0, and 0 times NaN is NaN."""
        for layer in self.cache.stores:
            if layer.is_initialized:
                layer.keys[slot].zero_()
                layer.values[slot].zero_()


def load_model(path: str, dtype: torch.dtype | str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal LM from a folder or hub id, safetensors only, in `dtype`; None: the checkpoint's own, or float32, see
    `widened`."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=trust_remote_code
    ).eval()
    return model if dtype else widened(model)
