"""What the examples share: a target that two cores train in seconds, and a way to run commands.

It stands where your own target would: a folder of `config.json`, weights in safetensors and a tokenizer.
"""

import json
import random
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cotrain.cli import main
from inference.drafts.bundled_target import resolve

STEPS, BATCH, LENGTH, VOCABULARY = 150, 16, 48, 512
WHO = ["the cook", "a sailor", "my neighbour", "the old clock", "her brother", "a red fox", "the third guest"]
DOES = ["opens", "forgets", "paints", "hears", "follows", "repairs", "counts", "sells"]
WHAT = ["the door", "a heavy box", "seven lamps", "the river", "an answer", "two letters", "the garden"]
WHERE = ["before noon", "in the rain", "behind the mill", "without a word", "every winter", "at the market"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)

# runs of a minute or two on two cores; words on an example's command line come behind them
SIZES = """data.block=64 rollout.texts=64 rollout.held_out_texts=8 rollout.prompt_tokens=12 rollout.new_tokens=48
trainer.steps=200 trainer.corpus_steps=0 trainer.batch=4 trainer.validations=2 init.layers=[0,-1]
bench.prompts=6 bench.quick_prompts=2 bench.prompt_tokens=12 bench.new_tokens=48 bench.parity_tokens=200
bench.minutes=1 bench.depths=[2,4] policy.k=4""".split()


def sentences(count: int, seed: int = 0) -> list[str]:
    """So many texts of a few words each."""
    rng = random.Random(seed)
    parts = (WHO, DOES, WHAT, WHERE)
    lines = [[" ".join(rng.choice(part) for part in parts) for _ in range(3)] for _ in range(count)]
    return [". ".join(line).capitalize() + "." for line in lines]


def jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    """The rows in a file, one a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def target(folder: Path, texts: list[str], chat: bool = False) -> Path:
    """A Qwen3 of four layers, 1 M parameters, taught these texts; chat: its tokenizer has a chat template."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve("bundled")).train_new_from_iterator(texts, VOCABULARY)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = teach(Qwen3ForCausalLM(config), tokenizer, texts)
    if chat:
        tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Qwen3ForCausalLM:
    """Train the model on the texts, STEPS batches of them."""
    ids = torch.tensor([token for text in texts for token in [*tokenizer.encode(text), 0]])
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)  # (N, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def cotrain(*words: object) -> None:
    """Show a command and run it; a command that fails ends the example."""
    line = [str(word) for word in words]
    print(f"\n$ cotrain {' '.join(line)}", flush=True)
    if status := main(line):
        raise SystemExit(status)
