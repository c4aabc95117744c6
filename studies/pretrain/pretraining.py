"""Pretraining of the bundled target, a small Llama, on the embedded corpora. It runs in phases that can be resumed."""

import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.board.curves import tensorboard
from cotrain.data.texts import SeededOrder
from cotrain.training.interrupts import Checkpoints, read_saved
from cotrain.training.progress import Bar
from inference.drafts.atomic import new_folder

Factory = Callable[..., Any]

CARD = """\
# The bundled target

A Llama of {parameters:.1f} M parameters with a byte-level BPE of its own, trained from random weights by
`{command}`
on Python sources, English prose and JSON records found or made on the machine (see `cotrain/data/corpora.py`). It is
there to be decoded quickly by newcomers; it is no assistant.

{steps} steps, {tokens:.1f} M tokens, {seconds} s in {phases} phase(s) on {cpu}, {cores} cores, {date}.

| held-out domain | bits per byte | 5-gram (Kneser-Ney) | difference |
|---|---|---|---|
{bits}

The 5-gram is the better of one trained on every domain and one on the domain alone, same split. A bigram table of
the train split's code, used as draft, is accepted with probability {bigram:.3f} on held-out code.

| corpus | files | bytes | hash |
|---|---|---|---|
{corpora}
"""


class LanguageModel(lightning.LightningModule):
    """The module that trains on next-token cross-entropy. It validates in bits per byte of text, by domain."""

    def __init__(
        self,
        network: PreTrainedModel,
        optimizer: Factory,
        scheduler: Factory,
        sizes: torch.Tensor,
        domains: list[str],
    ) -> None:
        super().__init__()
        self.network, self.make_optimizer, self.make_scheduler = network, optimizer, scheduler
        self.sizes, self.domains = sizes, domains  # bytes of each id (V,)

    def nats(self, ids: torch.Tensor) -> torch.Tensor:
        """Return -log p of ids[:, 1:], (B, T-1), in nats."""
        logits = self.network(ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.nats(batch["ids"]).mean()
        self.log("train/nats_per_token", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.totals = torch.zeros(len(self.domains), 2, dtype=torch.float64)  # nats, bytes

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        nats = self.nats(batch["ids"]).sum(1).cpu().double()
        size = self.sizes[batch["ids"][:, 1:].cpu()].sum(1).double()
        self.totals.index_add_(0, batch["domain"].cpu(), torch.stack([nats, size], 1))

    def on_validation_epoch_end(self) -> None:
        for name, bits in self.bits_per_byte().items():
            self.log(f"bits_per_byte/{name}", bits, prog_bar=True)

    def bits_per_byte(self) -> dict[str, float]:
        nats, size = self.totals.unbind(1)
        return dict(zip(self.domains, (nats / size / math.log(2)).tolist(), strict=True))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.network)
        schedule = self.make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def llama(
    vocabulary: int,
    width: int,
    layers: int,
    intermediate: int,
    kv_heads: int,
    context: int,
    head_dim: int = 64,
) -> LlamaForCausalLM:
    """Return a Llama with random weights and tied embeddings. Id 0 ends a text and id 1 is padding, see
    tokenizer.py."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=width // head_dim,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


def compile_layers(network: PreTrainedModel) -> None:
    """Compile each decoder layer. All layers share one graph, so this takes seconds instead of minutes."""
    for layer in network.model.layers:
        layer.compile()


class Phase(Callback):
    """Callback that ends a training phase after `minutes`. The next phase resumes from its checkpoint."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or time.monotonic() > self.end


def fit(
    module: LanguageModel,
    train: Any,
    held_out: Any,
    folder: Path,
    *,
    batch: int | None,
    steps: int,
    minutes: float,
    seed: int,
    every: int,
    precision: Any,
) -> float:
    """Train up to `steps` optimiser steps in total, or for `minutes`. Return the seconds that this phase took. The
    training resumes from folder/last.ckpt if that file exists. batch: rows of a step; None: items are batches."""
    last = folder / "last.ckpt"
    done = read_saved(last)["global_step"] if last.exists() else 0
    order = SeededOrder(len(train), seed, start=done * (batch or 1))
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=1,
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        default_root_dir=folder,
        enable_model_summary=False,
        logger=tensorboard(folder),
        plugins=[Checkpoints()],
        callbacks=[
            Phase(minutes),
            Bar(),
            ModelCheckpoint(folder, filename="last", every_n_train_steps=every, enable_version_counter=False),
        ],
    )
    start = time.perf_counter()
    trainer.fit(
        module,
        DataLoader(train, batch_size=batch, sampler=order),
        DataLoader(held_out, batch_size=batch),
        ckpt_path=last if last.exists() else None,
    )
    trainer.save_checkpoint(last)
    return time.perf_counter() - start


def measure(module: LanguageModel, held_out: Any, batch: int | None, precision: Any) -> dict[str, float]:
    """Return the bits per byte on all held-out blocks, by domain."""
    trainer = lightning.Trainer(devices=1, precision=precision, logger=False, enable_checkpointing=False)
    trainer.validate(module, DataLoader(held_out, batch_size=batch), verbose=False)
    return module.bits_per_byte()


def write_target(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: dict[str, Any],
    readme: Callable[[dict[str, Any]], str] | None = None,
) -> None:
    """Write the target in bfloat16 with its tokenizer and model card. An existing folder is replaced."""
    with new_folder(folder, replace=True) as new:
        half: Any = copy.deepcopy(network)
        half.to(torch.bfloat16)
        half.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / "README.md").write_text((readme or model_card)(card), encoding="utf-8")
        (new / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def model_card(card: dict[str, Any]) -> str:
    """Return the model card in Markdown, from the figures that `studies.pretrain` collected."""
    where, grams = card["environment"], card["five_gram"]
    bits = [
        f"| {name} | {entry:.3f} | {grams[name]:.3f} | {entry / grams[name] - 1:+.1%} |"
        for name, entry in card["bits_per_byte"].items()
    ]
    corpora = [
        f"| {name} | {entry['files']} | {entry['bytes']} | `{entry['hash']}` |"
        for name, entry in card["corpora"].items()
    ]
    return CARD.format(
        parameters=card["parameters"] / 1e6,
        command=where["command"],
        steps=card["steps"],
        tokens=card["tokens_seen"] / 1e6,
        seconds=card["seconds"],
        phases=len(card["phases"]),
        cpu=where["cpu"],
        cores=where["cores"],
        date=where["date"][:10],
        bits="\n".join(bits),
        bigram=card["bigram_alpha"],
        corpora="\n".join(corpora),
    )
