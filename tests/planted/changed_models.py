"""Planted bugs in what an engine sees of models that change, of other threads and of the keys and values it holds."""

S, T = "tests/test_stale.py::", "tests/test_threads.py::"
# fmt: off
ROWS_OF_BUGS = [
    ('a_target_looked_at_once', 'inference/engine.py', '            if self.target.stale:\n', '            if False:\n', [S + 'test_an_engine_has_the_weights_as_they_are'], 53),
    ('hooks_overlooked', 'inference/models/checksum.py', '*m._forward_hooks, "before", ', '', [S + 'test_an_engine_has_the_weights_as_they_are'], 53),
    ('hooks_before_overlooked', 'inference/models/checksum.py', '*m._forward_hooks, "before", *m._forward_pre_hooks', '*m._forward_hooks', [S + 'test_an_engine_has_the_weights_as_they_are'], 53),
    ('replaced_forwards_overlooked', 'inference/models/checksum.py', '(type(m).forward, vars(m).get("forward"), ', '(type(m).forward, ', [S + 'test_an_engine_has_the_weights_as_they_are'], 53),
    ('new_parameters_overlooked', 'inference/models/checksum.py', '*map(id, m._parameters.values()),', '', [S + 'test_an_exit_that_copied_nothing_shares_what_the_target_has_now'], 53),
    ('addresses_overlooked', 'inference/models/checksum.py', '(part.data_ptr(), ', '(', [S + 'test_an_engine_that_copied_nothing_has_them_too'], 53),
    ('counted_changes_overlooked', 'inference/models/checksum.py', '[(changes([t]), _where(t))', '[(0, _where(t))', [S + 'test_an_engine_that_copied_nothing_has_them_too'], 53),
    ('copies_not_summed', 'inference/models/lm.py', 'values=copies', 'values=False', [S + 'test_an_engine_has_the_weights_as_they_are'], 53),
    ('another_precision_overlooked', 'inference/models/checksum.py', '{(p.dtype, p.device) for p in model.parameters()}', '0', [S + 'test_an_engine_has_the_weights_as_they_are'], 53),
    ('dropout_while_serving', 'inference/models/lm.py', '            self.model.eval()\n        return', '            pass\n        return', [S + 'test_an_engine_has_the_weights_as_they_are'], 53),
    ('a_draft_looked_at_once', 'inference/proposers/independent.py', ' or self.lm.stale:', ':', [S + 'test_a_draft_has_its_weights_as_they_are'], 53),
    ('an_exit_of_an_old_target', 'inference/proposers/early_exit_network.py', ' or not found[2].holds(target)', '', [S + 'test_a_draft_of_the_targets_weights_has_them_as_they_are'], 53),
    ('an_exit_made_once', 'inference/proposers/early_exit.py', ' or self.model is not model', '', [S + 'test_an_exit_has_the_weights_of_its_network_as_they_are'], 53),
    ('bits_looked_at_once', 'inference/proposers/quantised.py', 'if not self.opened or not self.int8 or self.lm.stale:', 'if not self.opened:', [S + 'test_a_draft_of_the_targets_weights_has_them_as_they_are'], 53),
    ('heads_recorded_once', 'inference/proposers/newest_state.py', ' and self.stamp.holds(self.network)', '', [S + 'test_what_is_recorded_of_a_draft_reads_its_weights_as_they_are'], 53),
    ('an_eagle_recorded_once', 'inference/proposers/eagle.py', ' or not self.stamp.holds(self.network)', '', [S + 'test_what_is_recorded_of_a_draft_reads_its_weights_as_they_are'], 53),
    ('calls_of_threads_at_once', 'inference/engine.py', '        with ALONE:\n            run = self.begin(', '        if True:\n            run = self.begin(', [T + 'test_calls_of_several_threads_give_what_they_give_alone'], 54),
    ('rounds_of_threads_at_once', 'inference/engine.py', '            with ALONE:  # not while the caller has the events', '            if True:', [T + 'test_a_stream_gives_its_text_or_says_that_a_later_call_took_its_slots'], 54),
    ('a_stream_keeps_the_lock', 'inference/engine.py', '                events = self._round(run)\n            yield events', '                events = self._round(run)\n                yield events', [T + 'test_a_stream_that_is_left_half_way_holds_nobody_up'], 54),
    ('cache_bytes_by_the_config_alone', 'inference/models/memory.py', 'return _stored(kind, config.to_json_string()) * dtype.itemsize', 'return _written(config.get_text_config()) * dtype.itemsize', ['tests/test_families.py::test_an_estimate_of_keys_and_values_is_what_an_engine_holds'], 'memory of keys and values is estimated wrongly'),
    ('compiler_gets_half_a_path', 'inference/models/compiled.py', '[shlex.quote(path) for path in self._libraries_dirs]', 'self._libraries_dirs', ['tests/test_lean.py::test_libraries_in_a_path_with_a_space_reach_the_compiler_whole'], 'nothing compiles in a path with a space'),
    ('a_failed_compilation_says_its_first_line', 'inference/models/compiled.py', 'return lines[-1] if lines', 'return lines[0] if lines', ['tests/test_lean.py::test_a_failed_compilation_says_its_last_line'], 'the message hides the reason'),
]
# fmt: on
