"""Properties of every kind of student in `student_kinds.STUDENTS`, to which a new kind adds itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from cotrain.config.drafts import DRAFTS
from cotrain.data.texts import Texts
from cotrain.evaluation import profile
from cotrain.evaluation.held_out import evaluate, figures, held_out
from cotrain.losses import batch as losses_of_batches
from cotrain.losses.chunked import chunked
from cotrain.losses.spec import parse
from cotrain.students.base import ANY, KINDS, Guess, Seen, refuse_mixed, student_class
from cotrain.teacher.target_model import served, split
from cotrain.training.module import Distillation, Stage
from inference import Engine
from inference.policy import Fixed
from inference.sampling import one_hot
from tests import standin
from tests.cotrain.students.test_eagle import distributions
from tests.cotrain.training.test_module import alone
from tests.often import EACH_WAY, often
from tests.student_kinds import SERVED, STUDENTS, VOCABULARY, target
from tests.watched import Watched

IDS = torch.randint(VOCABULARY, (3, 14), generator=torch.Generator().manual_seed(4))
EVERY = pytest.mark.parametrize("kind", STUDENTS)
EACH = pytest.mark.parametrize("kind", often(STUDENTS, EACH_WAY.__contains__))


TRAINED = {kind for kind in KINDS if DRAFTS[kind].trained}


def seen(kind: Any, ids: Tensor) -> Seen:
    model = target()
    with torch.no_grad():
        return Seen(dict(served(model, layers=kind.reads)[0](ids)))  # type: ignore[arg-type]


def guesses(kind: Any, ids: Tensor, states: Seen | None = None, temperature: float = 1.0) -> list[Guess]:
    heat = torch.full((len(ids),), temperature)
    return list(kind.guesses({"ids": ids, "temperature": heat}, states or seen(kind, ids)))


def teaching(student: Any, loss: str, model: Any = None, **settings: Any) -> Distillation:
    """The first step of a training."""
    stages: Any = [Stage(1.0, parse(loss))], *([None] * 2)
    return alone(Distillation(student, model or target(), *stages, {}, **settings))


def whole(ids: Tensor = IDS, temperature: float | list[float] = 1.0) -> dict[str, Tensor]:
    """A batch of texts that are learnt from their second token on."""
    predicted = torch.ones(len(ids), ids.shape[1] - 1, dtype=torch.bool)
    heat = torch.tensor(temperature).expand(len(ids))
    return {"ids": ids, "predicted": predicted, "key": torch.arange(len(ids)), "temperature": heat}


def gradients(student: Any, loss: str, batch: dict[str, Tensor], **settings: Any) -> dict[str, Tensor | None]:
    teaching(student, loss, **settings).training_step(batch, 0).backward()
    return {name: weight.grad for name, weight in student.network.named_parameters()}


@EACH
def test_columns_of_padding_alone_are_not_computed(kind: str) -> None:
    student, widths = STUDENTS[kind](target()), []
    batch = whole(temperature=[1.0, 0.7, 2.0]) | {"length": torch.tensor([14, 9, 12])}
    batch["predicted"] &= torch.arange(1, 14) < batch["length"].unsqueeze(1)
    padded = batch | {name: pad(batch[name], (0, 70)) for name in ("ids", "predicted")}
    made = student.guesses
    student.guesses = lambda given, seen: widths.append(given["ids"].shape[1]) or made(given, seen)
    torch.testing.assert_close(gradients(student, "kl", padded), gradients(student, "kl", batch))
    assert widths == [32, 14]


@EVERY
def test_positions_and_depths_are_those_of_rounds(kind: str) -> None:
    by_depth = guesses(STUDENTS[kind](target()), IDS)
    refuse_mixed(by_depth)
    for guess in by_depth:
        assert guess.at.dtype == torch.int64 and len(guess.at) == len(guess.states) == len(guess.at.unique())
        places = torch.zeros(IDS.numel(), dtype=torch.bool).index_fill(0, guess.at, True).view(IDS.shape)
        assert bool(places[:, max(guess.depth, 0) + 2 :].all())  # rounds start anywhere after a prompt of two
        assert distributions(guess).shape == (len(guess.at), VOCABULARY)


@EVERY
def test_a_guess_reads_only_what_its_round_has(kind: str) -> None:
    """At position t and depth j: no token after t, and no state of the target from the anchor's position t - j on."""
    student = STUDENTS[kind](target())
    states = seen(student, IDS)
    before = guesses(student, IDS, states)
    for cut in (3, 4, 7, 12):
        ids, later = IDS.clone(), torch.arange(IDS.shape[1]) > cut
        ids[:, later] = (ids[:, later] + 7) % VOCABULARY
        for j, guess in enumerate(before):
            hidden = torch.arange(IDS.shape[1]) >= cut - max(guess.depth, 0)
            changed = {layer: one + 3.0 * hidden[:, None] for layer, one in states.states.items()}
            other = guesses(student, ids, Seen(changed))[j]
            here = guess.at % IDS.shape[1] <= cut if guess.depth == ANY else guess.at % IDS.shape[1] == cut
            torch.testing.assert_close(distributions(other)[here], distributions(guess)[here])
            if cut + max(guess.depth, 0) + 1 < IDS.shape[1]:  # changes are read by later guesses
                assert not torch.allclose(distributions(other)[~here], distributions(guess)[~here])


