"""Planted bugs of what users hand in: prompts in every form, stop strings, text."""

# fmt: off
ROWS_OF_BUGS = [
    ('padding_is_text', 'inference/request.py', '[token for token, on in zip(row, keep, strict=True) if on]', 'list(row)', ['tests/test_prompts_given.py::test_every_form_of_the_same_texts_gives_the_same_tokens[padded on the left]'], 52),
    ('keys_of_an_encoding_are_prompts', 'inference/request.py', '    if isinstance(prompts, Mapping):\n        return _batch("prompts", prompts)\n', '    prompts = list(prompts) if isinstance(prompts, Mapping) else prompts\n', ['tests/test_prompts_given.py::test_every_form_of_the_same_texts_gives_the_same_tokens'], 52),
    ('two_start_tokens', 'inference/request.py', 'return ids[1:] if doubled else ids', 'return ids', ['tests/test_prompts_given.py::test_every_form_of_the_same_chats_gives_the_same_tokens[rendered text]'], 52),
    ('a_start_token_before_a_rendered_template', 'inference/request.py', 'tokenizer(text, add_special_tokens=False)["input_ids"]', 'tokenizer(text)["input_ids"]', ['tests/test_prompts_given.py::test_every_form_of_the_same_chats_gives_the_same_tokens[messages]'], 52),
    ('text_without_its_start_token', 'inference/request.py', 'ids = list(tokenizer(prompt)["input_ids"])', 'ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])', ['tests/test_prompts_given.py::test_every_form_of_the_same_texts_gives_the_same_tokens[texts]'], 52),
    ('rows_of_a_tensor_without_a_mask', 'inference/request.py', '        if isinstance(encoding["input_ids"], Tensor | np.ndarray) and len(rows) > 1:', '        if False:', ['tests/test_prompts_given.py::test_anything_else_is_refused_by_name_before_anything_runs'], 52),
    ('text_shows_the_end_token', 'inference/request.py', 'self.new[:-1] if self.finish == "stop" and self.text[-1] in self.ends else self.new', 'self.new', ['tests/test_prompts_given.py::test_text_leaves_out_the_end_token_and_tokens_keep_it'], 'text ends in the end token'),
    ('stop_strings_longer_than_the_tail', 'inference/request.py', 'longest = max(map(len, self.sampling.stop))', 'longest = 4', ['tests/test_prompts_given.py::test_a_stop_is_seen_where_the_whole_text_shows_it'], 21),
    ('a_tail_alone_decides_on_a_stop', 'inference/request.py', ' and (first == self.prompt or self._has_stop(self._decoded(self.prompt)))', '', ['tests/test_prompts_given.py::test_a_stop_is_seen_where_the_whole_text_shows_it'], 21),
    ('biases_in_the_default_dtype', 'inference/batched/history.py', 'values = torch.tensor([entry[2] for entry in found], dtype=torch.float32, device=self.device)', 'values = torch.tensor([entry[2] for entry in found], device=self.device).float()', ['tests/test_prompts_given.py::test_a_bias_is_not_rounded_to_the_default_dtype'], 'a bias rounded to bfloat16'),
    ('sampling_of_a_config_that_is_greedy', 'inference/sampling.py', 'drawn = sampled if config.do_sample else {"temperature": 0.0}', 'drawn = sampled', ['tests/test_prompts_given.py::test_settings_of_a_generation_config'], 13),
]
