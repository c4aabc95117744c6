"""Each case has a test, in the file of its kind."""

import re

from tests.cases import CASES, FILES


def test_every_case_has_a_test_in_the_file_of_its_kind() -> None:
    marked = {
        (name, path.stem.removeprefix("test_"))
        for path in FILES.parent.glob("test_*.py")
        for name in re.findall(r'^@case\("(.*)"\)$', path.read_text(encoding="utf-8"), re.M)
    }
    assert marked == {(name, one["kind"]) for name, one in CASES.items()}
