"""vLLM as an arm of a timing, with an engine that only looks like vLLM; processes that are stopped between requests."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from inference import Sampling
from inference.measure.timing import interleave
from inference.servers.vllm_server import draft_model
from studies.vllm_arm import Server, Worker, vllm_arm

LOOKALIKE = """
from types import SimpleNamespace as N
import sys
__version__ = "0.0"
class SamplingParams:
    def __init__(self, **settings):
        self.__dict__.update(settings)
class LLM:
    def __init__(self, target, **settings):
        self.rounds, self.settings = 0, settings
        print("starting", settings["speculative_config"])
        if target.endswith("broken"):
            sys.exit("no such model")
    def get_metrics(self):
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        drafting = self.settings["speculative_config"] is not None
        counts = [N(name=n, value=self.rounds * w * drafting) for n, w in zip(names, (1, 2))] + [N(name="other")]
        values = [6 * self.rounds // 5, 4 * self.rounds // 5]
        depths = N(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=values)
        return counts + [depths] * drafting
    def generate(self, prompts, params, use_tqdm):
        self.rounds += 5
        return [N(outputs=[N(token_ids=[len(a["prompt_token_ids"]), p.seed] * (p.max_tokens // 2))])
                for a, p in zip(prompts, params)]
"""
REPAIRED = "def expand_batch_to_tokens(*_): raise AssertionError\n"
PROGRAM = """
import json, sys
print(json.dumps({"version": "1"}), flush=True)
for line in sys.stdin:
    print(json.dumps({"twice": 2 * json.loads(line)["number"]}), flush=True)
"""


@pytest.fixture
def lookalike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sampler = tmp_path / "site" / "vllm" / "v1" / "sample"
    sampler.mkdir(parents=True)
    for folder, text in ((sampler.parents[1], LOOKALIKE), (sampler.parent, ""), (sampler, "")):
        (folder / "__init__.py").write_text(text)
    (sampler / "rejection_sampler.py").write_text(REPAIRED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr("studies.vllm_arm.SETTLE", 0.0)
    return tmp_path


def test_vllm_answers_prompt_by_prompt(lookalike: Path) -> None:
    with Server(sys.executable, "target", draft_model("draft", 4), 2, 64, lookalike / "log") as server:
        assert server.version == "0.0"
        arm = vllm_arm("vllm", server, Sampling(0.5), 6)
        timing = interleave([arm], [[1, 2, 3], [4, 5]], 2, seed=7, warmup=0)
        answers = [server.generate([[1, 2, 3], [4, 5]], 6, 1.0, seed) for seed in (0, 1)]
    assert timing.texts("vllm").tokens == [[3, 7] * 3, [2, 8] * 3]
    assert timing.stats("vllm").tau == 3.0  # five rounds, two accepted drafts each
    assert "draft_model" in (lookalike / "log").read_text()  # its own lines went elsewhere
    counts = {"drafts": 5, "accepted": 10, "by_depth": [6, 4]}  # without those of earlier requests, though vLLM adds up
    assert [{name: one[name] for name in counts} for one in answers] == [counts] * 2


@pytest.mark.thorough
def test_without_drafts_vllm_emits_one_token_a_call(lookalike: Path) -> None:
    with Server(sys.executable, "target", None, 2, 64, lookalike / "log") as server:
        stats = interleave([vllm_arm("vllm", server, Sampling(), 4)], [[1]], 1, warmup=0).stats("vllm")
    assert stats.tau == 1.0


def test_a_vllm_that_does_not_start_says_why(lookalike: Path) -> None:
    with pytest.raises(RuntimeError, match="vLLM has ended(.|\n)*no such model"):
        Server(sys.executable, "broken", None, 2, 64, lookalike / "log")


def test_settings_that_are_not_translated_are_refused(lookalike: Path) -> None:
    with pytest.raises(ValueError, match="Sampling.top_k"):
        vllm_arm("vllm", SimpleNamespace(), Sampling(top_k=5), 4)  # type: ignore[arg-type]


def state(process: int) -> str:
    """Of a process, as /proc says: T if it is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("pauses", [True, False])
def test_a_process_runs_only_while_it_is_asked(pauses: bool, tmp_path: Path) -> None:
    with Worker("doubling", [sys.executable, "-c", PROGRAM], {}, tmp_path / "log", pauses) as worker:
        for number in (1, 2):
            assert worker.ask(number=number) == {"twice": 2 * number}
            time.sleep(0.1)
            assert (state(worker.process.pid) == "T") == pauses
    assert worker.process.returncode == 0
