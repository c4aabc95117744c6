"""Planted bugs of trees of drafts: rules, predicted calls, shapes and the noise of children."""

# fmt: off
ROWS_OF_BUGS = [
]
