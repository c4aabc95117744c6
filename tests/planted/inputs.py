"""Planted bugs of prompts, of what people have as data, and of kept texts and states."""

# fmt: off
DATA, INPUTS, ROWS, PRINTS = (f"cotrain/{name}.py" for name in ("data", "inputs", "prompt_rows", "fingerprints"))
P, I, K = (f"tests/test_{name}.py::test_" for name in ("prompt_rows", "inputs", "kept"))

ROWS_OF_BUGS = [
    ("prompts_without_a_start_token", ROWS, 'yield from tokenizer(list(texts[first : first + BATCH]), verbose=False)["input_ids"]', 'yield from tokenizer(list(texts[first : first + BATCH]), add_special_tokens=False, verbose=False)["input_ids"]', [P + "a_row_is_one_prompt_from_its_start[text]", P + "the_context_that_is_learnt_from_is_the_one_that_is_served"], 44),
    ("prompts_from_the_middle", ROWS, "return [ids[:tokens] for ids in encoded(", "return [ids[-tokens:] for ids in encoded(", [P + "a_text_that_is_longer_is_begun_and_a_prompt_is_dropped"], 44),
    ("prompts_are_cut", DATA, "    if column == PROMPT:\n        return prompt_rows", "    if column is None:\n        return prompt_rows", [P + "a_text_that_is_longer_is_begun_and_a_prompt_is_dropped"], "a prompt that is cut is asked in place of the one that was written"),
    ("dropped_prompts_are_not_counted", ROWS, 'return said if found else ""', 'return ""', [P + "a_text_that_is_longer_is_begun_and_a_prompt_is_dropped"], "prompts vanish unsaid"),
    ("prompts_want_a_column", DATA, "column = PROMPT if PROMPT in columns else TEXT", "column = TEXT", [P + "a_row_is_one_prompt_from_its_start[prompt]"], "a file of prompts is refused for its column's name"),
    ("packed_texts_begin_with_an_end", DATA, "return int(first if first == tokenizer.bos_token_id else tokenizer.eos_token_id)", "return int(tokenizer.eos_token_id)", [P + "packed_texts_begin_as_a_server_begins_them"], 44),
    ("chat_is_not_asked_of_a_bare_target", DATA, "if template.tokenizer.chat_template is None:", "if False:", [P + "texts_are_shown_as_a_users_where_that_is_asked"], "a prompt passes for a conversation's"),
    ("names_are_patterns", INPUTS, "return [glob.escape(str(file)) for file in files.values()]", "return [str(file) for file in files.values()]", [I + "a_file_of_each_kind_is_read_and_streamed[a [1] {b}?*.jsonl]"], "a file with brackets in its name is not found, or another is read"),
    ("folders_are_patterns", INPUTS, "data_dir=glob.escape(path)", "data_dir=path", [I + "a_folder_of_files_may_hold_splits[a [x] b]"], "a folder with brackets in its name holds nothing"),
    ("compressed_files_are_of_no_kind", INPUTS, "(path.with_suffix(\"\") if path.suffix in COMPRESSED else path).suffix", "path.suffix", [I + "a_file_of_each_kind_is_read_and_streamed[own.jsonl.gz]"], "compressed files are refused"),
    ("a_saved_dict_is_its_first_split", INPUTS, "found = found[data.split]", "found = next(iter(found.values()))", [I + "saved_data_sets_of_one_split_and_of_several_are_read"], "another split is learnt from than the one asked for"),
    ("a_stream_is_read_whole", INPUTS, "list(rows.take(data.take))", "list(rows)[: data.take]", [I + "of_a_stream_only_the_first_rows_are_read"], "what does not fit memory is read into it"),
    ("any_config_of_a_data_set", INPUTS, "datasets.load_dataset(path, name=data.config,", "datasets.load_dataset(path, name=None,", [I + "a_data_set_of_several_configs_is_asked_for_one"], "the config that is asked for is ignored"),
    ("kept_texts_of_another_column", INPUTS, '        "column": data.column,\n', "", [K + "of_other_data_they_are_not"], 45),
    ("kept_texts_of_another_template", INPUTS, '        "template": json.loads(json.dumps(dict(data.template), default=str)),\n', "", [K + "of_other_data_they_are_not"], 45),
    ("kept_texts_of_other_contents", INPUTS, "held = stamps if data.streaming else contents", "held = lambda files: str(sorted(files))", [K + "of_other_data_they_are_not"], 45),
    ("kept_texts_of_the_shipped_corpora", INPUTS, '"bytes": dict(data.bytes if split == "train" else data.held_out_bytes)', '"bytes": {}', [K + "the_shipped_texts_are_what_the_defaults_ask_for"], "the shipped texts, or none of them, serve whatever is asked"),
    ("kept_texts_by_some_keys_of_a_config", PRINTS, '"config": settings(model.config),', '"config": {"model_type": model.config.model_type},', [K + "of_another_config_they_are_not"], 45),
    ("kept_texts_of_other_ends", PRINTS, '        "ends": sorted(ends_of(model)),\n', "", [K + "of_another_config_they_are_not"], 45),
    ("kept_texts_of_another_chat_template", PRINTS, '        "chat_template": _hash(tokenizer.chat_template) if tokenizer.chat_template else None,\n', "", [K + "of_another_tokenizer_they_are_not"], 45),
    ("kept_texts_of_another_start_token", PRINTS, '        "ids": _hash(list(tokenizer(PROBE, verbose=False)["input_ids"])),\n', "", [K + "of_another_tokenizer_they_are_not"], 45),
    ("kept_texts_of_another_adapter", PRINTS, '"adapter": _adapter(model),', '"adapter": None,', [K + "an_adapter_beside_the_weights_is_part_of_the_target"], 45),
    ("a_fingerprint_of_samples", PRINTS, "total = sum(int(_bits(part).sum(dtype=torch.int64)) for part in flat.split(CHUNK))", "total = 0", [K + "one_value_of_any_tensor_is_seen"], 45),
    ("a_fingerprint_of_sums", PRINTS, "        if len(flat):\n", "        if not len(flat):\n", [K + "values_that_change_places_are_seen"], 45),
    ("a_miss_is_not_explained", "cotrain/sets.py", 'say(f"kept texts are not used, new ones are sampled: {other}")', "pass", [K + "of_other_data_they_are_not"], "hours of sampling begin, and nobody knows why"),
    ("steps_pass_the_cache_by", "cotrain/assembly.py", "    module.teacher.read = job.taught(module.teacher.read)\n", "", [K + "over_a_full_cache_the_target_reads_no_text"], "the target reads texts whose states are on disk"),
]
