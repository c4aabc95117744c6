"""Drafts with a small head before they are trained: which rows they begin with, which tokens they draft, and what their
acceptance is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from cotrain.cli import main
from cotrain.config.groups import Init
from cotrain.students.base import student_class
from cotrain.students.quantised import draft_projections
from cotrain.training import assembly
from cotrain.training.preconditions import size_of
from inference import load
from inference.models.small_heads import LowRank, factors
from inference.proposers.quantised import round_bits
from studies.quantisation_table import rounded_draft
from tests.cotrain.config.test_settings_reach import job_of
from tests.cotrain.students.test_every_student import IDS, distributions, guesses
from tests.cotrain.training.test_preconditions import SIZES as RUN
from tests.draft_folders import bare, draft_folder
from tests.folders import run_paths, target_and_texts
from tests.tiny import tiny

COUNTS = torch.bincount(torch.tensor([9] * 5 + [3] * 4 + [30] * 3 + [17, 17, 4]), minlength=32)
KNOWN = [3, 9, 17, 30]  # the four most frequent
CAUSAL = ["independent", "parallel", "conditioned", "hybrid"]
SCRATCH = {"width": 8, "layers": 1, "intermediate": 16, "head_dim": 8, "kv_heads": 1}


def started(kind: str, target: LlamaForCausalLM, init: str = "target_layers", **settings: Any) -> Any:
    draft = bare(kind, **settings)
    student = student_class(kind)
    return student(student.initial(draft, Init(kind=init, layers=[0]), target), target, 32)


def head_rows(student: Any) -> torch.Tensor:
    """The matrix (Vd, D) that the head stands for."""
    head: Any = student.network.get_output_embeddings()
    part = getattr(head, "projection", head)
    return part.up.weight @ part.down.weight if isinstance(part, LowRank) else part.weight


@pytest.mark.parametrize("kind", [*CAUSAL, "eagle", "p_eagle"])
def test_a_pruned_draft_has_the_most_frequent_tokens_with_their_rows(kind: str) -> None:
    target = tiny(dtype=torch.float32)
    student = started(kind, target, vocabulary=4)
    student.know(COUNTS)
    assert student.known.nonzero().flatten().tolist() == KNOWN and not student.undecided
    if kind not in CAUSAL:
        assert student.network.known.tolist() == KNOWN and student.network.d2t.tolist() == [3, 8, 15, 27]
    torch.testing.assert_close(head_rows(student), target.lm_head.weight[KNOWN])
    if kind in CAUSAL:
        assert student.network.model.embed_tokens.weight.shape == (32, 16)
    for guess in guesses(student.of(student.network.double()), IDS):
        mass = distributions(guess).exp()
        torch.testing.assert_close(mass[:, KNOWN].sum(-1), torch.ones(len(mass), dtype=mass.dtype))


@pytest.mark.parametrize("kind", ["independent", "parallel", "eagle", "p_eagle"])
@pytest.mark.parametrize("tokens", [None, 8])
def test_a_low_rank_head_begins_as_the_nearest_to_the_rows_it_has(kind: str, tokens: int | None) -> None:
    """Rows are cut first, then decomposed."""
    target = tiny(dtype=torch.float32)
    student = started(kind, target, head_rank=3, vocabulary=tokens)
    student.know(COUNTS)
    rows = target.lm_head.weight[student.known]
    assert len(rows) == (tokens or 32)
    up, down = factors(rows, 3)
    torch.testing.assert_close(head_rows(student), up @ down, atol=1e-5, rtol=1e-4)
    assert sum(p.numel() for p in student.network.get_output_embeddings().parameters()) == 3 * (len(rows) + 16)


@pytest.mark.parametrize(("tokens", "rank"), [(4, None), (None, 3), (4, 3)])
def test_a_new_draft_begins_with_the_targets_head_where_it_fits(tokens: int | None, rank: int | None) -> None:
    target = tiny(dtype=torch.float32)
    rows = target.lm_head.weight[KNOWN if tokens else slice(None)]
    expected = rows if rank is None else torch.matmul(*factors(rows, rank))
    for width in (8, 16):
        sizes = SCRATCH | {"width": width, "vocabulary": tokens, "head_rank": rank}
        student = started("independent", target, "scratch", **sizes)
        student.know(COUNTS)
        network = student.network
        assert student.known.sum() == (tokens or 32) and not network.config.tie_word_embeddings
        assert bool(head_rows(student).std() > 1e-5) and network.model.embed_tokens.weight.shape == (32, width)
        if width == 16:
            torch.testing.assert_close(head_rows(student), expected, atol=1e-5, rtol=1e-4)


def test_sizes_that_no_head_has_raise_by_name() -> None:
    target = tiny(dtype=torch.float32)
    for kind in ("independent", "eagle"):
        for settings, message in (
            ({"vocabulary": 99}, "draft.vocabulary=99: the vocabulary has only 32 tokens: set draft.vocabulary=null"),
            ({"head_rank": 17}, "draft.head_rank=17: it exceeds 16, the smaller size of the head"),
            ({"head_rank": 5, "vocabulary": 4}, "draft.head_rank=5: it exceeds 4"),
        ):
            with pytest.raises(ValueError, match=message):
                started(kind, target, **settings)
    whole = started("independent", target, vocabulary=32)
    assert type(whole.network.lm_head) is torch.nn.Linear  # all tokens are no choice


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = target_and_texts(tmp_path_factory.mktemp("small heads"))
    for kind in ("independent", "parallel", "eagle"):
        draft_folder(place / kind, place / "target", kind)
        draft_folder(place / f"small {kind}", place / "target", kind, vocabulary=20, head_rank=4)
    return place


@pytest.mark.parametrize("kind", ["independent", "parallel", "eagle"])
def test_a_folder_keeps_its_head_or_gets_a_smaller_one(kind: str, place: Path) -> None:
    target, whole = kinds_target(place), {"path": str(place / kind)}
    small = {"path": str(place / f"small {kind}")}
    again = started(kind, target, "pretrained", **small)
    stored = load_file(place / f"small {kind}" / "model.safetensors")
    for name, tensor in again.network.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    assert not again.undecided and int(again.known.sum()) == 20
    for settings, message in (
        ({"vocabulary": 16}, "draft.vocabulary=16: draft.path=.* 20.*; set draft.vocabulary=null"),
        ({"head_rank": 3}, "draft.head_rank=3: draft.path=.* 4; set draft.head_rank=null"),
    ):
        with pytest.raises(ValueError, match=message):
            started(kind, target, "pretrained", **small | settings)
    lower = started(kind, target, "pretrained", **whole, head_rank=4)
    own = load_file(place / kind / "model.safetensors")
    rows = own.get("lm_head.weight", own.get("model.embed_tokens.weight"))
    torch.testing.assert_close(head_rows(lower), torch.matmul(*factors(rows, 4)), atol=1e-4, rtol=1e-3)


def kinds_target(place: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(place / "target", dtype=torch.float32).eval()


def test_a_whole_folder_is_pruned_by_counts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = kinds_target(place)
    student = started("independent", target, "pretrained", path=str(place / "independent"), vocabulary=4)
    assert student.undecided
    ids = torch.tensor([[0, 9, 9, 3, 17, 30]])
    texts = SimpleNamespace(ids=ids, predicted=torch.ones(1, 5, dtype=torch.bool))
    monkeypatch.setattr(assembly, "parts", lambda job: (None, texts))
    job = job_of("init.kind=pretrained", "draft.vocabulary=4")
    held: Any = SimpleNamespace(texts=texts)
    assembly.prune(job, student, held)
    assert student.known.nonzero().flatten().tolist() == KNOWN and not student.undecided
    rows = load_file(place / "independent" / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(head_rows(student), rows[KNOWN])
    half = SimpleNamespace(texts=SimpleNamespace(ids=torch.tensor([[0, 3, 4]]), predicted=torch.ones(1, 2).bool()))
    assert assembly.coverage(half, student.known) == 0.5  # type: ignore[arg-type]
    student.know = None
    assembly.prune(job, student, held)  # its tokens are chosen


def test_rounding_is_of_both_matrices_and_of_no_projection() -> None:
    """The head is rounded by itself, as a serving engine does; training rounds projections alone."""
    network = started("independent", tiny(dtype=torch.float32), vocabulary=16, head_rank=5).network
    assert not [name for name in draft_projections(network) if "lm_head" in name]
    head, before = rounded_draft(network, "int8").lm_head.projection, network.lm_head.projection
    for part in ("up", "down"):
        ours, whole = (getattr(one, part).weight for one in (head, before))
        assert torch.equal(ours, round_bits(whole, "int8")) and not torch.equal(ours, whole)
    assert torch.equal(rounded_draft(network, "nf4").lm_head.projection.up.weight, before.up.weight)


def test_the_size_of_a_draft_counts_its_own_head() -> None:
    whole, small = started("independent", tiny()), started("independent", tiny(), vocabulary=16, head_rank=5)
    assert size_of(whole.network).active - size_of(small.network).active == 32 * 16 - 5 * (16 + 16)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("draft=independent", "draft.vocabulary=40", "draft.head_rank=4"), marks=pytest.mark.thorough),
        ("draft=eagle", "draft.head_rank=4", "draft.depths=2"),
    ],
    ids=lambda settings: settings[0],
)
def test_a_run_trains_and_its_folder_drafts(
    settings: tuple[str, ...], place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = run_paths(place, tmp_path / "run")
    more = "init=target_layers init.layers=[0] trainer.steps=2 measure=false".split()
    assert main(["train", *paths, *RUN, *more, *settings]) == 0
    said = capsys.readouterr().out
    assert ("the draft's vocabulary has 40 tokens:" in said) is ("draft.vocabulary=40" in settings)
    folder = next((tmp_path / "run").rglob("cotrain.json")).parent
    drafted = load(folder).generate(["def add"], max_new_tokens=12, ignore_eos=True)
    assert sum(drafted.stats.drafted) > 0
