"""Training for encoder-decoder targets, tiny and random: what the teacher reads, what a draft is and learns, and
a run through the command line."""

import copy
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from cotrain.cli import main
from cotrain.config.drafts import DRAFTS
from cotrain.config.groups import Init
from cotrain.data.splits import Prompts
from cotrain.data.texts import NO_ID, Learnt, joined_texts
from cotrain.evaluation.held_out import evaluate, held_out
from cotrain.export.hf import export
from cotrain.losses import divergences as losses
from cotrain.losses.spec import LossSpec
from cotrain.planning.plan import Plan
from cotrain.rollout.training_texts import padded, start_of
from cotrain.students.base import Student, student_class
from cotrain.students.independent import IndependentStudent, from_layers, shares_encoder
from cotrain.teacher.states_cache import DiskCache, MemoryCache
from cotrain.teacher.target_model import ENCODER, Seen, decoder_outputs, encoder_states, served
from cotrain.training.module import Distillation, Stage
from cotrain.training.preconditions import domains, fits
from inference import Engine, Sampling, load
from inference.drafts.atomic import write_json
from inference.drafts.weight_files import read_json
from inference.models.passes import LAST
from inference.models.pretrained import longest_text
from inference.policy import Fixed
from inference.proposers import Independent
from tests.cotrain.training.test_module import alone
from tests.encoder_decoders import VOCABULARY, bart, marian, own_logits, t5, whisper
from tests.folders import run_paths, tokenizer, write_rows
from tests.often import often

FAMILIES = pytest.mark.parametrize("made", often([t5, bart, marian], {t5, bart}.__contains__))
SOURCES = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]
# ids 0 and 1, which some of the targets use as padding, are tokens here
OUTPUTS = [[3, 0, 4], [20, 21, 1, 23, 24], [30]]


def texts_of(target: PreTrainedModel) -> Any:
    rows = [
        {"domain": "a", "prompt": source, "completion": output} for source, output in zip(SOURCES, OUTPUTS, strict=True)
    ]
    return padded(rows, start_of(target))


def student_of(
    target: Any, kind: str = "independent", init: str = "target_layers", chosen: tuple[int, ...] = (1,), **settings: Any
) -> Student:
    draft = DRAFTS[kind](**settings)
    made = student_class(kind)
    return made(made.initial(draft, Init(kind=init, layers=list(chosen)), target), target, VOCABULARY)


class TestTexts:
    def test_a_text_is_the_decoders_and_its_source_stays_with_it(self) -> None:
        target = t5()
        texts = texts_of(target)
        assert texts.ids[0, :4].tolist() == [0, 3, 0, 4] and texts.prompt.tolist() == [1, 1, 1]
        assert texts.length.tolist() == [4, 6, 2] and texts.prompts == SOURCES
        assert texts.source[1].tolist() == [12, 13, *[NO_ID] * 5]
        assert texts.predicted.tolist() == texts.at(1.0, whole=True).predicted.tolist()
        assert texts.rows([2, 1]).prompts == [SOURCES[2], SOURCES[1]]
        batch = Learnt(texts)[1]
        assert (batch["ids"][:3].tolist(), batch["source"][:3].tolist()) == ([0, 20, 21], [12, 13, NO_ID])

    def test_sets_are_joined_with_their_sources(self) -> None:
        texts = texts_of(t5())
        short = padded([{"domain": "b", "prompt": [9], "completion": [3]}], (0,))
        assert joined_texts([short, texts]).prompts == [[9], *SOURCES]
        assert joined_texts([texts, short]).source.shape == (4, 7)

    def test_equal_texts_of_other_sources_are_other_texts(self) -> None:
        rows = [{"domain": "a", "prompt": source, "completion": [3]} for source in ([4], [5], [4])]
        one, two, three = padded(rows, (0,)).hashes()
        assert one != two and one == three

    def test_a_target_that_reads_sound_or_does_not_say_how_it_begins_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"target.path: .* of Whisper.* reads audio or image features"):
            start_of(whisper())
        silent = t5()
        silent.generation_config.decoder_start_token_id = silent.config.decoder_start_token_id = None
        with pytest.raises(ValueError, match=r"target.path: .* set decoder_start_token_id"):
            start_of(silent)
        assert start_of(bart()) == (2,)

    def test_a_text_may_begin_with_several_ids(self) -> None:
        """As with a forced first id: it is no output, so nothing is learnt from it."""
        texts = padded([{"domain": "a", "prompt": [9], "completion": [3, 4]}], (2, 7))
        assert texts.ids.tolist() == [[2, 7, 3, 4]] and texts.prompt.tolist() == [2]
        assert texts.predicted.tolist() == [[False, True, True]]


