"""Planted bugs of the command line, run folders and atomic writes."""

# fmt: off
ROWS_OF_BUGS = [
    ('quote_leaves_interpolation', 'cotrain/config/overrides.py', 'escaped = re.sub(r"(\\\\*)\\$\\{", r"\\1\\1\\\\${", text)', 'escaped = text', ['tests/test_cli.py::test_text_arrives_unchanged'], 'a prompt with ${x} is resolved or refused'),
    ('quote_single_backslash', 'cotrain/config/overrides.py', 'r"\\1\\1\\\\${"', 'r"\\1\\\\${"', ['tests/test_cli.py::test_text_arrives_unchanged'], 'backslashes before ${ are lost'),
    ('quote_missing_mark', 'cotrain/config/overrides.py', 'if text == "???":', 'if text == "?":', ['tests/test_cli.py::test_text_arrives_unchanged'], 'the text ??? is taken for a missing value'),
    ('quote_not_paths', 'cotrain/config/overrides.py', 'return key.rpartition(".")[2] in FREE_TEXT', 'return key in FREE_TEXT', ['tests/test_cli.py::test_paths_are_literal_but_null_unsets_them'], 'a folder with a comma is a sweep'),
    ('sweep_shares_a_folder', 'cotrain/cli.py', 'if "output" in cfg and "output" not in swept:', 'if False:', ['tests/test_cli.py::test_a_sweep_runs_each_value_in_its_own_folder'], 'the jobs of a sweep overwrite one another'),
    ('failed_job_is_success', 'cotrain/cli.py', '    return _say(f"cotrain {name}", _full(error, output) if full else _message(error), 1)', '    return _say(f"cotrain {name}", _full(error, output) if full else _message(error), 0)', ['tests/test_cli.py::test_a_sweep_goes_on_after_a_failed_job'], 'a failure exits with 0'),
    ('added_keys_pass', 'cotrain/config/settings.py', 'OmegaConf.merge(OmegaConf.structured(SCHEMAS[name]), OmegaConf.to_container(cfg))', 'cfg', ['tests/test_cli.py::test_a_wrong_setting_is_named'], 'a knob that nothing reads is accepted'),
    ('atomic_in_place', 'inference/drafts/atomic.py', 'new = _temporary(place, "new")\n    try:\n        with open(new, "xb") as file:', 'new = place\n    try:\n        with open(new, "wb") as file:', ['tests/test_folders.py::test_a_full_disk_leaves_the_old_file_and_is_named'], 'a full disk leaves half a file'),
    ('folder_mode_0600', 'inference/drafts/atomic.py', 'path.chmod(mode)', 'path.touch()', ['tests/test_folders.py::test_a_folder_appears_when_it_is_whole'], 'weights that only their writer can read'),
    ('no_recovery', 'inference/drafts/atomic.py', 'if owner["role"] == "old" and not place.exists():', 'if False:', ['tests/test_folders.py::test_a_killed_replacement_leaves_the_old_folder'], 'killed between two renames, the old folder is lost'),
    ('recover_the_living', 'inference/drafts/atomic.py', ' or _alive(int(owner["pid"]))', '', ['tests/test_folders.py::test_a_killed_writer_leaves_the_old_file'], "a writer deletes another's unfinished file"),
    ('torch_full_disk', 'inference/drafts/atomic.py', '|PytorchStreamWriter failed|unexpected pos \\d+', '', ['tests/test_folders.py::test_a_full_disk_leaves_the_old_folder_and_is_named'], 'torch.save on a full disk shows a traceback'),
    ('lock_of_a_removed_file', 'cotrain/run_folder.py', '        if _is(file, handle):\n            break', '        break', ['tests/test_folders.py::test_a_lock_removed_between_open_and_lock_is_taken_anew'], 'two processes hold one folder'),
    ('overwrite_foreign', 'cotrain/run_folder.py', 'return not ours and _read(path) is None', 'return False', ['tests/test_folders.py::test_a_folder_of_others_is_refused'], 'files that are not ours are taken over'),
    ('resume_other_settings', 'cotrain/run_folder.py', 'changed = _compare(path, marker["settings"], settings, kind)', 'changed: dict[str, str] = {}', ['tests/test_folders.py::test_other_settings_are_refused_by_name'], 'a run with another loss is resumed in silence'),
    ('emptying_forgotten', 'cotrain/run_folder.py', '(overwrite or marker["state"] == "emptying")', 'overwrite', ['tests/test_folders.py::test_a_killed_overwrite_is_gone_on_with'], 'a half-deleted run is resumed'),
    ('rmtree_through_a_link', 'cotrain/run_folder.py', 'if entry.is_dir() and not entry.is_symlink():\n            shutil.rmtree(entry)', 'if entry.is_dir():\n            shutil.rmtree(entry.resolve())\n            entry.unlink(missing_ok=True) if entry.is_symlink() else None', ['tests/test_folders.py::test_overwrite_empties_what_is_ours_and_follows_no_link'], 'overwrite deletes what a link points at'),
]
