"""Train the bundled target in phases that can be resumed, then write its folder and model card.

    python -m studies.pretrain pretraining.steps=860 pretraining.decay=360 export=data/target

The settings and their defaults are the fields of `Settings`, given as key=value.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cotrain.data.corpora import Document, embedded
from cotrain.data.sources import embedded_texts
from cotrain.errors import UserError
from cotrain.export.engines import FILES
from cotrain.run_folder import claim, refuse_replaced, writable
from cotrain.training import optim
from cotrain.training.interrupts import read_saved
from cotrain.training.job import settle
from cotrain.training.optim import trapezoid
from cotrain.training.progress import Progress
from inference.drafts.atomic import new_file, new_folder, write_atomic
from inference.measure.environment import environment
from studies.pretrain import pretraining
from studies.pretrain.blocks import Blocks, blocks_of
from studies.pretrain.muon import MuonAdamW
from studies.pretrain.ngram_lm import bigram, bigram_alpha, evaluate
from studies.pretrain.tokenizer import token_bytes, train_tokenizer

VALIDATION_BLOCKS = 40  # per domain, in training; the figures of the card are measured on all blocks


@dataclass
class Shape:
    """The shape of the bundled target. Widths are multiples of 64."""

    vocabulary: int = 4096
    width: int = 256
    layers: int = 16
    intermediate: int = 768
    kv_heads: int = 2
    context: int = 512


@dataclass
class Corpora:
    """Tokens of a block, and bytes of each corpus by split."""

    block: int = 513
    bytes: dict[str, int] = field(
        default_factory=lambda: {"code": 32_000_000, "prose": 10_000_000, "records": 3_000_000}
    )
    held_out_bytes: dict[str, int] = field(
        default_factory=lambda: {"code": 600_000, "prose": 300_000, "records": 100_000}
    )


@dataclass
class Pretraining:
    """Each call ends after `minutes` or at `steps`, whichever comes first."""

    steps: int = 1000
    batch: int = 16
    lr: float = 5e-3
    embedding_lr: float = 4e-3
    weight_decay: float = 0.05
    warmup: int = 60
    decay: int = 400
    minutes: float = 120
    validate_every: int = 250
    precision: str = "auto"
    compile: bool = True
    threads: int = 0
    seed: int = 0


@dataclass
class Settings:
    """Settings of this command. export: the folder for the finished target."""

    data: Corpora = field(default_factory=Corpora)
    shape: Shape = field(default_factory=Shape)
    tokenizer_bytes: dict[str, int] = field(
        default_factory=lambda: {"code": 8_000_000, "prose": 4_000_000, "records": 600_000}
    )
    pretraining: Pretraining = field(default_factory=Pretraining)
    output: str = "outputs/pretrain"
    export: str | None = None


def main(arguments: list[str]) -> None:
    """Run with settings `key=value`. Raises the errors of OmegaConf for an unknown key or a wrong type, and
    UserError."""
    run(cast(Settings, OmegaConf.merge(OmegaConf.structured(Settings), OmegaConf.from_cli(arguments))))


def run(cfg: Settings) -> None:
    """Train for one phase. After the last step, measure the target and, with `export=`, write its folder."""
    if cfg.export:
        refuse_replaced(cfg.export, "card.json", (*FILES, "README.md"), key="export")
        writable("export", cfg.export)
    settle(cfg.pretraining.threads, cfg.pretraining.seed)
    with claim(cfg.output, command="pretrain") as folder:
        tokenizer = _tokenizer(cfg, folder.path / "tokenizer")
        train, held_out = (_blocks(cfg, split, tokenizer, folder.path) for split in ("train", "held_out"))
        module = _module(cfg, tokenizer, train.domains)
        _leg(cfg, module, train, _first(held_out), folder.path)
        if module.trainer.global_step < cfg.pretraining.steps:
            print(f"step {module.trainer.global_step} of {cfg.pretraining.steps}: run again to go on")
            return
        card = _card(cfg, module, train, held_out, tokenizer, folder.path)
        print(json.dumps(card, indent=2))
        if cfg.export:
            _export(module, tokenizer, Path(cfg.export), card)
        folder.finish()


def _tokenizer(cfg: Settings, folder: Path) -> PreTrainedTokenizerBase:
    if not folder.exists():
        texts = embedded_texts(dict(cfg.tokenizer_bytes), "train")["text"]
        with new_folder(folder) as new:
            train_tokenizer(texts, cfg.shape.vocabulary, cfg.shape.context).save_pretrained(new)
    return AutoTokenizer.from_pretrained(folder)


def _blocks(cfg: Settings, split: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Blocks:
    """Return the packed blocks of a split. They are stored in the run's folder, so that all phases train on the same
    data."""
    file = folder / f"{split}.pt"
    if not file.exists():
        sizes = cfg.data.bytes if split == "train" else cfg.data.held_out_bytes
        blocks = blocks_of(embedded_texts(dict(sizes), split), tokenizer, cfg.data.block)
        with new_file(file) as new:
            torch.save(vars(blocks), new)
    return Blocks(**read_saved(file))


def _first(blocks: Blocks) -> Blocks:
    keep = [(blocks.domain == i).nonzero().flatten()[:VALIDATION_BLOCKS] for i in range(len(blocks.domains))]
    rows = torch.cat(keep)
    return Blocks(blocks.ids[rows], blocks.domain[rows], blocks.domains)


def _module(cfg: Settings, tokenizer: PreTrainedTokenizerBase, domains: list[str]) -> pretraining.LanguageModel:
    shape, rate = cfg.shape, cfg.pretraining
    network = pretraining.llama(
        shape.vocabulary, shape.width, shape.layers, shape.intermediate, shape.kv_heads, shape.context
    )
    if rate.compile:
        pretraining.compile_layers(network)
    optimizer = partial(MuonAdamW, lr=rate.lr, embedding_lr=rate.embedding_lr, weight_decay=rate.weight_decay)
    schedule = partial(
        trapezoid, progress=Progress(rate.steps), warmup=rate.warmup / rate.steps, decay=rate.decay / rate.steps
    )
    return pretraining.LanguageModel(network, optimizer, schedule, token_bytes(tokenizer), domains)


def _leg(cfg: Settings, module: pretraining.LanguageModel, train: Blocks, held_out: Blocks, folder: Path) -> None:
    """Train for one phase, and append its duration to phases.jsonl."""
    rate = cfg.pretraining
    seconds = pretraining.fit(
        module,
        train,
        held_out,
        folder,
        batch=rate.batch,
        steps=rate.steps,
        minutes=rate.minutes,
        seed=rate.seed,
        every=rate.validate_every,
        precision=optim.precision(rate.precision, key="pretraining.precision"),
    )
    phase = {
        "step": module.trainer.global_step,
        "seconds": round(seconds),
        "ended": time.strftime("%Y-%m-%d %H:%M"),
    }
    file = folder / "phases.jsonl"
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    write_atomic(file, before + json.dumps(phase) + "\n")


def _card(
    cfg: Settings,
    module: pretraining.LanguageModel,
    train: Blocks,
    held_out: Blocks,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> dict[str, Any]:
    """Return the content of the model card: held-out bits per byte of the model and of a 5-gram, tokens, seconds,
    machine and corpora."""
    phases = [json.loads(line) for line in (folder / "phases.jsonl").read_text().splitlines()]
    rate = cfg.pretraining
    bits = evaluate(train, held_out, token_bytes(tokenizer))
    return {
        "parameters": sum(p.numel() for p in module.network.parameters()),
        "steps": rate.steps,
        "tokens_seen": rate.steps * rate.batch * (cfg.data.block - 1),
        "seconds": sum(phase["seconds"] for phase in phases),
        "phases": phases,
        "bits_per_byte": pretraining.measure(
            module, held_out, rate.batch, optim.precision(rate.precision, key="pretraining.precision")
        ),
        "five_gram": {d: min(bits[f"all/{d}"], bits[f"{d}/{d}"]) for d in held_out.domains},
        "bigram_alpha": _bigram_alpha(module, train, _first(held_out), tokenizer),
        "corpora": {d: manifest(embedded(d, "train", size)) for d, size in cfg.data.bytes.items()},
        "environment": environment(),
    }


def manifest(documents: Iterable[Document]) -> dict[str, int | str]:
    """Return the number of documents ("files"), their total size in bytes of UTF-8 ("bytes"), and a hash of their texts
    in this order ("hash")."""
    digest, files, size = hashlib.blake2b(digest_size=16), 0, 0
    for document in documents:
        data = document.text.encode()
        digest.update(data)
        files, size = files + 1, size + len(data)
    return {"files": files, "bytes": size, "hash": digest.hexdigest()}


@torch.no_grad()
def _bigram_alpha(
    module: pretraining.LanguageModel, train: Blocks, held_out: Blocks, tokenizer: PreTrainedTokenizerBase
) -> float:
    """Return the mean acceptance, on held-out code, of a bigram table that was counted on the training code."""
    code = train.domains.index("code")
    table = bigram(train.ids[train.domain == code].flatten(), len(tokenizer), add=0.1)
    blocks = held_out.ids[held_out.domain == code].long().split(1)
    return bigram_alpha(table, ((ids, module.network(ids).logits.float().log_softmax(-1)) for ids in blocks))


def _export(module: pretraining.LanguageModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: dict) -> None:
    pretraining.write_target(module.network, tokenizer, folder, card)
    print(f"wrote {folder}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"studies.pretrain: {error}")
