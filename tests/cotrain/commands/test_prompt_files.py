"""Prompts that `cotrain generate` reads of a file."""

from pathlib import Path

import pytest

from cotrain.cli import main
from inference import Engine, Sampling
from tests.cotrain.commands.test_cli import saved


def test_prompts_of_a_file_keep_their_spaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, prompts = saved(tmp_path / "target"), ["    return x", "a = 1  "]
    (tmp_path / "prompts").write_text("\n".join([prompts[0], "", "   ", prompts[1]]))
    settings = {"max_new_tokens": 6, "sampling": Sampling(temperature=0.0)}
    plain = Engine(str(target)).generate(prompts, **settings).text  # type: ignore[arg-type]
    other = Engine(str(target)).generate([one.strip() for one in prompts], **settings).text  # type: ignore[arg-type]
    capsys.readouterr()
    arguments = [f"target.path={target}", f"prompts={tmp_path / 'prompts'}", "max_new_tokens=6", "regime=t0"]
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == "".join(f"{one}\n" for one in plain) and plain != other
