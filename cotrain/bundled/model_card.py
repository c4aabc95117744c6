"""The bundled target's model card."""

from typing import Any

TEXT = """\
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


def model_card(card: dict[str, Any]) -> str:
    """Markdown of a card made by `cotrain pretrain`: what the model is, its data, how well it predicts."""
    where, grams = card["environment"], card["five_gram"]
    bits = [
        f"| {name} | {found:.3f} | {grams[name]:.3f} | {found / grams[name] - 1:+.1%} |"
        for name, found in card["bits_per_byte"].items()
    ]
    corpora = [
        f"| {name} | {found['files']} | {found['bytes']} | `{found['hash']}` |"
        for name, found in card["corpora"].items()
    ]
    return TEXT.format(
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
