"""Parallel drafts: all tokens of a round from one pass over masks; their text is the same recorded and on a device;
dropped starts keep the expected loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from cotrain.config.groups import Init
from cotrain.students.base import Seen, student_class
from cotrain.students.parallel import ParallelStudent
from cotrain.students.quantised import draft_projections, refuse_unknown
from inference import Engine, Sampling, load, proposers
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Metadata, save
from inference.models.markov import term_of
from inference.models.step import Replayed
from inference.policy import Fixed
from inference.sampling import draw, one_hot
from tests.draft_folders import bare, draft_folder
from tests.dropped_starts import check_dropped_starts
from tests.folders import target_folder
from tests.inference.test_drafting import PROMPTS, REGIMES
from tests.kinds import chained, masked, parallel, small
from tests.often import often
from tests.tiny import record_on_cpu, tiny


def texts(proposer: Any, target: Any, sampling: Any, rows: int = 3, **settings: Any) -> Any:
    engine = Engine(target, proposer, policy=Fixed(4), rows=rows, **settings)
    limits = [20, 4, 33, 11, 26]
    return engine.generate(PROMPTS, max_new_tokens=limits, sampling=sampling, seed=2, ignore_eos=True)


def chained_parallel(target: Any, greedy: bool = False, **settings: Any) -> proposers.Parallel:
    """A parallel draft with a Markov head."""
    return proposers.Parallel(chained(masked(target)), greedy, **settings)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds are recorded; the ids a row of each pass that makes all drafts."""
    record_on_cpu(monkeypatch)
    passes, drafts = [], Replayed.drafts

    def counted(self: Replayed, *given: Any) -> Any:
        passes.extend([given[3]["masked"].shape[1]] if (made := drafts(self, *given)) else [])
        return made

    monkeypatch.setattr(Replayed, "drafts", counted)
    return passes


@pytest.mark.parametrize(
    ("name", "rows", "markov"),
    often(
        [
            ("sampled", 1, False),
            ("sampled", 3, True),
            ("greedy", 3, False),
            ("mixed with greedy", 3, True),
            ("truncated", 3, True),
            ("with history", 3, False),
        ],
        lambda case: case[0] in ("greedy", "with history") or case == ("sampled", 3, True),
    ),
)
def test_recorded_it_gives_the_same_text_and_counts(calls: list[int], name: str, rows: int, markov: bool) -> None:
    """Rows come and go, slots grow, drafts are cut at a row's limit: in float64 nothing may change."""
    target = tiny()
    made = chained_parallel if markov else parallel
    ours, expected = (texts(made(target), target, REGIMES[name], rows, graphs=graphs) for graphs in (True, False))
    assert ours.tokens == expected.tokens
    assert (ours.stats.drafted, ours.stats.accepted) == (expected.stats.drafted, expected.stats.accepted)
    assert 4 <= min(calls) < max(calls) <= 9  # one id and three masks, up to all accepted


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("markov", [False, True], ids=["plain", "markov"])
def test_drafts_are_drawn_from_the_distributions_they_come_with(markov: bool, greedy: bool) -> None:
    """To the last bit; the distributions are those at the text's end and at the masks after it, independent of the
    drafts unless a Markov head adds to the logits what the draft before it says."""
    target = tiny(layers=1, seed=3)
    proposer = (chained_parallel if markov else parallel)(target, greedy)
    engine, seen, propose = Engine(target, proposer, policy=Fixed(3), rows=2), [], proposer.propose

    def watched(round: Any) -> Any:
        x, q, k, _ = proposal = propose(round)
        seen.append((list(map(list, round.texts)), x.clone(), q.clone(), k, round._streams(x.shape[1])[0].clone()))
        return proposal

    proposer.propose = watched  # type: ignore[method-assign]
    temperatures = [0.7, 1.0]
    engine.generate(
        [[1, 2, 3, 4], [5, 6, 7]], max_new_tokens=9, sampling=[Sampling(t) for t in temperatures], ignore_eos=True
    )
    model: Any = proposer.lm.model
    for texts, x, q, k, u in seen[:3]:
        assert torch.equal(x, q.argmax(-1) if greedy else draw(q, u))
        for row, text in enumerate(texts):
            with torch.no_grad():
                logits = model(torch.tensor([[*text, 31, 31]])).logits[0, len(text) - 1 :]
                if markov:
                    logits = logits + model.markov_head(torch.tensor([text[-1], *x[row, :2].tolist()]))
            expected = (logits / temperatures[row]).softmax(-1)
            expected = one_hot(expected.argmax(-1), expected) if greedy else expected
            torch.testing.assert_close(q[row, : k[row]], expected[: k[row]], rtol=1e-5, atol=1e-6)
    assert len(seen) > 2


