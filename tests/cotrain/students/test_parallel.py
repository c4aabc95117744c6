"""Parallel drafts: all tokens of a round from one pass over masks; their text is the same compiled and on a device;
dropped starts keep the expected loss."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from cotrain.config.groups import Init
from cotrain.export.engines import launch
from cotrain.losses.batch import _fill_dropped
from cotrain.students.base import Guess, Seen, student_class
from cotrain.students.parallel import ParallelStudent, masks_after, visible
from cotrain.students.quantised import projections, refuse_unknown
from inference import Engine, Sampling, load, proposers
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Metadata, save
from inference.models.lm import LM
from inference.models.markov import put_markov_head, term_of
from inference.models.replay import Compiled, _Bound
from inference.policy import Fixed
from inference.proposers.base import Host
from inference.proposers.parallel import masks
from inference.sampling import draw, one_hot
from tests import standin
from tests.draft_folders import bare, draft_folder
from tests.dropped_starts import check_dropped_starts
from tests.folders import target_folder
from tests.inference.test_drafting import PROMPTS, REGIMES, simple_round
from tests.kinds import chained, masked, parallel, small
from tests.tiny import compiles, tiny


def texts(proposer: Any, target: Any, sampling: Any, rows: int = 3, **settings: Any) -> Any:
    engine = Engine(target, proposer, policy=Fixed(4), rows=rows, **settings)
    limits = [20, 4, 33, 11, 26]
    return engine.generate(PROMPTS, max_new_tokens=limits, sampling=sampling, seed=2, ignore_eos=True)


def chained_parallel(target: Any, greedy: bool = False, **settings: Any) -> proposers.Parallel:
    """A parallel draft with a Markov head."""
    return proposers.Parallel(chained(masked(target)), greedy, **settings)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs compiled modules uncompiled; returns the ids a row of each pass that makes all drafts."""
    passes: list[int] = []

    def counted(module: torch.nn.Module, *_: Any) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            if isinstance(module, _Bound):
                passes.append(inputs["masked"].shape[1])
            return module(**inputs)

        return run

    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr(Compiled, "failed", False)
    return passes


@pytest.mark.parametrize("markov", [False, True], ids=["plain", "markov"])
@pytest.mark.parametrize(("name", "rows"), [("sampled", 1), *((name, 3) for name in REGIMES)])
def test_compiled_it_gives_the_same_text_and_counts(calls: list[int], name: str, rows: int, markov: bool) -> None:
    """Rows come and go, slots grow, drafts are cut at a row's limit: in float64 nothing may change."""
    target = tiny()
    made = chained_parallel if markov else parallel
    ours, expected = (texts(made(target, compile=compile), target, REGIMES[name], rows) for compile in (True, False))
    assert ours.tokens == expected.tokens
    assert (ours.stats.drafted, ours.stats.accepted) == (expected.stats.drafted, expected.stats.accepted)
    by_itself = name.startswith("truncated") or name in ("with history", "mixed with greedy")
    assert not calls if by_itself else 4 <= min(calls) < max(calls) <= 8  # one id and three masks, up to all accepted


