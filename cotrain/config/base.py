"""What all classes of settings share: types with an allowed range, marks of fields, and a walk over all fields."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic.fields import FieldInfo

COLDEST = 1e-5  # of inference.sampling, which takes torch to import; a test compares them
MOST_NODES = 62  # of inference.verify.tree, which does so too


class Mark(Enum):
    """Marks of a field, besides its type and range, written `Annotated[type, Mark.PATH]`. The value of a mark says what
    it means."""

    PATH = "a file or folder that is read"
    STORE = "a path that is written, and may not exist yet"
    OUTPUT = "the folder that the command writes and may replace"
    TEXT = "free text, which the command line passes on as it is"
    FREE = "it changes no weights, so it may differ when a run is resumed"
    LONGER = "a larger value extends the training of a run that is resumed"
    TRAINING = "only the training of a draft reads it"


class With(NamedTuple):
    """Mark of a draft's field that is read only with some values of init=. inits: these values."""

    inits: tuple[str, ...]


SCRATCH, NEW = With(("scratch",)), With(("scratch", "target_layers"))  # NEW: the kinds of init= that make a new draft


class Settings(BaseModel):
    """A group of settings. Each field has a type with its range, a default, and a docstring that says what the field
    does, which becomes its `description`.

    presets: the options of the Hydra group, as option -> the fields that differ from the defaults. {}: the options are
    files in conf/. None: the settings are no Hydra group.
    """

    model_config = ConfigDict(
        defer_build=True,
        extra="forbid",
        coerce_numbers_to_str=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]] | None] = None

    @classmethod
    def foreign(cls, command: "type[Settings]") -> Mapping[str, str]:
        """Return the fields that a command never reads, as field -> the reason and what to set instead. command: the
        class of its settings."""
        return {}

    def unread(self, run: Any) -> Mapping[str, str]:
        """Return the fields that nothing reads in this run, as field -> the reason and what to set instead. run: all
        settings of the command."""
        return {}


def fields(settings: type[Settings], before: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) for each field of `settings`: for the group itself, for the groups inside it, and for
    the fields of every kind of draft. before: text before each key, for example "data."."""
    for name, field in settings.model_fields.items():
        key = f"{before}{field.alias or name}"
        yield key, field
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Settings):
                yield from fields(inner, f"{key}.")


def marked(settings: type[Settings], *marks: Mark) -> set[str]:
    """Return the dotted keys of the fields that have at least one of these marks. Fields of groups inside `settings`
    are included."""
    return {key for key, field in fields(settings) if any(mark in field.metadata for mark in marks)}


@dataclass(frozen=True)
class Allowed(AfterValidator):
    """A validator whose allowed values are known. words: these values, as text."""

    words: str


def allowed(words: str, fits: Callable[[Any], bool]) -> Allowed:
    """Return a validator for `Annotated` that accepts the values for which `fits` is true. words: the allowed values,
    as text for the error message and the help."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(words)
        return value

    return Allowed(check, words)


def one_of(*names: str) -> Allowed:
    """Return a validator for `Annotated` that accepts only the texts `names`. Its error message lists them."""
    return allowed(f"one of {', '.join(names)}", lambda value: value in names)


def at_least(least: float) -> Allowed:
    """Return a validator for `Annotated` that accepts finite numbers >= `least`."""
    return allowed(f"at least {least}", lambda value: least <= value < math.inf)


Size = Annotated[int, at_least(1)]
Count = Annotated[int, at_least(0)]
Least = Annotated[float, at_least(0)]
Positive = Annotated[float, allowed("above 0", lambda value: 0 < value < math.inf)]
Share = Annotated[float, allowed("from 0 to 1", lambda value: 0 <= value <= 1)]
Fraction = Annotated[float, allowed("above 0, at most 1", lambda value: 0 < value <= 1)]
Decay = Annotated[float, allowed("from 0 to below 1", lambda value: 0 <= value < 1)]
Temperature = Annotated[
    float, allowed(f"0 (greedy) or at least {COLDEST:g}", lambda value: value == 0 or COLDEST <= value < math.inf)
]
Nodes = Annotated[
    int, allowed(f"0, or from 2 to {MOST_NODES} nodes", lambda value: value == 0 or 2 <= value <= MOST_NODES)
]
Some = Annotated[list[Size], allowed("a list of one or more, each at least 1", bool)]
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
Dtype = Annotated[str, one_of(*DTYPES)]
ServedDtype = Annotated[str, one_of(*DTYPES, "as_trained")]
Verify = Annotated[str, one_of("token", "block", "match", "coupled", "tree", "traversal", "lossy_typical")]
Objective = Annotated[str, one_of("sampled_draft", "greedy_draft")]
Path = Annotated[str | None, Mark.PATH]
Store = Annotated[str | None, Mark.STORE]
Text = Annotated[str | None, Mark.TEXT]
Output = Annotated[str, Mark.OUTPUT]
