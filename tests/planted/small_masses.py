"""Masses that float32 loses beside 1."""

# fmt: off
ROWS_OF_BUGS = [
    ('small_masses_lost_in_blocks', 'inference/verify/chain.py', 'mass / (mass + (1 - w))', 'mass / (mass + 1 - w)', ['tests/test_small_masses.py::test_a_draft_is_kept_where_the_next_one_alone_is_wrong'], 'at low temperatures block verification refuses right drafts and emits tokens of the tail: not exact'),
    ('small_masses_lost_in_trees', 'inference/verify/tree.py', 'continued(refused.sum(-1), weight)', 'refused.sum(-1) / (refused.sum(-1) + 1 - weight)', ['tests/test_small_masses.py::test_a_node_is_kept_where_its_child_alone_is_wrong'], 'as small_masses_lost_in_blocks, of trees'),
    ('small_masses_lost_in_prediction', 'inference/verify/traversal_prediction.py', 'w = continued(mass, w)', 'w = mass / (mass + 1 - w)', ['tests/test_small_masses.py::test_calls_of_peaked_laws_are_those_of_float64'], 'calls of trees have no value at low temperatures'),
    ('eight_bits_judged_as_float32', 'inference/exactness/agreement.py', 'lowered |= bool(getattr(model, "is_loaded_in_8bit", False))', 'pass', ['tests/test_tree_quantised.py::test_the_verdict_of_trees_on_rounded_targets'], 'the verdict calls every engine of an int8 target wrong'),
]
