"""Texts that follow a grammar, by xgrammar, with a draft.

    pip install xgrammar
    python docs/examples/json_grammar.py [draft folder]

Without a draft folder the bundled target continues, and look-up drafts for it.
"""

import sys
from typing import Any

import torch
import xgrammar

from inference import Engine, Sampling, load
from inference.proposers import NGram

SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
"size": {"type": "integer", "minimum": 1, "maximum": 999}}, "required": ["name", "size"]}"""


class Grammar:
    """A processor that allows only tokens with which a text can go on. One object per prompt.

    matcher: an xgrammar.GrammarMatcher. prompt: number of the prompt's tokens, which the grammar does not read.
    vocabulary: number of token ids.

    A round asks about texts with drafts, and then about texts in which some of them were rejected, so the matcher's
    state follows the text that is asked about: tokens that are not in it are rolled back. xgrammar's own
    `contrib.hf.LogitsProcessor` expects each text to be the one before with one more token: do not use it with drafts.
    """

    def __init__(self, matcher: Any, prompt: int, vocabulary: int) -> None:
        self.matcher, self.prompt, self.read = matcher, prompt, list[int]()
        self.mask = xgrammar.allocate_token_bitmask(1, vocabulary)

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        new = ids[0, self.prompt :].tolist()
        pairs = zip(new, self.read, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(new), len(self.read)))
        self.matcher.rollback(len(self.read) - same)
        self.read = new[:same]
        for token in new[same:]:
            if not self.matcher.accept_token(token):
                raise ValueError(f"the grammar does not allow token {token} after {self.read}")
            self.read.append(token)
        self.matcher.fill_next_token_bitmask(self.mask, 0)
        logits = logits.clone()
        xgrammar.apply_token_bitmask_inplace(logits, self.mask.to(logits.device))
        return logits


def main() -> None:
    engine = load(sys.argv[1]) if sys.argv[1:] else Engine("bundled", NGram())
    tokenizer, vocabulary = engine.tokenizer, engine.target.vocabulary
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=sorted(engine.ends))
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA, any_whitespace=False)
    prompts = ["A box: ", "A boat: ", "A house: "]
    sampling = [
        Sampling(0.8, processors=(Grammar(xgrammar.GrammarMatcher(compiled), len(ids), vocabulary),))
        for ids in engine.starts(prompts)
    ]
    out = engine.generate(prompts, sampling=sampling, max_new_tokens=60, logprobs=0).whole()
    for text, logprobs in zip(out.text or (), out.logprobs, strict=True):
        assert logprobs
        inside = sum(one.logprob for one in logprobs.processed)
        print(
            f"{text}  log-probability {inside:.1f}, {sum(one.logprob for one in logprobs.raw):.1f} without the grammar"
        )
    print(f"{out.stats.tau:.2f} tokens per target call")


if __name__ == "__main__":
    main()
