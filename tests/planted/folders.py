"""Planted bugs of draft folders and exports."""

# fmt: off
STORE, WEIGHTS, PAIR = (f"inference/{name}.py" for name in ("store", "weights", "pair"))
ENGINES, VOCABULARY, HF = (f"cotrain/export/{name}.py" for name in ("engines", "vocabulary", "hf"))
S, X = "tests/test_store.py::test_", "tests/test_export.py::test_"
D = S + "a_damaged_folder_is_refused_by_name"

ROWS_OF_BUGS = [
    ("store_config_lies_about_ties", STORE, "    _config(model).save_pretrained(folder)\n", "", [S + "tied_embeddings_come_back_as_they_were[True-False]"], "tied embeddings come back as random numbers"),
    ("store_writes_in_place", STORE, "        write(model, tokenizer, new, metadata, report)", "        write(model, tokenizer, Path(folder), metadata, report)", [S + "a_crash_in_the_middle_leaves_the_old_folder"], "a crash leaves half a draft"),
    ("store_any_tokenizer", STORE, 'if found != target["tokenizer"]:', "if not found:", [D + "[wrong tokenizer]"], "a tokenizer that merely looks the same"),
    ("store_any_format", STORE, 'if values.get("format") != FORMAT:', 'if "format" not in values:', [D + "[format version]"], "a newer folder is read as this version's"),
    ("store_adaptive_draft_length", STORE, 'num_assistant_tokens_schedule="constant"', 'num_assistant_tokens_schedule="heuristic"', [S + "generation_config_fixes_the_draft_length"], "transformers serves another draft length than planned"),
    ("weights_missing_is_random", WEIGHTS, 'for name in sorted(info["missing_keys"])', "for name in []", [D + "[missing tensor]"], "a missing tensor is filled with random numbers"),
    ("weights_misshapen_is_random", WEIGHTS, 'in sorted(info["mismatched_keys"])', "in []", [D + "[wrong shape]"], "a misshapen tensor is filled with random numbers"),
    ("weights_infinite", WEIGHTS, "torch.isfinite(values).all()", "(~torch.isnan(values)).all()", [D + "[infinity]"], "infinite weights are served"),
    ("weights_outside_the_folder", WEIGHTS, "if not names or any(name != Path(name).name for name in names):", "if not names:", [D + "[weights outside]"], "an index reads files outside its folder"),
    ("weights_run_code", WEIGHTS, "trust_remote_code=trust_remote_code,", "trust_remote_code=True,", [S + "code_in_a_folder_does_not_run"], "a folder's code runs unasked"),
    ("pair_hashes_the_pad_id", PAIR, '"unk": tokenizer.unk_token_id}', '"unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id}', [S + "hash_is_of_what_matters"], "setting the pad token makes a draft refuse its target"),
    ("pair_lengths_alone", PAIR, "    if p != q:\n", "    if len(p) != len(q):\n", [S + "vocabularies_of_one_size_may_differ"], "vocabularies compared by size"),
    ("vllm_drafts_greedily", "inference/vllm_server.py", '"probabilistic" if objective == "sampled" else "greedy"', '"greedy"', [X + "vllm_drafts_as_the_draft_was_trained"], "a draft trained for sampling is served greedily"),
    ("sglang_forgets_the_anchor", ENGINES, "str(k + 1)", "str(k)", [X + "sglang_counts_the_anchor_among_its_draft_tokens"], 27),
    ("padded_rows_anything", VOCABULARY, "0 if least is None else table.weight[least]", "table.weight[:1]", [X + "padded_rows_have_next_to_no_mass"], 22),
    ("padded_bias_zero", VOCABULARY, "BIAS = -1e4", "BIAS = 0.0", [X + "a_head_with_a_bias_gives_padded_rows_no_mass"], 22),
    ("export_any_report", HF, "digest(file) != found.report", "not found.report", [X + "what_cannot_serve_is_refused_and_nothing_written"], "a card shows figures that were not measured"),
    ("card_names_no_folder", "cotrain/export/card.py", "place(resolve(target)), k", "target, k", [X + "the_bundled_target_is_served_by_its_folder"], "the launch command serves a name that is no model"),
    ("check_extra_tensors_pass", "cotrain/export/check.py", "for name in unexpected]", "for name in []]", [X + "check_names_the_file[extra tensor]"], "config.json with fewer layers than the weights passes"),
]