@compiles
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("markov", [False, True], ids=["plain", "markov"])
def test_compiled_drafts_are_drawn_from_the_distributions_they_come_with(markov: bool, greedy: bool) -> None:
    """To the last bit; the distributions are those at the text's end and at the masks after it, independent of the
    drafts unless a Markov head adds to the logits what the draft before it says."""
    made = chained_parallel if markov else parallel
    proposer = made(tiny(layers=1, seed=3), compile=True)
    temperature = torch.tensor([0.7, 1.0], dtype=torch.float64)
    proposer.open(Host(2, 0, 32, 64, LM(proposer.model, 2)))
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    proposer.admit(0, prompts, {})
    u = torch.rand(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    round, ids = simple_round(u, temperature, greedy), torch.tensor([[3, 4, 31, 31], [7, 31, 31, 31]])
    given = {"masked": ids, "begins": torch.tensor([2, 2]), "anchors": torch.tensor([1, 0])}
    run = masks(greedy, proposer.term, None)
    with torch.inference_mode():
        drafts = proposer.lm.drafts(round, ("masks",), run, given, ids, 6, 3, greedy)
        assert drafts is not None and not Compiled.failed
        x, q = drafts
        assert torch.equal(x, q.argmax(-1) if greedy else draw(q, u))
        for row, prompt in enumerate(prompts):
            model: Any = proposer.lm.model
            logits = model(torch.tensor([[*prompt, 31, 31]])).logits[0, len(prompt) - 1 :]
            if markov:
                logits = logits + model.markov_head(torch.tensor([prompt[-1], *x[row, :2].tolist()]))
            expected = (logits / temperature[row]).softmax(-1)
            expected = one_hot(expected.argmax(-1), expected) if greedy else expected
            torch.testing.assert_close(q[row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("markov", [False, True], ids=["plain", "markov"])
@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(0.9, top_k=5, repetition_penalty=1.2)])
def test_on_a_device_a_round_is_one_replay_one_copy_and_one_read(
    sampling: Sampling, markov: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)
    target = tiny()
    draft: Any = chained(masked(target)) if markov else masked(target)
    expected = texts(proposers.Parallel(draft), target, sampling).tokens
    with standin.device() as gpu:
        there = copy.deepcopy(target).to("cuda")
        proposer = proposers.Parallel(copy.deepcopy(draft).to("cuda"), compile=True)
        assert texts(proposer, there, sampling, compile=True).tokens == expected and gpu.recordings
        engine = Engine(there, proposer, policy=Fixed(4), rows=3, compile=True)
        rounds = engine.rounds(engine.begin(PROMPTS[:3], 60, sampling, ignore_eos=True))
        copies_and_reads = []
        for _ in range(8):
            gpu.clear()
            next(rounds)
            copies_and_reads.append((sum(gpu.h2d.values()), sum(gpu.d2h.values())))
    assert sorted(copies_and_reads)[len(copies_and_reads) // 2] == (1, 1)


def test_attention_mask_by_enumeration() -> None:
    """Two texts packed into one row."""
    masks, owner = masks_after(torch.tensor([1, 4]), 6, 3), torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert list(zip(masks.start.tolist(), masks.depth.tolist(), strict=True)) == [(1, 1), (4, 1), (1, 2)]
    names = [("token", 0), ("token", 1), ("token", 2), ("token", 3), ("token", 4), ("token", 5), (1, 1), (4, 1), (1, 2)]
    for packed in (None, owner):
        shown = visible(masks, 6, packed)[0, 0]
        for i, (start, at) in enumerate(names):
            until = at if start == "token" else start
            for j, (other, there) in enumerate(names):
                near = packed is None or bool(owner[0, until] == owner[0, there if other == "token" else other])
                sees = near and there <= until if other == "token" else start == other and there <= at
                assert bool(shown[i, j]) == sees, (names[i], names[j])


def test_packed_texts_equal_texts_alone() -> None:
    student, ids = ParallelStudent(masked(tiny(), 0.3), tiny()), torch.randint(32, (1, 12))
    places = torch.tensor([[*range(5), *range(7)]])
    packed = student.guesses({"ids": ids, "position_ids": places}, Seen({}))
    for first, end in ((0, 5), (5, 12)):
        for whole, alone in zip(packed, student.guesses({"ids": ids[:, first:end]}, Seen({})), strict=True):
            here = (whole.at >= first) & (whole.at < end)
            assert (whole.at[here] - first).tolist() == alone.at.tolist()
            torch.testing.assert_close(whole.states[here], alone.states)


@pytest.mark.parametrize("name", ["kl", "0.3*kl+0.7*tv"])
def test_dropped_starts_keep_the_expected_loss(name: str) -> None:
    target = tiny()
    check_dropped_starts(ParallelStudent(masked(target, 0.3), target), name, 4)


def test_tokens_without_a_guess_get_the_mean_acceptance() -> None:
    logp, r = torch.full((1, 4), 0.3).log(), torch.tensor([[0.2, 0.4, 0.0, 0.0]])
    logq = (r * 0.3).log().requires_grad_()
    guess = Guess(2, torch.tensor([0, 1]), torch.zeros(2, 1), lambda states: states, share=0.5)
    filled = _fill_dropped(logp.masked_fill(r == 0, 0.0), logq, guess, torch.ones(1, 4, dtype=torch.bool))[1]
    torch.testing.assert_close(filled.exp(), torch.tensor([[0.06, 0.12, 0.3, 0.3]]))
    filled.sum().backward()
    assert logq.grad is not None and logq.grad.tolist() == [[2.0, 2.0, 0.0, 0.0]]  # each for two


def test_a_folder_says_its_mask(tmp_path: Path) -> None:
    target: LlamaForCausalLM = tiny(dtype=torch.float32)
    student = ParallelStudent(masked(target), target)
    hashes = {"name": "target", **hash_target(target.config, None)}
    save(student.network, None, tmp_path / "draft", Metadata(hashes, 3, kind="parallel"), None)
    engine = load(tmp_path / "draft", target)
    assert isinstance(engine.proposer, proposers.Parallel) and (engine.proposer.mask, engine.proposer.depths) == (31, 4)
    settings: Any = {"max_new_tokens": 12, "seed": 1, "ignore_eos": True}
    expected = Engine(target, student.proposer(), policy=Fixed(3)).generate(PROMPTS, **settings)
    assert engine.generate(PROMPTS, **settings).tokens == expected.tokens
    with pytest.raises(ValueError, match="config.json must name pard_token"):
        proposers.Parallel(tiny())


@pytest.mark.parametrize(("vocabulary", "pad", "eos", "mask"), [(30, 5, 2, 30), (32, 5, [2, 3], 5), (32, 2, 2, 31)])
def test_the_mask_id_is_unused_by_texts(vocabulary: int, pad: int, eos: Any, mask: int) -> None:
    network = tiny()
    network.config.pad_token_id, network.config.eos_token_id, network.config.pard_depths = pad, eos, 4
    assert ParallelStudent(network, None, vocabulary).mask == mask == network.config.pard_token


def test_sliding_windows_raise() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=8, pard_depths=4)
    with pytest.raises(ValueError, match="draft: MistralForCausalLM attends to the last 8 tokens"):
        ParallelStudent(MistralForCausalLM(config)).refuse()
    ParallelStudent(masked(tiny())).refuse()


def test_launch_commands_ask_for_parallel_drafting() -> None:
    assert '"parallel_drafting": true' in launch("vllm", "draft/", "target", 4, "sampled", kind="parallel")
    assert "parallel" not in launch("vllm", "draft/", "target", 4, "sampled")
    with pytest.raises(ValueError, match="engine=sglang: it does not draft in parallel; engine=vllm"):
        launch("sglang", "draft/", "target", 4, "greedy", kind="parallel")


def test_no_more_is_drafted_than_was_learnt() -> None:
    target = tiny()
    engine = Engine(target, parallel(target), policy=Fixed(6), rows=3)
    assert len(engine.generate(PROMPTS, max_new_tokens=12, seed=1, ignore_eos=True).stats.drafted) == 4


# --- a Markov head


@pytest.mark.parametrize("tokens", [None, 16])
def test_guesses_have_the_term_of_the_token_before(tokens: int | None) -> None:
    """By hand, in logits: that of the text's token at each position, at every depth; rows of tokens that the draft
    knows."""
    network = masked(tiny(), 0.3)
    plain: Any = small(network, tokens) if tokens else network
    ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(2))
    expected = ParallelStudent(plain, None, 30).guesses({"ids": ids}, Seen({}))
    before = [guess.head(guess.states).detach() for guess in expected]
    network = chained(plain)
    w1, w2 = network.markov_head.markov_w1.weight, network.markov_head.markov_w2.weight
    known = torch.arange(0, 32, 2) if tokens else torch.arange(32)
    assert w2.shape == (len(known), 3)
    for guess, logits in zip(ParallelStudent(network, None, 30).guesses({"ids": ids}, Seen({})), before, strict=True):
        term = torch.zeros(len(guess.at), 32, dtype=torch.float64)
        term[:, known] = w1[ids.flatten()[guess.at]] @ w2.T
        torch.testing.assert_close(guess.head(guess.states), logits + term[:, :30])


