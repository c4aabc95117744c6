"""What is special about a draft that is told the temperature: every row's own scale in every path, every text's own
while it trains and is judged, and one of them in an export."""

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from cotrain import losses
from cotrain.cli import main
from cotrain.config.groups import Draft, Init
from cotrain.config.regimes import judged, learnt
from cotrain.data.texts import Texts
from cotrain.errors import UserError
from cotrain.evaluation.held_out import evaluate, held_out
from cotrain.export.hf import export
from cotrain.export.layout_check import check
from cotrain.export.one_temperature import folded, measured_elsewhere, refuse
from cotrain.losses.spec import parse
from cotrain.students import rounding
from cotrain.students.base import Seen
from cotrain.students.conditioned import Conditioned as Student
from cotrain.teacher.target_model import served, split
from cotrain.training import assembly, durations
from cotrain.training.job import Job
from cotrain.training.module import Distillation
from cotrain.training.stages import Stage
from inference import Engine, Sampling
from inference.drafts.draft_folder import Metadata, load_draft, read
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.conditioned import Conditioned
from inference.proposers.conditioned_network import KNOTS, TABLE, ConditionedNetwork, Scale, conditioned
from inference.sampling import one_hot
from studies import temperatures
from tests import standin
from tests.cotrain.config.test_settings_reach import job_of
from tests.draft_folders import BARE, draft_folder
from tests.folders import own_texts, target_folder
from tests.kinds import told
from tests.tiny import compiles, near, tiny
from tests.watched import Watched

KNOWN = [0.0, 0.7, 1.0]  # of `told`
PROMPTS = [[(7 * i + 5 * n) % 30 + 1 for i in range(n)] for n in (3, 9, 2, 6, 14, 5, 11)]
SEVERAL = [Sampling(t) for t in (0.0, 0.35, 0.7, 1.0, 0.9, 1.6, 0.0)]
LIMITS = [6, 15, 9, 20, 12, 7, 10]
IDS = torch.randint(32, (3, 12), generator=torch.Generator().manual_seed(4))


def scale(network: Any, temperature: float) -> Tensor:
    """By hand (D,): between the rows of the table on either side, at the ends the first and the last."""
    table, t = network.get_parameter(TABLE).detach(), min(max(temperature, KNOWN[0]), KNOWN[-1])
    low = max(i for i, knot in enumerate(KNOWN[:-1]) if knot <= t)
    share = (t - KNOWN[low]) / (KNOWN[low + 1] - KNOWN[low])
    return 1 + (1 - share) * table[low] + share * table[low + 1]


def logits(network: Any, ids: Tensor, temperature: float) -> Tensor:
    """(B, T, V) by transformers' own forward."""
    with torch.no_grad():
        states = network.base_model(input_ids=ids).last_hidden_state
        return network.lm_head(states * scale(network, temperature).to(states))


def refused(watched: Watched, network: Any) -> int:
    """Distributions that are not those of the row's own temperature, of all that were drafted from; some must have
    been."""
    wrong = seen = 0
    for texts, heat, x, q, k in watched.rounds:
        for b, (text, t) in enumerate(zip(texts, heat, strict=True)):
            whole = torch.tensor([text + x[b, : k[b]].tolist()])
            for depth, found in enumerate(logits(network, whole, t)[0, len(text) - 1 : -1]):
                probs = (found / t).softmax(-1) if t else one_hot(found.argmax(-1), found)
                wrong += not torch.allclose(q[b, depth].cpu().to(probs), probs, atol=1e-6, rtol=1e-5)
                seen += 1
    assert seen > 60
    return wrong


def decoded(target: Any, proposer: Any, sampling: Any = None, compile: bool = False, **settings: Any) -> Any:
    engine = Engine(target, proposer, policy=Fixed(3), rows=3, compile=compile, **settings)
    asked: dict[str, Any] = {"max_new_tokens": LIMITS, "sampling": sampling or SEVERAL, "ignore_eos": True, "seed": 2}
    return engine.generate(PROMPTS, **asked | {"ids": range(7)})


# --- the scale


