"""An independent draft: a small causal LM, or an encoder-decoder, drafts with one pass per token, or makes all drafts
of a round in one call."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from inference.drafts.causal_lm import CausalLM
from inference.drafts.draft_folder import load_draft
from inference.drafts.weight_files import require_sound
from inference.models.checksum import Stamp
from inference.models.encoder_decoder import refuse_other_sources, same_encoder
from inference.models.forward import Lean
from inference.models.lm import CHUNK, LM, padded_rows, store_prompts, store_tails, takes_int8
from inference.models.passes import States
from inference.models.pretrained import widened
from inference.models.step import Drafts, Nodes, Run, by_round, one_by_one
from inference.proposers.base import Host, LoadArguments, Outcome, Proposal, Proposer, Round
from inference.proposers.trees import StaticTrees, TreeShape, trees_of
from inference.source import like

GAP = 16  # ids that a slot lacks before it is filled by passes of its own


class Independent(Proposer):
    """A proposer that drafts with a causal LM (Leviathan et al. 2023, 2211.17192), or, for an encoder-decoder as the
    target, with another encoder-decoder with the same tokenizer. A causal LM reads only the text of the target's
    decoder. An encoder-decoder encodes the sources itself. If its encoder has the target's weights (as in
    distil-whisper), it reads the target's encoder states instead, and its own encoder does not run.

    model: a transformers model, used unchanged, or a path or hub id. greedy: whether to draft argmax q, with a one-
    hot distribution, instead of drawing from q; serving engines do so by default. int8: whether the weights are
    rounded to 8 bits (`llama.drafting`); q is then the distribution of the rounded model. shape: the tree to draft,
    as the parent of each node (-1 for the text), for verify=tree, traversal or coupled; None for chains.
    own_encoder: whether to run the draft's encoder even if it equals the target's. Raises ValueError if `model` is
    neither a model nor a path."""

    network_class: Any = CausalLM
    drafts_trees = True
    catches_up = True
    scaled = False  # whether it writes to `LM.scale`
    shares_cache = False  # whether it reads and writes the target's keys and values
    tail = 2  # last ids of a text that a round with all drafts at once reads: up to two are not stored yet

    def __init__(
        self,
        model: PreTrainedModel | str | PathLike[str],
        greedy: bool = False,
        *,
        int8: bool = False,
        shape: TreeShape = None,
        own_encoder: bool = False,
    ) -> None:
        if not isinstance(model, str | PathLike) and not hasattr(model, "config"):
            raise ValueError(f"Independent: model must be a transformers model or its path, not {model!r}")
        self.model = _load(fspath(model)) if isinstance(model, str | PathLike) else model
        self.greedy, self.int8 = greedy, int8
        self.branching, self.own_encoder = trees_of(shape), own_encoder
        self.served: LM | None = None  # the target that it was opened for
        self.shares_encoder = False
        self.shared: list[tuple[Any, Stamp]] = []  # both encoders, if the target's is used, as they were when compared
        # of a round that drafts trees: the anchors' slots, on the host and on the device, and the number of levels
        self.anchors: tuple[list[int], Tensor, int]
        self.opened: tuple[int, int, int, int, bool] | None = None
        self.lm: LM
        self.stored: list[int] = []  # tokens of each row's text that its slot holds
        self.sent: dict[str, Tensor] = {}  # this round's numbers, once they are on the device
        self.longest = 0  # drafts of a round at once, the same number each time, since each length needs its own graph

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "Independent":
        """Return a proposer for a draft folder. Warns if the draft was trained for a target of another shape. Raises
        FileNotFoundError if the folder does not exist, and ValueError if its files or weights are damaged or if the
        network or tokenizer does not fit the target."""
        draft = cls.load_network(folder, arguments)
        int8 = arguments.int8 and takes_int8(draft)
        return cls(widened(draft), arguments.greedy, int8=int8, shape=arguments.shape)

    @classmethod
    def fits(cls, network: PreTrainedModel, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError if the network has an encoder that cannot read the target's sources. where: the start of the
        message."""
        refuse_other_sources(network, target, where)

    def language_model(self, rows: int, vocabulary: int) -> LM | None:
        return None if self.branching else LM(self.model, rows, vocabulary, int8=self.int8)

    @property
    def context(self) -> int | None:
        return self.lm.context

    @property
    def asks(self) -> bool:
        return self.branching is None and not self.lm.graphs

    @property
    def weights(self) -> str | None:
        """Return the name of the weights' dtype, such as "float32", or "int8" for rounded weights. Never None here."""
        return "int8" if self.int8 else str(self.model.dtype).removeprefix("torch.")

    def open(self, host: Host) -> None:
        if self.branching:
            self.branching.require(host.vocabulary, self.depths)
        refuse_other_sources(self.model, host.target.model, type(self).__name__)
        wanted = host.rows, host.vocabulary, host.context, host.spare, host.target.wants_graphs
        beside = host.target if self.shares_cache else None
        if wanted != self.opened or self.has_changed(host) or beside and self.lm.cache is not beside.cache:
            self.opened = wanted  # slots last from call to call
            self.lm = LM(
                self.model,
                *wanted[:3],
                graphs=wanted[-1],
                int8=self.int8,
                spare=host.spare,
                beside=beside,
                scaled=self.scaled,
            )
            self.served = None
        if self.served is not host.target or not all(stamp.holds(encoder) for encoder, stamp in self.shared):
            self.served = host.target
            self.shares_encoder = not self.own_encoder and same_encoder(self.model, host.target.model)
            both = [model.get_encoder() for model in (self.model, host.target.model) if self.shares_encoder]
            self.shared = [(encoder, Stamp(encoder, addresses=True, values=False)) for encoder in both]
        self.stored, self.longest = [], 0

    def has_changed(self, host: Host) -> bool:
        """Return whether the model has changed since `self.lm` read its weights. host: of the call that begins."""
        return self.lm.stale

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        # the target has just encoded the same sources
        encoded = self.served.encoded if self.served and self.shares_encoder else None
        store_prompts(self.lm, low, [like(prompt, prompt[: self.lm.context]) for prompt in prompts], encoded=encoded)

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        length = min(len(prompt), self.lm.context) - 1
        self.lm.move(source, target, length)
        self.stored.append(length)

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        self.stage(low, prompts, states)
        # a prompt longer than the draft's context never gets drafts
        self.stored[low:] = [min(len(prompt), self.lm.context) - 1 for prompt in prompts]

    def propose(self, round: Round) -> Proposal:
        """Read the ids that the slots lack (one or two, more after rounds without drafts), then return the drafts, at
        most round.k[b] for row b. A model with CUDA graphs makes all drafts at once, any other model one by one. A text
        that is longer than the draft's context gets no drafts."""
        k = [max(0, min(k, self.lm.context - len(text))) for k, text in zip(round.k, round.texts, strict=True)]
        K = max(k)
        if K == 0:
            return Proposal.empty(k, self.lm.device)
        self.sent = {}
        self._fill_gaps(round.texts, k)
        if self.branching:
            return self._by_level(round, k, self.branching)
        chained = None if round.decides else self._chain(round, k)
        at_once = chained or (self._at_once(round, k) if self.lm.graphs else None)
        if at_once:
            return at_once
        follows = self._lacking(round.texts, k)["follows"]
        logits = self._catch_up(round, k)

        def follow(ids: Tensor, nodes: Nodes) -> Tensor:
            ids, at = self._on_device(ids, round.send()["follows"] + (nodes.depth - 1))
            return self.lm.forward(ids, [end + nodes.depth - 1 for end in follows], at=at).logits

        return self._drafted(round, k, *one_by_one(K, logits, follow, by_round(round, self.greedy), round.goes_on))

    def _drafted(self, round: Round, k: list[int], x: Tensor, q: Tensor) -> Proposal:
        """Return chains x (A, K) with their distributions q (A, K, V). All but the last draft are stored."""
        rows = zip(round.texts, k, self.stored, strict=True)
        self.stored = [len(text) + x.shape[1] - 1 if wanted else stored for text, wanted, stored in rows]
        return Proposal(x, q, k)

    def _chain(self, round: Round, k: list[int]) -> Proposal | None:
        """Return all drafts from one operator, or None if it cannot make them. k: drafts per row."""
        draws = round.chain_draws(max(k), self.greedy) if self.lm.chains else None
        if draws is None:
            return None
        lacking = self._lacking(round.texts, k)
        sent = self.sent = round.send(k, **lacking)
        ends = [start + only + max(k) for start, only in zip(lacking["stored"], lacking["only"], strict=True)]
        drafts = self.lm.chain(sent["lacking"], sent["stored"], sent["only"], draws, max(k), max(ends))
        return drafts and self._drafted(round, k, *drafts)

    def _fill_gaps(self, texts: Sequence[list[int]], k: list[int]) -> None:
        """Store the ids that a row's slot lacks, except the text's last one, if there are more than `GAP`: the prompt
        was not read yet, or the row had no drafts for long. Each such row has its own passes, since a pass over all
        rows is as wide as the longest gap. k: drafts per row."""
        for slot, (text, wanted) in enumerate(zip(texts, k, strict=True)):
            if wanted and len(text) - self.stored[slot] > GAP:
                store_tails(self.lm, slot, [text], self.stored[slot], CHUNK)
                self.stored[slot] = len(text) - 1

    def _catch_up(self, round: Round, k: list[int]) -> Tensor:
        """Return the logits (A, V) after each whole text, from a pass that reads the ids that the slots lack. round:
        has the texts. k: drafts per row."""
        sent = self.sent or round.send(k, **self._lacking(round.texts, k))
        ids, only, at = self._on_device(sent["lacking"], sent["only"], sent["stored"])
        return self.lm.forward(ids, self.stored, only=only, at=at).logits[:, 0]

    def _lacking(self, texts: Sequence[list[int]], k: list[int]) -> dict[str, Any]:
        """Return, by name, four lists with one entry per row. `lacking`: the ids that the row's slot lacks, padded on
        the right. `only`: the index of the last of these ids. `stored`: the position of the first of them. `follows`:
        the position of the first draft; for a row without drafts it is the end of its stored tokens, since there may be
        no room after the text. k: drafts per row."""
        rows = list(zip(texts, k, self.stored, strict=True))
        tails = [text[stored:] if wanted else text[-1:] for text, wanted, stored in rows]
        follows = [len(text) if wanted else stored for text, wanted, stored in rows]
        only = [len(tail) - 1 for tail in tails]
        return {"lacking": padded_rows(tails), "only": only, "stored": self.stored, "follows": follows}

    def _on_device(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.lm.device) for tensor in tensors]

    def _by_level(self, round: Round, k: list[int], shape: StaticTrees) -> Proposal:
        """Return the drafts of trees of this shape, made with one pass per level. If passes are CUDA graphs, all levels
        are always drafted, since each tree needs its own graph. k: levels to draft per row."""
        lacking = self._lacking(round.texts, k)
        self.sent = round.send(shape.nodes(k), **lacking)
        depth = shape.depth if self.lm.graphs else min(max(k), shape.depth)
        logits, follows = self._catch_up(round, k), lacking["follows"]
        start, (at,) = [end - 1 for end in follows], self._on_device(round.send()["follows"] - 1)

        def follow(ids: Tensor, nodes: Nodes) -> Tensor:
            return self.lm.forward(ids, start, at=at, tree=nodes.tree).logits

        x, q = shape.grown(round, depth, logits, follow, self.greedy)
        self.anchors, rows = (start, at, depth), zip(round.texts, k, self.stored, strict=True)
        # no pass stored the last level
        self.stored = [len(text) + depth - 1 if wanted else stored for text, wanted, stored in rows]
        return shape.proposal(k, x, q)

    def _at_once(self, round: Round, k: list[int]) -> Proposal | None:
        """Return all drafts from one recorded call. Return None if `LM.drafts` cannot make them in one call,
        or if a text is too short or too near the end of the draft's context. k: drafts per row."""
        self.longest, K, ends = max(self.longest, *k), max(k), [len(text) for text in round.texts]
        rows = list(zip(ends, self.stored, k, strict=True))
        fits = self.tail <= min(ends) and max(ends) + self.longest <= self.lm.context
        if not fits:
            return None
        # if single steps follow, they need no further copy
        lacking = self._lacking(round.texts, k)
        sent = self.sent = round.send(k, last=[text[-self.tail :] for text in round.texts], ends=ends, **lacking)
        if any(wanted and end - stored > self.tail for end, stored, wanted in rows):
            self._catch_up(round, k)  # after rounds in which another part drafted
        last, at = self._on_device(sent["last"], sent["ends"])
        limit = max(ends) + self.longest - 1
        drafts = self.lm.drafts(
            round,
            ("chain",),
            chain_drafter(self.greedy),
            {"last": last, "ends": at},
            last,
            limit,
            self.longest,
            self.greedy,
        )
        if drafts is None:
            return None
        # for a row without drafts, no draft counts as stored (another part may draft for it), and a gap stays a gap
        left = [end if end - stored <= self.tail else stored for end, stored, _ in rows]
        self.stored = [end + self.longest - 1 if k_b else own for end, own, k_b in zip(ends, left, k, strict=True)]
        return Proposal(drafts[0][:, :K], drafts[1][:, :K], k)

    def commit(self, outcome: Outcome) -> None:
        if outcome.path is not None and self.branching:  # move the accepted nodes that a pass has stored
            (path,), (start, at, depth) = self._on_device(outcome.path), self.anchors
            self.lm.keep(start, self.branching.stored(path, depth), at)
            read = [max(length, anchor + 1) for length, anchor in zip(outcome.valid, start, strict=True)]
            self.stored = list(map(min, self.stored, read))
        self.stored = [min(stored, length) for stored, length in zip(self.stored, outcome.valid, strict=True)]
        for slot, length in enumerate(outcome.valid):
            if length == 0:
                self.lm.clear(slot)

    def move(self, source: int, target: int) -> None:
        if source != target:
            self.lm.move(source, target, self.stored[source])
            self.lm.clear(source)  # it may contain NaN past the text
            self.stored[target] = self.stored[source]
        self.stored.pop()


