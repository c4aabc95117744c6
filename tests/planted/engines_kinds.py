"""Planted bugs of folders that engines load: which of the target's states each engine is told to capture."""

# fmt: off
CAPTURED = 'tests/test_eagle_names.py::test_each_engine_captures_the_states_that_were_learnt_from'
ROWS_OF_BUGS = [
    ('vllm_counts_outputs', 'inference/proposers/eagle_network.py', 'layers = eagle_aux_hidden_state_layer_ids or (eagle_config or {}).get(LAYER_IDS) or ()', 'layers = (eagle_config or {}).get(LAYER_IDS) or eagle_aux_hidden_state_layer_ids or ()', [CAPTURED + '[vllm-[2, 4, 5]]'], 'a folder that is read and written again moves by a layer: vLLM captures the states before those that were learnt from'),
    ('sglang_counts_inputs', 'inference/proposers/eagle_network.py', 'LAYER_IDS: behind(layers)}', 'LAYER_IDS: list(layers)}', [CAPTURED + '[sglang-[2, 4, 5]]'], 'SGLang adds one to each number: it captures the states behind those that were learnt from'),
    ('tensorrt_llm_is_told_inputs', 'cotrain/export/eagle3.py', '"outputs_of_layers": behind(layers)', '"outputs_of_layers": layers', [CAPTURED + '[tensorrt_llm-[2, 4, 5]]'], 'TensorRT-LLM is told the layers behind those that were learnt from'),
    ('tensorrt_llm_keeps_its_defaults', 'cotrain/commands/export.py', 'layers = captured(written.made)', 'layers: list[int] = []', ['tests/test_eagle_names.py::test_the_command_that_is_printed_names_the_layers'], 'TensorRT-LLM does not read the folder for layers: it captures its own choice'),
    ('the_card_names_no_layers', 'cotrain/export/card.py', 'metadata.tree), captured(metadata.made)', 'metadata.tree), ()', ['tests/test_eagle_names.py::test_the_command_that_is_printed_names_the_layers'], 'the command of the card captures other layers than the one that is printed'),
    ('speculators_count_outputs', 'cotrain/export/eagle3.py', 'LAYER_IDS: ours[LAYER_IDS]', 'LAYER_IDS: ours["eagle_config"][LAYER_IDS]', ['tests/test_eagle_names.py::test_speculators_format_numbers_inputs_alone'], 'vLLM captures the states before those that were learnt from'),
    ('the_architecture_is_transformers_own', 'inference/proposers/eagle_network.py', '        self.config.architectures = ARCHITECTURES\n', '', ['tests/test_eagle_names.py::test_the_config_has_the_keys_that_loaders_read'], 'no engine knows the class EagleNetwork'),
    ('layers_that_repeat_are_exported_in_silence', 'cotrain/commands/export.py', 'if sorted(set(layers)) != list(layers)', 'if not layers', ['tests/test_eagle_names.py::test_states_that_no_engine_gives_twice_are_warned_of'], 'engines capture a layer once: fc gets too few states, and the server ends'),
]
