"""Small heads: the decomposition, folders, the forward in few operations, and the check of forwards."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, PhiConfig

from cotrain.students.independent import causal_lm
from inference.drafts.causal_lm import CausalLM
from inference.drafts.draft_folder import load_draft
from inference.measure.floor import weight_bytes
from inference.models import llama, packing
from inference.models.forward import Lean
from inference.models.lm import LM
from inference.models.small_heads import VOCABULARY, LowRank, SmallHead, factors, fill, projection, put_small_head
from inference.proposers import Independent, Parallel
from tests import kinds
from tests.inference.models.test_llama import WIDE, build
from tests.inference.models.test_packing import needs_kernels
from tests.often import often
from tests.tiny import near, tiny

F64 = torch.float64
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
SIZES = [(16, None), (None, 5), (16, 5)]  # tokens and rank


def matrix(tokens: int = 40, width: int = 12) -> torch.Tensor:
    return torch.randn(tokens, width, dtype=F64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_a_low_rank_is_the_nearest_and_split_evenly(rank):
    """The error is that of the left-out singular values, which is the least there is (Eckart and Young, 1936)."""
    weight = matrix()
    up, down = factors(weight, rank)
    singular = torch.linalg.svdvals(weight)
    least = float(singular[rank:].square().sum())
    assert float((weight - up @ down).square().sum()) == pytest.approx(least, rel=1e-9)
    for square in (up.T @ up, down @ down.T):
        torch.testing.assert_close(square, singular[:rank].diag(), atol=1e-9, rtol=0)
    for turned in (matrix()[:, :rank], torch.roll(up, 1, 0)):  # no other rows are nearer, with the best `down` for them
        other = turned @ torch.linalg.lstsq(turned, weight).solution
        assert float((weight - other).square().sum()) > least


def test_directions_without_weight_stay_finite():
    weight = matrix()[:, :2] @ matrix(2, 12)
    up, down = factors(weight, 6)
    assert bool(up.isfinite().all() and down.isfinite().all())
    torch.testing.assert_close(up @ down, weight, atol=1e-9, rtol=0)
    assert not any(bool(part.any()) for part in factors(torch.zeros(5, 3, dtype=F64), 2))


def test_sizes_that_no_head_has_raise():
    with pytest.raises(ValueError, match="head_rank must be from 1 to 12, .* not 13"):
        projection(12, 40, 13)
    for config, message in (
        (
            PhiConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
            ),
            "its head has a bias",
        ),
        (
            Gemma2Config(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
            ),
            "this model caps its logits",
        ),
    ):
        network = AutoModelForCausalLM.from_config(config)
        network.config.update({VOCABULARY: 8})
        with pytest.raises(ValueError, match=message):
            put_small_head(network)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tokens", "rank"), SIZES)
def test_a_folder_holds_the_head(tokens, rank, tied, tmp_path):
    """Embeddings stay whole, tied or not; logits are those of the product of the matrices, -inf for other tokens."""
    network = tiny(dtype=torch.float32)
    if tied:
        network.config.tie_word_embeddings = True
        network.tie_weights()
    embeddings, rows = network.model.embed_tokens.weight.clone(), network.lm_head.weight.detach().clone()
    network = kinds.small(network, tokens, rank)
    network.save_pretrained(tmp_path)
    again, info = CausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not again.config.tie_word_embeddings and torch.equal(again.model.embed_tokens.weight, embeddings)
    known = torch.arange(0, 32, 2) if tokens else torch.arange(32)
    states = again.model(IDS).last_hidden_state
    matrices = rows[known] if rank is None else _product(rows[known], rank)
    wanted = torch.full((2, 6, 32), -torch.inf).index_copy(-1, known, states @ matrices.T)
    torch.testing.assert_close(again(IDS).logits, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(again(IDS).logits, network(IDS).logits)


def _product(rows: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, v = torch.linalg.svd(rows.double(), full_matrices=False)
    return ((u[:, :rank] * s[:rank]) @ v[:rank]).to(rows.dtype)


@pytest.mark.parametrize(("tokens", "rank"), SIZES)
def test_few_operations_give_the_models_own_logits(tokens, rank):
    network = kinds.small(tiny(), tokens, rank)
    assert isinstance(LM(network, 2).run, Lean)
    ours, own = (LM(network, 2, stock=stock).forward(IDS, [0, 0]).logits for stock in (False, True))
    torch.testing.assert_close(ours, own)
    assert bool((own == -torch.inf).any()) is (tokens is not None)
    count = sum(p.numel() for p in network.parameters()) - network.model.embed_tokens.weight.numel()
    assert weight_bytes(LM(network, 2)) == (8 * count, count)


@needs_kernels
@pytest.mark.parametrize(("tokens", "rank"), [(16, None), (None, 16), (16, 16)])
def test_eight_bits_round_both_matrices(tokens, rank):
    network = kinds.small(build("Llama", WIDE, torch.bfloat16), tokens, rank)
    weights = llama.weights_of(network)
    assert packing.has_kernels()
    rounded, size = llama.int8(weights), network.config.vocab_size
    for linear, exact in ((rounded.head.up, weights.head.up), (rounded.head.down, weights.head.down)):  # type: ignore[union-attr]
        assert (linear is None) is (exact is None) is (linear is rounded.head.down and rank is None)  # type: ignore[union-attr]
        if linear is not None and exact is not None:
            columns = linear(torch.eye(exact.weight.shape[1])).T
            torch.testing.assert_close(columns, llama.rounded(exact.weight.float()), rtol=1e-6, atol=0)
    assert llama.can_round(network)
    ids = IDS % size
    q, own = (LM(network, 2, int8=int8).forward(ids, [0, 0]).logits.float().softmax(-1) for int8 in (True, False))
    assert 0 < (q - own).abs().sum(-1).mean() / 2 < 0.08


def test_a_wrong_forward_of_a_pruned_model_is_not_run(monkeypatch):
    """As `test_selfcheck` for whole heads."""
    shape = llama.shape_of
    monkeypatch.setattr(llama, "shape_of", lambda model: shape(model)._replace(scale=1.5 * shape(model).scale))
    with pytest.warns(UserWarning, match="in that of inference.models.llama logits differ"):
        assert not isinstance(LM(kinds.small(tiny(seed=5), 16), 2).run, Lean)


def test_a_head_of_another_class_is_not_bypassed():
    class Scaled(SmallHead):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(states)

    network: Any = kinds.small(tiny(seed=6), 16)
    network.lm_head.__class__ = Scaled
    assert not llama.applies(network)
    low: Any = kinds.small(tiny(seed=6), None, 5)
    low.lm_head.projection.__class__ = type("Other", (LowRank,), {})
    assert not llama.applies(low)
    fill(low.lm_head.projection, tiny().lm_head.weight)


def fetched(cache: Path, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The hub id of a folder, which is in the hub's cache as if it had been fetched; no request reaches a hub."""
    place, commit = cache / f"models--{name.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return name


