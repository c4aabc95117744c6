"""The rounds of `tests/engines/llamacpp/serve.mjs`, on models that only look like those of node-llama-cpp."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from studies.real_target_beside import SERVE
from studies.vllm_arm import Worker

K, NEW = 3, 29
# The likeliest token is a function of the text: see `likeliest`. Above temperature 0 the next one is sampled.
LOOKALIKE = """
export const LlamaLogLevel = {error: "error"};
const likeliest = (text, draft) => {
    const own = (text.reduce((sum, token, i) => sum + token * (i + 1), 0) + 3 * text.length) % 11;
    return draft && (own % 4 === 0 || text.length % 6 === 0) ? (own + 1) % 11 : own;
};
class Sequence {
    constructor(draft) { this.draft = draft; this.text = []; this.seeds = new Set(); }
    get nextTokenIndex() { return this.text.length; }
    async adaptStateToTokens(tokens) {
        let same = 0;
        while (same < tokens.length && same < this.text.length && tokens[same] === this.text[same])
            same++;
        this.text.length = same;
    }
    async controlledEvaluate(input) {
        const seeds = new Set();
        const output = input.map((one) => {
            const [token, asked] = Array.isArray(one) ? one : [one];
            this.text.push(token);
            if (!asked)
                return undefined;
            const {temperature, topK, topP, minP, seed} = asked.generateNext.options;
            if (temperature && (topK !== 0 || topP !== 1 || minP !== 0 || this.draft))
                throw new Error("truncated, or a draft that samples");
            if (temperature)
                seeds.add(seed);
            const next = (likeliest(this.text, this.draft) + (temperature ? 1 + seed % 5 : 0)) % 11;
            return {next: {token: next}};
        });
        for (const seed of seeds) {
            if (this.seeds.has(seed))
                throw new Error(`seed ${seed} twice`);
            this.seeds.add(seed);
        }
        return output;
    }
    dispose() {}
}
export const getLlama = async () => ({
    llamaCppRelease: {release: "b0"},
    loadModel: async ({modelPath}) => ({
        createContext: async () => ({
            _ctx: {ensureDraftContextIsCompatibleForSpeculative() {}},
            getSequence: () => new Sequence(modelPath.endsWith("draft.gguf")),
        }),
    }),
});
"""
PROMPTS = [[1, 2, 3], [5], [1, 2, 3]]


def likeliest(text: list[int], draft: bool) -> int:
    own = (sum(token * (i + 1) for i, token in enumerate(text)) + 3 * len(text)) % 11
    return (own + 1) % 11 if draft and (own % 4 == 0 or len(text) % 6 == 0) else own


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Ask a new process, with a draft or without."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    module = tmp_path / "modules" / "node-llama-cpp"
    (module / "dist").mkdir(parents=True)
    (module / "package.json").write_text('{"type": "module"}')
    (module / "dist" / "index.js").write_text(LOOKALIKE)

    def ask(draft: bool = True, temperature: float = 0.0) -> dict[str, Any]:
        settings = {
            "modules": str(tmp_path / "modules"),
            "target": "target.gguf",
            "k": K,
            "context": 64,
            "draft": "draft.gguf" if draft else None,
        }
        with Worker("llama.cpp", ["node", str(SERVE)], settings, tmp_path / "log") as worker:
            assert worker.version == "b0"
            return worker.ask(prompts=PROMPTS, max_new_tokens=NEW, temperature=temperature, seed=7)

    yield ask


def greedy(prompt: list[int]) -> list[int]:
    """The target's likeliest text, with a round beyond its end."""
    text = list(prompt)
    while len(text) < len(prompt) + NEW + K + 1:
        text.append(likeliest(text, draft=False))
    return text


def test_a_round_accepts_the_drafts_that_the_text_has(served: Callable[..., dict[str, Any]]) -> None:
    """At temperature 0 the text is the target's, so that alone says which drafts each round accepted."""
    answer, rounds, by_depth = served(), 0, [0] * K
    for prompt, tokens in zip(PROMPTS, answer["tokens"], strict=True):
        text, at = greedy(prompt), len(prompt)
        assert tokens == text[at : at + NEW]
        while at < len(prompt) + NEW:
            agreed = 0
            while agreed < K and likeliest(text[: at + agreed], draft=True) == text[at + agreed]:
                by_depth[agreed] += 1
                agreed += 1
            rounds, at = rounds + 1, at + agreed + 1
    assert by_depth[0] > by_depth[1] > by_depth[2] > 0 and rounds < len(PROMPTS) * NEW
    assert (answer["rounds"], answer["by_depth"]) == (rounds, by_depth)
    assert answer["accepted"] == len(PROMPTS) * NEW - rounds and answer["seconds"] > 0


def test_without_a_draft_a_round_is_a_token(served: Callable[..., dict[str, Any]]) -> None:
    answer = served(draft=False)
    assert answer["tokens"] == [greedy(prompt)[len(prompt) : len(prompt) + NEW] for prompt in PROMPTS]
    assert (answer["rounds"], answer["accepted"], answer["by_depth"]) == (len(PROMPTS) * NEW, 0, [])


@pytest.mark.parametrize("draft", [True, False])
def test_texts_are_sampled_from_the_whole_distribution_with_seeds_of_their_own(
    draft: bool, served: Callable[..., dict[str, Any]]
) -> None:
    answer = served(draft, temperature=1.0)
    assert all(len(tokens) == NEW for tokens in answer["tokens"])
    assert answer["tokens"][0] != answer["tokens"][2] and answer["tokens"] != served(draft)["tokens"]
