"""Damaged files: what is left out is counted by reason, or one sentence names the file and the reason.

Each file holds the good rows of `ROWS` beside its damage, so that a row that is neither read nor counted is missed.
"""

import bz2
import gzip
import json
import lzma
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from cotrain.cli import main
from cotrain.data.conversations import Template
from cotrain.data.sources import Source, sources_of
from cotrain.data.splits import ALL_ROWS
from tests.cotrain.data.test_inputs import given, templated
from tests.folders import target_folder

ROWS = [{"prompt": f"say {place}"} for place in range(30)]
NUMBERS = random.Random(0).sample(range(10**9), 3000)


def jsonl(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


GOOD = jsonl(*ROWS)
LONG = jsonl(*({"prompt": str(number)} for number in NUMBERS))
CSV = b"prompt,completion\n" + b"".join(b"say %d,x\n" % place for place in range(30))


def zst(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def parquet(table: pyarrow.Table) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    return bytes(sink.getvalue())


TABLE = pyarrow.table({"prompt": [f"say {place}" for place in range(30)]})
FAR = pyarrow.array([2**62] * 30, pyarrow.timestamp("us"))  # a date that Python has not
TEXTS = pyarrow.array([f"s{place:02d}" for place in range(30)])
BROKEN = pyarrow.Array.from_buffers(
    pyarrow.string(), 30, [None, TEXTS.buffers()[1], pyarrow.py_buffer(b"\xff\xfe." * 30)]
)
PARQUET = parquet(TABLE)
SAID = jsonl({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
DEEP = b"[" * 100_000 + b"]" * 100_000

# name -> content, and why the one row beside the good ones is skipped
SKIPPED: dict[str, tuple[bytes, str]] = {
    "half a line.jsonl": (GOOD + b'{"prompt": "ha', "it is no whole JSON: Unterminated string"),
    "plain line.jsonl": (GOOD + b"plain\n", "it is no JSON object"),
    "latin line.jsonl": (GOOD + b'{"prompt": "caf\xe9"}\n', "it is not UTF-8 text"),
    "latin line.txt": (b"".join(b"%d\n" % place for place in range(30)) + b"caf\xe9\n", "it is not UTF-8 text"),
    "latin cell.csv": (CSV + b"caf\xe9,x\n", "column 'prompt': the text is no valid Unicode"),
    "latin answer.tsv": (
        CSV.replace(b",", b"\t") + b"a\tcaf\xe9\n",
        "column 'completion': the text is no valid Unicode",
    ),
    "zeros.jsonl": (GOOD + b"\0" * 5000, "it is no JSON object"),
    "zero inside.jsonl": (GOOD + b'{"prompt": "a\0b"}\n', "it is no whole JSON: Invalid control character"),
    "deep.jsonl": (GOOD + b'{"prompt": ' + DEEP + b"}\n", "maximum recursion depth"),
    "deep text.jsonl": (GOOD + jsonl({"prompt": "a", "tools": DEEP.decode()}), "tools: the text is not JSON: maximum"),
    "long number.jsonl": (GOOD + b'{"prompt": ' + b"9" * 9000 + b"}\n", "Exceeds the limit"),
    "key twice.jsonl": (GOOD + b'{"prompt": "a", "prompt": "b"}\n', "it has 'prompt' twice"),
    "key twice inside.jsonl": (
        GOOD + b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}\n',
        "it has 'content' twice",
    ),
    "surrogate.jsonl": (GOOD + b'{"prompt": "\\ud800"}\n', "column 'prompt': the text is no valid Unicode"),
    "surrogate domain.jsonl": (
        GOOD + b'{"prompt": "a", "domain": "\\ud800"}\n',
        "column 'domain': the text is no valid",
    ),
    "surrogate tool.jsonl": (
        GOOD + b'{"prompt": "a", "tools": [{"name": "\\ud800"}]}\n',
        "the rendered conversation: the text is no valid Unicode",
    ),
    "number.jsonl": (GOOD + jsonl({"prompt": 3}), "column 'prompt' holds int, not text"),
    "nested lists.jsonl": (GOOD + jsonl({"prompt": [["a"]]}), "it holds no list of messages"),
    "list of texts.jsonl": (GOOD + jsonl({"prompt": ["a"]}), "it holds no list of messages"),
    "no role.jsonl": (GOOD + jsonl({"messages": [{"content": "a"}]}), "message 1 has the role None"),
    "unknown role.jsonl": (
        GOOD + jsonl({"messages": [{"role": "bot", "content": "a"}]}),
        "message 1 has the role 'bot'",
    ),
    "numbers as content.jsonl": (
        GOOD + jsonl({"messages": [{"role": "user", "content": 3}]}),
        "message 1: the content of a message is text or a list of text parts, not 3",
    ),
    "one message.jsonl": (GOOD + jsonl({"messages": {"role": "user", "content": "a"}}), "it holds no list of messages"),
    "too many cells.csv": (CSV + b"a,b,c\n", "it has more cells than the file's first line"),
    "blank.csv": (CSV + b",x\n", "it holds no text"),
}

# name -> content, and what the sentence says
REFUSED: dict[str, tuple[bytes, str]] = {
    "cut.jsonl.gz": (gzip.compress(LONG)[:15_000], r"after .*line \d+: Truncated compressed stream"),
    "cut in its end.jsonl.gz": (gzip.compress(GOOD)[:-4], "Truncated compressed stream"),
    "flipped.jsonl.gz": (gzip.compress(GOOD)[:-8] + bytes(8), "incorrect data check"),
    "cut.jsonl.zst": (zst(LONG)[:-1], "Truncated compressed stream"),
    "cut.jsonl.bz2": (bz2.compress(LONG)[:-9], "Truncated compressed stream"),
    "cut.jsonl.xz": (lzma.compress(LONG)[:-9], "ended before the end-of-stream marker"),
    "plain.jsonl.gz": (GOOD, "incorrect header check"),
    "plain.jsonl.zst": (GOOD, "Unknown frame descriptor"),
    "plain.jsonl.bz2": (GOOD, "bz2 decompress failed"),
    "plain.jsonl.xz": (GOOD, "Input format not supported by decoder"),
    "packed.jsonl": (gzip.compress(LONG), "it is not UTF-8 text"),
    "half.json": (json.dumps(ROWS).encode()[:-8], "it is no whole JSON: Unterminated"),
    "half over lines.json": (json.dumps(ROWS, indent=1).encode()[:-20], r"it is no whole JSON: .*: line \d+ column"),
    "half object.json": (json.dumps({"data": ROWS}).encode()[:-20], "it is no whole JSON: Unterminated"),
    "latin.json": (b'[{"prompt": "caf\xe9"}]', "it is not UTF-8 text"),
    "deep.json": (DEEP, "maximum recursion depth"),
    "two lists.json": (json.dumps({"train": ROWS, "test": ROWS}).encode(), "its 'train' is a list of objects"),
    "columns.json": (json.dumps({"text": ["a", "b"]}).encode(), "it holds no list of messages"),
    "numbers.json": (b"[1, 2, 3]", "3 of 3 rows cannot be read: 3, the first .*row 1: it is no JSON object"),
    "no rows.json": (b"[]", "has no rows"),
    "value.json": (b"3", "it is no JSON object"),
    "null.jsonl": (b"null\nnull\n", "2 of 2 rows cannot be read: 2, the first .*line 1: it is no JSON object"),
    "head.csv": (b"prompt\n", "has no rows"),
    "keys as columns.jsonl": (jsonl({f"key\n{place}": 1 for place in range(5000)}), r"but key 0, key 1.* \.\.\.$"),
    "wide utf.jsonl": (GOOD.decode().encode("utf-16"), "it is not UTF-8 text"),
    "wide utf.csv": (CSV.decode().encode("utf-16"), "it is not UTF-8 text"),
    "empty.jsonl": (b"", "is empty"),
    "blank.jsonl": (b"\n \n", "has no rows"),
    "only a mark.csv": (b"\xef\xbb\xbf", "has no rows"),
    "open quote.csv": (CSV + b'"never closed,x\n' + CSV, "after .*line 31: unexpected end of data"),
    "text behind a quote.csv": (CSV + b'"say \\"hi\\"",x\n' + CSV, "after .*line 31: ',' expected after '\"'"),
    "column twice.csv": (b"prompt,prompt\na,b\n", "it has 'prompt' twice"),
    "semicolons.csv": (CSV.replace(b",", b";"), "separate columns by commas, not by ';'"),
    "no header.csv": (CSV.partition(b"\n")[2], "it has no column"),
    "zero rows.parquet": (parquet(TABLE.slice(0, 0)), "has no rows"),
    "cut.parquet": (PARQUET[:300], "Parquet magic bytes not found"),
    "a gigabyte claimed.parquet": (
        PARQUET[:-8] + (2**30).to_bytes(4, "little") + PARQUET[-4:],
        "smaller than the size reported",
    ),
    "broken page.parquet": (PARQUET[:10] + b"\xff" * 30 + PARQUET[40:], "deserialize thrift"),
    "column twice.parquet": (parquet(pyarrow.table([TEXTS, TEXTS], ["prompt"] * 2)), "it has 'prompt' twice"),
    "far date.parquet": (parquet(TABLE.append_column("at", FAR)), "date value out of range"),
    "broken text.parquet": (parquet(pyarrow.table({"prompt": BROKEN})), "can't decode byte 0xff"),
    "bytes.parquet": (parquet(pyarrow.table({"prompt": [b"a"]})), "column 'prompt' holds bytes, not text"),
    "pointer.parquet": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1\n", "git lfs pull"),
    "pointer.txt": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1\n", "git lfs pull"),
}


def source(path: Path) -> Source:
    words = templated()
    words.chat_template = "{% for t in tools or [] %}{{ t.name }}{% endfor %}" + str(words.chat_template)
    return sources_of(given(path), (ALL_ROWS,), Template(words, {}, ()))[ALL_ROWS]


@pytest.mark.parametrize("name", SKIPPED)
def test_a_damaged_row_is_counted_with_its_reason(name: str, tmp_path: Path) -> None:
    content, reason = SKIPPED[name]
    (tmp_path / name).write_bytes(content)
    found = source(tmp_path / name)
    assert len(found) == 30 and found.remarks[0].startswith("data.path: 30 of 31 rows are read, ")
    skipped = f"data.path: 1 of 31 rows are skipped: 1, the first {name}, "
    assert found.remarks[1].startswith(skipped) and reason in found.remarks[1]
    assert all(line.isprintable() for line in found.remarks)


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_file_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    content, reason = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^data.path: .*{re.escape(name)}.*{reason}") as error:
        source(tmp_path / name)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000 + len(str(tmp_path))


WHOLE: dict[str, bytes] = {
    "joined.jsonl": b"\xef\xbb\xbf".join((jsonl(*ROWS[:9]), jsonl(*ROWS[9:]))),
    "mark and returns.jsonl": b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"),
    "no end of line.jsonl": GOOD.rstrip(),
    "members.jsonl.gz": gzip.compress(GOOD[:50]) + gzip.compress(GOOD[50:]),
    "frames.jsonl.zst": zst(GOOD[:50]) + zst(GOOD[50:]),
    "returns.csv": CSV.replace(b"\n", b"\r"),
    "zero in a cell.csv": CSV.replace(b"29", b"2\0"),
    "quotes.csv": CSV.replace(b"say 29", b'"say ""29"",\nloud"').replace(b"say 28", b'say "28"'),
    "not a number.jsonl": GOOD.replace(b"}", b', "score": NaN}'),
    "surrogate column.jsonl": GOOD.replace(b"}", b', "\\ud800": "a"}'),
    "LOUD.JSONL": GOOD,
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_only_odd_is_read_whole(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(WHOLE[name])
    found = source(tmp_path / name)
    assert len(found) == 30 and found.remarks[0].startswith("data.path: 30 of 30 rows are read, ")
    assert all(line.isprintable() for line in found.remarks)


def unreadable(place: Path) -> None:
    (place / "bad.jsonl").write_bytes(GOOD)
    (place / "bad.jsonl").chmod(0)


AMONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda place: (place / "bad.jsonl.gz").write_bytes(gzip.compress(LONG)[:900]), "bad.jsonl.gz: Truncated"),
    "empty": (lambda place: (place / "bad.jsonl").touch(), "bad.jsonl is empty"),
    "link": (
        lambda place: (place / "bad.jsonl").symlink_to(place / "none"),
        "bad.jsonl is a link to a file that is not",
    ),
    "unreadable": (unreadable, "bad.jsonl.*[Pp]ermission denied"),
}


@pytest.mark.parametrize("pattern", ["", "*"])
@pytest.mark.parametrize("name", AMONG)
def test_one_broken_file_among_good_ones_is_named(name: str, pattern: str, tmp_path: Path) -> None:
    if name == "unreadable" and not os.geteuid():
        pytest.skip("root reads every file")
    for place in range(3):
        (tmp_path / f"good{place}.jsonl").write_bytes(GOOD)
    (tmp_path / ".#good0.jsonl").symlink_to("an editor's lock, which is no file")
    assert len(source(tmp_path / pattern)) == 90
    AMONG[name][0](tmp_path)
    with pytest.raises((ValueError, OSError), match=AMONG[name][1]):
        source(tmp_path / pattern)


def test_links_to_nothing_and_names_without_end_are_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_folder(tmp_path / "target")
    capsys.readouterr()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "none")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "few.jsonl").write_bytes(jsonl({"prompt": "a"}, *[{"\ud800": 1}] * 9))
    for name, reason in (
        ("link.jsonl", "no such file"),
        ("loop.jsonl", "no such file"),
        ("x" * 300 + ".jsonl", "File name too long"),
        ("few.jsonl", r"but \\ud800"),
    ):
        settings = [
            f"target.path={target}",
            f"data.path={tmp_path / name}",
            f"output={tmp_path / 'out'}",
            "check=true",
            "init.layers=[0]",
        ]
        assert main(["train", *settings]) == 1
        said = capsys.readouterr().err
        assert name in said and re.search(reason, said) and said.count("\n") == 1


def test_reasons_that_differ_in_a_number_are_counted_as_one(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "a"}] * place + [{"role": "user", "content": place}] for place in (1, 2)]
    (tmp_path / "own.jsonl").write_bytes(GOOD + jsonl(*({"messages": one} for one in messages)))
    assert source(tmp_path / "own.jsonl").remarks[1] == (
        "data.path: 2 of 32 rows are skipped: 2, the first own.jsonl, line 31: message 2: the content of a message is "
        "text or a list of text parts, not 1"
    )
