"""Planted bugs of drafts that begin with a folder's weights."""

# fmt: off
BEGINS = 'tests/test_pretrained.py::test_a_draft_begins_as_the_folder_is'
REFUSES = 'tests/test_pretrained.py::test_what_does_not_fit_is_refused_by_name'
OTHER = 'tests/test_pretrained.py::test_other_refusals'
ROWS_OF_BUGS = [
    ('nothing_is_loaded', 'cotrain/students/pretrained.py', '    if device.type != "meta":\n', '    if device.type == "meta":\n', [BEGINS + '[eagle-eagle]', BEGINS + '[medusa-medusa]'], 'a run that goes on begins at random, in silence'),
    ('missing_tensors_stay_random', 'cotrain/students/pretrained.py', 'problems = [f"tensor {name} is missing" for name in sorted(missing)]', 'problems = list[str]()', [REFUSES + '[no tensor-with weights]'], 'loads a part, in silence'),
    ('tensors_too_many_are_dropped', 'cotrain/students/pretrained.py', 'set(found) - set(wanted) - OTHERS', 'set[str]()', [REFUSES + '[a tensor more-with weights]'], 'loads a part, in silence'),
    ('shapes_are_not_compared', 'cotrain/students/pretrained.py', 'if wanted[name] != found[name]:', 'if wanted[name] == ():', [REFUSES + '[another shape-without]'], 'check=true passes what the run ends at'),
    ('any_kind_begins_with_any', 'cotrain/students/pretrained.py', 'if made is not None and made.kind not in known:', 'if made is not None and not known:', [REFUSES + '[heads from a model-with weights]'], 'weights that mean something else'),
    ('a_mask_of_its_own_kind_may_lack', 'cotrain/students/pretrained.py', 'lacking = set() if metadata is not None and metadata.kind == kind else FRESH.get(kind, set())', 'lacking = FRESH.get(kind, set())', [REFUSES + '[no mask-with weights]'], 'loads a part, in silence'),
    ('weights_of_another_target', 'cotrain/students/pretrained.py', '    kind.fits(network, target, where)\n', '', [OTHER], 'fails at the first step'),
    ('weights_that_are_no_numbers', 'cotrain/students/pretrained.py', '        require_finite(network, f"draft.path={path}")\n', '', [OTHER], 'fails at the first step'),
    ('a_model_that_lacks_tensors', 'cotrain/students/pretrained.py', 'if info["missing_keys"]:', 'if info["missing_keys"] is None:', [OTHER], 'loads a part, in silence'),
    ('other_tokens_than_the_folder_knows', 'cotrain/students/eagle.py', 'if draft.vocabulary not in (None, known):', 'if draft.vocabulary == 0:', [OTHER], 'a setting that does nothing'),
    ('depths_of_the_folder', 'cotrain/students/eagle.py', '    found.config.depths = draft.depths\n', '', ['tests/test_pretrained.py::test_drafts_of_a_round_are_as_many_as_asked_for[p_eagle]'], 'a setting that does nothing'),
    ('tokens_are_chosen_behind_loading', 'cotrain/training/assembly.py', 'if not job.cfg.draft.vocabulary or job.cfg.init.kind == "pretrained":', 'if not job.cfg.draft.vocabulary:', ['tests/test_pretrained.py::test_what_was_loaded_is_not_chosen_again', 'tests/test_pretrained.py::test_a_run_goes_on_from_what_was_loaded'], "the loaded head is overwritten with the target's rows"),
    ('config_of_another_family', 'cotrain/students/pretrained.py', 'except (StrictDataclassError, ValueError, TypeError) as error:', 'except KeyError as error:', ['tests/test_pretrained.py::test_other_refusals'], 'a traceback where draft.path= names a model of another family'),
]
