"""Planted bugs of drafts that are told the temperature."""

T = "tests/test_conditioned.py::"
EACH, HELD = (
    T + "test_each_text_of_a_batch_is_learnt_at_its_own_temperature[kl]",
    T + "test_held_out_texts_are_judged_with_the_scale_of_their_temperature[0.7]",
)
ROW, PACKED = (
    T + "test_a_row_drafts_with_the_scale_of_its_own_temperature",
    T + "test_texts_that_share_a_row_have_temperatures_of_their_own",
)
WAYS, CALLS = (
    T + "test_every_way_of_running_it_reads_the_scale",
    T + "test_a_recorded_round_reads_the_scale_of_each_call",
)
JUDGED, TEXTS = (
    T + "test_a_run_learns_and_is_judged_at_every_temperature_that_its_draft_is_told",
    T + "test_texts_are_sampled_at_the_temperature_that_they_are_learnt_at",
)
FOLDED, KNOTS = (
    T + "test_an_export_drafts_as_the_folder_does_at_its_temperature[0.35]",
    T + "test_a_scale_is_that_of_its_temperature_and_lies_between_those_of_its_neighbours",
)
LIKELIEST, PART = (
    T + "test_made_for_its_likeliest_tokens_it_drafts_those_that_the_scale_chooses",
    T + "test_a_part_of_the_slots_is_read_with_its_own_scales",
)

