"""A confidence head: its figures against closed forms and pairs, its fit against known maps, and what it reads."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cotrain.config.groups import Init
from cotrain.data.texts import Texts
from cotrain.errors import UserError
from cotrain.evaluation import confidence
from cotrain.evaluation.confidence import DRAFTS, EVERY, Drafts, area, calibration_error, figures, fit, judged, logistic
from cotrain.evaluation.held_out import HeldOut, held_out
from cotrain.students.base import ANY, Guess, Seen, student_class
from cotrain.teacher.target_model import served, split
from cotrain.training import assembly, distil
from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers.block import Block, BlockConfig, BlockNetwork
from inference.proposers.confidence import measures
from inference.sampling import keep_top_p, probs
from tests import kinds
from tests.cotrain.config.test_settings_reach import composed, job_of
from tests.student_kinds import VOCABULARY, block, heads, target

IDS = torch.randint(VOCABULARY, (6, 14), generator=torch.Generator().manual_seed(4))
TEXTS = Texts(IDS, torch.tensor([3, 5, 2, 4, 3, 2]), torch.tensor([14, 11, 13, 14, 14, 12]), ["a", "b"] * 3)


def student(model: Any, markov: int = 3, **settings: Any) -> Any:
    """A block draft with a confidence head whose weights are random."""
    one = block(model, markov_rank=markov, **settings)
    one.network.add_confidence_head()
    with torch.no_grad():
        for weight in one.network.confidence_head.parameters():
            weight.normal_(generator=torch.Generator().manual_seed(8))
    return one


def held(model: Any, kind: Any, temperature: float = 1.0, truncate: Any = None) -> HeldOut:
    return held_out(served(model, layers=kind.reads)[0], TEXTS, temperature, truncate)


def weights(network: Any) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in network.state_dict().items() if "confidence" not in name}


# --- figures


def uniform(n: int, seed: int = 0) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)).double()


def test_the_area_counts_pairs_of_accepted_and_rejected_drafts() -> None:
    alpha, score = uniform(40), (uniform(40, 1) * 8).floor()  # ties
    wins = (score[:, None] > score).double() + 0.5 * (score[:, None] == score).double()
    pairs = alpha[:, None] * (1 - alpha)
    assert area(score, alpha) == pytest.approx(float((wins * pairs).sum() / pairs.sum()), abs=1e-12)
    assert area(torch.ones(40), alpha) == pytest.approx(0.5)
    hard = (uniform(40, 2) < 0.5).double()
    assert area(hard, hard) == 1 and area(-hard, hard) == 0
    weight = uniform(40, 7)
    pairs = pairs * weight[:, None] * weight
    assert area(score, alpha, weight) == pytest.approx(float((wins * pairs).sum() / pairs.sum()), abs=1e-12)
    assert area(score, torch.ones(40)) is None and area(score, torch.zeros(40)) is None


def test_the_area_is_that_of_sampled_acceptances() -> None:
    alpha = uniform(400)
    score = alpha + 0.3 * uniform(400, 1)
    coins = torch.rand(300, 400, generator=torch.Generator().manual_seed(2)) < alpha
    sampled = [area(score, one.double()) or 0.0 for one in coins]
    spread = torch.tensor(sampled).std() / len(sampled) ** 0.5
    assert abs(area(score, alpha) - sum(sampled) / len(sampled)) < 4 * spread + 1 / 400  # type: ignore[operator]


def test_no_score_exceeds_the_area_of_alpha_itself() -> None:
    alpha = uniform(300)
    ceiling = area(alpha, alpha)
    assert ceiling == area(alpha.square(), alpha) and ceiling == pytest.approx(0.5 + 1 / 3, abs=0.02)  # of uniform ones
    for noise in (0.01, 0.1, 1.0):
        assert area(alpha + noise * uniform(300, 3), alpha) < ceiling  # type: ignore[operator]


def test_measures_of_a_distribution() -> None:
    q = torch.tensor([[0.5, 0.125, 0.25, 0.125], [1.0, 0.0, 0.0, 0.0]]).double()
    expected = [[1.75 * math.log(2), 0.5, -math.log(2), 0.25], [0.0, 1.0, 0.0, 1.0]]
    assert torch.allclose(measures(q.log()), torch.tensor(expected).double())


def test_calibration_error_of_calibrated_and_of_shifted_probabilities() -> None:
    sure = 0.1 + 0.7 * uniform(6000)
    alpha = sure + 0.2 * (uniform(6000, 5) - 0.5)  # exact on average
    assert calibration_error(sure, sure) == 0 and calibration_error(sure, alpha) < 0.01
    for shift in (0.08, -0.08):
        assert calibration_error(sure + shift, alpha) == pytest.approx(0.08, abs=0.005)
    mirrored = 0.9 - sure  # right on average over all drafts, wrong in each bin: mean |2 sure - 0.9|
    assert calibration_error(mirrored, sure) == pytest.approx(0.35, abs=0.01)


def test_bins_have_as_many_drafts_each() -> None:
    sure, alpha = torch.tensor([0.9, 0.1, 0.2, 0.8, 0.3, 0.3]).double(), torch.tensor([1.0, 0, 0, 0.5, 0.5, 1]).double()
    table = confidence.reliability(sure, alpha, None, 3)
    assert [one["drafts"] for one in table] == [2, 2, 2]
    assert [one["confidence"] for one in table] == pytest.approx([0.15, 0.3, 0.85])
    assert [one["alpha"] for one in table] == pytest.approx([0.0, 0.75, 0.75])
    assert calibration_error(sure, alpha, None, 3) == pytest.approx((0.15 + 0.45 + 0.1) / 3)
    weight = torch.tensor([0.5, 1, 1, 0.5, 0, 0]).double()  # bins of mass 1: 0.1 alone, 0.2 alone, 0.8 and 0.9
    assert [one["drafts"] for one in confidence.reliability(sure, alpha, weight, 3)] == [1, 1, 1]
    assert calibration_error(sure, alpha, weight, 3) == pytest.approx((0.1 + 0.2 + 0.1) / 3)


def test_areas_of_a_draft_say_which_way_each_score_points() -> None:
    """All scores order these drafts as alpha does: entropy falls as the others rise."""
    alpha = uniform(50).sort().values
    reach = uniform(50, 6)
    drafts = Drafts(alpha, reach, alpha.sqrt(), alpha**2, 3 - alpha, alpha / 2, alpha / 3, torch.zeros(50))
    named = figures(drafts)
    assert set(named["area"].values()) == {area(alpha, alpha)} and len(named["area"]) == 6
    assert set(named["in_rounds"]["area"].values()) == {area(alpha, alpha, reach)}
    assert named["in_rounds"]["calibration_error"] == calibration_error(alpha.sqrt(), alpha, reach)
    assert named["drafts"] == 50 and named["alpha"] == pytest.approx(float(alpha.mean()))
    assert named["confidence"] == pytest.approx(float(alpha.sqrt().mean()))
    assert named["calibration_error"] == calibration_error(alpha.sqrt(), alpha)


# --- the fit


def test_the_fit_recovers_a_known_map() -> None:
    x = torch.randn(3000, 5, generator=torch.Generator().manual_seed(0)).double() * 3 + 1
    w, b = torch.tensor([0.5, -1.0, 0.0, 2.0, 0.1]).double(), 0.7
    weight, bias = logistic(x, torch.sigmoid(x @ w + b), 0.0)
    assert torch.allclose(weight, w, atol=1e-9) and float(bias) == pytest.approx(b, abs=1e-9)


def test_the_fit_is_the_minimum_and_a_constant_input_gets_nothing() -> None:
    """Also of labels that a line separates, where Newton's whole steps would diverge without the ridge."""
    x = torch.cat((uniform(300).view(100, 3), torch.full((100, 1), 4.0, dtype=torch.float64)), 1)
    for labels in (uniform(100, 9), (x[:, 0] > 0.5).double()):
        weight, bias = logistic(x, labels, 0.01)
        gap = torch.sigmoid(x @ weight + bias) - labels
        deviation = x.std(0, correction=0)
        slope = ((x - x.mean(0)).T @ gap / 100)[:3] + 0.01 * weight[:3] * deviation[:3].square()
        assert weight[3] == 0 and abs(float(gap.mean())) < 1e-9 and float(slope.abs().max()) < 1e-9


