"""Planted bugs of exports of look-up."""

# fmt: off
ROWS_OF_BUGS = [
    ('hybrid_written_as_a_plain_draft', 'cotrain/export/engines.py', '    "hybrid": LOOKUP,\n', '', ['tests/test_lookup_export.py::test_no_kind_is_written_as_a_plain_draft_that_it_is_not'], 'look-up is dropped in silence'),
    ('planned_length_of_look_up_lost', 'cotrain/export/lookup_layout.py', 'made.exported(target, k, None)', 'made.exported(target, k or 1, None)', ['tests/test_lookup_export.py::test_look_up_beside_a_model_goes_to_vllm_with_its_settings'], 'one draft a round is served'),
]
