"""Language models of Hugging Face with one forward for rows of different lengths. An `LM` has a cache with one row per
text. A row's slots store one token each; other modules call a whole row of the cache a slot."""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.models import llama
from inference.models.cache import FIRST_SLOTS, SlotCache, Window, tree_window
from inference.models.checksum import Stamp, unchanged
from inference.models.encoder_decoder import CrossStore, Encoded, EncoderDecoder
from inference.models.forward import Forward, Lean, Stock
from inference.models.llama import SHORT, applies, can_round
from inference.models.passes import ALONE, ChainDraws, Layers, Pass, States
from inference.models.pretrained import layers_of, longest_text, quantisation_of, refuse_unsupported
from inference.models.replay import Recorded
from inference.models.selfcheck import SelfCheck, form_of, lean_agrees
from inference.models.step import Drafts, Replayed, Run
from inference.source import Source, source_in_text
from inference.verify.tree import Tree


def takes_int8(model: PreTrainedModel) -> bool:
    """Return whether `LM` can run the model with int8 weights here. Only `llama`'s forward can, so its logits must
    agree with the logits of the model's own forward. If they do not, this warns once per model."""
    return can_round(model.eval()) and lean_agrees(model, longest_text(model.config))


CHUNK = 512  # positions of a pass that stores prompts
WORTH = {"cpu": 32}  # ids that take longer in a pass than one more pass


