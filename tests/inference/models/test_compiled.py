"""Compiled passes and what happens without a compiler; models share what is compiled."""

import shlex
from typing import Any

import pytest
import torch
from torch._inductor import cpp_builder

from inference.models.lm import LM
from inference.models.replay import Compiled, compiler_reason, quote_libraries
from inference.models.step import Replayed
from tests.inference.models.test_llama import build, passes
from tests.tiny import compiles, tiny, traced


def graphs(lm: LM) -> Any:
    assert isinstance(lm.run, Replayed) and not Compiled.failed
    return lm.run.replay.graphs


@compiles
def test_passes_are_the_models_own() -> None:
    """One layer: text and counts of compiled drafts have several."""
    model = build("Qwen3", {"num_hidden_layers": 1})
    lm = LM(model, 3, compile=True)
    torch.testing.assert_close(passes(lm), passes(LM(model, 3, stock=True)), rtol=1e-5, atol=1e-5)
    assert len(graphs(lm)) == 2  # several rows with several ids, and with one


@pytest.mark.thorough
def test_a_pass_of_one_id_that_also_returns_states_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that ends after such a round would wait for the compiler."""
    traced(monkeypatch)
    lm, stock = (LM(tiny(), 3, stock=stock, compile=not stock) for stock in (False, True))
    ids, found = torch.arange(12).view(3, 4), []
    with torch.inference_mode():
        for one in (lm, stock):
            one.store(ids[:, :1], [0] * 3)
            one.forward(ids[:, 1:3], [1] * 3, states=(1,))
            found.append(one.forward(ids[:, 3:], [3] * 3, states=(1,)))
    torch.testing.assert_close(found[0].logits, found[1].logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0].states[1], found[1].states[1], rtol=1e-4, atol=1e-4)
    assert [key[2] for key in graphs(lm)] == [True]  # that of several ids


def test_without_a_compiler_passes_run_uncompiled_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "failed", False)
    model = tiny()
    lm = LM(model, 3, compile=True)

    def broken(**_: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda _: broken)
    with pytest.warns(UserWarning, match="passes run uncompiled, since torch.compile failed: no C.. compiler"):
        logits = passes(lm)
    torch.testing.assert_close(logits, passes(LM(model, 3, stock=True)), rtol=1e-9, atol=1e-9)
    assert Compiled.failed


def test_libraries_in_a_path_with_a_space_reach_the_compiler_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    options = cpp_builder.BuildOptionsBase
    monkeypatch.setattr(options, "get_libraries_dirs", options.get_libraries_dirs)
    monkeypatch.setattr(torch, "__path__", ["/a path/torch"])
    quote_libraries()
    settings = options(libraries_dirs=["/a path/torch/lib"], libraries=["torch"])
    command = cpp_builder.CppBuilder("name", "source.cpp", settings).get_command_line()
    assert "-L/a path/torch/lib" in shlex.split(command)


def test_a_failed_compilation_says_its_last_line() -> None:
    message = (
        "C++ compile error\n\nOutput:\nld: cannot find -ltorch\n\nSet TORCHDYNAMO_VERBOSE=1 for the trace. For more\n"
    )
    assert compiler_reason(RuntimeError(message)) == "ld: cannot find -ltorch"
    assert (
        compiler_reason(RuntimeError("no compiler\n\n")) == "no compiler" and compiler_reason(KeyError()) == "KeyError"
    )


def module_of(model: Any, rows: int) -> Any:
    run: Any = LM(model, rows, compile=True).run
    return run.replay.compiled("pass", lambda: run._step((), True))


def in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


def uncounted(weight: torch.Tensor) -> None:
    weight.data.mul_(2)


@pytest.mark.parametrize("change", [in_place, uncounted])
def test_engines_share_what_is_compiled_until_weights_change(change: Any) -> None:
    model = tiny()
    module = module_of(model, 1)
    assert module_of(model, 2) is module
    change(model.model.layers[0].mlp.up_proj.weight)
    other = module_of(model, 1)
    assert other is not module and module_of(model, 1) is other