def test_a_draft_of_the_hub_has_its_own_modules(tmp_path, monkeypatch):
    """As from its folder, and with its settings of generation: a small head of every form, a Markov head, and a plain
    model."""
    target = tiny(dtype=torch.float32)
    forms = {
        "pruned": kinds.small(near(target, 0.2), 16),
        "low": kinds.small(near(target, 0.2), rank=5),
        "markov": kinds.chained(kinds.small(kinds.masked(target, 0.2), 16, 5)),
        "plain": near(target, 0.2),
    }
    for name, network in forms.items():
        network.generation_config.eos_token_id = [5, 7]
        network.save_pretrained(tmp_path / name)
        hub = fetched(tmp_path / "cache", tmp_path / name, f"me/{name}", monkeypatch)
        made: Any = Parallel if name == "markov" else Independent
        for again in (made(hub).model, causal_lm(hub, target), made(str(tmp_path / name)).model):
            assert type(again.lm_head) is type(network.lm_head) and again.generation_config.eos_token_id == [5, 7]
            assert again.state_dict().keys() == network.state_dict().keys()
            for key, tensor in network.state_dict().items():
                assert torch.equal(again.state_dict()[key], tensor), key
    place = next((tmp_path / "cache" / "models--me--low").rglob("model.safetensors"))
    tensors = load_file(place)
    del tensors["lm_head.projection.up.weight"]
    save_file(tensors, place, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="me/low: tensors are missing or have .*: lm_head.projection.up.weight"):
        Independent("me/low")
    with pytest.raises(ValueError, match="draft.path=me/low: tensors are missing: lm_head.projection.up.weight"):
        causal_lm("me/low", target)