@EVERY
@pytest.mark.parametrize("loss", often(["0.5*kl+0.5*calls", "calls_tv"], lambda loss: "kl" in loss))
def test_every_loss_reaches_every_parameter(kind: str, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in chunks, where what a guess does not name gets no gradient, and whether the target's distributions are
    computed once for all depths or for each. The target may have sampled other tokens than those that count."""
    columns, slopes = torch.arange(13).expand(3, -1), []
    batch = whole(temperature=[1.0, 0.7, 2.0]) | {
        "predicted": columns >= torch.tensor([[4], [9], [0]]),
        "sampled": (columns >= 1) & (columns < torch.tensor([[7], [8], [5]])),
    }
    for chunk, remembered in ((7, 2**28), (10_000, 0)):
        monkeypatch.setattr("cotrain.teacher.target_distributions.REMEMBERED", remembered)
        slopes.append(gradients(STUDENTS[kind](target()), loss, batch, chunk=chunk))
    assert slopes[0] and not [name for name, one in slopes[0].items() if one is None or not bool(one.abs().sum() > 0)]
    torch.testing.assert_close(*slopes)


SHORT = [0, 1, 1, 2]  # tokens of the completions of a batch


def short(prompts: list[int], completions: list[int], rows: int = 4) -> dict[str, Tensor]:
    """A batch of texts with prompts and completions of so many tokens."""
    start, count = torch.tensor(prompts), torch.tensor(completions)
    at = torch.arange(1, max(int((start + count).max()), 2))
    inside = (at >= start.unsqueeze(1)) & (at < (start + count).unsqueeze(1))
    ids = torch.randint(VOCABULARY, (rows, len(at) + 1), generator=torch.Generator().manual_seed(4))
    return {"ids": ids, "predicted": inside, "key": torch.arange(rows), "temperature": torch.ones(rows)}


@EACH
def test_answers_of_no_one_and_two_tokens_are_learnt_and_judged(kind: str) -> None:
    """In batches of only such, each loss is finite, as are its gradients, and each figure is of what there is."""
    model = target()
    student = STUDENTS[kind](model)
    batches = [short([3, 1, 2, 4], part) for part in (SHORT, [1, 1, 1, 1], [0, 0, 0, 0])]
    for name in ("0.5*lk+0.5*greedy_draft", "calls+calls_block", "calls_tv"):
        module = alone(teaching(student, name, model), 5, at=4)
        for batch in (short([1] * 4, [1] * 4), *batches):  # first texts of two tokens, of which some kinds guess none
            student.network.zero_grad()
            loss = module.training_step(batch, 0)
            loss.backward()
            assert bool(loss.isfinite()), name
            assert all(bool(w.grad.isfinite().all()) for w in student.network.parameters() if w.grad is not None), name
    assert not [figure for figure in module.step_figures if "acceptance" in figure]  # the last batch has no token
    length = torch.tensor([2, 2, 3, 5])
    texts = Texts(batches[1]["ids"], length - 1, length, ["a", "b", "a", "b"])
    held, head = held_out(served(model, layers=student.reads)[0], texts, 1.0), split(model)[1]
    scores = evaluate(held, student, head)["all"]
    assert scores.tau(3) == 1 and scores.alphas[1:] == pytest.approx([torch.nan] * len(scores.alphas[1:]), nan_ok=True)
    assert profile.profile_line(1.0, profile.profile(held.spread(1), student, head))  # of two tokens


@pytest.fixture(scope="module")
def drafted() -> set[tuple[int, int]]:
    """(token of a completion, depth) of all that rounds of an engine draft, of completions of four tokens or more."""
    model = target()
    watched = Watched(STUDENTS["independent"](model).proposer())
    Engine(model, watched, policy=Fixed(4), rows=64).generate(IDS[:, :3].tolist() * 40, max_new_tokens=9)
    return {
        (token, depth)
        for one in watched.rounds
        for text, k in zip(one.texts, one.k, strict=True)
        for depth in range(k)
        if (token := len(text) - 3 + depth) < 4
    }


@EACH
def test_what_is_learnt_at_a_depth_is_what_rounds_draft_at_it(
    kind: str, drafted: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of prompts of several lengths and completions of four tokens at most, and of one token alone."""
    model, counted = target(), set[tuple[int, int]]()

    def watched(loss: Any, target: Any, guess: Guess, weight: Tensor, *rest: Any, **options: Any) -> Any:
        counted.update((int(at), guess.depth) for at in guess.at if bool(weight.flatten()[at]))
        return chunked(loss, target, guess, weight, *rest, **options)

    monkeypatch.setattr(losses_of_batches, "chunked", watched)
    module = teaching(STUDENTS[kind](model), "tv", model)
    for completions in ([4, 1, 2, 3], [1, 1, 1, 1]):
        prompts, counted = [2, 5, 3, 4], set[tuple[int, int]]()
        batch = short(prompts, completions)
        width = batch["ids"].shape[1]
        for first in (0.0, 0.3, 0.6, 0.9):  # some kinds draw by it the rounds that they learn
            monkeypatch.setattr(module, "_uniforms", lambda keys, n, u=first: torch.eye(1, n).expand(len(keys), n) * u)
            module.training_step(batch, 0)
        depths = 1 + max(depth for _, depth in counted)
        rows = enumerate(zip(prompts, completions, strict=True))
        expected = {
            (row * width + prompt - 1 + token, depth)
            for row, (prompt, length) in rows
            for token, depth in drafted
            if token < length
        }
        if depths == 0:
            assert counted == {(at, ANY) for at, depth in expected if depth == 0}
        else:
            assert counted == {one for one in expected if one[1] < depths} and (depths > 1) == (
                kind != "example" and max(completions) > 1
            )


PRUNED = [kind for kind in STUDENTS if "pruned" in kind]


@pytest.mark.parametrize(
    ("loss", "vocabulary", "temperature"),
    [("0.3*kl+0.7*tv", None, 3.0), ("greedy", None, 3.0), ("tv", 29, 1.0), ("tv", 30, 1.0), ("tv", 31, 1.0)],
)
@pytest.mark.parametrize("kind", PRUNED)
def test_gradients_over_the_columns_of_a_pruned_vocabulary_are_those_over_all(
    kind: str, loss: str, vocabulary: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a temperature at which the tokens outside together often have more mass than the most probable token. Of the
    32 ids of a head with padding only the first can have mass; a draft's vocabulary may have some of the others."""
    slopes, ids = [], IDS % (vocabulary or VOCABULARY)
    for narrow in (True, False):
        made = STUDENTS[kind](target())
        student = type(made)(made.network, made.target, vocabulary)
        assert vocabulary or all(guess.pruned is not None for guess in guesses(student, ids)) is narrow
        slopes.append(gradients(student, loss, whole(ids, temperature)))
        monkeypatch.setattr(type(student), "pruned", None)
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize(
    "kind", [kind for kind in STUDENTS if kind not in ("heads", "example", "hydra", "early_exit", "hybrid_exit")]
)
def test_packed_texts_equal_texts_alone(kind: str) -> None:
    """Two texts in one row, each learnt at its own temperature."""
    student, cut = STUDENTS[kind](target()), 5
    parts = IDS[:1, :cut], IDS[:1, cut:]
    alone_seen = [seen(student, part) for part in parts]
    places = torch.tensor([[*range(cut), *range(14 - cut)]])
    packed = Seen({layer: torch.cat([one.states[layer] for one in alone_seen], 1) for layer in alone_seen[0].states})
    heat = torch.tensor([[0.0] * cut + [0.7] * (14 - cut)])
    together = student.guesses({"ids": IDS[:1], "position_ids": places, "temperature": heat}, packed)
    first, second = (guesses(student, *given) for given in zip(parts, alone_seen, (0.0, 0.7), strict=True))
    for guess, one, two in zip(together, first, second, strict=True):
        assert guess.at.tolist() == [*one.at.tolist(), *(cut + two.at).tolist()]
        torch.testing.assert_close(distributions(guess), torch.cat([distributions(one), distributions(two)]))


@EVERY
def test_save_and_load_round_trip(kind: str, tmp_path: Path) -> None:
    student = STUDENTS[kind](target())
    student.network.float()
    student.save(tmp_path)
    again = type(student).load(tmp_path, target().float())
    states = Seen({layer: one.float() for layer, one in seen(student, IDS).states.items()})
    ours = type(student)(student.network, target().float())
    for one, other in zip(guesses(ours, IDS, states), guesses(again, IDS, states), strict=True):
        assert one.depth == other.depth and torch.equal(one.at, other.at)
        assert torch.allclose(distributions(one), distributions(other), atol=1e-5)


@EVERY
def test_of_other_weights_is_the_same_student(kind: str) -> None:
    student, other = STUDENTS[kind](target()), STUDENTS[kind](target())
    with torch.no_grad():
        for weight in other.network.parameters():
            weight *= 1.5
    states = seen(student, IDS)
    for one, expected in zip(guesses(student.of(other.network), IDS, states), guesses(other, IDS, states), strict=True):
        assert torch.equal(distributions(one), distributions(expected))


@pytest.mark.parametrize("kind", often(SERVED, {*EACH_WAY, "p_eagle", "parallel"}.__contains__))
def test_the_trained_distribution_is_the_served_one(kind: str) -> None:
    """At each drafted token of real rounds, the text with its drafts being read as a text to learn from."""
    model = target()
    student = STUDENTS[kind](model)
    watched = Watched(student.proposer())
    engine = Engine(model, watched, policy=Fixed(3), rows=3)
    engine.generate(IDS[:, :4].tolist(), max_new_tokens=11 if kind == "example" else 7)
    checked = 0
    for served_round in watched.rounds:
        for b, text in enumerate(served_round.texts):
            k = served_round.k[b]
            texts_and_drafts = torch.tensor([text + served_round.x[b, :k].tolist()])
            for guess in guesses(student, texts_and_drafts):
                found = distributions(guess).exp()
                for depth in range(k) if guess.depth == ANY else [guess.depth] * (guess.depth < k):
                    expected = found[guess.at == len(text) - 1 + depth][0]
                    torch.testing.assert_close(served_round.q[b, depth].double(), expected, atol=1e-5, rtol=1e-4)
                    checked += 1
    assert checked > 20


TEXTS = Texts(IDS, torch.tensor([3, 5, 2]), torch.tensor([14, 11, 13]), ["a", "b", "a"])


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        ("heads", 1.0),
        *(("conditioned", t) for t in (0.0, 0.7)),
        *((kind, 1.0) for kind in PRUNED if "markov" not in kind),
    ],
)
def test_held_out_acceptance_is_that_of_each_guess_by_hand(kind: str, temperature: float) -> None:
    """r (N, L, K), alphas and tau of rounds that start at each token; a pruned draft drafts tokens that it knows."""
    model = target()
    student = STUDENTS[kind](model)
    held = held_out(served(model, layers=student.reads)[0], TEXTS, temperature)  # type: ignore[arg-type]
    scores = evaluate(held, student, split(model)[1])["all"]
    with torch.no_grad():
        logits, each = model(IDS).logits, guesses(student, IDS, temperature=temperature)
    p = (logits / temperature).softmax(-1) if temperature else one_hot(logits.argmax(-1), logits)
    order, alphas = [0, 2, 1], torch.zeros(len(each), dtype=torch.float64)  # by domain
    r = scores.r if scores.r.ndim == 3 else scores.r.unsqueeze(-1)
    for j, guess in enumerate(each):
        logq = guess.head(guess.states).detach() / (temperature or 1.0)
        q_of = dict(zip(guess.at.tolist(), logq.softmax(-1), strict=True))
        if "pruned" in kind:
            assert not logq.softmax(-1)[:, ~student.known].any()
        for row, b in enumerate(order):
            for column, t in enumerate(range(int(TEXTS.prompt[b]), int(TEXTS.length[b]))):
                q, here = q_of.get(b * 14 + t - 1), p[b, t - 1]
                if j > column or q is None:  # a round that would start in the prompt
                    assert r[row, column, j] == 0
                    continue
                q = q if temperature else one_hot(q.argmax(-1), q)
                token = IDS[b, t]
                if here[token] > 0:
                    torch.testing.assert_close(
                        r[row, column, j].double(), (q / here)[token].clamp(max=1), atol=1e-6, rtol=1e-5
                    )
                alphas[j] += torch.minimum(q, here).sum()
    drafts = [sum(max(length - j, 0) for length in (11, 6, 11)) for j in range(len(each))]
    wanted = (alphas / torch.tensor(drafts)).tolist()
    assert list(scores.alphas or [scores.alpha]) == pytest.approx(wanted, abs=1e-6) and scores.alpha == pytest.approx(
        wanted[0]
    )
    assert scores.tau(len(each)) >= scores.tau(1) > 1