@pytest.mark.parametrize("name", ["kl", "0.3*kl+0.7*tv"])
def test_dropped_starts_keep_the_expected_loss(name: str) -> None:
    target = tiny()
    check_dropped_starts(ParallelStudent(masked(target, 0.3), target), name, 4)


MASKS = pytest.mark.parametrize(
    ("vocabulary", "pad", "eos", "mask"), [(30, 5, 2, 30), (32, 5, [2, 3], 5), (32, 2, 2, 31)]
)


@MASKS
def test_the_mask_id_is_unused_by_texts(vocabulary: int, pad: int, eos: Any, mask: int) -> None:
    network = tiny()
    network.config.pad_token_id, network.config.eos_token_id, network.config.pard_depths = pad, eos, 4
    assert ParallelStudent(network, None, vocabulary).mask == mask == network.config.pard_token
    with pytest.raises(ValueError, match="config.json of a parallel draft must have pard_token"):
        proposers.Parallel(tiny())


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


@pytest.mark.parametrize("vocabulary", [30, 36])
def test_its_term_is_of_the_targets_vocabulary(vocabulary: int) -> None:
    """Of a larger vocabulary the ids that the draft lacks are read as its last one, and get no mass."""
    network = chained(masked(tiny(), 0.3))
    term = term_of(network, vocabulary)
    ids = torch.tensor([[0, 5, 31, vocabulary - 1]])
    whole = network.markov_head(ids.clamp(max=31))
    assert term(ids).shape == (1, 4, vocabulary) and torch.equal(term(ids)[..., :30], whole[..., :30])
    assert not term(ids)[..., 32:].any() and term_of(masked(tiny()), 32) is None
    target = tiny(vocab=vocabulary)
    ours, plain = (
        Engine(target, proposer, policy=Fixed(3), verify="coupled").generate(PROMPTS, max_new_tokens=9, seed=1).tokens
        for proposer in (proposers.Parallel(network), None)
    )
    assert ours == plain


def test_a_folder_holds_its_markov_head(tmp_path: Path) -> None:
    target: LlamaForCausalLM = tiny(dtype=torch.float32)
    hashes = {"name": "target", **hash_target(target.config, None)}
    network = chained(small(masked(target), 16))
    folder = save(network, None, tmp_path / "draft", Metadata(hashes, 3, kind="parallel"), None)
    again: Any = load(folder, target).proposer.model  # type: ignore[union-attr]
    for key, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    tensors = load_file(folder / "model.safetensors")
    del tensors["markov_head.markov_w2.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="tensor markov_head.markov_w2.weight is missing"):
        load(folder, target)


def test_where_a_markov_head_comes_from(tmp_path: Path) -> None:
    """draft.markov adds one that says nothing yet to any causal LM; a folder's own stays; other kinds leave it out."""
    place = target_folder(tmp_path / "target")
    target = LlamaForCausalLM.from_pretrained(place, dtype=torch.float32).eval()

    def started(kind: str, init: str = "pretrained", **settings: Any) -> Any:
        draft = bare(kind, **settings)
        return student_class(kind).initial(draft, Init(kind=init, layers=[0]), target)

    plain, whole = (draft_folder(tmp_path / f"{kind}", place, kind) for kind in ("independent", "parallel"))
    for network in (
        started("parallel", "target_layers", markov=3),
        started("parallel", path=str(plain), markov=3),
        started("parallel", path=str(whole), markov=3),
    ):
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
    with pytest.raises(ValueError, match=r"draft.markov=5: .* are for draft.markov=3: set draft.markov=3"):
        started("parallel", path=folder, markov=5)
    with pytest.raises(ValueError, match="draft.vocabulary=20: .* Markov head over all 300 tokens: set .*=null"):
        started("parallel", path=folder, vocabulary=20)
    for kind in ("independent", "conditioned", "hybrid"):
        other = started(kind, path=folder)
        assert getattr(other, "markov_head", None) is None and not hasattr(other.config, "markov_rank")


def test_rounding_leaves_a_markov_head_alone() -> None:
    network = chained(masked(tiny(), 0.3))
    assert not [name for name in draft_projections(network) if "markov" in name] and draft_projections(network)
    refuse_unknown(network)
