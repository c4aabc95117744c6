"""What a training run would stop at is refused before any weight is read, by `check=true` and by the run alike."""

import copy
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf import OmegaConf
from transformers import PreTrainedModel

from cotrain.cli import main
from cotrain.config import base
from cotrain.config.base import fields
from cotrain.config.drafts import EagleDraft
from cotrain.config.settings import SCHEMAS
from cotrain.data.prompt_rows import PromptRows
from cotrain.errors import UserError
from cotrain.rollout.training_texts import Sampled, padded
from cotrain.training import assembly
from cotrain.training.job import Job
from cotrain.training.preconditions import _counts, refuse_fractions, refuse_minutes, require, require_texts, size_of
from inference import sampling
from inference.proposers.quantised import BITS
from inference.verify.rules import RULES
from inference.verify.tree import MOST_NODES
from tests.cotrain.config.test_settings_reach import composed, job_of
from tests.cotrain.training.test_progress import BUDGET
from tests.folders import network, run_paths, tokenizer, write_rows
from tests.often import often

SIZES = """data.block=64 rollout.texts=8 rollout.held_out_texts=2 rollout.prompt_tokens=8 rollout.new_tokens=24
rollout.temperatures=[1.0] trainer.steps=4 trainer.batch=2 trainer.validations=2 bench.prompts=2 bench.quick_prompts=1
bench.prompt_tokens=8 bench.new_tokens=8 bench.depths=[2] policy.k=2 init.layers=[0]""".split()


def command(place: Path, *settings: str) -> list[str]:
    return ["train", *run_paths(place, "out"), *SIZES, *(setting.replace("PLACE", str(place)) for setting in settings)]


MISTAKES = {
    "target.path=PLACE/nowhere": "target.path: ",
    "target.path=PLACE/bare": "target.path: ",
    "target.adapter=/nowhere": "target.adapter: /nowhere is not an adapter",
    "data.path=PLACE/none.jsonl": "data.path: no such file",
    "data.path=PLACE/empty.jsonl": "data.path: ",
    "data.column=body": "data.column: ",
    "regime.temperature=-1": "regime.temperature=-1: it must be 0 (greedy) or at least",
    "rollout.prompt_tokens=120": "rollout.prompt_tokens, rollout.new_tokens: prompts of 120 tokens and 24",
    "rollout.url=http://127.0.0.1:9": "rollout.url=http://127.0.0.1:9: no OpenAI-compatible server answers",
    "data.shares={cod:0.5}": "data.shares: no text of cod; the domains are own",
    "data.shares={own:0.1}": "data.shares: {'own': 0.1} leave no text to learn from, of 8 texts of a domain",
    "bench.new_tokens=121": "rollout.prompt_tokens, bench.new_tokens: prompts of 8 tokens and 121",
    "trainer.batch=0": "trainer.batch=0: it must be at least 1",
    "trainer.precision=bf17": "trainer.precision=bf17: ",
    "trainer.precision=16-mixed": "trainer.precision=16-mixed: float16 trains only on a GPU",
    "trainer.precision=bf16-true": "trainer.precision=bf16-true: weights in half precision lose small updates, so they "
    "hardly train: set trainer.precision=auto or bf16-mixed, with weights in float32",
    "trainer.strategy=fsdp": "trainer.strategy=fsdp: ",
    "regime.top_k=301": "regime.top_k=301: the target has 300 tokens",
    "draft.width=16": "draft.width=16: the setting has no effect here",
    "loss=kl loss.then=tv": "loss.then=tv: the setting has no effect here: the loss never switches: set loss.switch=",
    "trainer.patience=2 measure=false": "trainer.patience=2: the setting has no effect here",
    "data.split=test": "data.split=test: the setting has no effect here",
    "data.template={enable_thinking:false}": "data.template: the setting has no effect here",
    "data.path=PLACE/latin.jsonl": "data.path: PLACE/latin.jsonl: 40 of 300 rows cannot be read: 40, the first "
    "latin.jsonl, line 6: it is not UTF-8",
    "trainer.corpus_steps=5": "trainer.corpus_steps=5: it must be at most trainer.steps=4",
    "data.path=PLACE/prompts.jsonl trainer.corpus_steps=1": "data.path: its conversations have no completion",
    "data.block=128 data.path=PLACE/few.jsonl trainer.corpus_steps=1": "data.block=128: 4 texts",
    "data=self data.path=null trainer.corpus_steps=1": "data=self: prompts are sampled, without texts to learn from",
    "trainer.nodes=2 trainer.batch=2": "trainer.nodes=2: each machine's process must be started by torchrun or srun",
    "trainer.cache=PLACE/file/x": "trainer.cache=",
    "bench.depths=[300]": "rollout.prompt_tokens, bench.new_tokens, bench.depths: prompts of 8 tokens and 305",
    "optimizer.betas=[0.9]": "optimizer.betas=[0.9]: it must be two numbers, one per moment",
    "draft=medusa draft.quantisation=int8": "draft.quantisation: MedusaNetwork has 2 matrices that are not in an nn",
    "loss.first=klx": "loss.first: 'klx'",
    "init=pretrained": "init=pretrained: it takes its weights",
    "init=pretrained draft.path=PLACE/large": "draft.path=PLACE/large: the draft has ",
    "init=pretrained draft.path=PLACE/other": "draft.path=PLACE/other: a draft must use the target's token ids",
    "init=pretrained draft.path=PLACE/fewer": "draft.path=PLACE/fewer: the draft has logits for 299 ids",
    "init.layers=[7]": "init.layers=[7]: the target has 2 layers: name one or more of 0 to 1",
    "init.layers=[0,1,0]": "init.layers=[0, 1, 0]: the draft has ",
    "output=PLACE/foreign": "output=PLACE/foreign has files",
    "output=PLACE/foreign overwrite=true": "output=PLACE/foreign has files",
    "output=PLACE/file/x": "output=PLACE/file/x cannot be written",
}


