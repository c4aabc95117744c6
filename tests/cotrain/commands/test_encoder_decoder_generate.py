"""`cotrain generate` of an encoder-decoder, whose prompts are sources."""

import copy
from pathlib import Path

import pytest

from cotrain.cli import main
from inference import Engine, Sampling
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Metadata, save
from tests import folders
from tests.encoder_decoders import t5, with_encoder_of


def test_a_source_is_continued_with_and_without_a_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = copy.deepcopy(folders.tokenizer())
    tokenizer.add_special_tokens({"pad_token": "<pad>", "eos_token": "</s>"})
    target = t5(vocab=len(tokenizer)).float()
    for model in (target, tokenizer):
        model.save_pretrained(tmp_path / "target")
    about = Metadata({"name": str(tmp_path / "target"), **hash_target(target.config, tokenizer)}, 3)
    save(with_encoder_of(target), tokenizer, tmp_path / "draft", about, None)
    engine = Engine(target, tokenizer=tokenizer)
    (wanted,) = engine.generate(["a cab"], max_new_tokens=6, sampling=Sampling(0)).text or ()
    for path in (f"target.path={tmp_path / 'target'}", f"draft.path={tmp_path / 'draft'}"):
        capsys.readouterr()
        main(["generate", path, "prompt=a cab", "max_new_tokens=6", "regime.temperature=0"])
        assert capsys.readouterr().out.rstrip("\n") == wanted.rstrip("\n")
