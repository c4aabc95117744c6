"""The table of serving engines: layout, versions, launch command, remarks.

It was written from the engines' sources and wheels (vLLM 0.28 to 0.33, SGLang 0.5.23, TensorRT-LLM 1.3, transformers
5.23). Sampled drafting (acceptance sum_v min(p, q)) and greedy drafting (acceptance p(argmax q)) need different flags.
With the wrong flag most of the speed-up is lost, without a warning.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from cotrain.errors import UserError
from cotrain.students.base import KINDS as STUDENTS
from cotrain.students.base import student_class
from inference.drafts.bundled_target import resolve
from inference.drafts.draft_folder import OBJECTIVES, PlannedTree
from inference.servers.vllm_server import draft_model

Command = Callable[[str, str, int, str], str]
MARK = "<!-- written by cotrain export -->"  # in each README; overwrite=true replaces only folders that have it
ASSISTANT_TYPE = "muse_glimmer_assistant"  # the model type of transformers that computes DFlash
GGUF_FILE = "draft.gguf"  # the one file of a draft for llama.cpp
EAGLE = "draft-eagle3"  # llama.cpp's name
MARKOV = "dspark"  # the layout of block drafts that keeps a Markov head
# names of what exports write
FILES = (
    "config.json",
    "generation_config.json",
    "cotrain.json",
    "report.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "mask_embedding.pt",
    GGUF_FILE,
)


@dataclass(frozen=True)
class ServingEngine:
    """How one engine serves a draft.

    Args:
        layout: the name of the layout of plain drafts that the engine loads.
        versions: the versions of the engine that load the folder.
        drafts: how the engine can draft: "sampled", "greedy" or both.
        command: a function (draft, target, k, objective) -> launch command for a POSIX shell.
        note: a remark for the user.
        parallel: such a function for drafts that draft all tokens in one pass; None if the engine does not serve them.
    """

    layout: str
    versions: str
    drafts: tuple[str, ...]
    command: Command
    note: str
    parallel: Command | None = None


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def serve_vllm(target: str, settings: dict[str, Any]) -> str:
    """Return vLLM's launch command for a POSIX shell. target: hub id or path. settings: the content of the option
    --speculative-config."""
    return shlex.join(["vllm", "serve", target, "--speculative-config", _json(settings)])


def _vllm(draft: str, target: str, k: int, objective: str, method: str = "draft_model", parallel: bool = False) -> str:
    return serve_vllm(target, draft_model(draft, k, objective, method, parallel))


def _sglang(
    draft: str,
    target: str,
    k: int,
    objective: str,
    tree: PlannedTree | None = None,
    algorithm: str = "STANDALONE",
) -> str:
    serve = [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        target,
        "--speculative-algorithm",
        algorithm,
        "--speculative-draft-model-path",
        draft,
    ]
    if algorithm == "DFLASH":  # a block has the anchor too; steps and children are not read
        return shlex.join([*serve, "--speculative-num-draft-tokens", str(k + 1)])
    steps, children, nodes = (k, 1, k) if tree is None else (tree.depth, tree.most_children, len(tree.parents))
    # SGLang chooses the nodes among these: `children` of the root, then in each step the children of `children` nodes
    rated = children + (steps - 1) * children**2
    return shlex.join(
        [
            *serve,
            "--speculative-num-steps",
            str(steps),
            "--speculative-eagle-topk",
            str(children),
            "--speculative-num-draft-tokens",
            str(min(nodes, rated) + 1),
        ]
    )


def _tensorrt_llm(draft: str, target: str, k: int, objective: str, kind: str = "Draft_Target", **more: Any) -> str:
    # as JSON, which is valid YAML and quotes any path
    settings = {"decoding_type": kind, "max_draft_len": k, "speculative_model": draft, **more}
    options = _json({"disable_overlap_scheduler": True, "speculative_config": settings})
    serve = ["trtllm-serve", target, "--backend", "pytorch", "--extra_llm_api_options", "speculative.yaml"]
    return f"printf '%s\\n' {shlex.quote(options)} > speculative.yaml && {shlex.join(serve)}"


def _transformers(draft: str, target: str, k: int, objective: str) -> str:
    code = (
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer\n"
        f"target, draft = {target!r}, {draft!r}\n"
        "encoder = AutoConfig.from_pretrained(target).is_encoder_decoder\n"
        "Model = AutoModelForSeq2SeqLM if encoder else AutoModelForCausalLM\n"
        "tokenizer = AutoTokenizer.from_pretrained(target)\n"
        'target, draft = (Model.from_pretrained(name, dtype="auto") for name in (target, draft))\n'
        f"draft.generation_config.num_assistant_tokens = {k}\n"
        'prompt = tokenizer("The", return_tensors="pt")\n'
        f"ids = target.generate(**prompt, assistant_model=draft, do_sample={objective == 'sampled'}, "
        "max_new_tokens=32)\n"
        "print(tokenizer.decode(ids[0]))"
    )
    return shlex.join(["python", "-c", code])


def _transformers_blocks(draft: str, target: str, k: int, objective: str) -> str:
    code = (
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer\n"
        f"target, draft = {target!r}, {draft!r}\n"
        "tokenizer = AutoTokenizer.from_pretrained(target)\n"
        'target = AutoModelForCausalLM.from_pretrained(target, dtype="auto")\n'
        "draft = AutoModel.from_pretrained(draft, dtype=target.dtype)\n"
        'prompt = tokenizer("The", return_tensors="pt")\n'
        'ids = target.generate(**prompt, assistant_model=draft, speculation_type="dflash", '
        f"do_sample={objective == 'sampled'}, max_new_tokens=32)\n"
        "print(tokenizer.decode(ids[0]))"
    )
    return shlex.join(["python", "-c", code])


def _llamacpp(draft: str, target: str, k: int, objective: str, kind: str = "draft-simple") -> str:
    """Return the launch command. It sets p-min to 0, because some builds have another default and then end a chain at a
    token that the draft is not sure of, and serves EAGLE-3 one text at a time: with several, build 11549 accepts less.
    kind: llama.cpp's name for the kind of draft; only causal LMs draw drafts."""
    target = target if target.endswith(".gguf") else "TARGET.gguf"
    drawn = kind == "draft-simple" and objective == "sampled"
    return shlex.join(
        [
            "llama-server",
            "-m",
            target,
            "-md",
            str(Path(draft) / GGUF_FILE),
            "--spec-type",
            kind,
            "--spec-draft-n-max",
            str(k),
            "--spec-draft-p-min",
            "0",
            *(("--spec-draft-sampling", "probabilistic") if drawn else ()),
            *(("-np", "1") if kind == EAGLE else ()),
        ]
    )


