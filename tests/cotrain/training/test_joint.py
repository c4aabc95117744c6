"""Joint training: gradients in both models, the bound, and what a run writes and says."""

import copy
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from cotrain.data.conversations import Template
from cotrain.data.prompt_rows import PromptRows, TextStarts
from cotrain.data.rows import Reader, nothing_skipped
from cotrain.data.sources import _cut, _turns
from cotrain.evaluation.moved import CONFIDENCE, Movement, movement
from cotrain.losses import chunked
from cotrain.losses import divergences as losses
from cotrain.losses.guess import Guess, Pruned
from cotrain.losses.spec import parse
from cotrain.rollout.samplers import Own
from cotrain.rollout.training_texts import padded, read_manifest, read_rows, save_rows
from cotrain.teacher.target_distributions import FromStates, with_rest
from cotrain.teacher.target_model import served
from cotrain.training import joint, optim
from cotrain.training.joint import WARM, JointTraining, adapters, add_lora, choose_scale, independent
from cotrain.training.module import Stage
from cotrain.training.optim import trapezoid
from cotrain.training.progress import Progress
from inference import Engine, Sampling
from inference.drafts.atomic import write_json
from inference.drafts.moved_target import MOVED, movement_of, said
from inference.drafts.weight_files import read_json
from inference.models import pretrained
from tests.cotrain.commands.test_train import job, same
from tests.cotrain.evaluation.test_held_out import judged, texts
from tests.cotrain.training.test_module import alone
from tests.folders import tokenizer
from tests.often import often
from tests.student_kinds import STUDENTS
from tests.student_kinds import target as target_of_kinds
from tests.tiny import tiny

B, T, V, D = 2, 5, 11, 4
MASK = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 1, 0]]).bool()
TWO, FOUR = texts([16, 12], [1, 3], ["a", "a"]), texts([16, 12, 14, 15], [1, 3, 2, 2], ["a"] * 4)


# --- gradients


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("chunk", [2, 512])
@pytest.mark.parametrize("loss", [losses.kl, losses.tv, losses.nla, losses.lk], ids=lambda f: f.__name__)
def test_a_trained_target_has_the_gradient_of_whole_distributions(loss: Any, chunk: int, pruned: bool) -> None:
    torch.manual_seed(3)
    heads = torch.randn(2, V, D, dtype=torch.float64)
    p, q = (3 * torch.randn(B, T, D, dtype=torch.float64) for _ in range(2))
    ids = torch.tensor([1, 4, 5, 9])

    def value(p: Tensor, q: Tensor, whole: bool) -> Tensor:
        if whole:
            logp, logq = ((side @ head.T / 0.7).log_softmax(-1) for side, head in zip((p, q), heads, strict=True))
            if pruned:
                logp = with_rest(logp[MASK], ids)
                logq = torch.nn.functional.pad((q @ heads[1][ids].T / 0.7).log_softmax(-1), (0, 1), value=-torch.inf)
                return loss(logp, logq[MASK]).sum()
            return loss(logp, logq)[MASK].sum()
        target = FromStates(p, lambda states: states @ heads[0].T, trained=True)
        part = Pruned(ids, lambda states: states @ heads[1][ids].T, V) if pruned else None
        guess = Guess.everywhere(q, lambda states: states @ heads[1].T, (torch.zeros(1),), pruned=part)
        return chunked.chunked(loss, target, guess, MASK, 0.7, chunk=chunk)[0]

    slopes = []
    for whole in (True, False):
        ours = [side.clone().requires_grad_() for side in (p, q)]
        slopes.append(torch.autograd.grad(value(*ours, whole), ours))
    assert float(slopes[0][0].abs().max()) > 1e-3
    torch.testing.assert_close(slopes[0], slopes[1])


def test_the_rest_of_a_whole_vocabulary_has_a_finite_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0, -80.0], [0.3, 0.1, 0.2]]).requires_grad_()
    rest = with_rest(logits.log_softmax(-1), torch.tensor([0, 1]))
    slope = torch.autograd.grad(torch.minimum(rest, torch.zeros_like(rest)).exp().sum(), logits)[0]
    assert bool(torch.isfinite(slope).all())


