"""Pretraining of the bundled encoder-decoder, a small T5, on the sequence tasks of the embedded corpora.

`python -m studies.pretrain.sequence_pretraining OUTPUT MINUTES [TARGET]` trains for up to MINUTES in OUTPUT; run it
again to go on. After the last step it measures the model and writes the folder TARGET with its card. data/target_t5 was
made so.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from cotrain.data.sequence_tasks import LONGEST, TASKS, embedded_pairs
from cotrain.students.independent import CACHED
from cotrain.training import optim
from cotrain.training.interrupts import read_saved
from cotrain.training.job import settle
from cotrain.training.progress import Progress
from inference.drafts.atomic import new_file
from inference.drafts.bundled_target import resolve
from inference.measure.environment import environment
from studies.pretrain import pretraining
from studies.pretrain.tokenizer import token_bytes

BYTES = {"train": {"code": 48_000_000, "records": 3_000_000}, "held_out": {"code": 4_000_000, "records": 50_000}}
TOKENS = {"source": LONGEST, "output": 96}  # longer pairs are left out
ROWS = 24  # pairs of a batch; they have similar lengths, so that little is padding
STEPS, EVERY, SEED = 900, 900, 0
LR, BETAS, WARMUP, DECAY = 2e-2, (0.9, 0.98), 0.05, 0.4
GENERATED = 60  # held-out pairs per task whose greedy outputs are compared with the pairs' own

CARD = """\
# The bundled encoder-decoder

A T5 of {parameters:.1f} M parameters ({layers} layers in the encoder, {decoder} in the decoder) with the bundled
target's tokenizer, trained from random weights by
`python -m studies.pretrain.sequence_pretraining OUTPUT MINUTES data/target_t5`
on sequence tasks made of Python sources and JSON records that are on the machine (`cotrain/data/sequence_tasks.py`):
`signature: ` and a docstring -> the function's first line; `summary: ` and code -> the docstring's first sentence;
`sentence: ` and a JSON record -> an English sentence. It is there to be decoded quickly; it is no assistant.

{steps} steps of {rows} pairs, {tokens:.1f} M tokens of outputs, {seconds} s on {cpu}, one thread beside other work,
{date}. {train} training pairs; no held-out source and no held-out function is among them. That is little. Outputs
have the right form, and sentences mostly the right names, cities and years; other numbers and names of code are wrong,
and greedy outputs of code repeat themselves. More STEPS in the module would make it better.

| held-out task | pairs | bits per byte | token accuracy | greedy output equals the pair's (two phrasings a record) |
|---|---|---|---|---|
{tasks}

| task | a held-out source | greedy output |
|---|---|---|
{examples}
"""


@dataclass(frozen=True)
class Batches(Dataset[dict[str, torch.Tensor]]):
    """Batches of `size` pairs (source ids, output ids, task) of similar lengths. An item has source (B, S) padded with
    the id `pad`, output (B, T) padded with -100, which has no loss, and domain (B,), an index into `TASKS`."""

    pairs: list[tuple[list[int], list[int], int]]
    pad: int
    size: int = ROWS

    def __len__(self) -> int:
        return -(-len(self.pairs) // self.size)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not index < len(self):
            raise IndexError(index)
        sources, outputs, domain = zip(*self.pairs[index * self.size : (index + 1) * self.size], strict=True)
        return {"source": padded(sources, self.pad), "output": padded(outputs, -100), "domain": torch.tensor(domain)}


def tokenized(rows: Any, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int], int]]:
    """Return the pairs of rows (source, output, domain), sorted by length, without those that are longer than
    `TOKENS`."""
    sources, outputs = (tokenizer(list(rows[name]))["input_ids"] for name in ("source", "output"))
    pairs = [
        (source, [*output, tokenizer.eos_token_id], TASKS.index(domain))
        for source, output, domain in zip(sources, outputs, rows["domain"], strict=True)
        if len(source) <= TOKENS["source"] and len(output) < TOKENS["output"]
    ]
    return sorted(pairs, key=lambda pair: (len(pair[1]) // 4, len(pair[0])))


def padded(rows: Any, value: int) -> torch.Tensor:
    """Rows of ids, padded on the right to one length -> (B, T)."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