class OnTargetsCache(Independent):
    """An `Independent` whose model has the shapes of the target's first layers. It reads the keys and values that the
    target has stored for the text, so no token of the text is computed or stored twice. Keys and values of drafts are
    written into the target's slots. The pass that verifies the drafts overwrites them before it reads them, so the
    target reads its own keys and values alone.

    target: the engine's model; `open` raises ValueError if the engine has another one. A draft's distribution depends
    on its depth, since earlier drafts' keys and values are not the target's.
    """

    shares_cache = True
    rounds = False  # whether its model is a rounded copy, which a change of the target alone makes old
    tail = 1  # all but the last token of a text is stored, by the target, and must not be overwritten
    target: PreTrainedModel
    # these do nothing, since the target stores prompts and moves its slots
    stage = Proposer.stage
    admit = Proposer.admit
    enter = Proposer.enter
    move = Proposer.move

    def open(self, host: Host) -> None:
        if host.target.model is not self.target:
            name = type(self).__name__
            raise ValueError(
                f"{name}: its target is not the engine's model: give the same model to {name} and to Engine"
            )
        if not self.rounds or self.served is not host.target or not host.target.copied:
            before = self.model, self.int8
            self.renew(isinstance(host.target.run, Lean))
            self.opened = self.opened if before == (self.model, self.int8) else None
        super().open(host)

    def renew(self, lean: bool) -> None:
        """Set `model` and `int8` for the target's present weights. lean: whether the target runs `Lean`."""
        raise NotImplementedError(f"{type(self).__name__}.renew")

    def has_changed(self, host: Host) -> bool:
        """Return whether the target has changed. If its LM compares values, the engine has just done so, and has made a
        new cache after a change. To compare them again for a rounded copy would take as long as several drafts."""
        return not (self.rounds and host.target.copied) and self.lm.stale

    def propose(self, round: Round) -> Proposal:
        self.stored = [len(text) - 1 for text in round.texts]
        return super().propose(round)

    def commit(self, outcome: Outcome) -> None:
        """Do nothing, since the target overwrites the keys and values of drafts."""