class TestTeacher:
    @FAMILIES
    def test_states_are_those_of_each_text_alone(self, made: Callable[[], Any]) -> None:
        """The source of each row, without its padding, and the decoder's ids where they stand."""
        target = made()
        read, head = served(target, VOCABULARY, (1, ENCODER))
        texts = texts_of(target)
        record = read(*texts.read(slice(None)))
        for row, (source, length) in enumerate(zip(SOURCES, texts.length.tolist(), strict=True)):
            text = texts.ids[row, :length].tolist()
            wanted = own_logits(target, text, tuple(source))
            torch.testing.assert_close(head(record[LAST][row, :length]), wanted, atol=1e-9, rtol=1e-9)
            alone = target.get_encoder()(input_ids=torch.tensor([source])).last_hidden_state[0]
            torch.testing.assert_close(record[ENCODER][row, : len(source)], alone, atol=1e-9, rtol=1e-9)
            inner = target(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([text]), output_hidden_states=True
            ).decoder_hidden_states[1][0]
            torch.testing.assert_close(record[1][row, :length], inner, atol=1e-9, rtol=1e-9)

    def test_id_0_is_a_token_of_a_source(self) -> None:
        target = t5()
        read, head = served(target, VOCABULARY)
        source = torch.tensor([[0, 5, 0], [6, NO_ID, NO_ID]])
        logits = head(read(torch.tensor([[0, 3], [0, 3]]), None, source)[LAST])
        torch.testing.assert_close(logits[0], own_logits(target, [0, 3], (0, 5, 0)), atol=1e-9, rtol=1e-9)

    def test_a_missing_layer_or_source_is_refused(self) -> None:
        target = t5()
        with pytest.raises(ValueError, match=r"states of layers \[2\]"):
            served(target, VOCABULARY, (2,))
        with pytest.raises(ValueError, match="its encoder needs an input for each text"):
            served(target, VOCABULARY)[0](torch.tensor([[0, 3]]))

    @torch.no_grad()
    def test_caches_tell_sources_apart(self, tmp_path: Path) -> None:
        target = t5()
        read = served(target, VOCABULARY, (ENCODER,))[0]
        ids, keys = torch.tensor([[0, 3, 4]] * 3), torch.arange(3)
        source = texts_of(target).source
        wanted = read(ids, None, source)
        memory, disk = MemoryCache(read, 2**20), DiskCache(read, tmp_path, {}, (LAST, ENCODER))
        for _ in range(2):
            for record in (memory(ids, keys, None, source), disk(ids, None, source)):
                assert all(torch.equal(record[layer], wanted[layer]) for layer in (LAST, ENCODER))
        assert not torch.equal(wanted[LAST][0], wanted[LAST][1])
        filled = MemoryCache(read, 2**20)
        filled.fill(ids, keys, batch=2, source=source)  # in parts
        filled.read = None  # type: ignore[assignment]
        torch.testing.assert_close(filled(ids, keys, None, source)[LAST], wanted[LAST])

    @torch.no_grad()
    def test_a_record_at_another_width_of_sources_is_not_used(self) -> None:
        """Encoder states of two widths cannot stand in one batch."""
        read = served(t5(), VOCABULARY, (ENCODER,))[0]
        ids, keys, source = torch.tensor([[0, 3, 4]]), torch.arange(1), torch.tensor([[12, 13, NO_ID, NO_ID]])
        cache = MemoryCache(read, 2**20)
        cache(ids, keys, None, source)
        assert cache(ids, keys, None, source[:, :3])[ENCODER].shape[1] == 3

    @torch.no_grad()
    def test_what_a_folder_lacks_is_read_with_its_own_source(self, tmp_path: Path) -> None:
        read = served(t5(), VOCABULARY)[0]
        ids, source = torch.tensor([[0, 3, 4]] * 3), texts_of(t5()).source
        disk = DiskCache(read, tmp_path, {})
        disk(ids[:1], None, source[:1])
        torch.testing.assert_close(disk(ids, None, source)[LAST], read(ids, None, source)[LAST])


