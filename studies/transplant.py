"""Acceptance over a training with init=transplant, beside init=scratch and init=target_layers of the same shape.

    python -m studies.transplant donor FOLDER [--minutes 3]
    python -m studies.transplant train FOLDER INIT [--steps 2600]
    python -m studies.transplant report FOLDER OUT.json

`donor` trains a small LM on the embedded corpora, with a tokenizer of SentencePiece's kind, in FOLDER/donor. `train`
trains a draft of the bundled target from INIT, one of transplant, scratch and target_layers, on the texts that the
target sampled (data/rollouts), and writes FOLDER/INIT.json: the mean acceptance of the first drafted token on held-out
texts at temperature 1, before the first step and after each fifth of the steps. All drafts have the shape of two
layers of the target, so a step takes the same time in each. Minutes and seconds are of the process's CPU, with one
thread (OMP_NUM_THREADS=1): they do not depend on what else the machine does. `report` puts the files together.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cotrain.config.settings import register
from cotrain.data.sources import embedded_texts
from cotrain.training.assembly import trained_by
from cotrain.training.deadline import Deadline
from cotrain.training.job import Job
from cotrain.training.module import Distillation, alpha_of
from cotrain.training.optim import adamw, trapezoid
from cotrain.training.preconditions import require
from cotrain.training.progress import Progress
from cotrain.training.run import train
from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment
from studies.pretrain import pretraining
from studies.pretrain.blocks import blocks_of
from studies.training_rates import config

SPACE = "\u2581"
VOCABULARY, CONTEXT, LAYERS, VALIDATIONS = 2500, 512, 2, 5
ROWS, BLOCK = 4, 256  # of a step of the donor's training
BYTES = {"code": 8_000_000, "prose": 2_500_000, "records": 750_000}
HELD_OUT = {"code": 60_000, "prose": 30_000, "records": 10_000}
SHAPE = {"width": 256, "layers": LAYERS, "intermediate": 768, "head_dim": 64, "kv_heads": 2}  # a layer of the target
STARTS = {
    "transplant": ["init=transplant", "draft.path={folder}/donor"],
    "scratch": ["init=scratch", *(f"draft.{key}={size}" for key, size in SHAPE.items())],
    "target_layers": ["init=target_layers", "init.layers=[0,-1]"],
}


def sentencepiece(texts: Iterable[str], size: int, context: int = CONTEXT) -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2 has it, of about `size` tokens: BPE over text with a mark for each space, before the first
    word too, and a token for each byte. Ids 0, 1 and 2 are `<unk>`, `<s>` and `</s>`."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    bare = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size - len(bare), limit_alphabet=200, show_progress=False)
    trained.train_from_iterator(texts, trainer)
    pieces = trained.get_vocab()
    names = [*bare, *sorted(pieces, key=pieces.__getitem__)]
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    vocabulary = {name: i for i, name in enumerate(names)}
    core = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    core.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=context
    )


def donor(folder: Path, minutes: float, bytes: dict[str, int], shape: dict[str, int]) -> None:
    """Train the small LM and write it to folder/donor, with its figures in folder/donor.json."""
    torch.manual_seed(0)
    texts = [embedded_texts(dict(sizes), split) for sizes, split in ((bytes, "train"), (HELD_OUT, "held_out"))]
    sentencepiece(texts[0]["text"], VOCABULARY).save_pretrained(folder / "donor")
    words = AutoTokenizer.from_pretrained(folder / "donor")
    # a text ends with </s>: the tokenizer adds no <s>
    learnt, held_out = (blocks_of(part, words, BLOCK + 1) for part in texts)
    width, layers, intermediate, _, kv_heads = shape.values()
    network = pretraining.llama(len(words), width, layers, intermediate, kv_heads, CONTEXT, shape["head_dim"])
    for name in ("bos", "eos", "pad"):
        setattr(network.config, f"{name}_token_id", getattr(words, f"{name}_token_id"))
    progress = Progress(10**6, minutes)
    module = pretraining.LanguageModel(
        network,
        partial(adamw, lr=3e-3, weight_decay=0.05, betas=(0.9, 0.95)),
        partial(trapezoid, progress=progress, warmup=0.05, decay=0.4),
        torch.ones(len(words)),  # bits per token, not per byte
        learnt.domains,
    )
    began, steps, order = (
        time.process_time(),
        0,
        torch.randperm(len(learnt), generator=torch.Generator().manual_seed(0)),
    )
    made: Any = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    while progress.at(0) < 1:
        rows = order[torch.arange(steps * ROWS, (steps + 1) * ROWS) % len(order)]
        loss = module.nats(learnt.ids[rows].long()).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps, progress.elapsed = steps + 1, time.process_time() - began
        schedule.step()
        if steps % 50 == 0:
            print(f"donor: step {steps}, {progress.elapsed:.0f} s, {loss.item():.3f} nats a token", flush=True)
    network.eval().save_pretrained(folder / "donor")
    with torch.no_grad():
        nats = {
            domain: float(module.nats(held_out.ids[held_out.domain == i].long()).mean())
            for i, domain in enumerate(held_out.domains)
        }
    about = {
        "minutes": minutes,
        "steps": steps,
        "tokens_seen": steps * ROWS * BLOCK,
        "vocabulary": len(words),
        "parameters": sum(one.numel() for one in network.parameters()),
        "held_out_nats_per_token": nats,
    }
    write_atomic(folder / "donor.json", json.dumps(about | _origin(), indent=2) + "\n")
    print(json.dumps(about, indent=2))


class Followed(Distillation):
    """Notes the figures of each validation, with the steps and the seconds of training before it."""

    def on_validation_epoch_end(self) -> None:
        before = time.process_time()
        super().on_validation_epoch_end()
        curve, spent = self.__dict__.setdefault("curve", []), self.__dict__.setdefault("spent", before)
        curve.append({"steps": self.trainer.global_step, "seconds": before - spent} | _figures(self))
        self.spent = spent + time.process_time() - before


def learn(folder: Path, start: str, steps: int, *settings: str) -> dict[str, Any]:
    """Train a draft and return its curve, which is written to folder/START.json too."""
    register()
    chosen = [one.format(folder=folder) for one in STARTS[start]]
    chosen += ["measure=false", "rollout.temperatures=[1]", f"trainer.steps={steps}", "trainer.threads=1"]
    chosen += [
        f"trainer.validations={VALIDATIONS}",
        f"trainer.cache={folder}/states",
        "data.shares={code:0.4,prose:0.4}",
    ]
    cfg = config([*chosen, *settings])

    def write(job: Job, module: Any, steps: int, *_: Any) -> dict[str, Any]:
        texts = len(module.held_out[module.temperature].texts)
        parameters = sum(one.numel() for one in module.draft.parameters())
        return {"init": start, "parameters": parameters, "held_out_texts": texts, "curve": module.curve}

    sources, place = require(cfg).sources, folder / start
    place.mkdir(parents=True)  # a training of before would be resumed
    made = train(cfg, place, Deadline(None), sources, build=partial(trained_by, build=Followed), write=write)
    write_atomic(folder / f"{start}.json", json.dumps(made | _origin(), indent=2) + "\n")
    print(json.dumps(made, indent=2))
    return made


def _figures(module: Distillation) -> dict[str, Any]:
    """The mean acceptance of the first drafted token at temperature 1, and tau at 4 drafts, on all held-out texts and
    by domain."""
    scores = module.judged[module.temperature]
    return {name: {"alpha": alpha_of(one), "tau_4": one.tau(4)} for name, one in scores.items()}


def _origin() -> dict[str, Any]:
    return {"environment": environment(), "command": " ".join(["python -m studies.transplant", *sys.argv[1:]])}


def report(folder: Path) -> dict[str, Any]:
    """The figures of the donor and of the trainings in the folder."""
    names = ("donor", *STARTS)
    return _origin() | {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.transplant")
    parts = parser.add_subparsers(dest="part", required=True)
    for name in ("donor", "train", "report"):
        parts.add_parser(name).add_argument("folder", type=Path)
    parts.choices["donor"].add_argument("--minutes", type=float, default=3)
    parts.choices["train"].add_argument("init", choices=sorted(STARTS))
    parts.choices["train"].add_argument("--steps", type=int, default=2600)
    parts.choices["report"].add_argument("out", type=Path)
    asked = parser.parse_args(arguments)
    if asked.part == "donor":
        donor(asked.folder, asked.minutes, BYTES, SHAPE)
    elif asked.part == "train":
        learn(asked.folder, asked.init, asked.steps)
    else:
        made = report(asked.folder)
        write_atomic(asked.out, json.dumps(made, indent=2) + "\n")
        for start in STARTS:
            print(start, *(f"{one['steps']}: {one['all']['alpha']:.3f}" for one in made[start]["curve"]))


if __name__ == "__main__":
    main(sys.argv[1:])