class LM:
    """A causal LM or an encoder-decoder with a cache of `rows` rows. The model is used unchanged; it is never cast or
    moved. For an encoder-decoder, texts are its decoder's texts; `encode` stores their sources.

    vocabulary: V, the number of ids that have mass; None for the model's own number. Logits of later ids (padded
    vocabulary rows) are cut, and missing logits are -inf. Ids that the model lacks are read as its last id; acceptance
    may fall, but the text stays exact.

    context: the largest number of tokens per row, at most the model's `max_position_embeddings`, which is the default.
    stock: whether to run transformers' own forward even if `llama` supports the model. graphs: whether to record short
    passes as CUDA graphs on a GPU (`replay`). int8: whether to round weights (`llama.drafting`); this is for a
    draft, since a rounded target has another distribution. A model that `llama.in_int8_rows` has rounded runs with int8
    weights if it can. spare: number of further rows of the cache, for waiting prompts. beside: an LM whose first layers
    have the shapes of this model's. This LM then has no cache of its own: it reads and writes the keys and values of
    `beside`. scaled: whether to multiply the states that the head reads by each row's `scale` (rows + spare, D), which
    starts at ones and is written by the caller.

    Raises ValueError if rows of different lengths cannot use the model's attention implementation or its state, and for
    int8 weights or a context that the model cannot have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        vocabulary: int | None = None,
        context: int | None = None,
        *,
        stock: bool = False,
        graphs: bool = False,
        int8: bool = False,
        spare: int = 0,
        beside: "LM | None" = None,
        scaled: bool = False,
    ) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        refuse_unsupported(model, config)
        quantisation = quantisation_of(model.config)
        stock = stock or beside is not None and not isinstance(beside.run, Lean)
        int8 = int8 or (quantisation == llama.INT8_ROWS and not stock and takes_int8(model))
        self.size = config.vocab_size
        self.vocabulary = vocabulary or self.size
        positions = longest_text(config)
        self.context = min(context or positions, positions)
        if self.context < 2:
            raise ValueError(
                f"{type(model).__name__}: context={self.context} leaves no room for a prompt and a new token; set "
                "context= to 2 or more"
            )
        slots = min(FIRST_SLOTS, self.context)
        self.rows, self.spare, self.depth = rows, spare, layers_of(model.config)
        self.wants_graphs = graphs  # so do drafts for it
        self.cache: SlotCache = beside.cache if beside else SlotCache(self.depth, rows + spare, slots, self.context)
        self.cross: CrossStore = beside.cross if beside else CrossStore(self.depth, rows + spare)
        self.encoded: Encoded | None = None  # by the latest `encode`
        with ALONE, unchanged(model):
            self.run: Forward = self._forward(stock, int8)
            lean = isinstance(self.run, Lean)
            copies = isinstance(self.run, Lean) and self.run.change is not None
            self.stamp = Stamp(model, addresses=lean, values=copies)
        self.check = SelfCheck(model, self.context, lean)
        self.device, self.dtype = model.device, self.run.dtype if isinstance(self.run, Lean) else model.dtype
        if beside and (self.held, self.device) != (beside.held, beside.device):
            raise ValueError(
                f"{type(model).__name__}: this draft reads the keys and values of the target, but they are stored in "
                f"{beside.held} there, and here in {self.held}: use another kind of draft"
            )
        self.scale = self.run.scale = self._ones(rows + spare, config.hidden_size) if scaled else None
        self.offsets = torch.arange(0, device=self.device)  # 0, 1, ...: as many as the longest pass had ids a row
        dtype = str(model.dtype).removeprefix("torch.")
        self.weights = "int8" if int8 else dtype if quantisation == "none" else f"{quantisation}, {dtype}"

    @property
    def stale(self) -> bool:
        """Return whether the model has changed (weights, adapters, hooks, modules, config), so that a new LM is needed.
        Each call of an engine checks this once. It takes 2 ms for 135 M parameters; with packed copies, a third of a
        pass."""
        if any(module.training for module in self.model.modules()):
            self.model.eval()
        return not self.stamp.holds(self.model)

    @property
    def copied(self) -> bool:
        """Return whether there are copies of the weights, so that `stale` compares the values."""
        return self.stamp.values

    @property
    def graphs(self) -> bool:
        """Return whether short passes run as CUDA graphs. A draft model can then make all drafts of a round in one call
        (`drafts`)."""
        return isinstance(self.run, Replayed)

    def _ones(self, rows: int, width: int) -> Tensor:
        with torch.inference_mode(False):  # written to in inference mode and outside it
            return torch.ones(rows, width, dtype=self.dtype, device=self.device)

    def _forward(self, stock: bool, int8: bool) -> Forward:
        if int8 and (stock or not can_round(self.model)):
            raise ValueError(
                f"{type(self.model).__name__}: int8 weights need a model of the Llama, Mistral, Qwen2 or Qwen3 family "
                "on a CPU with a C++ compiler, in float32 or half precision and small enough to be stored twice; set "
                "int8=False"
            )
        graphs = self.wants_graphs and Recorded.possible(self.model.device)
        if not stock and applies(self.model) and lean_agrees(self.model, self.context):
            if graphs:
                return Replayed(self.model, self.cache, int8, self.rows)
            return Lean(self.model, self.cache, int8)
        if int8:
            raise ValueError(
                f"{type(self.model).__name__}: int8 weights need the forward of inference.models.llama, which cannot "
                "run this model; set int8=False"
            )
        if graphs and not stock:
            warnings.warn(
                f"{type(self.model).__name__}: its passes cannot be recorded as CUDA graphs, so they run through "
                "transformers' own forward, which takes longer; to have no warning, set graphs=False",
                stacklevel=4,
            )
        if self.model.config.is_encoder_decoder:
            run = EncoderDecoder(self.model, self.cache, self.cross, self.context)
            form_of(self.model, self.context)
            return run
        return Stock(self.model, self.cache, self.context, form_of(self.model, self.context))

    @property
    def held(self) -> torch.dtype:
        """Return the dtype of keys and values."""
        return self.run.shape.held if isinstance(self.run, Lean) else self.dtype

    @property
    def encodes(self) -> bool:
        """Return whether the model is an encoder-decoder."""
        return isinstance(self.run, EncoderDecoder)

    def encode(self, low: int, sources: Sequence[Source], encoded: Encoded | None = None) -> None:
        """Run the encoder on `sources` (one per row, token ids or features) in one pass, and store the cross-attention
        keys and values in rows low, low + 1, ... encoded: the states of an encoder with equal weights; then this
        model's encoder does not run. None to run it."""
        assert isinstance(self.run, EncoderDecoder), "LM.encode of a model without an encoder"
        self.encoded = self.run.encode(sources) if encoded is None else encoded
        self.run.store_source(low, self.encoded)

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
        """Run one pass over ids (A, n) in the rows [low, low + A), from position start[b] (0-based) on in row b.

        Returns logits (A, n, V), and the states (A, n, D) of the layers in `states`, by layer (0: the embeddings, i:
        after i decoder layers, `LAST`: the input of the head). If passes are CUDA graphs, the next pass of this LM
        overwrites both: copy them if they are needed later. Results after a row's last token come from padding ids and
        have no meaning; the row's next pass overwrites their keys and values. only (A,): a column of each row; the
        logits are then (A, 1, V), after this column. at (A,): `start` as a tensor, if it is already on the device.

        tree: if given, the ids are the anchor (the text's last token) and the nodes of a tree of drafts (Miao et al.
        2023, 2305.09781), or the last n of these if earlier passes stored the others. start[b] is then the anchor's
        position. Node i is written to slot start[b] + 1 + i. Its position is start[b] plus its depth (1-based). It sees
        the text up to the anchor, its ancestors and itself. `keep` then moves an accepted path to the slots of its
        positions. Raises ValueError for a layer that the model lacks, and if the model's code cannot give states or run
        trees.
        """
        of_each = only if ids.shape[1] > 1 else None  # with one id per row there is nothing to choose
        window = self._aimed(ids, start, low, at, tree)
        output = self.run.forward(self._known(ids), window, of_each, self.check.states(states))
        return Pass(fitted(output.logits, self.vocabulary), output.states)

    def drafts(
        self,
        round: Any,
        name: tuple[Any, ...],
        run: Run,
        given: Mapping[str, Tensor],
        ids: Tensor,
        limit: int,
        K: int,
        greedy: bool,
    ) -> Drafts | None:
        """Return K drafts per row (A, K) and their distributions (A, K, V), in one call. Return None if this cannot be
        recorded: passes are not, the round cannot be, or drafts may be ids that the model lacks. The next
        call may overwrite the results.

        round: the `Round` to draft for. name: everything that `run` depends on except `given`. run: drafts with passes
        of the model, a function of tensors. given: inputs of `run`, by name. ids (A, n): what the first pass reads, in
        the rows [0, A). limit: number of slots per row that the passes read. greedy: whether `run` drafts the likeliest
        tokens.
        """
        if not isinstance(self.run, Replayed) or self.vocabulary > self.size:
            return None
        window = Window(0, len(ids), ids, None, limit)
        self.cache.aim(window)
        fit = partial(fitted, vocabulary=self.vocabulary)
        return self.run.drafts(round, name, run, given, ids, window, K, greedy, fit)

    @property
    def chains(self) -> bool:
        """Return whether one operator may draft a chain (`chain`)."""
        return isinstance(self.run, Lean) and self.run.chains and self.vocabulary == self.size

    def chain(self, ids: Tensor, start: Tensor, only: Tensor, draws: ChainDraws, K: int, limit: int) -> Drafts | None:
        """Return K drafts per row (A, K) and their distributions (A, K, V), by one operator of `kernels.cpp`; None if
        it cannot make them. The arguments are those of `Lean.chain`."""
        if limit > self.context or ids.shape[1] > SHORT or not self.chains:
            return None
        assert isinstance(self.run, Lean)
        self.cache.aim(Window(0, len(ids), ids, None, limit))
        return self.run.chain(ids, start, only, draws, K, limit)

    def store(self, ids: Tensor, start: Sequence[int], low: int = 0, *, states: Layers = ()) -> States:
        """Run `forward` without the head, to store the keys and values of prompts. Return the states (A, n, D) of the
        layers in `states`, by layer. ids (A, n): in the rows [low, low + A). start: for each row, the position
        (0-based) of its first id."""
        return self.run.store(self._known(ids), self._aimed(ids, start, low, None), self.check.states(states))

    def keep(self, start: Sequence[int], path: Tensor, at: Tensor | None = None) -> None:
        """Move the keys and values of accepted nodes of a tree to the slots after their anchor, so that slots are
        positions again. Call it after a pass over the tree. start: for each row, the anchor's position (0-based). path
        (A, m): the accepted nodes of each row, parents before children, then -1. at (A,): `start` as a tensor, if it is
        already on the device."""
        self.run.keep(torch.tensor(start, device=self.device) if at is None else at, path)

    def head(self, states: Tensor) -> Tensor:
        """Return logits (..., V). states (..., D): after the final norm."""
        return fitted(self.run.head(states.to(self.dtype)), self.vocabulary)

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the model's embeddings (..., D) of ids (...)."""
        return self.model.get_input_embeddings()(self._known(ids))

    def no_states(self, rows: int, layers: Layers) -> States:
        """Return empty states: (rows, 0, D) for each layer of `layers`, by layer."""
        width = self.model.config.get_text_config().hidden_size
        return {layer: torch.empty(rows, 0, width, dtype=self.dtype, device=self.device) for layer in layers}

    def _known(self, ids: Tensor) -> Tensor:
        """Return ids (...) in which the model's last id replaces ids that the model lacks."""
        return ids.clamp(max=self.size - 1) if self.vocabulary != self.size else ids

    def _aimed(
        self, ids: Tensor, start: Sequence[int], low: int, at: Tensor | None, tree: Tree | None = None
    ) -> Window:
        if tree is None:
            window = self._window(ids, start, low, at)
        else:
            self.check.trees()
            anchors = torch.tensor(start, device=self.device) if at is None else at
            window = tree_window(tree.on(self.device), ids.shape[1], anchors, max(start), low)
        self.cache.aim(window)
        return window

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

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens' keys and values of row `source` of the cache to row `target`; for an
        encoder-decoder, also the keys and values of its source."""
        self.cache.move(source, target, length)
        if self.encodes:
            self.cross.move(source, target)

    def clear(self, slot: int) -> None:
        """Set all keys and values of row `slot` of the cache to zero. They may contain NaN, and 0 times NaN is NaN even
        where they are masked."""
        self.cache.clear(slot)
        if self.encodes:
            self.cross.clear(slot)


def fitted(logits: Tensor, vocabulary: int) -> Tensor:
    """Return logits (..., vocabulary) from a model's logits (..., size): cut, or with -inf for ids that the model
    lacks."""
    missing = vocabulary - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
    return logits[..., :vocabulary]


def store_prompts(
    lm: LM,
    low: int,
    prompts: Sequence[list[int]],
    chunk: int = CHUNK,
    *,
    states: Layers = (),
    encoded: Encoded | None = None,
) -> States:
    """Store every token of each prompt except the last, in rows low, low + 1, ... of the cache, `chunk` positions per
    pass. Ids with which all begin are read once. An encoder-decoder first encodes the prompts' sources. encoded: the
    states of an encoder with equal weights; then this model's encoder does not run. None to run it.

    Returns the states (A, n, D) of the layers in `states`, by layer. Column j is the state of token j of a prompt;
    columns after its last stored token have no meaning. Raises ValueError if an encoder-decoder gets a text without a
    source.
    """
    if lm.encodes:
        sources = [source for prompt in prompts if (source := source_in_text(prompt)) is not None]
        if len(sources) < len(prompts):
            raise ValueError(
                f"{type(lm.model).__name__}: a text has no source; give texts that `Engine.starts` returns"
            )
        lm.encode(low, sources, encoded)
    parts, same, others = [lm.no_states(len(prompts), states)], 0, range(low + 1, low + len(prompts))
    if not lm.encodes:
        same = min(len(commonprefix(prompts)), *(len(prompt) - 1 for prompt in prompts))
    if same * len(others) > worth_a_pass(lm.device):
        parts += store_tails(lm, low, [prompts[0][: same + 1]], chunk=chunk, states=states)
        for row in others:
            lm.move(low, row, same)
    else:
        same = 0
    parts += store_tails(lm, low, prompts, same, chunk, states)
    return {layer: torch.cat([part[layer].expand(len(prompts), -1, -1) for part in parts], 1) for layer in states}


def worth_a_pass(device: torch.device) -> int:
    """Return the number of ids to save for which one more pass pays."""
    return WORTH.get(device.type, 512)


def store_tails(
    lm: LM, low: int, texts: Sequence[list[int]], begin: int = 0, chunk: int = CHUNK, states: Layers = ()
) -> list[States]:
    """Store every token of each text except the last, from position `begin` (0-based) on, in rows low, low + 1, ... of
    the cache, `chunk` positions per pass. Returns, for each pass, the states (A, n, D) of the layers in `states`, by
    layer. Column j of pass i is for position begin + i * chunk + j; columns after a text's last stored token have no
    meaning."""
    parts = []
    for start in range(begin, max(map(len, texts)) - 1, chunk):
        tails = [text[:-1][start : start + chunk] or text[:1] for text in texts]
        ids = torch.tensor(padded_rows(tails), device=lm.device)
        parts.append(lm.store(ids, [start] * len(texts), low, states=states))
    return parts


def padded_rows(rows: Sequence[list[int]]) -> list[list[int]]:
    """Return the rows with equal length, each padded on the right with its own last id."""
    width = max(map(len, rows))
    return [row + row[-1:] * (width - len(row)) for row in rows]