def test_a_markov_head_that_says_nothing_changes_nothing() -> None:
    """And one that says much of one pair of tokens is heard, in chains and in trees."""
    target = tiny()
    plain, network = masked(target), masked(target)
    network.config.markov_rank = 3
    put_markov_head(network)

    def tokens(draft: Any, shape: Any = None) -> Any:
        engine = Engine(target, proposers.Parallel(draft, shape=shape), verify="tree" if shape else "token",
                        policy=Fixed(3), rows=3)  # fmt: skip
        return engine.generate(PROMPTS, max_new_tokens=12, seed=1, ignore_eos=True)

    for shape in (None, (-1, -1, 0, 2)):
        assert tokens(network, shape).tokens == tokens(plain, shape).tokens
    with torch.no_grad():
        network.markov_head.markov_w1.weight.fill_(1.0)
        network.markov_head.markov_w2.weight[4] = 30.0  # after every token
    for shape in (None, (-1, 0)):
        drafts = proposals(network, shape)
        assert drafts and all(one == [4, 4] for one in drafts)


def proposals(network: Any, shape: Any) -> list[list[int]]:
    """The likeliest drafts of each row of the rounds of a call."""
    target, seen = tiny(), []
    proposer = proposers.Parallel(network, greedy=True, shape=shape)
    propose = proposer.propose

    def watched(round: Any) -> Any:
        proposal = propose(round)
        seen.extend(x[:k].tolist() for x, k in zip(proposal.x, proposal.k, strict=True) if k == 2)
        return proposal

    proposer.propose = watched  # type: ignore[method-assign]
    Engine(target, proposer, verify="tree" if shape else "token", policy=Fixed(2), rows=3).generate(
        PROMPTS, max_new_tokens=6, seed=1, ignore_eos=True
    )
    return seen