ALIKE = {  # each is found where one that is always tried is found too
    "target.path=PLACE/bare",
    "data.shares={own:0.1}",
    "bench.new_tokens=121",
    "trainer.batch=0",
    "trainer.precision=bf17",
    "trainer.precision=16-mixed",
    "draft.width=16",
    "trainer.patience=2 measure=false",
    "data.split=test",
    "data.template={enable_thinking:false}",
    "data.path=PLACE/prompts.jsonl trainer.corpus_steps=1",
    "optimizer.betas=[0.9]",
    "init=pretrained draft.path=PLACE/fewer",
    "init.layers=[7]",
    "output=PLACE/foreign",
}


@pytest.mark.parametrize("mistake", often(MISTAKES, lambda mistake: mistake not in ALIKE))
def test_check_and_run_refuse_alike_before_a_weight_is_read(
    mistake: str, mistakes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one function, so that one of five is typed with check=true too."""
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    said = []
    for way in ("check=false", "check=true")[: 1 + (list(MISTAKES).index(mistake) % 5 == 0)]:
        assert main(command(mistakes, *mistake.split(), way)) in (1, 2)
        said.append(capsys.readouterr().err.partition("cotrain train: ")[2])  # behind lines on what has no effect
    assert len(set(said)) == 1
    assert said[0].startswith(MISTAKES[mistake].replace("PLACE", str(mistakes))) and said[0].count("\n") == 1
    assert not (mistakes / "out").exists() and (mistakes / "foreign" / "thesis.tex").read_text() == "mine"


ROWS: dict[str, Any] = {
    "prompts": lambda n: {"prompt": f"say {n:03} and more"},
    "answers": lambda n: {"prompt": f"say {n:03} and more", "response": f"{n}"},
    "chats": lambda n: {"messages": [{"role": "user", "content": f"say {n:03} and more"}]},
    "texts": lambda n: {"text": f"{n:03} is the number of this text"},
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


@pytest.mark.parametrize("rows", often(ROWS, {"answers", "texts"}.__contains__))
def test_check_refuses_the_texts_that_a_run_could_not_learn_from_once_it_has_sampled(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over kinds of rows, targets and settings: what steps and figures read of the user's texts is refused before, in
    the same words, or not at all."""
    sampled = padded([{"domain": "own", "prompt": [2, 3], "completion": [4]}])
    monkeypatch.setattr(Sampled, "texts", lambda *_, **__: sampled)
    write_rows(tmp_path / "rows.jsonl", (ROWS[rows](n) for n in range(30)))
    sizes = """draft=independent loss=kl measure=false rollout.texts=8 rollout.held_out_texts=2 rollout.new_tokens=8
    rollout.prompt_tokens=64""".split()
    cfg = composed(f"data.path='{tmp_path}/rows.jsonl'", *sizes)
    target, outcomes = network(), set[bool]()
    for template, end in ((TEMPLATE, True), (None, True), (None, False)):
        words = copy.deepcopy(tokenizer())
        words.chat_template = template
        if not end:
            words.eos_token = words.bos_token = None
        for cfg.trainer.corpus_steps, cfg.data.on_target, cfg.data.block in (
            (0, True, 8),
            (1, False, 8),
            (1, False, 5000),
        ):
            job, said = Job(cfg, tmp_path, target, words), list[str | None]()
            for way in (lambda: require_texts(cfg, target, words), lambda: _read(job)):  # noqa: B023
                said.append(None)
                try:
                    way()
                except (ValueError, UserError) as error:
                    said[-1] = str(error)
            if said[0] and said[0].startswith("data.block=5000: the target reads texts of at most 128"):
                said[0] = said[1] and said[1]  # as they are longer than all of the user's
            assert said[0] == said[1]
            outcomes.add(said[0] is None)
    assert (False in outcomes) is (rows != "answers")


def _read(job: Job) -> None:
    """What a run reads of texts once it samples."""
    job.texts("held_out", job.cfg.regime.temperature)
    assembly.foreign(job)
    assembly.parts(job)


@pytest.mark.parametrize("kind", often(["retrieval", "independent"], {"retrieval"}.__contains__))
def test_what_only_training_reads_is_named_where_nothing_is_trained(
    kind: str, mistakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = f"draft={kind} loss=tv optimizer.lr=1e-3 check=true"
    assert main(command(mistakes, *typed.split())) == 0
    said = capsys.readouterr()
    line = "loss=tv, optimizer.lr=1e-3: the setting has no effect here: this kind of draft is not trained"
    assert (line in said.err) == (kind != "independent") == ("  training" not in said.out)


FEWER = "rollout.texts=7: data.path has 8 prompts to learn from"


def often_read(texts: int, times: int, more: int, remedy: str) -> str:
    return (
        f"{texts} texts are learnt from, each about {times} times; more texts help more than repetitions (on "
        "SmolLM2-135M 1,857 texts read 22 times gave acceptance .65 on them and .52 on others, 4,405 read 3 times "
        f".54): for {more} texts, each read 3 times, {remedy}"
    )


SAID = {  # of two domains, with 6 and 2 prompts of at most 8 tokens: settings, and the lines
    "rollout.texts=6": [often_read(8, 15, 40, "set rollout.texts=30")],  # 120 texts are read
    "rollout.texts=7": [FEWER, often_read(8, 15, 40, "give more prompts")],
    "rollout.texts=3": [often_read(5, 24, 40, "set rollout.texts=24")],
    "rollout.texts=1": [often_read(2, 60, 40, "set rollout.texts=20")],
    "trainer.batch=6": [often_read(8, 45, 120, "set rollout.texts=90")],
    "trainer.accumulate=1": [],  # each about 5 times
    "trainer.accumulate=2": [often_read(8, 10, 27, "set rollout.texts=20")],
    "trainer.corpus_steps=5": [often_read(8, 11, 30, "set rollout.texts=22")],
    "trainer.corpus_steps=20": [],
    "rollout.train_temperatures=[0.3]": [often_read(8, 15, 40, "set rollout.texts=30")],
    "rollout.train_temperatures=[0.3,0.6]": [],  # 16 texts
    "rollout.train_temperatures=[0.3,0.6] trainer.batch=4": [often_read(16, 15, 80, "set rollout.texts=30")],
    "rollout.train_temperatures=[0.3,0.6] data.on_target=true": [often_read(8, 15, 40, "set rollout.texts=30")],
    "trainer.minutes=3": [],  # steps are as many as there is time for
    "draft.kind=retrieval": [],
    "draft.kind=retrieval rollout.texts=7": [FEWER],
}


@pytest.mark.parametrize("settings", SAID)
def test_lines_say_how_often_a_text_is_read(settings: str) -> None:
    job = job_of(
        *f"""rollout.prompt_tokens=8 trainer.steps=20 trainer.batch=2 trainer.accumulate=3 trainer.corpus_steps=0
        trainer.minutes=null rollout.texts=6 {settings}""".split()
    )
    rows = [
        {"domain": domain, "prompt": [place] * size, "completion": []}
        for domain, count, size in (("a", 6, 8), ("b", 2, 3), ("a", 4, 9))
        for place in range(count)
    ]
    assert _counts(job.cfg, PromptRows(rows)) == SAID[settings]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("rollout.texts=8", []),
        ("rollout.texts=3", [often_read(6, 13, 27, "set rollout.texts=14")]),  # three domains, a tenth of one
        ("rollout.texts=3 draft=retrieval", []),
        ("data=self", [often_read(8, 10, 27, "set rollout.texts=27")]),
    ],
)
def test_texts_that_are_not_the_users_are_counted_too(
    settings: str, said: list[str], mistakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [one for one in command(mistakes, "trainer.steps=40")[1:] if not one.startswith("data.path")]
    require(composed(*asked, *settings.split()))
    assert [line for line in capsys.readouterr().out.splitlines() if "learnt from" in line] == said


def test_conversations_without_a_template_are_warned_of(mistakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": [{"role": "user", "content": f"say {n:03}"}]} for n in range(400)]  # none begins another
    write_rows(mistakes / "chats.jsonl", rows)
    assert (
        main(command(mistakes, f"data.path={mistakes / 'chats.jsonl'}", "rollout.prompt_tokens=0", "check=true")) == 0
    )
    assert "no chat template, so the user's messages are used as prompts without one" in capsys.readouterr().out


def test_speeds_on_a_cpu_are_warned_of_if_the_quantisation_is_for_gpus(
    mistakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(mistakes, "quantisation=nf4", "check=true")) == 0
    assert "speeds are not" in capsys.readouterr().err


def test_what_is_not_measured_needs_no_room(mistakes: Path) -> None:
    asked = command(mistakes, "rollout.prompt_tokens=0", "bench.new_tokens=999", "check=true", "measure=false")
    assert main(asked) == 0 and main(asked[:-1]) == 1


def test_a_mistake_does_not_delete_the_run_it_would_replace(
    mistakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = mistakes / "kept"
    monkeypatch.setattr("cotrain.commands.train.train", lambda cfg, path, *_: (path / "figures").write_text("1"))
    main(command(mistakes, f"output={run}", "measure=false"))  # which has no figures to print
    assert (run / "figures").is_file()
    assert main(command(mistakes, f"output={run}", "overwrite=true", "data.path=/none.jsonl")) == 1
    assert (run / "figures").is_file()
    assert main(command(mistakes, f"output={run}", "measure=false", "trainer.seed=7", "check=true")) == 1
    assert "has a run with trainer.seed=0 (now 7)" in capsys.readouterr().err


def test_texts_that_were_read_by_the_preconditions_are_those_of_the_run(
    mistakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[object] = []
    monkeypatch.setattr("cotrain.commands.train.train", lambda cfg, path, _, sources: met.append(sources))
    main(command(mistakes, "output=" + str(mistakes / "texts")))
    assert set(met[0]) == {"train", "held_out", "final"}  # type: ignore[call-overload]


def test_experts_that_are_not_chosen_cost_nothing() -> None:
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    shape = {
        "hidden_size": 8,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 16,
        "num_experts_per_tok": 2,
    }
    with torch.device("meta"):
        few, many = (AutoModelForCausalLM.from_config(MixtralConfig(**shape, num_local_experts=n)) for n in (4, 8))
    assert size_of(many).parameters > size_of(few).parameters
    router = 8 * 4  # a row an expert
    assert size_of(many).active - size_of(few).active == router


def test_names_and_limits_are_those_of_the_engine() -> None:
    assert sampling.COLDEST == base.COLDEST and MOST_NODES == base.MOST_NODES
    (known,) = (one.func for one in get_args(base.Verify)[1:])
    for name in RULES:
        assert known(name) == name
    with pytest.raises(ValueError, match=f"one of {', '.join(RULES)}"):
        known("other")
    assert {EagleDraft(quantisation=name).quantisation for name in ("none", *BITS)} == {"none", *BITS}


# numbers that are checked elsewhere, together with others or with what is there, or of which any will do
ELSEWHERE = {"seed", "optimizer.warmup", "optimizer.decay", "init.layers", "data.take"}


# bytes of corpora, where none is none
CORPORA = ("data.bytes", "data.held_out_bytes")


def test_every_number_has_a_range() -> None:
    """Or a check of its own: one that has neither is taken whatever it is."""
    free = set()
    for key, field in (pair for schema in SCHEMAS.values() for pair in fields(schema)):
        types = str(field.annotation) + str(field.metadata)
        if re.search(r"\b(int|float)\b", types) and "Allowed" not in types:
            free |= {key} if key.rpartition(".")[2] not in ELSEWHERE and key not in ELSEWHERE else set()
    assert {key for key in free if not key.startswith(CORPORA)} == set()


def test_a_range_names_key_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["bench", "bench.rows=0"], "bench.rows=0: it must be at least 1"),
        (["train", "rollout.temperatures=[1,-1]"], "rollout.temperatures=[1, -1]: each must be 0 (greedy)"),
        (["train", "loss.switch=200"], "loss.switch=200: it must be from 0 to 1"),
        (["train", "optimizer.betas=[0.9,1.0]"], "optimizer.betas=[0.9, 1.0]: each must be from 0 to below 1"),
        (["rollout", "kind=test"], "kind=test: it must be one of train, held_out"),
        (["rollout", "rollout.temperatures=[1]"], "rollout.temperatures=[1]: the setting has no effect here: cotrain"),
        (["teacher", "target.device_map=auto"], "target.device_map=auto: the setting has no effect here: this command"),
        (
            ["datastore", "target.device_map=auto"],
            "target.device_map=auto: the setting has no effect here: this command",
        ),
        (["train", "data.shares={a: 2.0}"], "data.shares.a=2.0: it must be from 0 to 1"),
    ):
        assert main(arguments) == 1
        assert capsys.readouterr().err.startswith(f"cotrain {arguments[0]}: {message}")


@pytest.mark.parametrize(
    ("warmup", "decay", "said"),
    [(50, 0.5, "warmup: .* 50 of 200 steps are optimizer.warmup=0.25"), (0.1, -1, "optimizer.decay: .* not -1")],
)
def test_steps_are_no_fractions(warmup: float, decay: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse_fractions(warmup, decay, 200)


def test_minutes_that_measuring_needs_alone_raise() -> None:
    cfg: Any = OmegaConf.create(BUDGET | {"bench": {"minutes": 9.0}})
    with pytest.raises(ValueError, match="minutes=10: bench.minutes=9 leaves training less than 15 %"):
        refuse_minutes(cfg)
    cfg.measure = False
    refuse_minutes(cfg)
