"""Planted bugs of a round: what it copies and reads, which rows it ends, and what it takes from its neighbours."""

# fmt: off
ROWS_OF_BUGS = [
    ('rounds_read_twice', 'inference/engine.py', 'table = settled.tolist()  # the', 'proposal.x.tolist()\n            table = settled.tolist()  # the', ['tests/test_gpu_counts.py::test_a_round_copies_once_and_reads_once[draft, token]'], 34),
    ('rounds_copy_lengths_by_themselves', 'inference/round.py', 'return sent["length"] if k == self.lengths else torch.tensor(k, device=self.device)', 'return torch.tensor(k, device=self.device)', ['tests/test_gpu_counts.py::test_a_round_copies_once_and_reads_once[draft, token]'], 34),
    ('copies_wait_for_the_device', 'inference/batched/batch.py', 'host.pin_memory().to(device, non_blocking=True)', 'host.to(device)', ['tests/test_gpu_counts.py::test_a_round_copies_once_and_reads_once[draft, token]'], 34),
    ('mixed_rows_share_a_top_k', 'inference/batched/laws.py', 'least = largest.gather(-1, (k - 1).clamp(0, largest.shape[-1] - 1))', 'least = largest[..., -1:]', ['tests/test_batched_settings.py::test_mixed_regimes_give_the_laws_of_each_alone'], 10),
    ('rows_that_differ_in_min_p_alike', 'inference/batched/laws.py', 'kinds = {(s.temperature, s.top_k, s.top_p, s.min_p) for s in sampling}', 'kinds = {(s.temperature, s.top_k, s.top_p) for s in sampling}', ['tests/test_batched_settings.py::test_rows_that_differ_in_one_setting_alone'], 10),
    ('bias_after_the_penalties', 'inference/batched/history.py', 'if self.bias is not None:\n            out = out + self.bias.unsqueeze(1)\n        if self.penalised:\n            out = self._penalise(out, self.made.unsqueeze(1) + self._drafted(x, first, n))', 'if self.penalised:\n            out = self._penalise(out, self.made.unsqueeze(1) + self._drafted(x, first, n))\n        if self.bias is not None:\n            out = out + self.bias.unsqueeze(1)', ['tests/test_batched_settings.py::test_histories_are_processed_as_one_by_one'], 10),
    ('newest_ids_uncounted', 'inference/round.py', 'history.count(self.sent["newest"])', 'pass', ['tests/test_rounds.py::test_penalties_on_the_text_see_the_accepted_drafts[sampling0]'], 11),
    ('drafts_without_a_law_are_tested', 'inference/round.py', 'missing = missing | without_law(q)', 'pass', ['tests/test_batched_settings.py::test_drafts_end_where_a_law_is_missing'], 40),
    ('processors_asked_behind_a_rows_drafts', 'inference/batched/user_processors.py', 'if len(draft) > k[a] or not', 'if not', ['tests/test_faults.py::test_processors_are_not_asked_behind_a_rows_own_drafts[draft]'], 40),
    ('nan_becomes_a_greedy_token', 'inference/sampling.py', 'none = top - top  # 0, or NaN', 'none = torch.zeros_like(top)', ['tests/test_batched_settings.py::test_no_law_is_nan_throughout'], 41),
    ('poisoned_slots_are_handed_on', 'inference/slots.py', 'if run.active[slot].stained:', 'if False:', ['tests/test_faults.py::test_no_slot_keeps_nan'], 41),
    ('a_draft_with_nan_ends_its_row', 'inference/slots.py', '        if doubtful and not row.alone:\n            row.alone = True', '        if False:\n            row.alone = True', ['tests/test_faults.py::test_a_draft_with_nan_is_only_refused'], 40),
    ('processors_errors_end_the_call', 'inference/batched/user_processors.py', 'except Exception as error:', 'except NotImplementedError as error:', ['tests/test_faults.py::test_a_row_that_cannot_go_on_ends_alone[plain-token-raises]'], 42),
    ('streams_end_in_silence', 'inference/engine.py', 'if run.rows[0].error:', 'if False:', ['tests/test_faults.py::test_a_stream_raises_with_the_message_of_its_row'], 42),
    ('foreign_ids_found_while_decoding', 'inference/request.py', 'if foreign:', 'if False:', ['tests/test_faults.py::test_settings_with_foreign_ids_are_refused_before_anything_runs'], 12),
    ('proposers_shared_by_two_streams', 'inference/slots.py', 'if run.proposer and _PROPOSING.get(id(run.proposer)) is not run:', 'if False:', ['tests/test_faults.py::test_a_proposer_serves_one_engine_at_a_time'], "a second engine overwrites the state of the first one's proposer"),
    ('negative_draft_lengths', 'inference/policy.py', 'and length >= 0', '', ['tests/test_faults.py::test_a_policy_that_gives_no_draft_lengths_is_named[lengths0]'], 'a policy of -1'),
    ('laws_stay_on_the_drafts_device', 'inference/round.py', '        logits = logits.to(self.device)\n', '', ['tests/test_faults.py::test_a_draft_on_another_device_than_the_target[sampling0]'], 'two devices in one operation'),
    ('ngrams_index_the_last_one', 'inference/proposers/retrieval.py', 'for end in range(self.length, len(text)):', 'for end in range(self.length, len(text) + 1):', ['tests/test_faults.py::test_an_index_that_grows_finds_what_a_search_finds[2]'], 'a text finds its own end'),
    ('ngrams_indexed_again_each_round', 'inference/proposers/retrieval.py', 'self.length = len(text)', 'self.length = 1', ['tests/test_faults.py::test_rounds_only_index_what_is_new'], 'a round reads the whole text'),
]