def held_out_figures(kind: str, device: str) -> dict[str, Any]:
    model = target()
    student = STUDENTS[kind](model)  # made on the CPU: random numbers of a GPU are others
    model.to(device)  # type: ignore[arg-type]
    student.network.to(device)  # type: ignore[arg-type]
    held = held_out(served(model, layers=student.reads)[0], TEXTS, 1.0)  # type: ignore[arg-type]
    return figures(evaluate(held, student, split(model)[1]))


@pytest.mark.parametrize("kind", often(["eagle", "block", "early_exit"], {"eagle"}.__contains__))
def test_a_student_is_judged_on_another_device(kind: str) -> None:
    """Held-out texts stay on the CPU. Other kinds: `tests/cotrain/training/test_on_a_device.py`."""
    with standin.device():
        there = held_out_figures(kind, "cuda")
    assert there == pytest.approx(held_out_figures(kind, "cpu"), nan_ok=True)


def step_of(kind: str, device: str) -> dict[str, Tensor]:
    """The gradients of a training step."""
    model = target()
    student = STUDENTS[kind](model)
    model.to(device)  # type: ignore[arg-type]
    module = teaching(student, "0.5*kl+0.5*calls", model).to(device)
    module.training_step({name: value.to(device) for name, value in whole().items()}, 0).backward()
    return {name: weight.grad.cpu() for name, weight in student.network.named_parameters() if weight.grad is not None}


@EVERY
@pytest.mark.gpu
def test_a_step_on_a_gpu_has_the_gradients_of_a_cpu(kind: str) -> None:
    torch.testing.assert_close(step_of(kind, "cuda"), step_of(kind, "cpu"), atol=1e-4, rtol=1e-3)


@EVERY
@pytest.mark.gpu
def test_a_student_is_judged_on_a_gpu(kind: str) -> None:
    assert held_out_figures(kind, "cuda") == pytest.approx(held_out_figures(kind, "cpu"), rel=1e-4, nan_ok=True)


def test_unknown_kinds_and_mixed_depths_raise() -> None:
    assert student_class("independent").kind == "independent" and TRAINED <= set(STUDENTS)
    with pytest.raises(ValueError, match="draft.kind: 'medusae' is not one of independent"):
        student_class("medusae")
    one = Guess.everywhere(torch.zeros(1, 2, 3), lambda states: states)
    for wrong in ([], [one, one], [Guess(1, one.at, one.states, one.head)]):
        with pytest.raises(ValueError, match="guesses of depths"):
            refuse_mixed(wrong)
