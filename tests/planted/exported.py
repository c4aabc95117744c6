"""What an export says, and what a gate is counted from."""

# fmt: off
ROWS_OF_BUGS = [
    ('a_merged_adapter_is_named_again', 'inference/drafts/draft_folder.py', 'made = {**self.made, "adapter": None} if target and self.made.get("adapter") else self.made', 'made = self.made', ['tests/test_eagle_export.py::test_an_export_is_for_the_target_that_was_named'], 'bench of an export loads the adapter into weights that have it'),
    ('feature_drafts_for_the_old_target', 'cotrain/commands/export.py', 'objective=asked, name=target,', 'objective=asked,', ['tests/test_eagle_export.py::test_a_planned_tree_is_what_the_engine_is_told_that_drafts_trees'], 'target.path= of an export is ignored: the base model is served'),
    ('look_up_names_the_old_target', 'cotrain/export/lookup_layout.py', '        describe(new, metadata)\n', '', ['tests/test_lookup_export.py::test_look_up_beside_a_model_goes_to_vllm_with_its_settings'], 'the exported folder says another target and length than its card'),
    ('rounds_of_fewer_drafts', 'inference/measure/gating.py', ' if start + k < len(text)}', '}', ['tests/test_gating.py::test_rounds_that_drafted_all_are_counted_and_no_others'], 'a model looks worse to the gate than it is'),
    ('last_round_left_out', 'inference/measure/gating.py', 'ends = zip(starts, [*starts[1:], len(text)], strict=True)', 'ends = zip(starts, starts[1:], strict=False)', ['tests/test_gating.py::test_rounds_that_drafted_all_are_counted_and_no_others'], 'a round that ends its text whole is the one that is not counted'),
]
