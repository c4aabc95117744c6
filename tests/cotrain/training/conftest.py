"""Folders that tests of training share, so that a target is written, and texts are sampled, once."""

import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from studies.pretrain.tokenizer import train_tokenizer
from tests.cotrain.commands.test_train import place as place  # a fixture: a folder with a target and own texts
from tests.folders import CONTEXT, VOCABULARY, target_and_texts, target_folder, tokenizer


@pytest.fixture(scope="session")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, texts of the user, and files that are named by mistake."""
    folder = target_and_texts(tmp_path_factory.mktemp("mistakes"))
    (folder / "empty.jsonl").write_text("")
    (folder / "text.jsonl").write_text("no json\n")
    (folder / "file").write_text("")
    rows = [b'{"text": "caf\xc3\xa9"}\n'] * 5 + [b'{"text": "caf\xe9"}\n'] * 40 + [b'{"text": "a"}\n'] * 255
    (folder / "latin.jsonl").write_bytes(b"".join(rows))
    (folder / "few.jsonl").write_text("".join(f'{{"text": "{n} is a short text"}}\n' for n in range(20)))
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "say {n}"}}\n' for n in range(40)))
    shutil.copytree(folder / "target", folder / "bare")
    (folder / "bare" / "model.safetensors").unlink()
    target_folder(folder / "large", layers=3, hidden=128)
    target_folder(folder / "other", layers=1)
    train_tokenizer(["another text, again and again " * 40], 290, CONTEXT).save_pretrained(folder / "other")
    fewer = LlamaConfig(
        vocab_size=VOCABULARY - 1, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(fewer).save_pretrained(folder / "fewer")
    tokenizer().save_pretrained(folder / "fewer")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "thesis.tex").write_text("mine")
    return folder