class TestDraft:
    @FAMILIES
    def test_layers_of_the_decoder_are_the_targets(self, made: Callable[..., Any]) -> None:
        """T5's first layer alone has the position bias, which all layers use."""
        target = made(**({"layers": 3} if made is t5 else {"decoder_layers": 3}))
        draft = from_layers(target, [1, -1]).double()
        cut = copy.deepcopy(target)
        decoder: Any = cut.get_decoder()
        layers = decoder.block if made is t5 else decoder.layers
        if made is t5:
            layers[1].layer[0].SelfAttention.relative_attention_bias = (
                layers[0].layer[0].SelfAttention.relative_attention_bias
            )
            layers[1].layer[0].SelfAttention.has_relative_attention_bias = True
        del layers[0]
        for place, layer in enumerate(layers):  # of transformers' cache
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = place
        text, source = [1, 3, 4, 5], (6, 7, 8)
        wanted = own_logits(cut, text, source)
        torch.testing.assert_close(own_logits(draft, text, source), wanted, atol=1e-6, rtol=1e-6)
        assert not torch.allclose(wanted, own_logits(target, text, source), atol=1e-3)

    def test_there_is_no_dropout(self) -> None:
        draft = from_layers(bart(dropout=0.3, attention_dropout=0.2, decoder_layerdrop=0.5), [0])
        assert (draft.config.dropout, draft.config.attention_dropout, draft.config.decoder_layerdrop) == (0, 0, 0)
        assert from_layers(t5(dropout_rate=0.3), [0]).config.dropout_rate == 0

    @FAMILIES
    def test_a_shared_encoder_is_read_from_the_target_and_stays(self, made: Callable[..., Any]) -> None:
        target = made()
        student = student_of(target)
        student.network.double()
        texts = texts_of(target)
        record = served(target, VOCABULARY, student.reads)[0](*texts.read(slice(None)))
        assert student.reads == (ENCODER,)
        batch = {"ids": texts.ids, "source": texts.source}
        guess = student.guesses(batch, Seen(record))[0]
        for row, length in enumerate(texts.length.tolist()):
            logits = guess.head(guess.states.view(*texts.ids.shape, -1)[row, :length])
            wanted = own_logits(student.network, texts.ids[row, :length].tolist(), tuple(SOURCES[row]))
            torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=1e-9)
        before = copy.deepcopy(student.network.get_encoder().state_dict())
        one_step(student, guess)
        assert all(
            torch.equal(value, before[name]) for name, value in student.network.get_encoder().state_dict().items()
        )
        assert served_by(student, target).shares_encoder

    def test_an_encoder_of_its_own_learns(self) -> None:
        target = t5()
        student = student_of(target, encoder_layers=1)
        assert student.reads == () and student.network.config.num_layers == 1
        texts = texts_of(target)
        before = copy.deepcopy(student.network.get_encoder().block[0].state_dict())
        guess = student.guesses({"ids": texts.ids, "source": texts.source}, Seen({}))[0]
        one_step(student, guess)
        after = student.network.get_encoder().block[0].state_dict()
        assert not any(torch.equal(value, before[name]) for name, value in after.items() if "SelfAttention.q" in name)
        student.network.double()
        assert not served_by(student, target).shares_encoder
        with pytest.raises(ValueError, match="draft.encoder_layers=2: the target's encoder has 2 layers"):
            student_of(target, encoder_layers=2)

    def test_weights_of_a_folder(self, tmp_path: Path) -> None:
        """Begin a draft that learns without dropout; a target without an encoder has no use for it."""
        t5(dropout_rate=0.3).float().save_pretrained(tmp_path)
        network = student_of(t5(), init="pretrained", chosen=(), path=str(tmp_path)).network.train()
        assert network.config.dropout_rate == 0
        assert not [module for module in network.modules() if isinstance(module, torch.nn.Dropout) and module.p]
        causal = student_of(
            t5(), init="scratch", chosen=(), width=16, layers=1, intermediate=16, head_dim=8, kv_heads=1
        ).network
        with pytest.raises(ValueError, match=r"draft.path=.*: T5.* has an encoder, but the target has none"):
            student_of(causal, init="pretrained", chosen=(), path=str(tmp_path))

    def test_a_draft_without_an_encoder_reads_the_text_alone(self) -> None:
        target = t5()
        sizes = {"width": 16, "layers": 1, "intermediate": 16, "head_dim": 8, "kv_heads": 1}
        student = student_of(target, init="scratch", chosen=(), **sizes)
        texts = texts_of(target)
        assert not student.network.config.is_encoder_decoder and student.reads == ()
        assert len(student.guesses({"ids": texts.ids, "source": texts.source}, Seen({}))) == 1
        with pytest.raises(ValueError, match="draft.encoder_layers=1: "):
            student_of(target, init="scratch", chosen=(), **sizes, encoder_layers=1)

    def test_a_small_head_is_refused(self) -> None:
        with pytest.raises(ValueError, match="draft.head_rank=3"):
            student_of(t5(), head_rank=3)


