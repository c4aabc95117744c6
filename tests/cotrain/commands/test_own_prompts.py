"""`data=self` and GGUF targets through the command line: a run needs nothing but the target."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from cotrain.cli import main
from cotrain.data.splits import in_split
from cotrain.export.publishing import card
from cotrain.rollout import self_prompts
from cotrain.rollout.training_texts import read_rows
from inference import load
from inference.drafts import gguf_target
from inference.drafts.bundled_target import resolve
from inference.drafts.draft_folder import PROMPTS, read
from inference.drafts.gguf_target import about
from inference.drafts.weight_files import read_json
from tests.folders import network, own_texts, target_folder
from tests.gguf_files import write_gguf

SIZES = """data.block=64 rollout.texts=8 rollout.held_out_texts=2 rollout.new_tokens=24 rollout.temperatures=[1.0]
trainer.steps=3 trainer.batch=2 trainer.validations=1 bench.prompts=2 bench.quick_prompts=1 bench.new_tokens=8
bench.parity_tokens=100 bench.minutes=0 bench.depths=[2] policy.k=2 init.layers=[0,1]""".split()
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}on{% endfor %}"  # "on" ends a turn


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundled target, which writes text; the same with a chat template; and a tiny target."""
    place = tmp_path_factory.mktemp("own_prompts")
    target_folder(place / "tiny", context=256)
    shutil.copytree(resolve("bundled"), place / "base")
    shutil.copytree(resolve("bundled"), place / "chat")
    words = AutoTokenizer.from_pretrained(place / "base")
    words.chat_template = CHAT
    words.save_pretrained(place / "chat")
    own_texts(place / "own.jsonl")
    return place


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache of dequantised targets."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    gguf_target._dequantised.cache_clear()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few tokens, for time."""
    monkeypatch.setattr("cotrain.training.job.LONGEST", 24)


def train(place: Path, target: str, output: Path, *settings: str) -> int:
    return main(["train", f"target.path={place / target}", "data=self", f"output={output}", *SIZES, *settings])


def assert_final_prompts(draft: Path, file: Path) -> list[dict[str, object]]:
    """A draft's folder has prompts of the final split alone. Returns all rows of the file that were sampled."""
    rows, unseen = ([json.loads(row) for row in path.open()] for path in (file, draft / PROMPTS))
    final = [rows[row] for row in in_split([self_prompts.split_content(row) for row in rows], "final")]
    assert unseen and all(row in final for row in unseen)
    return rows


