"""Planted bugs of what commands ask of a draft folder's kind."""

# fmt: off
FIT = 'tests/test_every_kind.py::test_a_folder_that_does_not_fit_is_refused_by_name'
RUN = 'tests/test_every_kind.py::test_a_folder_is_measured_and_decodes'
ROWS_OF_BUGS = [
    ('every_draft_measured_as_a_model', 'cotrain/commands/bench.py', 'kind=found.kind, tree=', 'tree=', [f'{RUN}[medusa]'], 'heads are run as a causal LM'),
    ('every_draft_served_as_a_model', 'cotrain/commands/serve_check.py', 'drafts, kind=found.kind)', 'drafts)', ['tests/test_every_kind.py::test_a_server_of_any_kind_is_compared[hydra]'], 'heads are run as a causal LM'),
    ('a_folder_read_as_any_kind', 'inference/drafts/draft_folder.py', '    if held is not network:\n', '    if False:\n', ['tests/test_every_kind.py::test_a_folder_is_read_as_what_it_says'], 'a feature draft is read as a Llama, whose missing weights are named one by one'),
    ('missing_features_are_random', 'inference/proposers/eagle.py', 'widened(cls.network_beside(folder, beside))', 'widened(EagleNetwork.from_pretrained(folder))', ['tests/test_every_kind.py::test_a_folder_is_read_as_what_it_says'], 'a missing tensor is filled with random numbers'),
    ('another_shape_where_none_is_known', 'inference/drafts/draft_folder.py', 'not in (None, target["config"])', '!= target["config"]', ['tests/test_store.py::test_a_target_of_unknown_shape_is_not_warned_of'], 'a warning that nothing is known of'),
    ('tokenizers_with_a_warning', 'inference/drafts/draft_folder.py', 'path, config=ours, local', 'path, local', ['tests/test_every_kind.py::test_a_tokenizer_is_read_beside_any_network'], 'a paragraph of warnings at every command'),
    ('kinds_are_not_asked_what_they_fit', 'cotrain/commands/served_pair.py', '            kind.fits(draft, target, f"draft.path={draft_path}")\n', '            pass\n', [f'{FIT}[width]', f'{FIT}[layers]', f'{FIT}[no store]'], 50),
    ('sizes_of_another_target_pass', 'inference/drafts/compatibility.py', '        if ours != other:\n', '        if ours > 99 * other:\n', [f'{FIT}[width]', f'{FIT}[vocabulary]'], 50),
    ('changes_of_other_projections_pass', 'inference/proposers/early_exit_network.py', 'if theirs.get(name, size) != size:', 'if name not in theirs:', [f'{FIT}[projections]'], 50),
    ('positions_of_the_target_alone', 'cotrain/commands/bench.py', 'for model in (pair.target, pair.draft) if', 'for model in (pair.target,) if', [f'{FIT}[positions]'], 'texts are timed that the draft does not hold'),
    ('a_store_of_other_ids_passes', 'inference/proposers/retrieval.py', 'self.datastore.about.vocabulary > vocabulary:', 'self.datastore.about.vocabulary < vocabulary:', [f'{FIT}[other store]'], 22),
    ('other_tokenizers_are_never_served', 'cotrain/commands/served_pair.py', ' and not kind.own_tokenizer', '', ['tests/test_every_kind.py::test_a_kind_that_is_not_trained_decodes_and_is_not_measured[other_tokenizer]'], 'a kind that takes any tokenizer is refused for its tokenizer'),
    ('more_drafts_in_a_grid_than_heads', 'cotrain/bench/matrix.py', 'min(grid.k, most)', 'grid.k', ['tests/test_matrix.py::test_heads_have_no_assistant_and_no_more_drafts_than_heads'], 'three drafts are held against the costs of four'),
]