def test_a_draft_is_not_rounded_where_it_has_the_targets_encoder() -> None:
    """Of a target in float32; the encoder of one in bfloat16 loses nothing."""
    for dtype in (torch.float32, torch.bfloat16):
        target = t5().to(dtype).float()
        student = student_of(target)
        size: Any = SimpleNamespace(draft_dtype="bfloat16")
        plan = Plan(target, tokenizer(), student.network.train(), Sampling(), "token", size, ("target", "draft"))
        assert plan.served.dtype == dtype and shares_encoder(plan.served, target) and not plan.served.training
        own = replace(plan, draft=student_of(target, encoder_layers=1).network)
        assert own.served.dtype == torch.bfloat16


def test_a_step_compares_target_and_draft_after_the_same_source() -> None:
    """A copy of the target, which reads the sources with its own encoder, has nothing to learn."""
    target = t5().float()
    student = IndependentStudent(copy.deepcopy(target).requires_grad_(True), None, VOCABULARY)
    texts = texts_of(target)
    held = {1.0: held_out(served(target, VOCABULARY)[0], texts, 1.0)}
    stages: Any = [Stage(1.0, LossSpec(losses.kl))]
    module = alone(Distillation(student, target, stages, None, None, held, remember=2**20), 2)  # type: ignore[arg-type]
    module.eval()
    module.log = module.log_dict = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    for rows in ([0, 1, 2], [2, 0]):  # the second batch comes from memory
        loss = module.learn(default_collate([Learnt(texts)[row] for row in rows]))
        assert abs(loss.item()) < 1e-5


def test_a_measurement_reads_whole_sources() -> None:
    size: Any = SimpleNamespace(prompt_tokens=4)
    given = Prompts(SOURCES[:2], SOURCES[2:], "own")
    plan = Plan(t5(), tokenizer(), t5(), Sampling(), "token", size, ("target", "draft"), given=given)
    assert [(list(one), list(one.source)) for one in plan.ranking(1, 2)] == [([0], SOURCES[1]), ([0], SOURCES[0])]
    assert [list(one.source) for one in plan.final(0, 1)] == [SOURCES[2]]


def one_step(student: Student, guess: Any) -> None:
    """A step of some loss, with every parameter that has a gradient."""
    guess.head(guess.states).float().logsumexp(-1).sum().backward()
    with torch.no_grad():
        for weight in student.network.parameters():
            if weight.grad is not None:
                weight -= 0.1 * weight.grad


def served_by(student: Student, target: Any) -> Independent:
    """The proposer of a student after a call of the engine."""
    proposer = student.proposer()
    Engine(target, proposer, rows=2).generate(SOURCES, max_new_tokens=3)
    assert isinstance(proposer, Independent)
    return proposer