_vllm_features = partial(_vllm, method="eagle3")
_sglang_features = partial(_sglang, algorithm="EAGLE3")
# kind of TensorRT-LLM and the option that names the layers whose outputs it captures, by layout
CAPTURING = {"eagle3": ("Eagle3", "eagle3_layers_to_capture"), "dflash": ("DFlash", "target_layer_ids")}

# layout of `eagle3` -> the engines that load it, with their launch commands
FEATURES: dict[str, dict[str, Command]] = {
    "eagle3": {
        "vllm": _vllm_features,
        "sglang": _sglang_features,
        "tensorrt_llm": partial(_tensorrt_llm, kind="Eagle3"),
        "llamacpp": partial(_llamacpp, kind=EAGLE),
    },
    "speculators": {"vllm": _vllm_features},
    "dflash": {
        "vllm": partial(_vllm, method="dflash"),
        "llamacpp": partial(_llamacpp, kind="draft-dflash"),
        "sglang": partial(_sglang, algorithm="DFLASH"),
        "tensorrt_llm": partial(_tensorrt_llm, kind="DFlash"),
        "transformers": _transformers_blocks,
    },
    MARKOV: {"llamacpp": partial(_llamacpp, kind="draft-dspark")},
}
TARGET_HEAD = (
    "sglang",
    "tensorrt_llm",
    "transformers",
)  # whose block drafts have the target's head and embeddings alone
BLOCKS = ("dflash", MARKOV)  # layouts of blocks, which engines draft in one pass by a method of its own
# (engine, layout) that can draft trees -> a remark for the user; all others draft chains
TREES = {
    ("sglang", "eagle3"): "SGLang grows its trees anew in every round, of its likeliest tokens: the flags give it the "
    "levels, the most children of a node and the nodes of the planned tree, not its shape.",
}