def training(kind: str = "independent", loss: str = "tv", remember: int = 2**20, **settings: Any) -> JointTraining:
    """A joint training of a tiny target. Its adapter is not 0."""
    target = target_of_kinds()
    student = STUDENTS[kind](target)
    wrapped = add_lora(target, 2)
    torch.manual_seed(7)
    adapter = [p for p in wrapped.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in adapter:
            p.copy_(0.1 * torch.randn_like(p))
    given = {"epsilon": 0.01, "rank": 2, "lr": 1e-2, "every": 1, "weight": None, "detach": 0.0} | settings
    module = JointTraining(
        student.of(student.network),
        target,
        [Stage(1.0, parse(loss))],
        partial(optim.adamw, lr=1e-2, weight_decay=0.0, betas=[0.9, 0.95]),
        partial(trapezoid, progress=Progress(9), warmup=0.1, decay=0.1),
        {1.0: judged(target, TWO)},
        adapter=adapter,
        settings=SimpleNamespace(**given),
        remember=remember,
        decay=1.0,
    )
    return alone(module, 9)


def batch() -> dict[str, Any]:
    return {
        "ids": TWO.ids,
        "predicted": TWO.predicted,
        "sampled": TWO.sampled,
        "key": torch.tensor([0, 1]),
        "temperature": torch.ones(2, dtype=torch.float64),
    }


@pytest.mark.parametrize("kind", ["independent, pruned", "eagle", "medusa", "early_exit"])
def test_the_adapter_has_the_slope_of_the_loss(kind: str) -> None:
    """Of the acceptance and of the KL, through the target's distributions and through what the draft reads of it."""
    module = training(kind, "kl", weight=0.7)
    parameters = list(module.adapter)
    slopes = torch.autograd.grad(module.learn(batch()), parameters)
    direction = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
        for i, p in enumerate(parameters)
    ]
    ends = []
    for step in (2e-4, -4e-4):  # the loss is summed in float32
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=step)
        ends.append(float(module.learn(batch()).detach()))
    expected = (ends[0] - ends[1]) / 4e-4
    along = sum(float((s * d).sum()) for s, d in zip(slopes, direction, strict=True))
    assert abs(expected) > 1e-4 and along == pytest.approx(expected, rel=5e-3)


# --- the bound


def test_the_kl_is_that_between_the_models() -> None:
    module, given = training(), batch()
    original, moved = tiny(32), merged(module.student.target)
    with torch.no_grad():
        p, q = (model(given["ids"]).logits[:, :-1].log_softmax(-1) for model in (original, moved))
    inside = given["predicted"]
    truth = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)[inside].mean()
    without = training(weight=0.0).learn(given).detach()
    loss = module.learn(given).detach()
    weight = joint.START / module.settings.epsilon
    assert float(loss - without) == pytest.approx(weight * float(truth), rel=1e-6) and float(truth) > 1e-3


def merged(target: Any) -> Any:
    """The target with the adapter's products added to its weights, by hand."""
    other = tiny(32)
    with torch.no_grad():
        for name, layer in target.named_modules():
            if layer in adapters(target):
                change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
                other.get_submodule(name).weight.add_(change)
    return other


def test_the_original_is_read_as_it_was_also_after_the_adapter_has_moved() -> None:
    module, given = training("eagle", remember=0), batch()
    plain = served(tiny(32), layers=module.student.reads)[0](given["ids"])
    module.learn(given)
    for layer in adapters(module.student.target):
        layer.lora_B["default"].weight.data += 1.0
    record = module.moving.original(given["ids"], given["key"])
    for layer, states in plain.items():
        torch.testing.assert_close(record[layer], states)
    assert not any(states.requires_grad for states in record.values())
    live = module.moving(given["ids"], given["key"])
    for layer in set(live) - {0}:  # the embeddings have no adapter
        assert live[layer].requires_grad and not torch.allclose(live[layer], plain[layer])
    assert all(p.requires_grad for p in module.adapter)  # also after the adapter was off


