"""The queue under load, at a size the suite can afford."""

from studies import load


def test_none_is_lost_and_each_is_as_if_alone():
    found = load.run(200)
    assert found["answered"] == found["whole"] == 200
    assert found["sample"] == 100 and found["differ"] == []