def test_states_of_wider_sources_are_read_from_their_start() -> None:
    """As those of a cache, whose rows are as wide as its longest source."""
    model = t5()
    ids, source = torch.tensor([[0, 3], [0, 4]]), torch.tensor([[5, 6, 7], [8, 9, NO_ID]])
    wide = torch.nn.functional.pad(source, (0, 2), value=NO_ID)
    states = encoder_states(model, wide)
    wanted = decoder_outputs(model, ids, source).last_hidden_state
    found = decoder_outputs(model, ids, wide, states).last_hidden_state
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", often(["independent", "medusa"], {"independent"}.__contains__))
def test_figures_of_held_out_texts_are_those_of_the_engine(kind: str) -> None:
    """Acceptance from one teacher-forced pass, against the rounds of the engine: texts of the target, each with its own
    source."""
    target = t5(eos=None)
    student = student_of(target, kind, **({"depths": 1, "layers": 1} if kind == "medusa" else {}))
    student.network.double()
    if kind == "medusa":
        with torch.no_grad():
            for weight in student.network.parameters():
                weight.normal_(std=0.3)
    prompts = [source for _ in range(30) for source in SOURCES]
    out = Engine(target, rows=32).generate(prompts, max_new_tokens=12, sampling=Sampling(), seed=1)
    rows = [{"domain": "a", "prompt": one, "completion": text} for one, text in zip(prompts, out.tokens, strict=True)]
    read, head = served(target, VOCABULARY, student.reads)
    scores = evaluate(held_out(read, padded(rows, start_of(target)), 1.0), student, head)["all"]
    engine = Engine(target, student.proposer(), policy=Fixed(1), rows=32)
    stats = engine.generate(prompts, max_new_tokens=12, sampling=Sampling(), seed=2, ignore_eos=True).stats
    drafted, accepted = sum(stats.drafted), sum(stats.accepted)
    predicted = scores.tau(1)
    assert 1.02 < predicted < 1.98
    error = (predicted * (1 - predicted / 2) / drafted) ** 0.5 + 0.5 / len(prompts) ** 0.5 / 12
    assert abs(stats.tau - predicted) < 4 * error + 0.01, (stats.tau, predicted, accepted / drafted)


# --- through the command line

SIZES = """rollout.texts=12 rollout.held_out_texts=4 rollout.prompt_tokens=100 rollout.new_tokens=20
rollout.temperatures=[1.0] trainer.steps=6 trainer.batch=3 trainer.validations=1 trainer.precision=32-true
optimizer.warmup=0.2 optimizer.decay=0.4 bench.prompts=2 bench.quick_prompts=1 bench.new_tokens=8
bench.parity_tokens=100 bench.minutes=0 bench.depths=[2] policy.k=2 init.layers=[0,2] trainer.threads=1""".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a T5 of three decoder layers, and sources of its own."""
    place = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=300,
        d_model=64,
        d_kv=32,
        d_ff=64,
        num_layers=1,
        num_decoder_layers=3,
        num_heads=2,
        decoder_start_token_id=1,
        eos_token_id=0,
        pad_token_id=1,
        decoder_layers=3,
    )
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    model.save_pretrained(place / "target")
    tokenizer().save_pretrained(place / "target")
    rows = [{"source": f"sentence: order {number} of {number % 7} items", "text": "not this"} for number in range(200)]
    write_rows(place / "own.jsonl", rows)
    return place


def train(place: Path, output: str, *settings: str) -> int:
    return main(["train", *run_paths(place, output), *SIZES, *settings])


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A finished run."""
    assert train(place, "run", "measure=false") == 0
    return place / "run"


@pytest.mark.thorough
def test_a_run_ends_with_a_measured_draft(run: Path, place: Path) -> None:
    assert train(place, "run") == 0
    report = read_json(run / "draft" / "report.json")
    assert report["exactness"]["passed"] and abs(report["extra"]["parity"]["z"]) < 4
    assert report["extra"]["prompts"] == "own"
    engine = load(run / "draft")
    assert engine.proposer.model.config.num_decoder_layers == 2  # type: ignore[union-attr]
    out = engine.generate(["sentence: order 3"], max_new_tokens=8, sampling=Sampling(temperature=0))
    assert engine.proposer.shares_encoder  # type: ignore[union-attr]
    plain = Engine(engine.target.model, tokenizer=engine.tokenizer)
    assert (
        out.tokens == plain.generate(["sentence: order 3"], max_new_tokens=8, sampling=Sampling(temperature=0)).tokens
    )