def test_the_multiplier_rises_above_the_bound_and_falls_below() -> None:
    for epsilon, rises in ((1e-4, True), (10.0, False)):
        module = training(epsilon=epsilon)
        module.learn(batch())
        change = float(module.multiplier) / joint.START
        assert change > 1.05 if rises else change < 0.95
    fixed = training(weight=0.1)
    fixed.learn(batch())
    assert float(fixed.multiplier) == pytest.approx(joint.START)


def test_the_adapter_moves_in_its_steps_only() -> None:
    module = training(every=3)
    for step, moves in ((0, True), (1, False), (2, False), (3, True)):
        module._trainer.global_step = step  # type: ignore[misc]
        slopes = torch.autograd.grad(module.learn(batch()), list(module.adapter), allow_unused=True)
        assert any(slope is not None for slope in slopes) is moves


def test_detached_steps_pass_only_the_slope_of_the_bound() -> None:
    module = training(detach=0.5, weight=0.0)
    assert module.masses is None, "nothing of a moving target is stored"
    for step in range(4):
        module._trainer.global_step = step  # type: ignore[misc]
        slopes = torch.autograd.grad(module.learn(batch()), list(module.adapter), allow_unused=True)
        size = sum(float(slope.abs().sum()) for slope in slopes if slope is not None)
        assert (size < 1e-12) is (step % 2 == 1)


def test_detached_steps_are_counted_among_those_that_move() -> None:
    module, detached = training(detach=0.5, every=2), []
    for step in range(0, 8, 2):
        module._trainer.global_step = step  # type: ignore[misc]
        assert module.moves
        detached.append(module.detached)
    assert detached == [False, True, False, True]


def test_the_batches_of_a_step_change_the_multiplier_as_one_batch_would() -> None:
    one, two = training(), training()
    for batches, module in ((1, one), (2, two)):
        for _ in range(batches):
            module._weight(torch.tensor(0.02), batches)
    assert float(one.multiplier) == pytest.approx(float(two.multiplier)) and float(one.multiplier) > joint.START


def ups(target: Any) -> list[Tensor]:
    return [up.weight for layer in adapters(target) for up in layer.lora_B.values()]


@pytest.mark.parametrize("epsilon", [1e-3, 1e-2, 3e-2, 0.1, 1e9])
def test_the_scale_is_the_largest_within_the_bound(epsilon: float) -> None:
    module = training()
    target, live, head = module.student.target, module.live, module.head_target
    whole = [weight.clone() for weight in ups(target)]
    scale = choose_scale(target, live, head, FOUR, epsilon)  # type: ignore[arg-type]
    torch.testing.assert_close(ups(target), [scale * value for value in whole])
    bound = movement(served(tiny(32)), (live, head), FOUR).bound(CONFIDENCE)
    if epsilon > 1:
        assert scale == 1
    else:  # of its upper bound, not of the mean
        assert joint.NEAR * epsilon <= bound <= joint.MOST * epsilon


def test_the_adapter_has_the_scale_that_is_returned_also_if_the_last_one_tried_was_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint, "SEARCHES", 1)
    module = training()
    assert choose_scale(module.student.target, module.live, module.head_target, FOUR, 1e-6) == 0  # type: ignore[arg-type]
    assert not any(bool(weight.any()) for weight in ups(module.student.target))


# --- a run


SETTINGS = """mode=joint joint.warm_steps=3 joint.steps=3 joint.rank=2 measure=false trainer.steps=2
trainer.validations=1 rollout.held_out_texts=6 rollout.temperatures=[1.0] rollout.prompt_tokens=24""".split()


WITHIN = ("joint.epsilon=0.5", "joint.lr=0.02", *SETTINGS)


class Made(NamedTuple):
    """A finished run: its folder, and hashes of the texts that chose the scale and of those that were compared."""

    folder: Path
    chosen: list[str]
    compared: list[list[str]]


