"""Masses that float32 loses beside 1."""

# fmt: off
ROWS_OF_BUGS = [
    ('small_masses_lost_in_blocks', 'inference/verify/chain.py', 'mass / (mass + (1 - w))', 'mass / (mass + 1 - w)', ['tests/test_small_masses.py::test_a_draft_is_kept_where_the_next_one_alone_is_wrong'], 'at low temperatures block verification refuses right drafts and emits tokens of the tail: not exact'),
    ('small_masses_lost_in_trees', 'inference/verify/tree.py', 'mass / (mass + (1 - w))', 'mass / (mass + 1 - w)', ['tests/test_small_masses.py::test_a_node_is_kept_where_its_child_alone_is_wrong'], 'as small_masses_lost_in_blocks, of trees'),
    ('small_masses_lost_in_prediction', 'inference/verify/traversal_prediction.py', 'mass / (mass + (1 - w))', 'mass / (mass + 1 - w)', ['tests/test_small_masses.py::test_calls_of_peaked_laws_are_those_of_float64'], 'calls of trees have no value at low temperatures'),
]