class SequenceModel(pretraining.LanguageModel):
    """The module that trains on the cross-entropy of outputs. It validates in bits per byte and in token accuracy."""

    def scores(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """-log p of each token of the outputs (B, T), in nats, 0 in the padding, and whether it is the likeliest."""
        source, output = batch["source"], batch["output"]
        logits = self.network(source, attention_mask=source != self.pad, labels=output, use_cache=False).logits.float()
        nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), output, reduction="none", ignore_index=-100)
        return nats, logits.argmax(-1) == output

    @property
    def pad(self) -> int:
        return int(self.network.config.pad_token_id)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.scores(batch)[0].sum() / (batch["output"] >= 0).sum()
        self.log("train/nats_per_token", loss, prog_bar=True, batch_size=1)
        return loss

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.correct = torch.zeros(len(self.domains), 2, dtype=torch.float64)  # correct tokens, all tokens

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        nats, correct = self.scores(batch)
        inside = batch["output"] >= 0
        size = (self.sizes[batch["output"].clamp(min=0)] * inside).sum(1)
        self.totals.index_add_(0, batch["domain"], torch.stack([nats.sum(1), size], 1).double())
        self.correct.index_add_(0, batch["domain"], torch.stack([correct.sum(1), inside.sum(1)], 1).double())

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        for name, share in self.accuracy().items():
            self.log(f"token_accuracy/{name}", share, prog_bar=True)

    def accuracy(self) -> dict[str, float]:
        correct, tokens = self.correct.unbind(1)
        return dict(zip(self.domains, (correct / tokens).tolist(), strict=True))


def t5(
    vocabulary: int, width: int = 256, layers: int = 2, decoder_layers: int = 8, intermediate: int = 512, heads: int = 4
) -> T5ForConditionalGeneration:
    """Return a T5 with random weights and tied embeddings. Id 0 ends a text; id 1 is padding, and starts outputs."""
    config: Any = T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=intermediate,
        num_layers=layers,
        num_decoder_layers=decoder_layers,
        num_heads=heads,
        dropout_rate=0.0,
        eos_token_id=0,
        pad_token_id=1,
    )
    config.update({"decoder_start_token_id": 1, CACHED: decoder_layers})
    return T5ForConditionalGeneration(config)


def optimizer(network: torch.nn.Module) -> torch.optim.AdamW:
    """Return AdamW with learning rates in proportion to the size of each weight, its root mean square: T5 starts from
    weights of many sizes (embeddings 1, queries 1/128), as nanoT5 (Nawrot 2023, 2309.02373) found."""
    groups = [{"params": [p], "lr": LR * p.detach().square().mean().sqrt().item()} for p in network.parameters()]
    return torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)


def batches(folder: Path, split: str, tokenizer: PreTrainedTokenizerBase) -> Batches:
    """The batches of a split. Its pairs are stored in the run's folder, so that all phases train on the same data."""
    file = folder / f"{split}.pt"
    if not file.exists():
        with new_file(file) as new:
            torch.save({"pairs": tokenized(embedded_pairs(BYTES[split], split), tokenizer)}, new)
    return Batches(read_saved(file)["pairs"], tokenizer.pad_token_id)


def run(output: Path, minutes: float, target: Path | None) -> None:
    """Train for one phase in `output`. After the last step, measure the model and write the folder `target`, if any."""
    settle(1, SEED)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(resolve("bundled"))
    train, held_out = (batches(output, split, tokenizer) for split in ("train", "held_out"))
    network = t5(len(tokenizer))
    schedule = partial(optim.trapezoid, progress=Progress(STEPS), warmup=WARMUP, decay=DECAY)
    module = SequenceModel(network, optimizer, schedule, token_bytes(tokenizer), list(TASKS))
    seconds = pretraining.fit(
        module,
        train,
        held_out,
        output,
        batch=None,
        steps=STEPS,
        minutes=minutes,
        seed=SEED,
        every=EVERY,
        precision="32-true",
    )
    with (output / "seconds").open("a", encoding="utf-8") as file:
        file.write(f"{seconds:.0f}\n")
    if module.trainer.global_step < STEPS:
        print(f"step {module.trainer.global_step} of {STEPS}: run again to go on")
    elif target:
        pretraining.write_target(
            network, tokenizer, target, card(module, train, held_out, tokenizer, output), model_card
        )