ENGINES = {
    "vllm": ServingEngine(
        "hf",
        "vllm>=0.28",
        ("sampled", "greedy"),
        _vllm,
        "vLLM drafts greedily unless draft_sample_method says otherwise. The draft runs with the target's "
        "tensor parallel size.",
        partial(_vllm, parallel=True),
    ),
    "sglang": ServingEngine(
        "hf",
        "sglang>=0.5.23",
        ("greedy",),
        _sglang,
        "SGLang drafts greedily here and has no rejection sampling: acceptance is p(argmax q). It needs the "
        "target's vocabulary, token by token.",
    ),
    "tensorrt_llm": ServingEngine(
        "hf",
        "tensorrt_llm>=1.3",
        ("greedy",),
        _tensorrt_llm,
        "PyTorch backend; written from its sources, not run here. By these it drafts greedily, whatever a request's "
        "sampling settings (`_allow_greedy_draft_tokens`). Older releases call decoding_type "
        "DraftTarget and speculative_model speculative_model_dir.",
    ),
    "transformers": ServingEngine(
        "hf",
        "transformers>=5.17",
        ("sampled", "greedy"),
        _transformers,
        "Assisted generation takes one prompt at a time; its speed-up is not a server's. With do_sample=True it draws "
        "drafts from q, with do_sample=False drafts and text are greedy.",
    ),
    "llamacpp": ServingEngine(
        "gguf",
        "llama.cpp with --spec-type",
        ("greedy", "sampled"),
        _llamacpp,
        "llama.cpp drafts the likeliest tokens and samples from the target as without a draft: a draft is accepted "
        "if it is the target's own sample, with p(argmax q). With --spec-draft-sampling probabilistic it draws the "
        "drafts of a causal LM among its ten likeliest tokens and accepts them with min(1, p / q): less than predicted "
        "for the whole of q. Builds that know no such flag draft the likeliest tokens: leave it out. Older ones call "
        "the flags before it --draft-max and --draft-p-min.",
    ),
}


def engine_named(name: str) -> ServingEngine:
    """Return the entry of `ENGINES` with this name. Raises UserError, which lists the engines, for an unknown name."""
    if name not in ENGINES:
        raise UserError(f"engine={name}: there is no such engine: set engine= to one of {', '.join(ENGINES)}")
    return ENGINES[name]


def layout_of(kind: str, engine: str) -> Any | None:
    """Return the module, with the function `export`, that writes drafts of this kind for an engine. Return None if
    every engine loads the kind in the plain Hugging Face layout. Raises UserError for feature drafts (eagle, p_eagle,
    block), which have layouts of their own, for an unknown engine or kind, and for a kind that the engine does not
    load."""
    engine_named(engine)
    if kind not in STUDENTS:  # such as ngram, which is not trained
        raise UserError(
            f"engine={engine}: no engine of the table loads {kind} drafts: use cotrain generate or cotrain bench"
        )
    student = student_class(kind)
    if student.features:
        able = [name for name in ENGINES if any(name in FEATURES[layout] for layout in student.features)]
        if engine not in able:
            raise UserError(f"engine={engine}: it loads no {kind} drafts: set engine={' or '.join(able)}")
        raise UserError(f"layout=hf: feature drafts are written with layout={' or '.join(student.features)}")
    if student.layouts is None:
        return None
    if engine not in student.layouts:
        loads = ", ".join(student.layouts) or "no engine of the table"
        raise UserError(f"engine={engine}: it loads no {kind} drafts; they are loaded by {loads}")
    return import_module(student.layouts[engine])


def usual_layout(kind: str, engine: str, markov: bool = False) -> str:
    """Return the layout to use for layout=auto. For a feature draft (eagle, p_eagle, block) it is the first of its
    kind's layouts that the engine loads, otherwise the engine's layout for plain drafts. markov: whether the draft has
    a Markov head, which a layout is preferred for that keeps it. Raises UserError for an unknown engine."""
    plain = engine_named(engine).layout
    features = student_class(kind).features if kind in STUDENTS else ()
    loads = [layout for layout in features if engine in FEATURES[layout]]
    return MARKOV if markov and MARKOV in loads else next(iter(loads), plain)


def refuse_layout(engine: str, layout: str) -> None:
    """Raise UserError, which names the key, if the engine does not load this layout, or if this package cannot write
    it."""
    if layout == MARKOV and engine not in FEATURES[MARKOV]:
        raise UserError(
            f"layout=dspark: it is written for {', '.join(FEATURES[MARKOV])} alone, since vLLM runs DSpark only with "
            "Triton, with which it was not tested: set layout=dflash, which leaves out the Markov head"
        )
    loads = [engine_named(engine).layout, *(name for name, serves in FEATURES.items() if engine in serves)]
    if layout not in loads:
        raise UserError(f"layout={layout}: {engine} does not load it: set layout= to one of {', '.join(loads)}")