def chain_drafter(greedy: bool) -> Run:
    """Return a function of tensors that drafts one token after the other, in one call (`LM.drafts`). The function's
    inputs are `last` (A, n), the last ids of each text, and `ends` (A,), the number of tokens of each text. All ids
    before `last` must be stored. greedy: whether to draft the likeliest tokens."""

    def run(read: Callable[..., Tensor], round: Any, given: Mapping[str, Tensor], K: int) -> Drafts:
        last, ends = given["last"], given["ends"]

        def follow(ids: Tensor, nodes: Nodes) -> Tensor:
            return read(ids, ends + (nodes.depth - 1))

        logits = read(last, ends - last.shape[1])[:, -1]
        return one_by_one(K, logits, follow, by_round(round, greedy))

    return run


def _load(path: str) -> PreTrainedModel:
    """Return the model at a path. A local folder is loaded as a draft folder. Any other path is the hub id of a causal
    LM, with or without modules of this project.

    Raises ValueError if tensors are missing, are not finite or have other shapes than config.json says, and if a pruned
    head has wrong ids.
    """
    if Path(path).is_dir():
        return widened(load_draft(path)[0])
    loaded: Any = CausalLM.from_pretrained(path, use_safetensors=True, output_loading_info=True)
    network, info = loaded
    if lacking := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise ValueError(
            f"{path}: tensors are missing or have other shapes than config.json says: {', '.join(lacking)}: use the "
            "config.json that belongs to these weights"
        )
    require_sound(network, path)
    return widened(network.eval())