def card(
    module: SequenceModel, train: Batches, held_out: Batches, tokenizer: PreTrainedTokenizerBase, output: Path
) -> dict[str, Any]:
    """Return the content of the model card: held-out figures by task, tokens, seconds, machine."""
    bits = pretraining.measure(module, held_out, None, "32-true")
    equal, examples = generated(module.network.eval(), held_out, tokenizer)
    config = module.network.config
    seconds = sum(int(line) for line in (output / "seconds").read_text(encoding="utf-8").split())
    count = [task for _, _, task in held_out.pairs]
    tokens = sum(len(one) for _, one, _ in train.pairs) / len(train.pairs) * STEPS * ROWS
    tasks = {
        task: {
            "pairs": count.count(index),
            "bits_per_byte": bits[task],
            "token_accuracy": module.accuracy()[task],
            "equal": equal[task],
            "of": min(GENERATED, count.count(index)),
        }
        for index, task in enumerate(TASKS)
    }
    return {
        "parameters": sum(p.numel() for p in module.network.parameters()),
        "steps": STEPS,
        "rows": ROWS,
        "output_tokens_seen": round(tokens),
        "seconds": seconds,
        "training_pairs": len(train.pairs),
        "layers": config.num_layers,
        "decoder_layers": config.num_decoder_layers,
        "tasks": tasks,
        "examples": examples,
        "environment": environment(),
    }


@torch.no_grad()
def generated(
    network: Any, held_out: Batches, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Decode some held-out sources of each task greedily: how many outputs equal the pairs', and an example."""
    equal, examples = dict[str, int](), dict[str, list[str]]()
    for index, task in enumerate(TASKS):
        mine = [pair for pair in held_out.pairs if pair[2] == index]
        mine = mine[:: max(len(mine) // GENERATED, 1)][:GENERATED]
        source = padded([pair[0] for pair in mine], held_out.pad)
        rows = network.generate(
            source, attention_mask=source != held_out.pad, max_new_tokens=TOKENS["output"], do_sample=False
        )
        texts = [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
        wanted = [tokenizer.decode(pair[1], skip_special_tokens=True) for pair in mine]
        equal[task] = sum(one == other for one, other in zip(texts, wanted, strict=True))
        short = min(range(len(mine)), key=lambda row: abs(len(mine[row][0]) - 40))
        examples[task] = [str(tokenizer.decode(mine[short][0])), texts[short]]
    return equal, examples


def model_card(card: dict[str, Any]) -> str:
    """Return the model card in Markdown."""
    tasks = [
        f"| {name} | {one['pairs']} | {one['bits_per_byte']:.3f} | {one['token_accuracy']:.1%} | "
        f"{one['equal']} of {one['of']} |"
        for name, one in card["tasks"].items()
    ]
    cell = lambda text: "`" + text.replace("|", "\\|").replace("\n", " ") + "`"  # noqa: E731
    examples = [f"| {name} | {cell(source)} | {cell(output)} |" for name, (source, output) in card["examples"].items()]
    where = card["environment"]
    return CARD.format(
        parameters=card["parameters"] / 1e6,
        layers=card["layers"],
        decoder=card["decoder_layers"],
        steps=card["steps"],
        rows=card["rows"],
        tokens=card["output_tokens_seen"] / 1e6,
        seconds=card["seconds"],
        cpu=where["cpu"],
        date=where["date"][:10],
        train=card["training_pairs"],
        tasks="\n".join(tasks),
        examples="\n".join(examples),
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
