"""Planted bugs of what commands refuse, what `check=true` says, and what they take from a draft folder."""

P, CLI = "tests/test_preconditions.py::test_", "tests/test_served.py::test_"
ALIKE = P + "check_and_run_refuse_alike_before_a_weight_is_read"
WAYS = "cotrain/preconditions.py"

# fmt: off
ROWS_OF_BUGS = [
    ("ranges_are_not_asked", "cotrain/config.py", "    refuse(name, typed)\n", "", [P + "a_range_names_key_and_value"], 50),
    ("own_rule_of_a_command_is_lost", "cotrain/ranges.py", 'RULES.get(f"{command}:{key}") or RULES[key]', "RULES[key]", [P + "a_range_names_key_and_value"], "k = 0 is refused where it is plain decoding"),
    ("a_list_is_not_looked_into", "cotrain/ranges.py", "if not all(one is not None and rule.fits(one) for one in value):", "if not value:", [P + "a_range_names_key_and_value"], 50),
    ("other_tokenizer_passes", WAYS, "        same_tokenizer(path, target.config, tokenizer, config, own)\n", "", [ALIKE + "[init=pretrained draft.path=PLACE/other]"], "a draft of another tokenizer is trained in silence"),
    ("larger_draft_passes", WAYS, "        if ours > theirs:", "        if ours > 100 * theirs:", [ALIKE + "[init=pretrained draft.path=PLACE/large]"], "a draft larger than its target is trained in silence"),
    ("data_is_read_late", WAYS, "    if cfg.data.path is None:\n        return {}", "    if True:\n        return {}", [ALIKE + "[data.column=body]"], 50),
    ("weights_are_missed_late", WAYS, "    _weights(key, place)\n", "", [ALIKE + "[target.path=PLACE/bare]"], 50),
    ("check_overlooks_the_output", "cotrain/commands/train.py", "state = refuse(cfg.output, cfg.overwrite, settings, kinds)", 'state = "new"', [ALIKE + "[output=PLACE/foreign]"], 50),
    ("pretrained_draft_sized_as_the_target", "cotrain/draft.py", "            return AutoModelForCausalLM.from_config(config)\n", "            return AutoModelForCausalLM.from_config(target.config)\n", [P + "check_tells_the_drafts_own_size_a_prompt_and_time_by_phase"], "139 GiB are asked for a recipe of 35"),
    ("all_experts_are_active", "cotrain/sizes.py", '(share if ".experts." in name else 1.0)', "1.0", [P + "experts_that_are_not_chosen_cost_nothing"], "a dense draft of a sparse target passes for the cheaper model"),
    ("bench_forgets_the_folders_target", "cotrain/served.py", '        cfg.target.path = made.target["name"]\n', '        cfg.target.path = "bundled"\n', [CLI + "the_target_is_the_one_that_the_folder_names"], "a draft is measured against another target"),
    ("baseline_by_whole_label_alone", "cotrain/compare.py", "{*parts, *(part.partition(\"=\")[2] for part in parts)}", "{*parts}", [CLI + "a_baseline_is_named_by_the_value_that_was_swept"], "compare baseline=kl fails after a sweep"),
    ("seeds_are_labels", "cotrain/cli.py", 'if text.partition("=")[0] not in SEEDS', "if text", [CLI + "runs_of_a_sweep_that_differ_in_seed_share_a_label"], "seeds are compared as if they were losses"),
    ("relative_launch", "cotrain/export/engines.py", "str(found.absolute()) if found.is_dir()", "str(found) if found.is_dir()", [CLI + "a_launch_command_works_from_any_folder"], "the launch command holds in one working folder only"),
    ("a_rollout_folder_is_shared", "cotrain/folders.py", "    _folder(path)\n    with _locked(path):\n        yield path", "    _folder(path)\n    yield path", [CLI + "a_folder_of_texts_is_held_by_one_process"], "two processes write one file of texts"),
]
