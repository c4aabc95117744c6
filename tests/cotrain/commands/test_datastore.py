"""`cotrain datastore`: what is written is what the training split says, in the target's ids."""

from pathlib import Path

import pytest

from cotrain.cli import main
from inference.drafts.compatibility import hash_tokenizer
from inference.drafts.draft_folder import load_tokenizer
from inference.lookup.corpus import Datastore
from tests.folders import target_folder, write_rows

TEXTS = [f"the value of item {n} is {n * n} and no more" for n in range(60)]


def test_a_datastore_of_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = target_folder(tmp_path / "target")
    rows = [{"text": text} for text in TEXTS]
    write_rows(tmp_path / "data.jsonl", rows)
    command = [
        "datastore",
        f"target.path={target}",
        f"data.path={tmp_path / 'data.jsonl'}",
        "depth=6",
        f"output={tmp_path / 'store'}",
    ]
    assert main(command) == 0
    assert "tokens of" in capsys.readouterr().out
    tokenizer, store = load_tokenizer(target), Datastore.open(tmp_path / "store")
    assert store.about.tokenizer == hash_tokenizer(tokenizer) and store.about.depth == 6
    assert store.about.vocabulary == 1 + max(tokenizer.get_vocab().values())
    assert 40 < store.about.documents < 60  # the other splits are left to be measured on
    ids = tokenizer("the value of item")["input_ids"]
    match = store.look_up(ids, 2)
    assert match.length == min(len(ids), 6) and len(match.drafts) == 2
    inside = f"lies in the datastore {tmp_path / 'store'}"
    for output, said in (("store", "has a datastore: name"), ("store/in", inside)):
        assert main([*command[:-1], f"output={tmp_path / output}"]) == 1
        assert f"cotrain datastore: output={tmp_path / output} {said}" in capsys.readouterr().err
    assert main(["train", "check=true", "draft=retrieval", f"draft.datastore={tmp_path / 'store'}"]) == 1
    assert f"token ids of another tokenizer (that of {target}): make a new one" in capsys.readouterr().err