@pytest.mark.parametrize("vocabulary", [30, 36])
def test_its_term_is_of_the_targets_vocabulary(vocabulary: int) -> None:
    """Of a larger vocabulary the ids that the draft lacks are read as its last one, and get no mass."""
    network = chained(masked(tiny(), 0.3))
    term = term_of(network, vocabulary)
    assert term is not None
    ids = torch.tensor([[0, 5, 31, vocabulary - 1]])
    whole = network.markov_head(ids.clamp(max=31))
    assert term(ids).shape == (1, 4, vocabulary) and torch.equal(term(ids)[..., :30], whole[..., :30])
    assert not term(ids)[..., 32:].any() and term_of(masked(tiny()), 32) is None
    target = tiny(vocab=vocabulary)
    text = Engine(target, proposers.Parallel(network), policy=Fixed(3), verify="coupled").generate(
        PROMPTS, max_new_tokens=9, seed=1, ignore_eos=True
    )
    assert text.tokens == Engine(target, verify="coupled").generate(
        PROMPTS, max_new_tokens=9, seed=1, ignore_eos=True
    ).tokens  # fmt: skip


def test_a_folder_holds_its_markov_head(tmp_path: Path) -> None:
    target: LlamaForCausalLM = tiny(dtype=torch.float32)
    hashes = {"name": "target", **hash_target(target.config, None)}
    for name, network in (("whole", masked(target)), ("pruned", small(masked(target), 16))):
        network = chained(network)
        save(network, None, tmp_path / name, Metadata(hashes, 3, kind="parallel"), None)
        engine = load(tmp_path / name, target)
        again: Any = engine.proposer.model  # type: ignore[union-attr]
        for key, tensor in network.state_dict().items():
            assert torch.equal(again.state_dict()[key], tensor), key
        settings: Any = {"max_new_tokens": 12, "seed": 1, "ignore_eos": True}
        expected = Engine(target, proposers.Parallel(network), policy=Fixed(3)).generate(PROMPTS, **settings)
        out = engine.generate(PROMPTS, **settings)
        assert (out.tokens, out.stats.accepted) == (expected.tokens, expected.stats.accepted)
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    del tensors["markov_head.markov_w2.weight"]
    save_file(tensors, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="tensor markov_head.markov_w2.weight is missing"):
        load(tmp_path / "whole", target)


def test_where_a_markov_head_comes_from(tmp_path: Path) -> None:
    """draft.markov adds one that says nothing yet to any causal LM; a folder's own stays; other kinds leave it out."""
    place = target_folder(tmp_path / "target")
    target = LlamaForCausalLM.from_pretrained(place, dtype=torch.float32).eval()

    def started(kind: str, init: str = "pretrained", **settings: Any) -> Any:
        draft = bare(kind, **settings)
        return student_class(kind).initial(draft, Init(kind=init, layers=[0]), target)

    plain, whole = (draft_folder(tmp_path / f"{kind}", place, kind) for kind in ("independent", "parallel"))
    for network in (started("parallel", "target_layers", markov=3), started("parallel", path=str(plain), markov=3),
                    started("parallel", path=str(whole), markov=3)):  # fmt: skip
        head = network.markov_head
        assert not head.markov_w2.weight.any() and head.markov_w1.weight.std() > 0.1
        assert network.config.markov_rank == 3 and head.markov_w2.weight.shape == (300, 3)
    with torch.no_grad():
        head.markov_w2.weight.normal_()
    about = Metadata({"name": str(place), **hash_target(target.config, None)}, 2, kind="parallel")
    folder = str(save(network, None, tmp_path / "chained", about, None))
    for settings in ({}, {"markov": 3}):
        again = started("parallel", path=folder, **settings)
        assert torch.equal(again.markov_head.markov_w2.weight, head.markov_w2.weight)
    with pytest.raises(ValueError, match=r"draft.markov=5: .* has 3, which cannot change: set draft.markov=3"):
        started("parallel", path=folder, markov=5)
    with pytest.raises(ValueError, match="draft.vocabulary=20: .* Markov head over all 300 tokens: set .*=null"):
        started("parallel", path=folder, vocabulary=20)
    for kind in ("independent", "conditioned", "hybrid"):
        other = started(kind, path=folder)
        assert getattr(other, "markov_head", None) is None and not hasattr(other.config, "markov_rank")


def test_rounding_leaves_a_markov_head_alone() -> None:
    network = chained(masked(tiny(), 0.3))
    assert not [name for name in projections(network) if "markov" in name] and projections(network)
    refuse_unknown(network)
