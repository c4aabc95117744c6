"""vLLM's connector that writes hidden states to files, on a CPU, where vLLM 0.32's own ends the server.

It runs inside a vLLM installation, which imports it by `kv_connector_module_path`, and imports nothing of this project.
vLLM's own connector copies the states on a CUDA stream into pinned memory; there are neither here.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own


class Done:
    """Stands for a CUDA event of a copy: copies on a CPU are done at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HiddenStatesOnCPU(own.ExampleHiddenStatesConnector):
    """Writes hidden states to the files that vLLM's own connector writes on a GPU."""

    def _submit_async_write(self, pending: own.PendingSave) -> None:
        assert self._kv_cache is not None
        size = self._block_size
        slots = (torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)).flatten()
        count = len(pending.token_ids)
        states = own.extract_from_kv_cache(self._kv_cache, slots, count).clone()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        done = Done()
        future = self._executor.submit(
            self._write_tensors, tensors, done, pending.filename, self._lock_fds.pop(pending.req_id, None)
        )
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda future: self._on_write_done(pending.req_id, future))
