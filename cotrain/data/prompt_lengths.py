"""Which prompts are used where the settings leave their length open (rollout.prompt_tokens=0)."""

from cotrain.data.prompt_rows import PromptRows, TextStarts

SHORTEST = 48  # tokens: of starts of texts, and at least
COVERED = 0.95  # of the prompts
STEP = 16


def prompt_tokens(train: PromptRows | TextStarts | None, room: int) -> int:
    """Tokens of the longest prompt that is used: `COVERED` of the prompts to learn from are no longer, as far as `room`
    tokens before the new ones allow. Texts without prompts (and none, which stands for the embedded corpora) begin with
    `SHORTEST`."""
    if not isinstance(train, PromptRows):
        return SHORTEST
    lengths = sorted(len(row["prompt"]) for row in train.rows if row["prompt"])
    if not lengths:
        return SHORTEST
    covering = lengths[min(int(COVERED * len(lengths)), len(lengths) - 1)]
    return max(min(max(-(-covering // STEP) * STEP, SHORTEST), room), 1)
