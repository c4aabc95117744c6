"""Planted bugs of draft folders and exports."""

# fmt: off
ROWS_OF_BUGS = [
    ('store_config_lies_about_ties', 'inference/drafts/draft_folder.py', '    _config(model).save_pretrained(folder)\n', '', ['tests/test_store.py::test_tied_embeddings_come_back_as_they_were[True-False]'], 'tied embeddings come back as random numbers'),
    ('store_writes_in_place', 'inference/drafts/draft_folder.py', '        write(model, tokenizer, new, metadata, report)', '        write(model, tokenizer, Path(folder), metadata, report)', ['tests/test_store.py::test_a_crash_in_the_middle_leaves_the_old_folder'], 'a crash leaves half a draft'),
    ('store_any_tokenizer', 'inference/drafts/draft_folder.py', 'if found != target["tokenizer"]:', 'if not found:', ['tests/test_store.py::test_a_damaged_folder_is_refused_by_name[wrong tokenizer]'], 'a tokenizer that merely looks the same'),
    ('store_any_format', 'inference/drafts/draft_folder.py', 'if values.get("format") != FORMAT:', 'if "format" not in values:', ['tests/test_store.py::test_a_damaged_folder_is_refused_by_name[format version]'], "a newer folder is read as this version's"),
    ('store_adaptive_draft_length', 'inference/drafts/draft_folder.py', 'num_assistant_tokens_schedule="constant"', 'num_assistant_tokens_schedule="heuristic"', ['tests/test_store.py::test_generation_config_fixes_the_draft_length'], 'transformers serves another draft length than planned'),
    ('weights_missing_is_random', 'inference/drafts/weight_files.py', 'for name in sorted(info["missing_keys"])', 'for name in []', ['tests/test_store.py::test_a_damaged_folder_is_refused_by_name[missing tensor]'], 'a missing tensor is filled with random numbers'),
    ('weights_misshapen_is_random', 'inference/drafts/weight_files.py', 'in sorted(info["mismatched_keys"])', 'in []', ['tests/test_store.py::test_a_damaged_folder_is_refused_by_name[wrong shape]'], 'a misshapen tensor is filled with random numbers'),
    ('weights_infinite', 'inference/drafts/weight_files.py', 'torch.isfinite(values).all()', '(~torch.isnan(values)).all()', ['tests/test_store.py::test_a_damaged_folder_is_refused_by_name[infinity]'], 'infinite weights are served'),
    ('weights_outside_the_folder', 'inference/drafts/weight_files.py', 'if not names or any(name != Path(name).name for name in names):', 'if not names:', ['tests/test_store.py::test_a_damaged_folder_is_refused_by_name[weights outside]'], 'an index reads files outside its folder'),
    ('weights_run_code', 'inference/drafts/weight_files.py', 'trust_remote_code=trust_remote_code,', 'trust_remote_code=True,', ['tests/test_store.py::test_code_in_a_folder_does_not_run'], "a folder's code runs unasked"),
    ('pair_hashes_the_pad_id', 'inference/drafts/compatibility.py', '"unk": tokenizer.unk_token_id}', '"unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id}', ['tests/test_store.py::test_hash_is_of_what_matters'], 'setting the pad token makes a draft refuse its target'),
    ('pair_lengths_alone', 'inference/drafts/compatibility.py', '    if p != q:\n', '    if len(p) != len(q):\n', ['tests/test_store.py::test_vocabularies_of_one_size_may_differ'], 'vocabularies compared by size'),
    ('vllm_drafts_greedily', 'inference/servers/vllm_server.py', '"probabilistic" if objective == "sampled" else "greedy"', '"greedy"', ['tests/test_export.py::test_vllm_drafts_as_the_draft_was_trained'], 'a draft trained for sampling is served greedily'),
    ('sglang_forgets_the_anchor', 'cotrain/export/engines.py', 'str(min(nodes, rated) + 1)', 'str(min(nodes, rated))', ['tests/test_export.py::test_sglang_counts_the_anchor_among_its_draft_tokens'], 27),
    ('padded_rows_anything', 'cotrain/export/vocabulary.py', '0 if least is None else table.weight[least]', 'table.weight[:1]', ['tests/test_export.py::test_padded_rows_have_next_to_no_mass'], 22),
    ('padded_bias_zero', 'cotrain/export/vocabulary.py', 'BIAS = -1e4', 'BIAS = 0.0', ['tests/test_export.py::test_a_head_with_a_bias_gives_padded_rows_no_mass'], 22),
    ('export_any_report', 'cotrain/export/hf.py', 'digest(file) != found.report', 'not found.report', ['tests/test_export.py::test_what_cannot_serve_is_refused_and_nothing_written'], 'a card shows figures that were not measured'),
    ('card_names_no_folder', 'cotrain/export/card.py', 'place(resolve(target)), k', 'target, k', ['tests/test_export.py::test_the_bundled_target_is_served_by_its_folder'], 'the launch command serves a name that is no model'),
    ('check_extra_tensors_pass', 'cotrain/export/layout_check.py', 'for name in unexpected]', 'for name in []]', ['tests/test_export.py::test_check_names_the_file[extra tensor]'], 'config.json with fewer layers than the weights passes'),
]
