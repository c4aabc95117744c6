"""Planted bugs of the user's data: shapes of rows and files, damaged files, what is said of them."""

DAMAGED = "tests/cotrain/data/test_damaged_files.py::"
SHAPES = "tests/cotrain/data/test_shapes_of_data.py::"
SKIPPED, REFUSED = (
    DAMAGED + "test_a_damaged_row_is_counted_with_its_reason",
    DAMAGED + "test_a_damaged_file_is_refused_in_a_sentence",
)
WHOLE, AMONG = (
    DAMAGED + "test_what_is_only_odd_is_read_whole",
    DAMAGED + "test_one_broken_file_among_good_ones_is_named",
)
SHAPE = SHAPES + "test_a_shape_is_read_as_its_template_renders_it"

# fmt: off
ROWS_OF_BUGS = [
    ('a_quote_takes_all_rows_after_it', 'cotrain/data/sources.py', '_csv', 'strict=True', 'strict=False', [REFUSED], 'rows are lost in silence'),
    ('cells_without_their_bytes', 'cotrain/data/sources.py', '_csv', 'errors="surrogateescape"', 'errors="ignore"', [SKIPPED], 'other texts than those of the file'),
    ('a_header_of_other_bytes', 'cotrain/data/sources.py', '_csv', 'if any(', 'if False and any(', [REFUSED], 'a file in UTF-16 has unreadable column names'),
    ('tabs_in_a_comma_file', 'cotrain/data/sources.py', '_csv', '== ".tsv" else', '== ".csv" else', [SHAPE], 'tsv has one column'),
    ('a_line_of_other_bytes_ends_the_run', 'cotrain/data/sources.py', '_lines', 'yield f"line {number}", ValueError(NOT_UTF8)', 'raise', [SKIPPED], 'one line costs a log'),
    ('marks_inside_joined_files', 'cotrain/data/sources.py', '_lines', 'line.decode("utf-8-sig")', 'line.decode("utf-8")', [WHOLE], 'the first row of each joined file is lost'),
    ('deep_values_end_the_run', 'cotrain/data/sources.py', '_parsed', '(ValueError, RecursionError)', 'ValueError', [SKIPPED], 'one row costs a log'),
    ('half_a_line_passes_for_text', 'cotrain/data/sources.py', '_parsed', 'said if line', 'line if line', [SKIPPED], 'the reason names no JSON'),
    ('the_second_of_two_keys', 'cotrain/data/sources.py', '_object', '< len(pairs)', '> len(pairs)', [SKIPPED], 'a value is lost in silence'),
    ('the_second_of_two_columns', 'cotrain/data/sources.py', '_refuse_twice', '< len(names)', '> len(names)', [REFUSED], 'a column is lost in silence'),
    ('a_broken_list_by_lines', 'cotrain/data/sources.py', '_values', 'if isinstance(_parsed(text.partition("\\n")[0]), list)', 'if True', [REFUSED], 'each line of a broken file is a reason'),
    ('the_first_of_joined_objects', 'cotrain/data/sources.py', '_values', 'while at < len(text)', 'while at < len(text) and not values', [SHAPES + 'test_objects_over_several_lines_are_all_read'], 'rows are lost in silence'),
    ('a_list_in_an_object_is_a_row', 'cotrain/data/sources.py', '_wrapped', 'if len(lists) == 1 else None', 'if False else None', [SHAPE], 'files of many tools are refused'),
    ('the_first_of_two_lists', 'cotrain/data/sources.py', '_wrapped', 'len(lists) == 1', 'lists', [REFUSED], 'half of a file is lost in silence'),
    ('an_error_without_its_file', 'cotrain/data/sources.py', 'rows_in', "{'after ' * (place != name)}{place}: ", '', [AMONG], 'one of a hundred files is broken, and none is named'),
    ('links_to_nothing', 'cotrain/data/sources.py', '_present', 'not path.exists()', 'False', [AMONG], 'a file is missed in silence'),
    ('pointers_are_texts', 'cotrain/data/sources.py', 'rows_in', '== POINTER', '== b""', [REFUSED], 'a draft learns three lines of Git LFS'),
    ('dates_that_python_has_not', 'cotrain/data/sources.py', '', '    OverflowError,', '    csv.Error,', [REFUSED], 'a traceback for a column that nobody reads'),
    ('loud_names', 'cotrain/data/sources.py', 'extension_of', 'else path).suffix.lower()', 'else path).suffix', [WHOLE], 'files with .JSONL are no data'),
    ('reasons_one_by_one', 'cotrain/data/rows.py', 'Skipped.add', 're.sub(r"\\d+", "0", str(reason))', 'str(reason)', [DAMAGED + 'test_reasons_that_differ_in_a_number_are_counted_as_one'], 'four of a thousand equal reasons are listed'),
    ('names_that_cannot_be_printed', 'cotrain/data/rows.py', '_line', 'text.encode(errors="backslashreplace").decode()', 'text', [WHOLE], 'a traceback of the terminal'),
    ('domains_without_a_check', 'cotrain/data/rows.py', 'Reader.row', '_text("domain", left.pop("domain", "own"))', 'str(left.pop("domain", "own"))', [SKIPPED], 'a traceback where texts are written'),
    ('renderings_without_a_check', 'cotrain/data/conversations.py', 'Template.text', 'content_of("the rendered conversation", {"content": text})', 'pass', [SKIPPED], 'a traceback of the tokenizer'),
    ('questions_are_texts', 'cotrain/data/rows.py', 'Reader._read', '(PROMPT, INSTRUCTION, QUESTION)', '(PROMPT, INSTRUCTION)', [SHAPE], 'answers are lost'),
    ('answers_without_their_end', 'cotrain/data/conversations.py', 'Template.ended', 'place + 1 for', 'place for', [SHAPE], 'a draft never ends a turn'),
    ('columns_read_as_another', 'cotrain/data/rows.py', '_meanings', 'MEANINGS.get(name, main)', 'main', [SHAPES + 'test_what_columns_are_read_as_is_said'], 'the check says nothing of answers'),
    ('answers_that_are_not_shown', 'cotrain/training/preconditions.py', 'shown', 'if cfg.data.on_target else 0', 'if False else 0', [SHAPES + 'test_a_check_shows_the_answers_that_are_learnt'], 'what is learnt is not seen'),
    ('values_without_the_name_in_vllm', 'cotrain/config/settings.py', '_wrong', 'if key in IN_VLLM else', 'if False else', ['tests/cotrain/commands/test_cli.py::test_what_users_mistype_points_to_the_right_setting'], 'a user of vLLM does not know the setting'),
    ('full_head_that_moves', 'inference/drafts/published.py', '_completed', 'elif offsets is not None and', 'elif False and', ['tests/inference/drafts/test_published.py::test_what_our_network_cannot_compute_is_refused_by_name'], 'tokens of a published draft are taken for others'),
    ('causal_by_one_name', 'inference/drafts/published.py', '_block', 'flat.get("is_causal", False)', 'False', ['tests/inference/drafts/test_published.py::test_the_dtype_is_that_of_the_tensors_that_are_read'], 'a causal block is read as a bidirectional one'),
    ('negative_layers', 'inference/drafts/published.py', '_eagle', 'draft.whole(LAYER_IDS, layer, 0)', 'layer', ['tests/inference/drafts/test_published.py::test_what_our_network_cannot_compute_is_refused_by_name'], 'states of another layer are read'),
    ('negative_layers_of_blocks', 'inference/drafts/published.py', '_block', 'draft.whole("target_layer_ids", number, 0)', 'int(number)', ['tests/inference/drafts/test_published.py::test_blocks_that_our_network_cannot_compute_are_refused_by_name'], 'states of another layer are read'),
    ('part_of_the_angles', 'inference/drafts/published.py', '_layer_config', 'draft.refuse_keys(rope, {"partial_rotary_factor": 1.0})', 'pass', ['tests/inference/drafts/test_published.py::test_what_our_network_cannot_compute_is_refused_by_name'], 'a draft with partial rotary angles is read with whole ones'),
    ('quantised_published_weights', 'inference/drafts/published.py', '_layer_config', 'if values.get("quantization_config")', 'if False', ['tests/inference/drafts/test_published.py::test_what_our_network_cannot_compute_is_refused_by_name'], 'packed weights are read as numbers'),
    ('cut_medusa_vocabulary', 'inference/drafts/published.py', '_medusa', 'draft.refuse_keys(values, {"truncated_vocab_size": values.get("vocab_size")})', 'pass', ['tests/inference/drafts/test_published.py::test_medusa_heads_with_an_output_head_of_their_own_are_refused'], 'heads of a cut vocabulary draft other tokens'),
    ('sharded_drafts_are_pickled', 'inference/drafts/published.py', 'Published.files', '("", ".index.json")', '("",)', ['tests/inference/drafts/test_published.py::test_an_index_of_weights_is_read_before_a_pickled_file'], 'other weights than the safetensors are read'),
    ('given_dtype_is_ignored', 'inference/drafts/published.py', 'imported', 'dtype or own_dtype if', 'own_dtype if', ['tests/inference/drafts/test_published.py::test_the_dtype_is_that_of_the_tensors_that_are_read'], 'a published draft runs in its own dtype'),
    ('dtype_of_a_dropped_head', 'inference/drafts/published.py', 'imported', 'in ours.tensors.values() if tensor.is', 'in stored.values() if tensor.is', ['tests/inference/drafts/test_published.py::test_the_dtype_is_that_of_the_tensors_that_are_read'], 'a DSpark draft runs in float32'),
    ('ids_of_another_model', 'cotrain/export/eagle3.py', '_as_assistant', 'dict.fromkeys(SPECIAL) | ours', 'ours', ['tests/cotrain/export/test_target_head.py::test_transformers_computes_the_distributions_that_were_trained'], 'transformers takes ids of its own model for special ones'),
    ('small_states_hide_a_cap', 'cotrain/export/eagle3.py', '_refuse_block', '1000 * torch.eye', 'torch.eye', ['tests/cotrain/export/test_target_head.py::test_a_head_that_is_more_than_its_matrix_stays_here'], 'a draft for a capped head is served without the cap'),
    ('checks_of_foreign_layouts', 'cotrain/export/hf.py', 'is_foreign', ' or read_json(draft.path / CONFIG).get("model_type") == ASSISTANT_TYPE', '', ['tests/cotrain/export/test_target_head.py::test_transformers_computes_the_distributions_that_were_trained'], 'check= refuses what transformers loads'),
    ('foreign_numbers_pass', 'cotrain/export/hf.py', '_stored', 'not bool(torch.isfinite(tensor).all())', 'False', ['tests/cotrain/export/test_every_layout.py::test_an_export_is_planned_for_its_engine_and_names_the_target_that_was_learnt_from[medusa-vllm-auto]'], 'check= passes a draft of NaN'),
    ('tau_with_a_head_that_is_left_out', 'cotrain/export/publishing.py', '_has_markov', '.get("markov", True)', '.get("", True)', ['tests/cotrain/export/test_export.py::test_the_card_predicts_either_way_of_drafting'], 'the card promises more than the export has'),
    ('greetings_are_openings', 'cotrain/data/rows.py', 'DataRow.opening', ' and place > roles.index("user")', '', ['tests/cotrain/data/test_rows.py::test_rows_that_begin_alike_are_split_by_what_the_user_asks'], 'rows that begin with one greeting are never held out'),
    ('two_system_turns', 'cotrain/data/rows.py', 'Reader._conversation', '"system" in left and messages[0]["role"] not in ("system", "developer")', '"system" in left', ['tests/cotrain/data/test_rows.py::test_a_system_turn_of_the_row_is_not_put_before_that_of_its_messages'], 'a prompt has two system turns'),
    ('answers_of_weight_0', 'cotrain/data/conversations.py', 'Template._turn', 'message.get("weight") == 0', 'False', ['tests/cotrain/data/test_rows.py::test_an_answer_of_weight_0_is_not_learnt'], 'bad answers are learnt'),
    ('hidden_files_are_data', 'cotrain/data/sources.py', 'files_of', ' and not file.name.startswith(".")', '', ['tests/cotrain/data/test_rows.py::test_an_extension_is_read_in_any_case_and_hidden_files_are_not'], "an editor's files are learnt"),
    ('the_target_head_may_be_small', 'inference/proposers/block.py', 'BlockConfig.__init__', 'if target_head and (', 'if False and (', ['tests/cotrain/students/test_block.py::test_the_head_of_the_target_is_no_weight_of_the_draft'], 'a config says another vocabulary than its head has'),
    ('a_small_head_of_the_target', 'cotrain/students/block.py', 'BlockStudent.initial', '_refuse_small_head(draft)', 'pass', ['tests/cotrain/students/test_block.py::test_the_head_of_the_target_is_no_weight_of_the_draft'], 'a setting does nothing'),
    ('an_overfit_run_resumes', 'cotrain/training/overfit.py', 'overfit', 'except Interrupted as', 'except NotImplementedError as', ['tests/cotrain/training/test_overfit.py::test_an_interrupted_try_does_not_say_that_it_goes_on'], 'a message promises what is not kept'),
    ('logprobs_in_the_dtype_of_logits', 'inference/verify/logprobs.py', 'logprobs', 'wide(logits)', 'logits', ['tests/inference/test_logprobs.py::test_those_of_a_target_in_bfloat16_are_of_a_distribution'], 'log-probabilities have two digits'),
    ('gains_are_not_over_a_plain_step', 'cotrain/export/publishing.py', 'planned_anew', 'seconds[0] * tau', 'tau', ['tests/cotrain/export/test_export.py'], 'the card promises gains of another machine'),
]
