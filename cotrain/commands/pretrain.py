"""Command `cotrain pretrain`. It trains the bundled target in phases that can be resumed, then writes its folder and
model card."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cotrain.bundled import pretraining
from cotrain.bundled.ngram_lm import bigram, bigram_alpha, evaluate
from cotrain.bundled.tokenizer import token_bytes, train_tokenizer
from cotrain.config.settings import PretrainConfig
from cotrain.data.corpora import embedded, manifest
from cotrain.data.sources import Blocks, embedded_texts, pack
from cotrain.run_folder import claim, refuse_replaced, writable
from cotrain.training import optim
from cotrain.training.interrupts import read_saved
from cotrain.training.job import settle
from cotrain.training.optim import trapezoid
from cotrain.training.progress import Progress
from inference.drafts.atomic import new_file, new_folder, write_atomic
from inference.report.build import environment

VALIDATION_BLOCKS = 40  # per domain, in training; the figures of the card are measured on all blocks


def run(cfg: PretrainConfig) -> None:
    """Train for one phase. After the last step, measure the target and, with `export=`, write its folder."""
    if cfg.export:
        refuse_replaced(cfg.export, "card.json", key="export")
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


def _tokenizer(cfg: PretrainConfig, folder: Path) -> PreTrainedTokenizerBase:
    if not folder.exists():
        texts = embedded_texts(dict(cfg.tokenizer_bytes), "train")["text"]
        with new_folder(folder) as new:
            train_tokenizer(texts, cfg.shape.vocabulary, cfg.shape.context).save_pretrained(new)
    return AutoTokenizer.from_pretrained(folder)


def _blocks(cfg: PretrainConfig, split: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Blocks:
    """Return the packed blocks of a split. They are stored in the run's folder, so that all phases train on the same
    data."""
    file = folder / f"{split}.pt"
    if not file.exists():
        sizes = cfg.data.bytes if split == "train" else cfg.data.held_out_bytes
        blocks = pack(embedded_texts(dict(sizes), split), tokenizer, cfg.data.block)
        with new_file(file) as new:
            torch.save(vars(blocks), new)
    return Blocks(**read_saved(file))


def _first(blocks: Blocks) -> Blocks:
    keep = [(blocks.domain == i).nonzero().flatten()[:VALIDATION_BLOCKS] for i in range(len(blocks.domains))]
    rows = torch.cat(keep)
    return Blocks(blocks.ids[rows], blocks.domain[rows], blocks.domains)


def _module(cfg: PretrainConfig, tokenizer: PreTrainedTokenizerBase, domains: list[str]) -> pretraining.LanguageModel:
    shape, rate = cfg.shape, cfg.pretraining
    network = pretraining.llama(
        shape.vocabulary, shape.width, shape.layers, shape.intermediate, shape.kv_heads, shape.context
    )
    if rate.compile:
        pretraining.compile_layers(network)
    optimizer = partial(optim.MuonAdamW, lr=rate.lr, embedding_lr=rate.embedding_lr, weight_decay=rate.weight_decay)
    schedule = partial(trapezoid, progress=Progress(rate.steps), warmup=rate.warmup / rate.steps,
                       decay=rate.decay / rate.steps)  # fmt: skip
    return pretraining.LanguageModel(network, optimizer, schedule, token_bytes(tokenizer), domains)


def _leg(cfg: PretrainConfig, module: pretraining.LanguageModel, train: Blocks, held_out: Blocks, folder: Path) -> None:
    """Train for one phase, and append its duration to phases.jsonl."""
    rate = cfg.pretraining
    seconds = pretraining.fit(
        module, train, held_out, folder, batch=rate.batch, steps=rate.steps, minutes=rate.minutes, seed=rate.seed,
        every=rate.validate_every, precision=optim.precision(rate.precision, key="pretraining.precision"),
    )  # fmt: skip
    phase = {
        "step": module.trainer.global_step,
        "seconds": round(seconds),
        "ended": time.strftime("%Y-%m-%d %H:%M"),
    }
    file = folder / "phases.jsonl"
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    write_atomic(file, before + json.dumps(phase) + "\n")


def _card(
    cfg: PretrainConfig,
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