@pytest.fixture(scope="module", autouse=True)
def emulates() -> Iterator[None]:
    """As a CPU without instructions for bfloat16: texts and divergences do not depend on the rows of a batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "emulated", lambda dtype: dtype == torch.bfloat16)
        yield


@pytest.fixture(scope="module")
def half(place: Path) -> Path:
    """The target in bfloat16."""
    AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.bfloat16).save_pretrained(place / "half")
    tokenizer().save_pretrained(place / "half")
    return place / "half"


@pytest.fixture(scope="module")
def made(half: Path) -> Made:
    made, choose, moved = Made(half.parent / "pair", [], []), joint.choose_scale, joint.movement

    def chosen(*given: Any) -> float:
        made.chosen.extend(given[3].hashes())
        return choose(*given)

    def compared(*given: Any) -> Movement:
        made.compared.append(given[2].hashes())
        return moved(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "choose_scale", chosen)
        patch.setattr(joint, "movement", compared)
        assert job(half.parent, "pair", *WITHIN, "overwrite=true", target="half") == 0
    return made


@pytest.fixture(scope="module")
def pair(made: Made) -> Path:
    return made.folder


def warmed(pair: Path, output: Path, **joint: float) -> None:
    """A run that stopped behind its first stage, which is the pair's. joint: other settings of the second."""
    shutil.copytree(pair / WARM, output / WARM)
    run = read_json(pair / "run.json")
    run["state"] = "unfinished"
    run["settings"]["joint"] |= joint
    write_json(output / "run.json", run)


def test_a_run_writes_a_moved_target_that_is_as_far_as_it_says(pair: Path, half: Path) -> None:
    """In the dtype of the original's files."""
    said = movement_of(str(pair / "target"))
    assert said["certified"] and said["bound"] <= 0.5 and said["original"] == str(half)
    original, files = (load_file(path / "model.safetensors") for path in (half, pair / "target"))
    assert {value.dtype for value in files.values()} == {torch.bfloat16} and not same(original, files)
    folders = half, pair / "target"
    old, new = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in folders)
    changed = [name for name, value in new.state_dict().items() if not torch.equal(value, old.state_dict()[name])]
    assert any("q_proj" in name for name in changed) and not any("norm" in name or "embed" in name for name in changed)
    metadata = read_json(pair / "draft" / "cotrain.json")
    assert metadata["target"]["name"] == str(pair / "target") and metadata["made"]["moved"]["kl"] == said["kl"]


def held_out_rows(run: Path, place: str) -> list[dict[str, Any]]:
    return [dict(row) for row in read_rows(run / place / "rollouts" / "held_out_T1")]


