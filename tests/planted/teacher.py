"""Planted bugs of a target that runs on servers, on several devices or over several processes."""

# fmt: off
STATES = 'tests/cotrain/teacher/test_server_states.py::'
SPREAD = 'tests/cotrain/teacher/test_spread.py::'
DEVICES, DISK = SPREAD + 'test_layers_on_two_devices_give_the_same_states_and_texts', SPREAD + 'test_layers_on_a_disk_give_the_same_states_texts_and_drafts'
ROWS_OF_BUGS = [
    ('layers_of_a_server_in_another_order', 'cotrain/teacher/server_states.py', 'ServerReader.__init__', 'sorted({*layers} - {LAST})', 'sorted({*layers} - {LAST}, reverse=True)', [STATES + 'test_states_and_logits_are_those_of_a_target_in_the_process'], 'a draft learns from the states of other layers'),
    ('the_norm_is_left_out', 'cotrain/teacher/server_states.py', 'ServerReader.__call__', 'self.norm(read[:, :, -1])', 'read[:, :, -1]', [STATES + 'test_states_and_logits_are_those_of_a_target_in_the_process'], 'p is another'),
    ('packed_texts_are_one_request', 'cotrain/teacher/server_states.py', '_texts', 'if places else [0]', 'if False else [0]', [STATES + 'test_states_and_logits_are_those_of_a_target_in_the_process'], 'a text sees the one before it'),
    ('a_servers_logits_of_padded_rows', 'cotrain/teacher/server_states.py', 'served_elsewhere', '[..., :vocabulary]', '', [STATES + 'test_logits_are_of_ids_that_can_have_mass'], 'ids without a token have mass'),
    ('the_parts_here_are_emulated', 'cotrain/teacher/server_states.py', 'load_ends', 'if dtype == "auto":', 'if False:', [STATES + 'test_the_parts_here_have_the_dtype_of_a_whole_target'], 'p is rounded otherwise than by a target in the process'),
    ('one_server_is_asked_always', 'cotrain/teacher/servers.py', 'Servers._next', '(first + i)', 'i', [STATES + 'test_texts_are_sampled_by_all_servers_and_leave_no_files'], 'the second server idles'),
    ('a_failed_server_is_asked_again_at_once', 'cotrain/teacher/servers.py', 'Servers.call', 'self.well_at[number] = time.monotonic() + DOWN', 'pass', [STATES + 'test_a_server_that_hangs_leaves_the_others_their_time'], 'a server that hangs uses up the time of the others'),
    ('files_of_sampled_texts_stay', 'inference/servers/hidden_states.py', 'StatesClient._read', 'if body and (file', 'if False and (file', [STATES + 'test_texts_are_sampled_by_all_servers_and_leave_no_files'], 'a disk fills'),
    ('a_server_deletes_any_file', 'inference/servers/hidden_states.py', 'discard', 'path.suffix != ".safetensors" or', '', [STATES + 'test_a_server_cannot_delete_what_it_did_not_write'], "a server deletes the user's files"),
    ('states_before_they_are_whole', 'inference/servers/hidden_states.py', '_await_whole', 'fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)', 'None', [STATES + 'test_after_a_fault_the_states_are_the_same'], 'half of a file is read'),
    ('states_of_another_text', 'inference/servers/hidden_states.py', 'read_states', 'of_ids != ids', 'len(of_ids) != len(ids)', [STATES + 'test_after_a_fault_the_states_are_the_same'], 'a draft learns from the states of another text'),
    ('a_cache_serves_another_body', 'cotrain/training/job.py', 'identity_of', 'if _teachers(cfg) else {}', 'if False else {}', [STATES + 'test_texts_are_kept_when_the_servers_address_changes'], 'states of one target teach the draft of another'),
    ('texts_belong_to_an_address', 'cotrain/training/job.py', 'sampled_texts', 'TEACHER if _teachers(cfg)', 'cfg.teacher.url if _teachers(cfg)', [STATES + 'test_texts_are_kept_when_the_servers_address_changes'], 'a resumed run learns from other texts'),
    ('the_last_batch_is_read_and_not_learnt', 'cotrain/training/distributed.py', 'Ahead.__iter__', 'if earlier is not None:\n            yield earlier', 'if False:\n            yield earlier', [STATES + 'test_the_last_batch_is_learnt_too'], 'texts are not learnt'),
    ('slots_of_the_first_device', 'inference/models/cache.py', 'Window.indices', '.flatten().to(store.device)', '.flatten()', [DEVICES], 'layers on another device cannot write their keys'),
    ('states_stay_where_their_layer_is', 'inference/models/pretrained.py', 'tapped', 'value.to(device)', 'value', [DEVICES], 'a draft gets states on several devices'),
    ('the_last_states_stay_there', 'cotrain/teacher/target_model.py', '_read', 'output.last_hidden_state.to(model.device)', 'output.last_hidden_state', [DEVICES], 'the loss gets states of another device'),
    ('rows_to_keep_on_the_first_device', 'inference/models/pretrained.py', 'own_logits', 'if not spread and', 'if', [DEVICES], "a model's own logits cannot be compared"),
    ('meta_weights_have_no_print', 'inference/models/pretrained.py', 'whole_tensor', 'if not tensor.is_meta:', 'if True:', [DISK], 'a target that is partly on a disk has no fingerprint'),
    ('drafts_copy_meta_layers', 'cotrain/students/independent.py', 'plain_tensors', 'whole_tensor(target, name, tensor)', 'tensor', [DISK], 'a draft begins with layers without values'),
    ('offloaded_weights_are_refused', 'inference/models/selfcheck.py', '_once', 'if not elsewhere and any', 'if any', [DISK], 'a target that is partly on a disk cannot sample'),
    ('a_shard_finds_states_that_others_read', 'cotrain/training/assembly.py', 'trained_by', 'remember=0 if cfg.shards_target else', 'remember=', [SPREAD + 'test_states_are_read_in_step'], 'one process waits for ever'),
    ('a_sharded_target_is_measured', 'cotrain/training/preconditions.py', '_spread', '(several and cfg.measure,', '(False,', [SPREAD + 'test_what_needs_the_target_in_one_place_is_refused'], 'one process waits for ever'),
    ('one_process_has_all_layers', 'cotrain/training/distributed.py', 'sharded_target', 'fully_shard(layer, mesh=mesh)', 'pass', [SPREAD + 'test_each_of_two_processes_has_half_of_the_layers'], 'a target that needs two GPUs does not fit'),
    ('paths_of_the_first_device', 'inference/models/cache.py', 'move_path', 'slots.index_put_((row.to(here), target.to(here)), old)', 'slots.index_put_((row, target), old)', [SPREAD + 'test_a_tree_of_drafts_on_two_devices_gives_the_texts_of_one'], 'an accepted path cannot be kept on another device'),
    ('logits_stay_where_the_head_is', 'inference/models/pretrained.py', 'head_of', '.to(states.device)', '', [SPREAD + 'test_a_tree_of_drafts_on_two_devices_gives_the_texts_of_one'], 'the loss gets logits of another device'),
    ('a_head_without_values', 'inference/models/pretrained.py', 'head_weight', 'return whole_tensor(head, "weight", head.weight.detach())', 'return head.weight', [SPREAD + 'test_a_head_on_a_disk_fills_an_eagle_as_one_in_memory'], 'an eagle cannot begin with a head in other memory'),
    ('bits_of_layers_elsewhere', 'inference/proposers/quantised.py', '_quantised_copy', 'if any(weight.is_meta for', 'if False and any(weight.is_meta for', [SPREAD + 'test_a_head_on_a_disk_fills_an_eagle_as_one_in_memory'], 'a draft is the whole target, and its acceptance too high'),
    ('machines_do_not_share', 'cotrain/config/settings.py', 'TrainConfig.shards_target', 'self.trainer.devices * self.trainer.nodes', 'self.trainer.devices', [SPREAD + 'test_one_process_on_each_of_two_machines_shares_the_target'], 'each machine loads the whole target'),
    ('a_process_samples_alone', 'cotrain/training/job.py', 'sampled_texts', 'and cfg.shards_target:', 'and False:', [SPREAD + 'test_processes_that_share_a_target_do_not_sample'], 'one process waits for ever'),
    ('parts_stay_gathered', 'cotrain/training/distributed.py', 'sharded_target', 'fully_shard(layer, mesh=mesh)', 'fully_shard(layer, mesh=mesh, reshard_after_forward=False)', [SPREAD + 'test_each_of_two_processes_has_half_of_the_layers'], 'after a pass each process has the whole target'),
    ('memory_of_one_device', 'cotrain/training/preflight.py', '_memory', 'cfg.target.device_map is None or', 'True or', ['tests/cotrain/commands/test_train.py::test_memory_of_a_target_on_several_devices_is_theirs_together'], 'a target that fits on two GPUs is refused'),
]