def refuse_kind(engine: str, kind: str) -> None:
    """Raise UserError, which names the key, if a draft of this kind drafts all tokens in one pass and the engine serves
    no such drafts."""
    engine_named(engine)
    if is_parallel(kind):
        blocks = [layout for layout in student_class(kind).features if layout in BLOCKS]
        able = [name for name, row in ENGINES.items() if row.parallel or any(name in FEATURES[one] for one in blocks)]
        if engine not in able:
            raise UserError(f"engine={engine}: it does not load drafts of kind {kind}: set engine={' or '.join(able)}")


def is_parallel(kind: str) -> bool:
    """Return whether drafts of this kind draft all tokens of a round in one pass."""
    return kind in STUDENTS and student_class(kind).parallel


def launch(
    engine: str,
    draft_path: str,
    target: str,
    k: int,
    objective: str,
    layout: str = "hf",
    kind: str = "independent",
    tree: PlannedTree | None = None,
    layers: Sequence[int] = (),
) -> str:
    """Return the command that serves `target` with the draft in `draft_path`, for a POSIX shell.

    Args:
        engine: a key of `ENGINES`.
        draft_path: the exported folder. target: hub id or path.
        k: drafts per round.
        objective: "sampled" or "greedy"; what the draft was trained for, and how the engine should draft.
        layout: the layout of the folder.
        kind: the kind of draft.
        tree: the planned tree, or None. It is used if the engine drafts trees in this layout (`TREES`); otherwise
            chains of k are drafted.
        layers: the target's layers (0-based) whose outputs a feature draft reads; () for other drafts.

    Raises UserError for an unknown engine, and for a kind that the engine does not serve. Raises ValueError, which
    names the key, for an unknown objective and for k < 1.
    """
    refuse_kind(engine, kind)
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective}: it must be one of {', '.join(OBJECTIVES)}")
    if k < 1:
        raise ValueError(f"k={k}: it must be at least 1")
    if tree is not None and (engine, layout) in TREES:
        return _sglang_features(draft_path, target, k, objective, tree=tree)
    if layers and engine == "tensorrt_llm" and layout in FEATURES:
        # which does not take them from the draft's config.json
        named, option = CAPTURING[layout]
        return _tensorrt_llm(draft_path, target, k, objective, named, **{option: list(layers)})
    row, parallel = ENGINES[engine], is_parallel(kind)
    plain = row.parallel if parallel and row.parallel else row.command
    command = FEATURES[layout][engine] if layout in FEATURES else plain
    if parallel and command is _vllm_features:
        command = partial(_vllm_features, parallel=True)
    return command(draft_path, target, k, objective)


def captured(origin: Mapping[str, Any]) -> list[int]:
    """Return the target's layers (0-based) whose outputs an exported feature draft reads; [] for other drafts. origin:
    the entry `origin` in the metadata of the exported draft."""
    return (origin.get("export") or {}).get("outputs_of_layers", [])


def place(target: str) -> str:
    """Return the target's name for a launch command: the absolute path of a folder, or the hub id."""
    folder = Path(resolve(target))
    return str(folder.absolute()) if folder.is_dir() else target


def drafting(engine: str, objective: str, layout: str = "hf") -> str:
    """Return how an engine drafts, "sampled" or "greedy": as `objective` says if the engine can, otherwise the other
    way. objective: "sampled" or "greedy", what the draft was trained for. layout: of the exported draft."""
    drafts = engine_named(engine).drafts
    if engine == "llamacpp" and layout in FEATURES:
        drafts = drafts[:1]
    return objective if objective in drafts else drafts[0]


def caveats(engine: str, objective: str, layout: str = "hf") -> list[str]:
    """Return remarks for users who serve a draft with this engine. objective: what the draft was trained for. layout:
    of the exported draft."""
    note = engine_named(engine).note
    if objective == drafting(engine, objective, layout):
        return [note]
    return [
        note,
        f"This draft was trained for {objective} drafting, which {engine} does not do: expect less "
        "acceptance than measured, or train with the greedy objective.",
    ]