# fmt: off
ROWS_OF_BUGS = [
    ('one_temperature_for_a_batch', 'cotrain/students/conditioned.py', 'states = states * self._scale(batch["temperature"]).to(states)', 'states = states * self._scale(batch["temperature"][:1]).to(states)', [EACH], 'all texts of a batch are learnt with the scale of the first'),
    ('packed_texts_told_as_one', 'cotrain/students/conditioned.py', 'temperature if temperature.ndim == 2 else temperature.unsqueeze(1)', 'temperature.reshape(len(temperature), -1)[:, :1]', [PACKED], 'texts that share a row are all learnt with the scale of the first'),
    ('untold_while_it_learns', 'cotrain/students/conditioned.py', 'states = states * self._scale(batch["temperature"]).to(states)', 'states = states', [EACH], 'the scale never learns'),
    ('judged_with_another_scale', 'cotrain/evaluation/held_out.py', 'torch.full((len(ids),), held.temperature, device=student.network.device)', 'torch.ones(len(ids), device=student.network.device)', [HELD], 'held-out acceptance of another scale than the one that is served'),
    ('not_judged_where_it_is_told', 'cotrain/config/regimes.py', 'sorted({*cfg.rollout.temperatures, *learnt(cfg), cfg.regime.temperature})', 'sorted({*cfg.rollout.temperatures, *cfg.rollout.train_temperatures, cfg.regime.temperature})', [JUDGED], 'nobody sees how a draft does at a temperature that it is told'),
    ('told_and_not_taught', 'cotrain/config/regimes.py', 'return list(cfg.rollout.train_temperatures) or list(cfg.draft.temperatures) or [cfg.regime.temperature]', 'return list(cfg.rollout.train_temperatures) or [cfg.regime.temperature]', [JUDGED, TEXTS], 'texts of the regime alone'),
    ('sampled_in_the_regime', 'cotrain/training/assembly.py', 'job.texts("train", t, Share(i, cfg.rollout.rounds), by)', 'job.texts("train", cfg.regime.temperature, Share(i, cfg.rollout.rounds), by)', [TEXTS], 'texts of temperature 0 are drawn at 1, and no sampled text is the greedy one'),
    ('given_texts_at_one_temperature', 'cotrain/data/texts.py', 'each[torch.arange(len(self)) % len(each)]', 'each[0 * torch.arange(len(self))]', [TEXTS], 'corpus texts teach the scale of one temperature'),
    ('a_knot_without_texts', 'cotrain/training/assembly.py', 'if missing := [t for t in cfg.draft.temperatures if t not in learnt(cfg)]:', 'if missing := []:', [JUDGED], 'a scale that no text teaches is served'),
    ('scale_of_another_row', 'inference/models/forward.py', 'states * scale[low : low + len(states)].unsqueeze(1)', 'states * scale[low : low + len(states)].flip(0).unsqueeze(1)', [ROW], 'rows of a batch have the scales of each other'),
    ('scale_of_rows_that_left', 'inference/proposers/conditioned.py', 'if temperature is not self.written:', 'if self.written is None:', [ROW], 'rows that come later are drafted for at the temperatures of the first'),
    ('scale_baked_into_all_drafts', 'inference/models/cuda_graphs.py', 'self._stored(slots), self.scale\n', 'self._stored(slots), None if self.scale is None else self.scale.clone()\n', [CALLS + "[31]"], 'a graph keeps the scale of the call that it was recorded in'),
    ('scale_baked_into_drafting', 'inference/models/cuda_graphs.py', 'def run(columns: Tensor) -> Any:\n            tails, ends, u, temperature = columns.split((tail, 1, k, 1), 1)\n            return step(tails, ends[:, 0], numbers_of(u), numbers_of(temperature[:, 0]), *stored, scale=self.scale)', 'def run(columns: Tensor, kept: Any = None if self.scale is None else self.scale.clone()) -> Any:\n            tails, ends, u, temperature = columns.split((tail, 1, k, 1), 1)\n            return step(tails, ends[:, 0], numbers_of(u), numbers_of(temperature[:, 0]), *stored, scale=kept)', [CALLS + "[0]"], 'the same where temperature is all there is'),
    ('scale_in_other_memory', 'inference/proposers/conditioned.py', 'self.lm.scale[: len(temperature)].copy_(self.scale_of.at(temperature))', 'self.lm.scale = self.lm.run.scale = self.scale_of.at(temperature).to(self.lm.dtype)', [CALLS + "[31]"], 'graphs read the scale where it was'),
    ('scale_forgotten_in_recorded_passes', 'inference/models/cuda_graphs.py', 'branches, scale=self.scale)', 'branches)', [WAYS + "[in graphs, trees]"], 'single passes that are replayed draft untold'),
    ('scale_forgotten_in_all_drafts', 'inference/models/step.py', 'return self.chosen(chosen, tails, ends, scale, cos, sin, slots, keys, values)', 'return self.chosen(chosen, tails, ends, None, cos, sin, slots, keys, values)', [CALLS + "[0]"], 'compiled drafts are untold'),
    ('scale_forgotten_by_stock', 'inference/models/forward.py', 'if self.scale is not None:\n            return self._scaled(ids, window, only, layers)', 'if False:\n            return self._scaled(ids, window, only, layers)', [WAYS + "[stock]"], "untold where transformers' own forward runs"),
    ('scale_forgotten_in_compiled_passes', 'inference/models/compiled.py', '*self._stores(), only, branches, self.scale)', '*self._stores(), only, branches, None)', [T + "test_compiled_rounds_read_the_scale"], 'a compiled pass that catches up is untold'),
    ('scale_forgotten_in_compiled_drafts', 'inference/models/compiled.py', 'inputs = (tails, ends, u, temperature, *self.angles, slots, *self._stores(), self.scale)', 'inputs = (tails, ends, u, temperature, *self.angles, slots, *self._stores(), None)', [T + "test_compiled_rounds_read_the_scale"], 'drafts of a compiled round are untold'),
    ('folded_at_another_temperature', 'cotrain/export/hf.py', 'folded(model, temperature), _at(metadata, temperature)', 'folded(model, float(metadata.regime.get("temperature", 1.0))), _at(metadata, temperature)', [T + "test_an_exported_folder_is_an_independent_draft_of_one_temperature"], 'an export of the temperature of the run, called by the one that was asked for'),
    ('fold_that_nobody_compares', 'cotrain/export/one_temperature.py', 'if not torch.allclose(found, wanted, rtol=close, atol=close * float(wanted.abs().max())):', 'if False:', [T + "test_a_norm_that_takes_no_scale_is_refused"], 'an export with other laws'),
    ('exported_untold', 'cotrain/export/one_temperature.py', 'if told and temperature is None:', 'if False:', [T + "test_an_exported_folder_is_an_independent_draft_of_one_temperature"], 'an engine would load it without its scale'),
    ('next_knot_down', 'inference/proposers/conditioned_network.py', 'table[above - 1].lerp(table[above], share)', 'table[above - 1]', [KNOTS], 'between two temperatures the scale of the lower one'),
    ('beyond_the_last_knot', 'inference/proposers/conditioned_network.py', '.clamp(self.knots[0], self.knots[-1])', '', [KNOTS], 'a temperature above all that it knows scales further and further'),
    ('a_scale_that_is_made_up', 'inference/proposers/conditioned_network.py', 'info["missing_keys"] = {*info["missing_keys"], TABLE}', 'pass', [T + "test_a_folder_that_lacks_its_scale_is_refused"], 'a folder without its scale is served untold'),
    ('a_scale_that_starts_anew', 'cotrain/students/conditioned.py', 'network.get_parameter(TABLE).data.copy_(table_in(str(draft.path)))', 'pass', [T + "test_it_begins_as_an_independent_draft_or_goes_on_with_its_scale"], 'what a draft has learnt of temperatures is lost when it goes on'),
    ('one_law_for_all_temperatures', 'inference/proposers/conditioned.py', 'return None\n\n    def open', 'return super().language_model(rows, vocabulary)\n\n    def open', ["tests/test_proposers.py::test_forced_rounds_predict_measured_ones[conditioned-token]"], 'calls are predicted of a draft without its scale'),
    ('share_of_unpaired_texts', 'tests/studies/temperatures.py', 'others[at].sum() / own[at].sum() for at in draws', 'others[at].sum() / own[at[::-1] - 1].sum() for at in draws', ['tests/test_conditioned.py::test_a_share_is_of_the_calls_of_the_same_texts'], 'an interval of the difference between texts'),
    ('one_temperature_is_untold', 'inference/proposers/conditioned_network.py', 'return 1 + table[0].expand', 'return 1 + 0 * table[0].expand', [KNOTS], 'a draft of one temperature is served without its scale'),
    ('told_drafts_lose_their_likeliest', 'inference/proposers/conditioned.py', 'super().__init__(model, greedy, compile', 'super().__init__(model, False, compile', [LIKELIEST], 'a draft that learnt to draft its likeliest tokens draws them'),
    ('scale_of_the_first_slots', 'inference/models/forward.py', 'last = scaled(last, self.scale, window.low)', 'last = scaled(last, self.scale)', [PART], 'a pass over some slots reads the scales of others'),
    ('scale_of_the_first_slots_by_stock', 'inference/models/forward.py', 'self.head(scaled(last, self.scale, window.low))', 'self.head(scaled(last, self.scale))', [PART], 'the same by transformers\' own forward'),
    ('export_silent_of_where_it_was_measured', 'cotrain/export/one_temperature.py', '(at := made.regime.get("temperature", 1.0)) == temperature', '(at := made.regime.get("temperature", 1.0)) != temperature', ['tests/test_conditioned.py::test_an_export_says_where_it_was_measured'], 'speeds and a draft length of another temperature, said to be of this one'),
    ('time_of_one_temperature', 'cotrain/training/durations.py', '* len(learnt(cfg)) if split', 'if split', ['tests/test_conditioned.py::test_time_is_reckoned_for_texts_of_every_temperature'], 'a run of four temperatures is said to sample a quarter of its texts'),
]
