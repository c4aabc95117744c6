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
    ('loud_names', 'cotrain/data/sources.py', 'extension_of', '.suffix.lower()', '.suffix', [WHOLE], 'files with .JSONL are no data'),
    ('reasons_one_by_one', 'cotrain/data/rows.py', 'Skipped.add', 're.sub(r"\\d+", "0", str(reason))', 'str(reason)', [DAMAGED + 'test_reasons_that_differ_in_a_number_are_counted_as_one'], 'four of a thousand equal reasons are listed'),
    ('names_that_cannot_be_printed', 'cotrain/data/rows.py', '_line', 'text.encode(errors="backslashreplace").decode()', 'text', [WHOLE], 'a traceback of the terminal'),
    ('domains_without_a_check', 'cotrain/data/rows.py', 'Reader.row', '_text("domain", str(left.pop("domain", "own")))', 'str(left.pop("domain", "own"))', [SKIPPED], 'a traceback where texts are written'),
    ('renderings_without_a_check', 'cotrain/data/conversations.py', 'Template.text', 'content_of("the rendered conversation", {"content": text})', 'pass', [SKIPPED], 'a traceback of the tokenizer'),
    ('questions_are_texts', 'cotrain/data/rows.py', 'Reader._read', '(PROMPT, INSTRUCTION, QUESTION)', '(PROMPT, INSTRUCTION)', [SHAPE], 'answers are lost'),
    ('answers_without_their_end', 'cotrain/data/conversations.py', 'Template.ended', 'place + 1 for', 'place for', [SHAPE], 'a draft never ends a turn'),
    ('columns_read_as_another', 'cotrain/data/rows.py', '_meanings', 'MEANINGS.get(name, main)', 'main', [SHAPES + 'test_what_columns_are_read_as_is_said'], 'the check says nothing of answers'),
    ('answers_that_are_not_shown', 'cotrain/training/preconditions.py', 'shown', 'if cfg.data.on_target else 0', 'if False else 0', [SHAPES + 'test_a_check_shows_the_answers_that_are_learnt'], 'what is learnt is not seen'),
    ('values_without_the_name_in_vllm', 'cotrain/config/settings.py', '_wrong', 'if key in IN_VLLM else', 'if False else', ['tests/cotrain/commands/test_cli.py::test_what_users_mistype_points_to_the_right_setting'], 'a user of vLLM does not know the setting'),
]