def test_the_kl_is_that_between_the_folders_on_every_second_text(pair: Path, half: Path) -> None:
    """And on texts that the moved target samples from the same prompts."""
    said = movement_of(str(pair / "target"))
    folders = half, pair / "target"
    old, new = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in folders)
    rows = held_out_rows(pair, "warm")[1::2]
    prompts, sampler = [row["prompt"] for row in rows], Own(Engine(new, tokenizer=tokenizer(), rows=4))
    own = sampler(prompts, Sampling(), 24, 2, range(len(rows)))  # rollout.seed + 1
    for name, more in (("texts", [row["completion"] for row in rows]), ("own_texts", own)):
        kl = []
        for prompt, completion in zip(prompts, more, strict=True):
            with torch.no_grad():
                both = (model(torch.tensor([prompt + completion])).logits[0].double() for model in (old, new))
                p, q = (logits[len(prompt) - 1 : -1].log_softmax(-1) for logits in both)
            kl += (p.exp() * (p - q)).sum(-1).tolist()
        assert said[name]["tokens"] == len(kl) and said[name]["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)
    assert said["kl"] == max(said[name]["kl"] for name in ("texts", "own_texts"))
    assert said["bound"] == max(said[name]["bound"] for name in ("texts", "own_texts"))


def test_texts_that_choose_the_scale_do_not_certify(made: Made) -> None:
    texts, own_texts = made.compared[-2:]  # those before choose the scale
    assert len(texts) == len(own_texts) == len(made.chosen) == 3 and not {*texts, *own_texts} & {*made.chosen}
    rows = read_rows(made.folder / WARM / "rollouts" / "held_out_T1")
    assert sorted(texts + made.chosen) == sorted(padded(rows).hashes())


def test_texts_that_certify_share_no_conversation_or_document() -> None:
    """Nor a beginning: turns of one conversation, pieces of one document, and prompts that begin alike in full."""
    words = copy.deepcopy(tokenizer())
    words.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}{{ 'a' if add_generation_prompt }}"
    )
    one = [{"role": role, "content": f"{role}{n}"} for n in range(3) for role in ("user", "assistant")]
    two = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    rendered = [Reader(templated=True).row({"messages": messages}) for messages in (one, two)]
    chats = _turns(rendered, Template(words, {}, ()), nothing_skipped(), nothing_skipped())
    assert len(chats.rows) == 5 and independent([row["prompt"] for row in chats.rows][1:], chats, 99) == [0, 2]
    words.chat_template = "{{ messages[-1].content }}"  # turns of one conversation that do not begin alike
    apart = _turns(rendered, Template(words, {}, ()), nothing_skipped(), nothing_skipped())
    assert len(apart.rows) == 5 and independent([row["prompt"] for row in apart.rows], apart, 99) == [0, 3]

    long = "".join(f"{n} is the number of this line\n" for n in range(400))
    corpus = Dataset.from_list([{"text": long, "domain": "a"}, {"text": "another", "domain": "a"}])
    pieces = TextStarts(_cut(corpus), corpus, tokenizer())
    prompts = pieces.each(99)
    assert len(prompts) > 2 and independent(prompts, pieces, 99) == [0, len(prompts) - 1]

    rows = PromptRows(
        [{"prompt": ids, "domain": "a", "completion": []} for ids in ([1, 2], [1, 2, 3], [4], [1, 2], [5])]
    )
    assert independent([row["prompt"] for row in rows.rows], rows, 9) == [0, 2, 4]
    assert independent([[8], [9]], rows, 9) == [0, 1]  # shipped


def test_the_last_stage_is_judged_on_texts_of_the_moved_target(pair: Path) -> None:
    first, last = held_out_rows(pair, "warm"), held_out_rows(pair, ".")
    assert [row["prompt"] for row in first] == [row["prompt"] for row in last] and first != last
    assert not (pair / "rollouts" / "train_T1.json").exists()  # it learns from texts of the original


@pytest.mark.thorough
def test_its_prompts_are_those_of_the_originals_texts_also_if_these_were_given(pair: Path, place: Path) -> None:
    """The bundled target has held-out texts in the package, whose prompts are no beginnings of texts."""
    given = place / "given texts"
    file = given / "held_out_T1"
    shutil.copytree(pair / "warm" / "rollouts", given)
    manifest = {key: value for key, value in (read_manifest(file) or {}).items() if key not in ("rows", "tokens")}
    rows = [row | {"prompt": row["prompt"][2:]} for row in reversed(list(read_rows(file)))]
    save_rows(rows, file, manifest)
    settings = ("joint.epsilon=9", "joint.lr=0.05", *SETTINGS, f"rollout.folder={given}")
    assert job(place, "of given", *settings, target="half") == 0
    last = held_out_rows(place / "of given", ".")
    assert [row["prompt"] for row in last] == [row["prompt"] for row in rows] and last != rows
    judged = [read_json(place / "of given" / part / "held_out.json")["texts"]["1"] for part in (".", WARM)]
    assert judged[0]["prompts"] == judged[1]["prompts"] and judged[0]["hashes"] != judged[1]["hashes"]


@pytest.mark.thorough
def test_texts_to_learn_from_at_last_are_the_originals(pair: Path, place: Path) -> None:
    """Also if no first stage sampled them."""
    settings = [one for one in SETTINGS if not one.startswith(("joint.warm_steps", "trainer."))]
    settings += ["joint.warm_steps=0", "init=pretrained", f"draft.path={pair / 'warm' / 'draft'}"]
    settings += "joint.epsilon=9 joint.lr=0.2 trainer.steps=2 trainer.corpus_steps=0".split()
    assert job(place, "pretrained", *settings, target="half") == 0
    found = list((place / "pretrained").rglob("train_T1.parquet"))
    assert found == [place / "pretrained" / "warm" / "rollouts" / "train_T1.parquet"]
    assert found[0].read_bytes() == (pair / "warm" / "rollouts" / "train_T1.parquet").read_bytes()