def test_a_fitted_head_is_right_on_average_and_leaves_the_draft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    one = student(model)
    before, texts = weights(one.network), held(model, one, 0.7)
    count = fit(texts, one, split(model)[1])
    assert weights(one.network).keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(one.network).items())
    assert {weight.requires_grad for weight in one.network.confidence_head.parameters()} == {False}
    drafts = every_draft(texts, one, split(model)[1])
    assert len(drafts) == count
    for sure in (drafts.confidence, drafts.states):  # the bias is free: its slope is the mean of the differences
        assert float(sure.double().mean()) == pytest.approx(float(drafts.alpha.double().mean()), abs=1e-5)
    by = figures(drafts)["area"]
    assert by["confidence"] > by["states"] > 0.6 and by["confidence"] > by["entropy"]


def test_a_fit_reads_all_depths_of_one_round_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    one = student(model)
    texts = held(model, one)
    parts = list(confidence._drafts(texts, one, split(model)[1], every=EVERY))
    whole = every_draft(texts, one, split(model)[1])
    some = Drafts(*(torch.cat([getattr(part, name) for _, part in parts]) for name in Drafts.__annotations__))
    assert 3 * len(some) < len(whole) == fit(texts, one, split(model)[1])  # it reads all rounds of few texts
    monkeypatch.setattr(confidence, "DRAFTS", 2)
    assert fit(texts, one, split(model)[1]) == len(some)
    inside = torch.nn.functional.pad(TEXTS.sampled, (0, 1)).flatten()
    for depth in range(3):
        at = torch.arange(0, IDS.numel(), EVERY) + depth
        at = at[(at < IDS.numel()) & (at // 14 == (at - depth) // 14) & ((at - depth) % 14 > 0)]
        assert int((some.depth == depth).sum()) == int(inside[at].sum())


def every_draft(texts: HeldOut, one: Any, head: Any, greedy: bool = False) -> Drafts:
    parts = [part for _, part in confidence._drafts(texts, one, head, greedy)]
    return Drafts(*(torch.cat([getattr(part, name) for part in parts]) for name in Drafts.__annotations__))


def test_a_fit_without_a_head_raises() -> None:
    model = target()
    with pytest.raises(ValueError, match=r"BlockNetwork has no confidence head: set draft\.confidence=true"):
        fit(held(model, block(model)), block(model), split(model)[1])


@pytest.mark.parametrize(("temperature", "top_p", "greedy"), [(1.0, 1.0, False), (0.7, 0.8, False), (0.0, 1.0, False),
                                                              (0.7, 1.0, True)])  # fmt: skip
def test_labels_and_scores_are_those_of_whole_distributions(temperature: float, top_p: float, greedy: bool) -> None:
    model = target()
    one = student(model)
    cut = (lambda logits: keep_top_p(logits, top_p)) if top_p < 1 else None
    texts = held(model, one, temperature, cut)
    drafts = every_draft(texts, one, split(model)[1], greedy)
    whole, expected = Sampling(temperature, top_p=top_p), []
    passes: dict[tuple[int, int], float] = {}  # by the position of a round's first draft, and depth
    after = torch.nn.functional.pad(TEXTS.sampled, (0, 1)).flatten()
    with torch.no_grad():
        p = probs(model(IDS).logits.flatten(0, 1), [whole] * IDS.numel())
        for guess in one.guesses({"ids": IDS}, confidence_seen(model, one)):
            logits = guess.head(guess.states)
            q, plain = probs(logits, [whole] * len(logits)), (logits / (temperature or 1.0)).softmax(-1)
            if greedy:
                q = torch.nn.functional.one_hot(q.argmax(-1), VOCABULARY).to(q)
            inside, first = after[guess.at], guess.at - guess.depth
            x = IDS.roll(-1, 1).flatten()[guess.at].unsqueeze(1)
            ratio = (q.gather(1, x) / p[guess.at].gather(1, x)).nan_to_num(0.0).clamp(max=1)[:, 0]
            passes |= {(start, guess.depth): float(r) for start, r in zip(first.tolist(), ratio, strict=True)}
            reach = [math.prod(passes[start, i] for i in range(guess.depth)) * bool(after[start])
                     for start in first.tolist()]  # fmt: skip
            top = plain.topk(2).values
            named = {"alpha": torch.minimum(p[guess.at], q).sum(-1), "entropy": -(plain * plain.log()).sum(-1),
                     "margin": top[:, 0] - top[:, 1], "top": top[:, 0],
                     "confidence": one.network.confidence_head(guess.states, plain.log()),
                     "states": one.network.confidence_head(guess.states), "reach": torch.tensor(reach),
                     "depth": torch.full((len(logits),), float(guess.depth))}  # fmt: skip
            expected.append({name: value[inside] for name, value in named.items()})
    for name in expected[0]:
        wanted = torch.cat([part[name] for part in expected]).double()
        torch.testing.assert_close(getattr(drafts, name).double(), wanted, atol=1e-5, rtol=1e-4, msg=name)


def confidence_seen(model: Any, one: Any) -> Seen:
    with torch.no_grad():
        return Seen(dict(served(model, layers=one.reads)[0](IDS)))  # type: ignore[arg-type]


def test_figures_are_of_all_depths_and_of_each() -> None:
    model = target()
    one = student(model)
    report = judged(held(model, one), one, split(model)[1])
    assert len(report["by_depth"]) == 3
    assert sum(part["drafts"] for part in report["by_depth"]) == report["all"]["drafts"]
    mean = sum(part["drafts"] * part["alpha"] for part in report["by_depth"]) / report["all"]["drafts"]
    assert mean == pytest.approx(report["all"]["alpha"]) and report["temperature"] == 1.0
    assert sum(one["drafts"] for one in report["reliability"]) == report["all"]["drafts"]
    assert len(report["reliability"]) == report["bins"] == 15
    assert confidence.line(report).startswith("confidence head at T 1: calibration error ")


def test_a_fit_has_texts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first sampling, at the regime's temperature if texts of it are learnt from; training has the others."""
    many = Texts(IDS.repeat(5, 1), TEXTS.prompt.repeat(5), TEXTS.length.repeat(5), TEXTS.domain * 5)
    numbered = replace(many, ids=many.ids.clone())
    numbered.ids[:, 0] = torch.arange(30)  # names of texts
    job = job_of("regime.temperature=0.7", "rollout.rounds=2")
    monkeypatch.setattr(type(job), "texts", lambda self, kind, t, part, by=None: numbered.at(t))
    monkeypatch.setattr(type(job), "chats", True)
    monkeypatch.setattr(type(job), "given", lambda self, kind: numbered)
    for learnt, asked, first in (([], True, 0), ([0.3, 0.7], True, 1), ([0.3, 0.5], True, 0), ([], None, None)):
        job.cfg.rollout.train_temperatures, job.cfg.draft.confidence = learnt, asked
        names = [texts[0].tolist() for texts in assembly.parts(job, 2)[1].ids.unsqueeze(1)]
        aside = assembly.fitting(job).ids[:, 0].tolist()
        assert len(aside) == 3  # a tenth
        samplings = [sorted(set(range(30)) - set(aside)) if n == first else list(range(30))
                     for n in range(2 * max(len(learnt), 1))]  # fmt: skip
        assert [name for name, *_ in names] == [name for one in samplings for name in one]


def test_a_fit_has_no_more_texts_than_it_reads() -> None:
    many = Texts(IDS.repeat(9000, 1), TEXTS.prompt.repeat(9000), TEXTS.length.repeat(9000), TEXTS.domain * 9000)
    few = many.rows(confidence.reserved(many, 4))
    assert EVERY * DRAFTS <= 4 * int(few.sampled.sum()) < 1.05 * EVERY * DRAFTS and len(few) < 900 * 6
    assert len(confidence.reserved(TEXTS, 4)) == 1


# --- what it reads


def read_by(one: Any, ids: Tensor, seen: Any) -> list[tuple[Guess, Tensor]]:
    head = one.network.confidence_head
    with torch.no_grad():
        guesses = one.guesses({"ids": ids}, seen)
        return [(guess, torch.stack([head(guess.states), head(guess.states, guess.head(guess.states).log_softmax(-1))]))
                for guess in guesses]  # fmt: skip


@pytest.mark.parametrize("markov", [0, 3])
def test_it_reads_the_token_before_and_never_the_one_it_decides_about(markov: int) -> None:
    """Of a draft at position t, which predicts token t + 1: tokens from t + 1 on change nothing; token t, a draft of
    the same round, changes it if rows of the Markov head are read, and only then."""
    model = target()
    one = student(model, markov)
    seen = confidence_seen(model, one)
    before = read_by(one, IDS, seen)
    for t in (6, 9):
        for changed, same in ((torch.arange(14) > t, True), (torch.arange(14) == t, not markov)):
            ids = IDS.clone()
            ids[:, changed] = (ids[:, changed] + 7) % VOCABULARY
            for (guess, sure), (_, now) in zip(before[1:], read_by(one, ids, seen)[1:], strict=True):
                here = guess.at % 14 == t
                assert bool(here.any()) and torch.equal(sure[:, here], now[:, here]) is same


def test_what_was_fitted_is_what_a_round_computes() -> None:
    """`BlockNetwork.confidence` of states and tokens before, beside the head on the guesses' states."""
    for markov in (0, 3):
        model = target()
        one = student(model, markov)
        for guess, sure in read_by(one, IDS, confidence_seen(model, one)):
            states = guess.states[:, : one.network.config.hidden_size]
            before, q = IDS.flatten()[guess.at], guess.head(guess.states).log_softmax(-1)
            assert torch.equal(one.network.confidence(states, before), sure[0])
            assert torch.equal(one.network.confidence(states, before, q), sure[1])


def test_drafts_are_the_same_with_and_without_it() -> None:
    model, outputs = target(), []
    for network in (kinds.block(model, markov_rank=3), student(model).network):
        network.load_state_dict(kinds.block(model, markov_rank=3).state_dict(), strict=False)
        engine = Engine(model, Block(network), policy=Fixed(3), rows=3)
        out = engine.generate(IDS[:3, :4].tolist(), max_new_tokens=10, seed=5)
        outputs.append((out.tokens, out.stats.drafted, out.stats.accepted))
    assert outputs[0] == outputs[1] and sum(outputs[0][2]) > 0


# --- the network


def test_a_cast_network_keeps_it_in_float32(tmp_path: Path) -> None:
    network = student(target()).network.to(torch.bfloat16)
    weight = network.confidence_head.proj.weight
    assert weight.dtype == torch.float32 and network.dtype == torch.bfloat16
    assert weight.shape == (1, network.config.hidden_size + 3) and bool((weight != weight.bfloat16()).any())
    network.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        again = BlockNetwork.from_pretrained(tmp_path, dtype=dtype)
        assert torch.equal(again.confidence_head.proj.weight, weight) and again.dtype == dtype
        assert again.confidence_head.proj.weight.dtype == torch.float32
    states = torch.zeros(2, network.config.hidden_size, dtype=torch.bfloat16)
    assert network.confidence(states, torch.tensor([1, 2])).dtype == torch.float32


def test_a_new_head_says_one_half_and_an_old_folder_has_none(tmp_path: Path) -> None:
    network = kinds.block(target(), markov_rank=3)
    values = network.config.to_dict()
    for name in ("enable_confidence_head", "confidence_head_with_markov"):
        assert values.pop(name) is False
    old = BlockNetwork(BlockConfig(**values))
    assert not hasattr(old, "confidence_head") and old.state_dict().keys() == network.state_dict().keys()
    for made in (BlockNetwork(BlockConfig(**values, enable_confidence_head=True)), old):
        made.add_confidence_head()
        first = made.confidence(torch.ones(1, values["hidden_size"]), torch.tensor([3]))
        assert float(first) == 0.5 and made.config.enable_confidence_head
    assert (made.confidence_head.width, made.config.confidence_head_with_markov) == (values["hidden_size"] + 3, True)


def test_draft_confidence_adds_it_and_changes_no_other_weight(tmp_path: Path) -> None:
    networks = []
    for asked in (None, True):
        draft = composed("draft=block").draft
        draft.depths, draft.markov, draft.confidence = 2, 3, asked
        draft.head_dim, draft.kv_heads, draft.intermediate = 8, 1, 24
        torch.manual_seed(3)
        networks.append(student_class("block").initial(draft, Init("scratch", [0], 0.0), target()))
    without, having = (network.state_dict() for network in networks)
    assert set(having) - set(without) == {
        f"confidence_head.{by}.{name}" for by in ("proj", "with_q") for name in ("weight", "bias")
    }
    assert all(torch.equal(having[name], weight) for name, weight in without.items())


def test_students_without_depths_are_judged_as_one() -> None:
    drafts = Drafts(*[uniform(30)] * 7, torch.full((30,), float(ANY)))
    assert math.isfinite(figures(drafts)["calibration_error"])
    one = heads(target())
    assert confidence.head_of(one) is None


def test_an_export_fits_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On texts set aside, at the regime's temperature, and judged on held-out texts of the regime."""
    model = target()
    one, job = student(model), job_of("regime.temperature=0.7", "regime.top_p=0.9", "objective=sampled_draft")
    job.cfg.draft.depths = 3
    job.target, job.reads = model, one.reads
    monkeypatch.setattr(type(job), "read", property(lambda self: served(model, layers=one.reads)[0]))
    monkeypatch.setattr(distil, "fitting", lambda job: TEXTS)
    calls: list[Any] = []
    monkeypatch.setattr(confidence, "fit", lambda *given: calls.append(("fit", *given)) or 99)
    monkeypatch.setattr(confidence, "judged", lambda *given: calls.append(("judged", *given)) or {"all": 1})
    monkeypatch.setattr(confidence, "line", str)
    module: Any = type("Module", (), {})()
    module.student, module.head_target, module.temperature = one, split(model)[1], 0.7
    module.held_out = {0.7: "held", 1.0: "other"}
    assert distil.fit_confidence(job, module) == {"fitted": {"texts": 6, "drafts": 99}, "all": 1}
    (first, texts, *rest), (second, *other) = calls
    assert (first, second) == ("fit", "judged") and rest == [one, module.head_target, False]
    assert other == ["held", one, module.head_target, False]
    assert texts.temperature == 0.7 and torch.equal(texts.texts.ids, IDS) and texts.truncate is not None
    module.student = block(model)
    assert distil.fit_confidence(job, module) is None and len(calls) == 2


def test_few_texts_leave_some_to_learn_from(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Of two to nine texts one is set aside, which is said; of one there would be none to learn from."""
    for count in range(2, 10):
        many = Texts(IDS[:1].repeat(count, 1), TEXTS.prompt[:1].repeat(count), TEXTS.length[:1].repeat(count),
                     ["a"] * count)  # fmt: skip
        assert len(confidence.reserved(many, 4)) == 1
    with pytest.raises(UserError, match="draft.confidence=true: .* there is 1 text to learn from: .* rollout.texts=10"):
        confidence.reserved(TEXTS.rows([0]), 4)
    model = target()
    one, job = student(model), job_of("regime.temperature=0.7", "objective=sampled_draft")
    job.target, job.reads = model, one.reads
    monkeypatch.setattr(type(job), "read", property(lambda self: served(model, layers=one.reads)[0]))
    module: Any = SimpleNamespace(student=one, head_target=split(model)[1], temperature=0.7)
    module.held_out = {0.7: held(model, one, 0.7)}
    for texts, said in ((TEXTS.rows([0]), "1 text was set aside for the head"), (TEXTS, "")):
        monkeypatch.setattr(distil, "fitting", lambda job, texts=texts: texts)
        distil.fit_confidence(job, module)
        warned = capsys.readouterr().err
        assert said in warned and bool(warned) is bool(said)
