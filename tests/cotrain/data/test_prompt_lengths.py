"""How long prompts are where the settings leave it open: as the data call for, as far as the target holds."""

import pytest

from cotrain.data.prompt_rows import PromptRows, prompt_tokens


def of(**domains: list[int]) -> PromptRows:
    return PromptRows(
        [{"domain": name, "prompt": [2] * size, "completion": []} for name, sizes in domains.items() for size in sizes]
    )


@pytest.mark.parametrize(
    ("lengths", "room", "wanted"),
    [
        ([3] * 20, 1000, 48),  # short ones need no less than what texts are cut to
        ([100] * 95 + [700] * 5, 1000, 704),
        ([100] * 96 + [700] * 4, 1000, 112),  # a few long ones are left out
        ([500] * 20, 300, 300),  # as far as the target holds
        ([0, 0, 60], 1000, 64),  # empty ones do not count
        ([0], 1000, 48),
    ],
)
def test_most_prompts_are_used(lengths: list[int], room: int, wanted: int) -> None:
    assert prompt_tokens(of(a=lengths), room) == wanted


def test_a_domain_of_long_prompts_is_covered_as_others_are() -> None:
    train = of(chats=[60] * 200, summaries=[400] * 9 + [500])
    assert prompt_tokens(train, 1000) == 512
    assert train.prompts(999, prompt_tokens(train, 1000), 0)


def test_every_domain_to_measure_on_has_a_prompt() -> None:
    train, held_out = of(chats=[60] * 200, code=[60] * 40), of(chats=[60], code=[300, 200])
    assert prompt_tokens(train, 1000) == 64 and prompt_tokens(train, 1000, [held_out]) == 208
    assert prompt_tokens(train, 150, [held_out]) == 150