def test_missing_texts_of_the_original_are_not_sampled_from_the_moved_target(
    pair: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(pair, place / "missing")
    for file in (copy / "warm" / "rollouts").glob("train_*"):
        file.unlink()
    assert job(place, "missing", *WITHIN, "trainer.steps=3", target="half") == 1
    assert "the texts of the original target are missing in" in capsys.readouterr().err


@pytest.mark.thorough
def test_shared_folders_are_the_originals(place: Path) -> None:
    shared, cache = place / "shared texts", place / "shared states"
    given = (*SETTINGS, "joint.epsilon=9", f"rollout.folder={shared}", f"trainer.cache={cache}")
    before: dict[Path, bytes] = {}
    for output in ("first", "second"):  # whose targets differ
        assert job(place, output, *given, f"joint.lr={0.01 * len(output)}") == 0
        now = {file: file.read_bytes() for folder in (shared, cache) for file in folder.iterdir()}
        assert before.items() <= now.items() and (place / output / "rollouts" / "held_out_T1.json").exists()
        before = now


@pytest.mark.thorough
def test_an_interrupted_run_moves_the_target_to_the_same_place(
    pair: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the step after a checkpoint, and while the certificate is made."""
    calls = []

    def once(name: str, original: Any, at: int) -> Any:
        def failing(*given: Any, **named: Any) -> Any:
            calls.append(name)
            if calls.count(name) == at:
                raise OSError("the machine went down")
            return original(*given, **named)

        return failing

    monkeypatch.setattr(JointTraining, "judge", once("judge", JointTraining.judge, 2))
    monkeypatch.setattr(joint, "movement", once("movement", joint.movement, 2))
    warmed(pair, place / "halted")
    assert [job(place, "halted", *WITHIN, target="half") for _ in range(3)] == [1, 1, 0]
    one, two = (load_file(run / "target" / "model.safetensors") for run in (pair, place / "halted"))
    assert same(one, two)
    assert movement_of(str(pair / "target")) == movement_of(str(place / "halted" / "target"))


def test_an_adapter_that_is_not_merged_is_named_in_the_report_too(tmp_path: Path) -> None:
    write_json(tmp_path / MOVED, {"kl": 0.1, "identity": {}})
    assert movement_of("elsewhere", str(tmp_path)) == {"kl": 0.1} and movement_of("elsewhere") is None


def test_what_cards_say_of_a_certificate() -> None:
    """That it is of a mean, and how sure it is."""
    moved = {"original": "theirs", "kl": 0.0073, "epsilon": 0.01, "confidence": 0.95, "certified": True}
    begin = (
        "The target is theirs, moved by joint training: KL(original || moved) = 0.0073 nats per token in the mean "
        "over held-out texts, "
    )
    end = " Exact means: with respect to the moved target."
    assert said(moved) == f"{begin}certified with 95 % confidence to be at most 0.01.{end}"
    assert said(moved | {"certified": False}) == f"{begin}not certified.{end}"
    assert said(moved | {"kl": 0.0}) == "The target is theirs: joint training did not move it."


def test_both_bounds_hold_together() -> None:
    """Each is computed with half of the risk."""
    values, text = torch.tensor([0.0, 0.1, 0.3, 0.2]), torch.tensor([0, 1, 2, 3])

    def moved(kl: Tensor) -> Movement:
        return Movement(kl, kl, kl > 0, kl, kl, text, text, ["a"] * 4)

    one = moved(values)
    cfg = SimpleNamespace(joint=SimpleNamespace(epsilon=0.2, weight=None))
    given = SimpleNamespace(
        cfg=SimpleNamespace(target=SimpleNamespace(path="t")), identity={}, tokenizer=SimpleNamespace(decode=str)
    )
    found = joint._about(cfg, given, {"texts": one, "own_texts": one})  # type: ignore[arg-type]
    assert found["kl"] < 0.2 < found["bound"] and not found["certified"]
    assert found["bound"] == pytest.approx(one.bound(1 - (1 - CONFIDENCE) / 2)) and found["bound"] > one.bound(
        CONFIDENCE
    )
    for kl, certified in ((0.01, True), (0.3, False), (float("nan"), False)):  # a bound that is no number
        parts = {"texts": moved(values * 0), "own_texts": moved(torch.full((4,), kl))}
        assert joint._about(cfg, given, parts)["certified"] is certified  # type: ignore[arg-type]


def test_a_finished_stage_is_not_repeated(pair: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "SecondStage", lambda *_: pytest.fail("the target moves again"))
    moved = shutil.copytree(pair, place / "longer") / "target"
    before = {path: path.stat().st_mtime_ns for path in moved.iterdir()}
    assert job(place, "longer", *WITHIN, "trainer.steps=3", target="half") == 0
    assert {path: path.stat().st_mtime_ns for path in moved.iterdir()} == before


def test_a_target_outside_the_bound_exports_nothing(
    pair: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warmed(pair, place / "far", lr=0.2, weight=0.0, epsilon=1e-6)
    far = (*WITHIN, "joint.lr=0.2", "joint.weight=0.0", "joint.epsilon=1e-6")
    assert job(place, "far", *far, target="half") != 0
    assert "joint.epsilon" in capsys.readouterr().err and not (place / "far" / "draft").exists()
    assert not movement_of(str(place / "far" / "target"))["certified"]  # type: ignore[index]
    capsys.readouterr()
    assert job(place, "far", *far, "joint.uncertified=true", target="half") == 0
    assert (place / "far" / "draft").exists()


@pytest.mark.parametrize(
    ("setting", "says"),
    often(
        [
            ("regime.temperature=0", "regime.temperature"),
            ("joint.warm_steps=0", "joint.warm_steps"),
            ("draft=retrieval", "not trained"),
            ("trainer.minutes=5", "minutes"),
            ("rollout.held_out_texts=3", "there are 3 held-out texts of different conversations"),
            ("trainer.strategy=fsdp2", "trainer.strategy"),
            (
                "loss.then=calls trainer.corpus_steps=1",
                "trainer.corpus_steps: calls",
            ),  # from the last stage's step 1 on
            ("data.on_target=true", "data.on_target"),
            ("joint.epsilon=[0.1]", "joint.epsilon"),
        ],
        lambda case: case[0].startswith(("regime", "joint", "rollout.held", "loss")),
    ),
)
def test_settings_that_joint_training_lacks_are_refused(
    setting: str, says: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [one for one in SETTINGS if one.partition("=")[0] != setting.partition("=")[0]]
    assert job(place, "wrong", *given, *setting.split()) != 0
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said and not (place / "wrong" / "warm").exists()


def test_files_of_all_stages_are_sealed(pair: Path) -> None:
    files = [file for parts in joint.WRITTEN for part in parts for file in (pair / part).rglob("*") if file.is_file()]
    sealed = read_json(pair / joint.SEALS)
    assert len(files) > 6 and {str(file.relative_to(pair)) for file in files} == sealed.keys()


def test_what_a_stage_wrote_and_is_changed_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With all that the stage wrote; what a user deleted is nothing to say."""
    names = [f"{part}/model.safetensors" for parts in joint.WRITTEN for part in parts]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"weights")
    for parts in joint.WRITTEN:
        joint.seal(tmp_path, parts)
    for parts in joint.WRITTEN:
        joint.remove_changed(tmp_path, parts)
    assert all((tmp_path / name).is_file() for name in names) and not capsys.readouterr().err
    (tmp_path / names[-1]).write_bytes(b"wEights")
    (tmp_path / names[0]).unlink()
    for parts in joint.WRITTEN:
        joint.remove_changed(tmp_path, parts)
    assert [(tmp_path / name).parent.exists() for name in names] == [True, False, False]
    assert capsys.readouterr().err == f"{tmp_path / names[-1]} was changed since it was written: it is made again\n"