def test_a_scale_is_that_of_its_temperature_and_lies_between_those_of_its_neighbours() -> None:
    network = told(tiny())
    asked = torch.tensor([0.0, 0.7, 1.0, 0.35, 0.9, 5.0])
    found = Scale(network).at(asked)
    for one, t in zip(found, asked.tolist(), strict=True):
        torch.testing.assert_close(one, scale(network, t), atol=1e-6, rtol=1e-6)
    table = network.get_parameter(TABLE)
    assert torch.equal(found[:3], 1 + table) and torch.equal(found[5], found[2])
    each = Scale(network).at(asked.view(2, 3))
    assert torch.equal(each, found.view(2, 3, -1))
    alone: Any = conditioned(tiny(), [0.5])
    assert torch.equal(Scale(alone).at(asked), torch.ones(6, 16, dtype=torch.float64))
    alone.temperature_scale.weight.data.normal_()
    assert torch.equal(Scale(alone).at(asked), 1 + alone.temperature_scale.weight.expand(6, -1))


@pytest.mark.parametrize("wrong", [[], [0.3, 0.3], [1.0, 0.0]])
def test_temperatures_that_are_no_list_of_knots_are_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one, each once, in rising order"):
        conditioned(tiny(), wrong)
    with pytest.raises(ValueError, match=f"{KNOTS}: the config"):
        Conditioned(conditioned_without(tiny()))


def conditioned_without(model: Any) -> Any:
    """With a scale, and without what it is of."""
    model = conditioned(model, [0.5])
    delattr(model.config, KNOTS)
    return model


def test_untold_it_is_the_independent_draft() -> None:
    target = tiny()
    plain, fresh = near(target, 0.15), conditioned(near(target, 0.15), KNOWN)
    assert decoded(target, Independent(plain)).tokens == decoded(target, Conditioned(fresh)).tokens
    assert {name for name, _ in fresh.named_parameters()} - {name for name, _ in plain.named_parameters()} == {TABLE}


# --- each row's own, in every path


def test_a_row_drafts_with_the_scale_of_its_own_temperature() -> None:
    """Rows come, move and leave; one of them is greedy, whose likeliest token the scale decides."""
    target, network = tiny(), told(tiny())
    watched = Watched(Conditioned(network))
    decoded(target, watched)
    assert refused(watched, network) == 0
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.temperature_scale.weight[0] = 0  # without it, greedy rows would have drafted otherwise
    assert refused(watched, other) > 3


def test_made_for_its_likeliest_tokens_it_drafts_those_that_the_scale_chooses() -> None:
    """For certain, whatever the row's temperature."""
    target, network = tiny(), told(tiny())
    watched, seen = Watched(Conditioned(network, greedy=True)), 0
    decoded(target, watched)
    for texts, heat, x, q, k in watched.rounds:
        for b, (text, t) in enumerate(zip(texts, heat, strict=True)):
            found = logits(network, torch.tensor([text + x[b, : k[b]].tolist()]), t)[0, len(text) - 1 : -1]
            assert torch.equal(q[b, : k[b]].to(found), one_hot(found.argmax(-1), found))
            seen += k[b]
    assert seen > 60


@pytest.mark.parametrize("stock", [False, True])
def test_a_part_of_the_slots_is_read_with_its_own_scales(stock: bool) -> None:
    """Those of the slots that a pass is of, which need not begin at the first."""
    lm = LM(tiny(), 3, stock=stock, scaled=True)
    assert lm.scale is not None
    lm.scale.normal_()
    with torch.inference_mode():
        whole = lm.forward(IDS[:, :4], [0, 0, 0]).logits.clone()
        part = lm.forward(IDS[1:, :4], [0, 0], low=1).logits
    torch.testing.assert_close(part, whole[1:])
    assert not torch.allclose(part, whole[:2])