class TestDataSelf:
    @pytest.mark.thorough
    @pytest.mark.parametrize("target", ["base", "chat"])
    def test_a_run_needs_nothing_but_the_target(
        self, target: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        measured = "measure=" + str(target == "chat").lower()  # once is enough
        assert train(place, target, tmp_path / "run", measured, "check=true") == 0
        assert "sampled from the target itself" in capsys.readouterr().out and not (tmp_path / "run").exists()
        assert train(place, target, tmp_path / "run", measured) == 0
        out = capsys.readouterr().out
        counts = read_json(tmp_path / "run" / "rollouts" / "self_prompts.json")["counts"]
        assert self_prompts.counts_line(counts) in out and counts["kept"] >= 8
        draft = tmp_path / "run" / "draft"
        rows = assert_final_prompts(draft, tmp_path / "run" / "rollouts" / "self_prompts.jsonl")
        assert all(("messages" in row) == (target == "chat") for row in rows)
        assert read(draft).metadata.served.messages == (target == "chat")
        if target == "chat":
            report = read_json(draft / "report.json")
            assert report["exactness"]["passed"] and report["extra"]["prompts"] == "own"
        else:
            sizes = "bench.minutes=0 bench.prompts=1 bench.new_tokens=8 bench.parity_tokens=20".split()
            assert main(["bench", f"draft.path={draft}", f"output={tmp_path / 'bench'}", *sizes]) == 0
            assert f"of {draft / PROMPTS}, which the draft did not learn from" in capsys.readouterr().out
            assert read_json(tmp_path / "bench" / "report.json")["extra"]["prompts"] == "own"
        assert main(["generate", f"draft.path={draft}", "prompt=hello there", "max_new_tokens=4"]) == 0
        capsys.readouterr()
        assert train(place, target, tmp_path / "run", measured) == 0  # finished, as its settings are the same
        assert self_prompts.counts_line(counts) not in capsys.readouterr().out

    @pytest.mark.thorough
    def test_every_stage_of_joint_training_has_the_prompts_of_the_original(self, place: Path, tmp_path: Path) -> None:
        run = tmp_path / "run"
        sizes = """mode=joint joint.warm_steps=2 joint.steps=2 joint.rank=1 joint.epsilon=1 rollout.held_out_texts=4
        trainer.steps=1 measure=false""".split()
        assert train(place, "base", run, *sizes) == 0
        assert [file.parent for file in run.rglob("self_prompts.jsonl")] == [run / "warm" / "rollouts"]
        first, last = (read_rows(run / at / "rollouts" / "held_out_T1")["prompt"] for at in ("warm", "."))
        assert list(first) == list(last)
        manifests = [read_json(file)["source"] for file in run.rglob("*_T1.json")]
        assert len(manifests) == 3 and all("contents" in one for one in manifests)
        assert_final_prompts(run / "draft", run / "warm" / "rollouts" / "self_prompts.jsonl")

    @pytest.mark.thorough
    def test_the_file_of_a_run_is_a_data_set_for_others(
        self, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cotrain.training.job.LONGEST", 12)
        assert (
            main(
                [
                    "rollout",
                    f"target.path={place / 'chat'}",
                    "data=self",
                    f"output={tmp_path / 'texts'}",
                    "rollout.texts=3",
                    "rollout.held_out_texts=1",
                    "rollout.new_tokens=4",
                ]
            )
            == 0
        )
        file = tmp_path / "texts" / "self_prompts.jsonl"
        assert (tmp_path / "texts" / "train_T1.parquet").is_file()
        again = [f"target.path={place / 'chat'}", f"data.path={file}", f"output={tmp_path / 'again'}"]
        assert main(["rollout", *again, "rollout.texts=3", "rollout.held_out_texts=1", "rollout.new_tokens=4"]) == 0
        one, two = ((tmp_path / name / "train_T1.parquet").read_bytes() for name in ("texts", "again"))
        assert one == two

    def test_a_file_goes_first(self, place: Path, tmp_path: Path) -> None:
        assert train(place, "tiny", tmp_path / "run", f"data.path={place / 'own.jsonl'}", "measure=false") == 0
        assert not list((tmp_path / "run").rglob("*prompts*"))
        metadata = read(tmp_path / "run" / "draft").metadata
        assert metadata.origin["gguf"] is None
        assert "GGUF" not in card(metadata, "vllm", "draft", None, [])

    @pytest.mark.parametrize("command", ["bench", "datastore"])
    def test_commands_that_sample_nothing_name_the_file(
        self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([command, "data=self", f"output={tmp_path / 'out'}"]) == 1
        assert "data=self: only cotrain train and rollout sample prompts" in capsys.readouterr().err


class TestGGUF:
    @pytest.mark.thorough
    def test_a_draft_of_a_gguf_target_says_so_and_is_served(
        self, place: Path, tmp_path: Path, cache: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_gguf(tmp_path / "tiny.gguf", network(context=256))
        settings = [f"target.path={tmp_path / 'tiny.gguf'}", f"data.path={place / 'own.jsonl'}", "measure=false"]
        assert main(["train", *settings, f"output={tmp_path / 'run'}", *SIZES]) == 0
        metadata = read(tmp_path / "run" / "draft").metadata
        assert metadata.target["name"] == str(tmp_path / "tiny.gguf")
        said = about(str(tmp_path / "tiny.gguf"))
        assert said and metadata.origin["gguf"] == said
        text = card(metadata, "vllm", "draft", None, [])
        assert all(str(value) in text for value in said.values()) and "GGUF" in text
        assert load(tmp_path / "run" / "draft").generate(["def f"], max_new_tokens=4).stats.tau >= 1
        capsys.readouterr()
        draft = f"draft.path={tmp_path / 'run' / 'draft'}"
        assert main(["generate", draft, "prompt=def f", "max_new_tokens=4"]) == 0
        sizes = """bench.minutes=0 bench.prompts=2 bench.new_tokens=8 bench.parity_tokens=50
        bench.prompt_tokens=8""".split()
        assert main(["bench", draft, f"output={tmp_path / 'bench'}", *sizes]) == 0


def test_a_template_whose_answers_do_not_end_texts_is_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(place / "tiny", tmp_path / "chat")
    words = AutoTokenizer.from_pretrained(target)
    words.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    words.chat_template = CHAT.replace("}}on", "}}<|im_end|>")
    words.save_pretrained(target)
    id = words.convert_tokens_to_ids("<|im_end|>")
    wider = network(context=256)
    wider.resize_token_embeddings(id + 1)
    for ends in ([0], [0, id]):
        wider.generation_config.eos_token_id = ends
        wider.save_pretrained(target)
        assert train(tmp_path, "chat", tmp_path / "run", "check=true") == 0
        said = f"ends answers with '<|im_end|>', but its texts go on after it: add {id} to eos_token_id"
        assert (said in capsys.readouterr().err) == (id not in ends)