DAMAGES: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "an id twice": (
        {"lm_head.known": torch.tensor([*range(15), 3])},
        "id 3 is in the draft's vocabulary more than once",
    ),
    "an id too high": ({"lm_head.known": torch.arange(17, 33)}, "id 32 of the draft's vocabulary is not from 0 to 31"),
    "no number": ({"model.norm.weight": torch.full((16,), torch.nan)}, "tensor model.norm.weight holds NaN"),
    "another shape": ({"markov_head.markov_w2.weight": torch.zeros(15, 3)}, "markov_head.markov_w2.weight"),
}


@pytest.mark.parametrize("damage", often(DAMAGES, {"an id twice", "no number"}.__contains__))
def test_a_damaged_draft_is_refused_wherever_it_is_read(damage, tmp_path, monkeypatch):
    """From a folder and from the hub, to serve and to go on from."""
    tensors, said = DAMAGES[damage]
    target, folder = tiny(dtype=torch.float32), tmp_path / "draft"
    kinds.chained(kinds.small(kinds.masked(target, 0.2), 16)).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    hub = fetched(tmp_path / "cache", folder, "me/draft", monkeypatch)
    readers: list[Any] = [Independent, Parallel, lambda path: causal_lm(path, target), load_draft]
    for path, read in ((path, read) for path in (str(folder), hub) for read in readers):
        if path == hub and read is load_draft:
            continue
        with pytest.raises(ValueError, match=said):
            read(path)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([*range(15), 32], "id 32 of the draft's vocabulary is not from 0 to 31"),
        ([*range(15), -1], "id -1 of the draft's vocabulary is not from 0 to 31"),
        ([*range(15), 3], "id 3 is in the draft's vocabulary more than once"),
        (list(range(12)), "shape.*known|known.*shape"),
    ],
)
def test_ids_of_a_pruned_head_are_distinct_ids_of_the_target(ids, said, tmp_path):
    """Wherever they are read: as a draft to serve, as one to go on from, as an export to check; of feature drafts
    too."""
    target = tiny(dtype=torch.float32)
    network = kinds.small(near(target, 0.2), 16)
    network.save_pretrained(tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    save_file(load_file(file) | {"lm_head.known": torch.tensor(ids)}, file, metadata={"format": "pt"})
    for read in (load_draft, lambda path: causal_lm(str(path), target), lambda path: Independent(str(path))):
        with pytest.raises(ValueError, match=said):
            read(tmp_path / "draft")
    if len(ids) < 16:
        return
    feature = kinds.eagle(target, draft_vocab_size=16)
    feature.fits(target, "draft")
    feature.d2t.copy_(torch.tensor(ids) - torch.arange(16))
    with pytest.raises(ValueError, match=f"draft: tensor d2t: {said}"):
        feature.fits(target, "draft")
    for unmarked, marked in (([3], []), ([], [20]), ([3], [20])):
        feature.know(range(16))
        feature.fits(target, "draft")
        feature.t2d[unmarked], feature.t2d[marked] = False, True
        with pytest.raises(ValueError, match="draft: the tensors t2d and d2t name different tokens"):
            feature.fits(target, "draft")