@pytest.mark.parametrize("path", ["stock", "in passes", "in graphs", "in graphs, with cuts", "in graphs, trees"])
def test_every_way_of_running_it_reads_the_scale(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own forward, single passes, and passes that are recorded on the stand-in device, drafts of a round
    all at once, all at once by the round's own distributions, and level by level."""
    monkeypatch.setattr("inference.models.recording.WARMUP", 1)
    if path == "stock":
        monkeypatch.setattr("inference.models.lm.applies", lambda model: False)
    there = path.startswith("in graphs")
    sampling = [Sampling(s.temperature, top_k=31) for s in SEVERAL] if path.endswith("cuts") else None
    shape, settings = ((-1, -1, 0, 0), {"verify": "tree"}) if path.endswith("trees") else (None, {})
    wanted = decoded(tiny(), Conditioned(told(tiny()), shape=shape), sampling, **settings)
    with standin.device() if there else nullcontext():
        target = tiny().to("cuda") if there else tiny()
        proposer = Conditioned(told(target), compile=there, shape=shape)
        found = decoded(target, proposer, sampling, compile=there, **settings)
        assert proposer.lm.replayed is there
        assert (found.tokens, found.stats.accepted) == (wanted.tokens, wanted.stats.accepted)
    plain = decoded(tiny(), Independent(near(tiny(), 0.15), shape=shape), sampling, **settings)
    assert plain.stats.accepted != wanted.stats.accepted


@pytest.mark.filterwarnings("error:.*CUDA graphs failed")
@pytest.mark.parametrize("cut", [0, 31])
def test_a_recorded_round_reads_the_scale_of_each_call(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shape, so one recording, at one temperature after another; and weights that learnt between two calls."""
    monkeypatch.setattr("inference.models.recording.WARMUP", 0)

    def texts(target: Any, compile: bool) -> list[Any]:
        network = told(target)
        engine = Engine(target, Conditioned(network, compile=compile), policy=Fixed(3), rows=2, compile=compile)
        found = []
        for t in (1.0, 0.7, 0.85, 1.0):
            out = engine.generate(PROMPTS[:2], max_new_tokens=16, sampling=Sampling(t, top_k=cut), seed=3, ids=range(2),
                                  ignore_eos=True)  # fmt: skip
            found.append((out.tokens, out.stats.accepted))
            if len(found) == 3:
                with torch.no_grad():
                    network.temperature_scale.weight[2] -= 0.3
        return found

    wanted = texts(tiny(), False)
    with standin.device() as gpu:
        assert texts(tiny().to("cuda"), True) == wanted and gpu.recordings
    assert wanted[0] != wanted[3]


@compiles
def test_compiled_rounds_read_the_scale() -> None:
    """As many rows as the graph is of, so that it runs; of one temperature, of several, and beside a greedy row, where
    drafts are made pass by pass."""
    target, counts = tiny(), []
    for sampling in (Sampling(0.7), [Sampling(t) for t in (0.35, 1.0, 0.7)],
                     [Sampling(t) for t in (0.0, 0.35, 1.0)]):  # fmt: skip
        asked: dict[str, Any] = {"max_new_tokens": 15, "sampling": sampling, "ignore_eos": True, "ids": range(3)}
        one, other = (
            Engine(target, Conditioned(told(target), compile=compile), policy=Fixed(3), rows=3).generate(
                PROMPTS[:3], **asked
            )
            for compile in (False, True)
        )
        assert one.tokens == other.tokens and one.stats.accepted == other.stats.accepted
        counts.append(one.stats.accepted)
    assert counts[0] != counts[1] != counts[2]


def test_a_scale_is_written_once_for_rows_that_stay() -> None:
    target, written = tiny(), []
    proposer = Conditioned(told(target))
    engine = Engine(target, proposer, policy=Fixed(3), rows=3)

    def counted(temperature: Tensor) -> Tensor:
        written.append(temperature.tolist())
        return at(temperature)

    run = engine.begin(PROMPTS[:3], 12, SEVERAL[:3], ignore_eos=True)
    at = proposer.scale_of.at
    proposer.scale_of.at = counted  # type: ignore[method-assign]
    assert len(list(engine.rounds(run))) > len(written) and written[0] == [0.0, 0.35, 0.7]


# --- each text's own, while it learns and is judged


def module_of(student: Student, target: Any, loss: str = "kl") -> Distillation:
    module = Distillation(student, target, [Stage(1.0, parse(loss))], *([None] * 2), {})  # type: ignore[arg-type]
    module._trainer = SimpleNamespace(global_step=0, max_steps=1, world_size=1)  # type: ignore[assignment]
    return module


def batch_of(ids: Tensor, heat: Any) -> dict[str, Any]:
    predicted = torch.ones(len(ids), ids.shape[1] - 1, dtype=torch.bool)
    return {"ids": ids, "predicted": predicted, "key": torch.arange(len(ids)), "temperature": torch.as_tensor(heat)}


@pytest.mark.parametrize("loss", ["kl", "tv"])
def test_each_text_of_a_batch_is_learnt_at_its_own_temperature(loss: str) -> None:
    """The loss is the mean of those of each text alone, by hand, and only scales that were used learn: at temperature 0
    too, where the likeliest token is all that the target has."""
    target, student = tiny(), Student(told(tiny(), 0.3), tiny())
    heat = [0.0, 1.0, 1.0]
    found = module_of(student, target, loss).training_step(batch_of(IDS, heat), 0)
    each = []
    for text, t in zip(IDS.unsqueeze(1), heat, strict=True):
        with torch.no_grad():
            wanted = target(text).logits[0, :-1]
        logp = (wanted / t).log_softmax(-1) if t else one_hot(wanted.argmax(-1), wanted).log()
        logq = (logits(student.network, text, t)[0, :-1] / (t or 1.0)).log_softmax(-1)
        each.append(losses.kl(logp, logq).mean() if loss == "kl" else losses.tv(logp, logq).mean())
    torch.testing.assert_close(found.double(), torch.stack(each).mean(), rtol=1e-5, atol=1e-6)
    found.backward()
    slope = student.network.get_parameter(TABLE).grad
    assert slope is not None and bool((slope[[0, 2]].abs().sum(1) > 1e-4).all()) and not bool(slope[1].any())


def test_texts_that_share_a_row_have_temperatures_of_their_own() -> None:
    """Two packed texts against each alone."""
    student = Student(told(tiny(), 0.3), tiny())
    ids, places = IDS[:1], torch.cat([torch.arange(7), torch.arange(5)]).unsqueeze(0)
    heat = torch.tensor([[0.0] * 7 + [0.7] * 5])
    (packed,) = student.guesses({"ids": ids, "position_ids": places, "temperature": heat}, Seen({}))
    for part, t in ((slice(0, 7), 0.0), (slice(7, 12), 0.7)):
        (alone,) = student.guesses({"ids": ids[:, part], "temperature": torch.tensor([t])}, Seen({}))
        torch.testing.assert_close(packed.states[part], alone.states)
        torch.testing.assert_close(alone.head(alone.states), logits(student.network, ids[:, part], t)[0])


@pytest.mark.parametrize("t", [0.0, 0.7, 1.0])
def test_held_out_texts_are_judged_with_the_scale_of_their_temperature(t: float) -> None:
    target, student = tiny(), Student(told(tiny(), 0.3), tiny())
    texts = Texts(IDS, torch.full((3,), 4), torch.full((3,), 12), ["a"] * 3)
    found = evaluate(held_out(served(target)[0], texts, t), student, split(target)[1])["all"]
    with torch.no_grad():
        p, q = target(IDS).logits[:, 3:-1], logits(student.network, IDS, t)[:, 3:-1]
    both = [(one / t).softmax(-1) if t else one_hot(one.argmax(-1), one) for one in (p, q)]
    assert found.alpha == pytest.approx(float(torch.minimum(*both).sum(-1).mean()), abs=1e-6)


def test_a_run_learns_and_is_judged_at_every_temperature_that_its_draft_is_told() -> None:
    cfg = job_of("draft.temperatures=[0.0,0.3]", "rollout.temperatures=[0.5]").cfg
    assert learnt(cfg) == [0.0, 0.3] and judged(cfg) == [0.0, 0.3, 0.5, 0.8]
    cfg.rollout.train_temperatures = [0.3, 0.6]
    assert learnt(cfg) == [0.3, 0.6] and judged(cfg) == [0.3, 0.5, 0.6, 0.8]
    with pytest.raises(ValueError, match=r"draft.temperatures: no text is learnt at 0: rollout.train_temp.*=\[\], or"):
        assembly.refuse(cfg, [])
    cfg.rollout.train_temperatures, cfg.trainer.top, cfg.init.cosine = [], 4, 0
    with pytest.raises(
        ValueError, match="trainer.top: distributions are kept at one temperature, the regime's: trainer.top=0"
    ):
        assembly.refuse(cfg, [])
    cfg.draft.temperatures = []
    assert learnt(cfg) == [0.8] and judged(cfg) == [0.5, 0.8]
    assembly.refuse(cfg, [])


def test_texts_are_sampled_at_the_temperature_that_they_are_learnt_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of temperature 0 are greedy; given texts, which nobody sampled here, take turns."""
    job = job_of("draft.temperatures=[0.0,0.3]", "trainer.corpus_steps=1")
    given, met = Texts(IDS, torch.ones(3), torch.full((3,), 12), ["a"] * 3), list[Any]()
    monkeypatch.setattr(Job, "chats", False)
    monkeypatch.setattr(Job, "given", lambda self, kind: given)
    monkeypatch.setattr(Job, "texts", lambda self, *asked: met.append(asked[1]) or given)
    corpus, sampled = assembly.parts(job, 1)
    assert met == [0.0, 0.3]
    torch.testing.assert_close(sampled.temperature, torch.tensor([0.0, 0.0, 0.0, 0.3, 0.3, 0.3]))
    torch.testing.assert_close(corpus.temperature, torch.tensor([0.0, 0.3, 0.0]))


# --- where it begins


def begun(path: Path | None, known: list[float], target: Any) -> Any:
    draft = Draft(**BARE | {"kind": "conditioned", "path": path and str(path), "temperatures": known})
    return Student.initial(draft, Init("pretrained" if path else "target_layers", [0], 0.0), target)


def test_it_begins_as_an_independent_draft_or_goes_on_with_its_scale(tmp_path: Path) -> None:
    target = tiny(dtype=torch.float32)
    plain = near(target, 0.2)
    plain.save_pretrained(tmp_path / "plain")
    network = begun(tmp_path / "plain", KNOWN, target)
    assert all(torch.equal(network.get_parameter(name), weight) for name, weight in plain.named_parameters())
    assert not bool(network.get_parameter(TABLE).any())
    own = told(target)
    own.save_pretrained(tmp_path / "own")
    again = begun(tmp_path / "own", KNOWN, target)
    assert all(torch.equal(again.get_parameter(name), weight) for name, weight in own.named_parameters())
    with pytest.raises(ValueError, match=r"draft.temperatures: .*own was told \[0.0, 0.7, 1.0\]: draft.temperatures="):
        begun(tmp_path / "own", [0.5], target)
    with pytest.raises(ValueError, match="draft.temperatures: temperatures .*: at least one"):
        begun(None, [], target)
    assert begun(None, [0.5], target).get_parameter(TABLE).shape == (1, 16)


def test_other_kinds_are_told_no_temperature() -> None:
    cfg = job_of("draft.temperatures=[0.0,0.3]").cfg
    with pytest.raises(ValueError, match=r"draft.temperatures=\[0.0, 0.3\]: independent drafts do not have it.*=\[\]"):
        assembly.initial(cfg, tiny())


def test_a_folder_that_lacks_its_scale_is_refused(tmp_path: Path) -> None:
    network = told(tiny(dtype=torch.float32))
    network.save_pretrained(tmp_path)
    again = ConditionedNetwork.from_pretrained(tmp_path)
    assert all(torch.equal(again.get_parameter(name), weight) for name, weight in network.named_parameters())
    file, tensors = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    for changed, message in (
        ({}, f"tensor {TABLE} is missing"),
        ({TABLE: torch.zeros(2, 16)}, rf"tensor {TABLE} has shape \(2, 16\), config.json says \(3, 16\)"),
        ({TABLE: torch.full((3, 16), torch.nan)}, f"tensor {TABLE} holds NaN"),
    ):
        save_file({name: one for name, one in tensors.items() if name != TABLE} | changed, file, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load_draft(tmp_path, network=ConditionedNetwork)


def test_rounded_weights_keep_their_scale() -> None:
    network = told(tiny(hidden=64, dtype=torch.float32))
    rounding.refuse_unknown(network)
    other = rounding.rounded(network, "int8")
    assert torch.equal(other.get_parameter(TABLE), network.get_parameter(TABLE))
    assert not torch.equal(other.lm_head.weight, network.lm_head.weight)


# --- at one temperature


@pytest.mark.parametrize("t", [0.0, 0.35, 1.0])
def test_an_export_drafts_as_the_folder_does_at_its_temperature(t: float) -> None:
    network = told(tiny())
    wanted, other = (logits(network, IDS, one) for one in (t, 0.7))
    found = folded(copy.deepcopy(network), t)
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, wanted)
        assert not torch.allclose(found(IDS).logits, other)
    assert TABLE not in found.state_dict() and not hasattr(found.config, KNOTS)


def test_a_norm_that_takes_no_scale_is_refused() -> None:
    class Capped(LlamaForCausalLM):
        def forward(self, *given: Any, **settings: Any) -> Any:
            found = super().forward(*given, **settings)
            found.logits = torch.tanh(found.logits)
            return found

    network = told(tiny())
    network.__class__ = Capped
    with pytest.raises(ValueError, match="temperature: Capped has a final norm that takes no scale"):
        folded(network, 0.3)


def test_an_exported_folder_is_an_independent_draft_of_one_temperature(tmp_path: Path, capsys: Any) -> None:
    target = target_folder(tmp_path / "target")
    draft, output = draft_folder(tmp_path / "draft", target, "conditioned"), tmp_path / "out"
    network = ConditionedNetwork.from_pretrained(draft)
    with torch.no_grad():
        network.temperature_scale.weight.normal_(std=0.4, generator=torch.Generator().manual_seed(0))
    network.save_pretrained(draft)
    words = ["export", f"draft.path={draft}", f"output={output}"]
    assert main(words) == 1
    assert "give the one that you serve at, as temperature=0.7" in capsys.readouterr().err and not output.exists()
    assert main([*words, "temperature=0.35"]) == 0
    assert check(output) == []
    metadata = read(output).metadata
    assert metadata and (metadata.kind, metadata.regime["temperature"]) == ("independent", 0.35)
    card = (output / "README.md").read_text()
    assert "Made for temperature 0.35" in card and "measured at" not in card  # nothing was measured
    ids, plain = torch.arange(2, 12).unsqueeze(0), AutoModelForCausalLM.from_pretrained(output)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, logits(network, ids, 0.35), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="temperature: .* drafts differently"):
        export(draft, tmp_path / "other", "vllm")
    with pytest.raises(UserError, match="temperature=0.3: .* drafts alike at every temperature: temperature=null"):
        refuse(output, 0.3)


def test_an_export_says_where_it_was_measured() -> None:
    target = {"name": "t", "config": None, "tokenizer": None}
    made = Metadata(target, 4, regime={"temperature": 1.0}, kind="conditioned", report="0" * 64)
    found = measured_elsewhere(made, 0.7)
    assert found and "measured at temperature 1, not at 0.7: cotrain bench regime.temperature=0.7" in found
    assert measured_elsewhere(made, 1.0) is None and measured_elsewhere(replace(made, report=None), 0.7) is None


def test_time_is_reckoned_for_texts_of_every_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, known = (
        job_of("draft.temperatures=[0.0,0.3,1.0]", "rollout.temperatures=[0.5]").cfg,
        SimpleNamespace(sources=None),
    )
    monkeypatch.setattr(durations, "domains", lambda cfg, sources, split: ["a", "b"])
    given: Any = known
    assert durations._count(cfg, given, "train") == 3 * 2 * cfg.rollout.texts
    assert durations._count(cfg, given, "held_out") == 5 * 2 * cfg.rollout.held_out_texts  # 0.8, the regime's, too


# --- a run, and the study


def test_one_run_learns_at_every_temperature_and_the_study_reads_its_draft(tmp_path: Path) -> None:
    """Every scale has learnt; the draft that is exported is judged on the texts that the run judged on."""
    target, own, run = target_folder(tmp_path / "target"), own_texts(tmp_path / "own.jsonl"), tmp_path / "run"
    sizes = """data.block=64 rollout.texts=4 rollout.held_out_texts=3 rollout.prompt_tokens=8 rollout.new_tokens=16
    rollout.temperatures=[] trainer.corpus_steps=0 trainer.batch=3 trainer.validations=1 init=target_layers
    init.layers=[0] init.cosine=0 policy.k=2 draft.temperatures=[0,0.7,1]""".split()
    place = [f"target.path={target}", f"data.path={own}", f"rollout.folder={tmp_path / 'texts'}", *sizes]
    timed = """bench.prompts=2 bench.quick_prompts=1 bench.prompt_tokens=8 bench.new_tokens=8 bench.parity_tokens=100
    bench.minutes=0 bench.depths=[2] bench.draft_dtype=float32 trainer.steps=6""".split()
    assert main(["train", "draft=conditioned", f"output={run}", *timed, *place]) == 0
    found, report = (json.loads((run / name).read_text()) for name in ("held_out.json", "draft/report.json"))
    assert set(found["texts"]) == {"0", "0.7", "1"} and report["exactness"]["passed"]
    assert report["extra"]["training"]["temperatures"] == [0.0, 0.7, 1.0]
    table = load_file(run / "checkpoints" / "step-6" / "model.safetensors")[TABLE]
    assert table.shape == (3, 64) and bool((table.abs().sum(1) > 0).all())
    step, plain = report["extra"]["exported_step"], draft_folder(tmp_path / "plain", target, "independent")
    served = load_file(run / "draft" / "model.safetensors")
    assert torch.equal(served[TABLE], load_file(run / "checkpoints" / f"step-{step}" / "model.safetensors")[TABLE])
    settings = [part for one in place for part in ("--set", one)]
    words = [str(tmp_path / "out.json"), str(run / "draft"), f"1={plain}", f"0={plain}", "--k", "2", *settings]
    temperatures.main(words)
    made = json.loads((tmp_path / "out.json").read_text())
    assert set(made) == {"environment", "commit", "command", "target", "conditioned", "k", "rows"}
    assert made["command"] == " ".join(["python -m studies.temperatures", *words])
    assert [row["temperature"] for row in made["rows"]] == [0.0, 1.0]
    for row in made["rows"]:
        assert row["low"] <= row["share"] <= row["high"] and row["texts"] == 3 and row["specialist"] > 1
        wanted = report["extra"]["held_out"][f"tau_T{row['temperature']:g}/all/2"]
        assert row["conditioned"] == pytest.approx(wanted, rel=1e-4)


def test_a_share_is_of_the_calls_of_the_same_texts() -> None:
    def scored(calls: list[float], lengths: list[int]) -> Any:
        each = torch.tensor(calls)
        return SimpleNamespace(lengths=torch.tensor(lengths), calls=lambda k: each * k,
                               tau=lambda k: sum(lengths) / float(each.sum() * k))  # fmt: skip

    ours, theirs = scored([4.0, 2.0, 3.0], [8, 8, 8]), scored([3.0, 3.0, 3.0], [8, 8, 8])
    found = temperatures.shares(ours, theirs, 2)
    assert (found["specialist"], found["conditioned"]) == (pytest.approx(24 / 18), pytest.approx(24 / 18))
    assert found["share"] == pytest.approx(1.0) and found["low"] < 0.9 < 1.1 < found["high"]
    same = temperatures.shares(ours, ours, 2)  # a text's ease is no difference between the sides
    assert (same["share"], same["low"], same["high"]) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="the same texts"):
        temperatures.shares(ours, scored([1.0], [8]), 2)


def test_a_model_that_nobody_scales_reads_its_states_as_they_are() -> None:
    lm = LM(tiny(), 2)
    assert lm.scale is None and lm.run.scale is None