def test_the_encoder_has_not_moved(run: Path, place: Path) -> None:
    draft, target = (AutoModelForSeq2SeqLM.from_pretrained(path) for path in (run / "draft", place / "target"))
    theirs = target.get_encoder().state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in draft.get_encoder().state_dict().items())
    moved = [
        name
        for name, value in draft.decoder.block[1].state_dict().items()
        if not torch.equal(value, target.decoder.block[2].state_dict()[name])
    ]
    assert len(moved) > 5


def test_transformers_drafts_with_the_folder(run: Path, place: Path) -> None:
    draft, target = (AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (run / "draft", place / "target"))
    inputs = tokenizer()("sentence: order 3", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    alone = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), alone)


def test_sources_of_embedded_records_reach_a_run_without_files(place: Path, capsys: pytest.CaptureFixture) -> None:
    settings = [one for one in SIZES if "prompt_tokens" not in one]
    wanted = ["data.bytes={code: 0, prose: 0, records: 4000}", "data.held_out_bytes={code: 0, prose: 0, records: 4000}"]
    assert (
        main(
            [
                "train",
                f"target.path={place / 'target'}",
                f"output={place / 'embedded'}",
                *settings,
                *wanted,
                "rollout.prompt_tokens=400",
                "rollout.texts=3",
                "trainer.steps=1",
                "measure=false",
            ]
        )
        == 0
    )
    assert (place / "embedded" / "draft" / "config.json").is_file()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["draft=eagle", "draft.depths=2"],
            "draft=eagle: not for T5ForConditionalGeneration: .*independent, medusa, retrieval",
        ),
        (["data=self", "data.path=null"], "data=self"),
        (["data.chat=true"], "data.chat"),
        (["draft.quantisation=int8"], "draft.quantisation"),
        (["mode=joint"], "mode=joint"),
        (["trainer.corpus_steps=2"], "trainer.corpus_steps: not for T5"),
        (["data.on_target=true"], "data.on_target: not for T5"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(
    place: Path, settings: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert train(place, "refused", *settings, "check=true") != 0
    assert re.search(message, capsys.readouterr().err)


def test_a_deeper_decoder_that_transformers_cannot_decode_is_named_early(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "target", tmp_path / "deep")
    file = tmp_path / "deep" / "config.json"
    config = read_json(file)
    assert config.pop("decoder_layers") == 3
    write_json(file, config)
    assert train(place, "refused", f"target.path={tmp_path / 'deep'}", "check=true") != 0
    assert 'needs "decoder_layers": 3 in its config.json' in capsys.readouterr().err


@pytest.mark.parametrize("key", ["n_positions", "max_position_embeddings"])
def test_texts_fit_where_the_engine_says_they_do(key: str) -> None:
    """A T5 has no learned positions, and its config may name a longest text all the same."""
    model = t5(**{key: 32})
    assert longest_text(model.config) == Engine(model).target.context == 32


def test_sources_and_texts_fit_each_for_itself() -> None:
    """The encoder reads the one and the decoder the other, so each may be as long as the context."""
    fits("a", 100, "b", 99, 100, start=(2,))
    for prompt, new, key in ((101, 10, "a: 101"), (10, 100, "b: 101")):
        with pytest.raises(ValueError, match=key):
            fits("a", prompt, "b", new, 100, start=(2,))
    with pytest.raises(ValueError, match="a, b: "):
        fits("a", 100, "b", 10, 100)


def test_domains_of_embedded_texts_are_the_tasks() -> None:
    cfg: Any = SimpleNamespace(
        data=SimpleNamespace(from_target=False, path=None, bytes={"code": 9, "prose": 9, "records": 0})
    )
    assert domains(cfg, t5(), {}, "train") == {"signature", "summary"}


def test_the_folder_is_exported_for_transformers_alone(run: Path, tmp_path: Path) -> None:
    output = export(run / "draft", tmp_path / "out", "transformers")
    assert "AutoModelForSeq2SeqLM" in (output / "README.md").read_text()
    with pytest.raises(ValueError, match=r"engine=vllm: it loads no drafts for encoder-decoders"):
        export(run / "draft", tmp_path / "other", "vllm")
