"""Embedded corpora and the user's own texts: splits, caps, every bad input, token blocks, endless orders."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch

from cotrain.config.groups import Data
from cotrain.data import corpora
from cotrain.data.corpora import Document, embedded, records
from cotrain.data.sources import embedded_texts, pack_blocks
from cotrain.data.texts import Curriculum, Learnt, SeededOrder, Texts, joined_texts, none, shared_texts
from tests.cotrain.data.test_inputs import source_of
from tests.folders import few_files, tokenizer, write_rows

CAP = 40_000


@pytest.fixture(scope="module")
def files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        few_files(patch)
        yield


def own(tmp_path: Path, *rows: object, name: str = "own.jsonl") -> str:
    return str(write_rows(tmp_path / name, rows))


def test_the_split_of_a_path_never_changes() -> None:
    paths = ["json/decoder.py", "json/__init__.py", "topics/if", "hmac.py", "records/16", "records/17"]
    assert [Document(path, "").held_out for path in paths] == [False, True, False, True, False, True]


@pytest.mark.parametrize("domain", corpora.DOMAINS)
def test_no_document_is_in_both_splits(domain: str, files: None) -> None:
    train, held_out = (embedded(domain, split, CAP) for split in ("train", "held_out"))
    assert not {d.path for d in train} & {d.path for d in held_out}
    assert not {d.text for d in train} & {d.text for d in held_out}
    assert all(d.held_out for d in held_out) and not any(d.held_out for d in train)


@pytest.mark.parametrize("domain", ["code", "records"])
def test_a_corpus_ends_with_the_document_that_reaches_the_cap(domain: str, files: None) -> None:
    sizes = [len(d.text.encode()) for d in embedded(domain, "train", CAP)]
    assert sum(sizes[:-1]) < CAP <= sum(sizes)
    assert embedded(domain, "train", CAP) == embedded(domain, "train", CAP)


def test_a_corpus_holds_no_text_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    train = [number for number in range(50) if not Document(f"records/{number}", "").held_out]
    monkeypatch.setattr(corpora, "records", lambda number: f"{number % 5}" * 10)
    assert len(embedded("records", "train", 45)) == 5 and len(train) > 5


def test_unknown_corpora_and_splits_are_named() -> None:
    with pytest.raises(ValueError, match="data.bytes, .*: there is no embedded corpus 'poems'"):
        embedded("poems", "train", 1)
    with pytest.raises(ValueError, match="'test' is neither"):
        embedded("records", "test", 1)


def test_records_are_json_of_their_number() -> None:
    assert records(7) == records(7) != records(8)
    decoder, text, found = json.JSONDecoder(), records(7), 0
    while text.strip():
        value, end = decoder.raw_decode(text)
        text, found = text[end:].lstrip(), found + isinstance(value, dict)
    assert found >= 2


def test_a_domain_of_no_bytes_is_left_out() -> None:
    assert set(embedded_texts({"code": 0, "records": 500}, "train")["domain"]) == {"records"}


def test_another_column_and_own_domains_are_read(tmp_path: Path) -> None:
    path = own(tmp_path, {"body": "a", "domain": "x"}, {"body": "b", "domain": None})
    named = settings(path).model_copy(update={"column": "body"})
    assert list(source_of(named, "all", tokenizer()).texts["domain"]) == ["x", "own"]


def settings(path: str | None, block: int = 8, **sizes: int) -> Data:
    return Data(path=path, bytes=sizes, held_out_bytes=sizes, block=block, embedded_shares={}, take=1000)


@pytest.mark.parametrize("row", [{"prompt": "a"}, {"prompt": "a", "response": "b"}, {"messages": []}])
def test_a_column_that_is_named_must_be_there(tmp_path: Path, row: dict[str, object]) -> None:
    named = settings(own(tmp_path, row)).model_copy(update={"column": "nope"})
    with pytest.raises(ValueError, match="data.column: .* no column 'nope'"):
        source_of(named, "train", tokenizer())


def test_too_little_text_is_named(tmp_path: Path) -> None:
    one = own(tmp_path, {"text": "ab"})
    with pytest.raises(ValueError, match="data.path: the split held_out gets none of the 1 rows"):
        source_of(settings(one), "held_out", tokenizer())
    with pytest.raises(ValueError, match="data.block=64: 1 texts make less than one block of 64"):
        pack_blocks(source_of(settings(one), "train", tokenizer()).texts, tokenizer(), 64)
    with pytest.raises(ValueError, match="data.block=8: 0 texts"):
        pack_blocks(source_of(settings(one), "train", tokenizer()).texts.filter(lambda _: False), tokenizer(), 8)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="target.path: its tokenizer has no end token"):
        pack_blocks(datasets.Dataset.from_dict({"text": ["a"], "domain": ["x"]}), SimpleNamespace(eos_token_id=None), 2)


def test_blocks_are_the_stream_of_each_domain_cut() -> None:
    texts = datasets.Dataset.from_dict({"text": ["abcd", "XY", "efg"], "domain": ["b", "a", "b"]})
    blocks = pack_blocks(texts, tokenizer(), 3)
    encode = tokenizer().encode
    stream = [0, *encode("abcd"), 0, *encode("efg")]
    assert blocks.domain == ["a"] + ["b"] * (len(stream) // 3)
    assert blocks.ids[0].tolist() == [0, *encode("XY")][:3]
    assert blocks.ids[1:].flatten().tolist() == stream[: len(stream) // 3 * 3]
    assert blocks.ids.dtype == torch.int64 and blocks.predicted.all()


@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 30])
def test_an_order_resumes_anywhere(start: int) -> None:
    whole = list(islice(SeededOrder(7, seed=3), 40))
    assert list(islice(SeededOrder(7, seed=3, start=start), 40 - start)) == whole[start:]


def test_an_order_is_shuffled_anew_each_epoch() -> None:
    one, two = (list(islice(SeededOrder(50, seed, 0), 100)) for seed in (0, 1))
    assert sorted(one[:50]) == sorted(one[50:]) == list(range(50))
    assert one[:50] != one[50:] and one != two and one[:50] != list(range(50))


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 25])
def test_a_curriculum_resumes_anywhere(start: int) -> None:
    def indices(start: int) -> list[int]:
        return list(islice(Curriculum((4, 3), 10, seed=0, start=start), 40 - start))

    assert indices(start) == indices(0)[start:]
    assert max(indices(0)[:10]) < 4 <= min(indices(0)[10:]) and set(indices(0)) == set(range(7))


def test_of_a_domain_only_its_share_is_learnt_from() -> None:
    ids = torch.arange(1, 7)[:, None].repeat(1, 4)
    texts = Texts(ids, torch.full((6,), 2), torch.tensor([4, 3, 4, 4, 4, 4]), ["a", "b", "a", "a", "b", "a"])
    part = Learnt(joined_texts([shared_texts(texts, {"a": 0.5}).at(0.5, whole=True)]), first=7)
    assert part.texts.ids[:, 0].tolist() == [1, 2, 3, 5] and [part[i]["key"] for i in range(4)] == [7, 8, 9, 10]
    assert part.predicted.tolist() == [[True] * 3, [True, True, False], [True] * 3, [True] * 3]
    for wrong in ({"a": 1.5}, {"a": 0.0, "b": 0.0}):
        with pytest.raises(ValueError, match="data.shares"):
            shared_texts(texts, wrong)


def test_without_corpus_steps_no_corpus_is_read() -> None:
    assert len(Learnt(none())) == 0
    assert sorted(islice(Curriculum((0, 3), 0, seed=0), 3)) == [0, 1, 2]
