"""Peak memory of a process."""

from studies.floor import peak_memory


def test_peak_memory_is_in_bytes() -> None:
    """Of a process that has imported torch."""
    assert 2**26 < peak_memory() < 2**42
