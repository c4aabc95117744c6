"""Planted bugs of sequential draft heads."""

# fmt: off
ROWS_OF_BUGS = [
    ('anchor_that_no_head_sees', 'inference/proposers/hydra.py', 'target.embedded(given["anchor"][:, 0])', 'target.embedded(0 * given["anchor"][:, 0])', ['tests/test_heads_of_state.py::test_hydra_sees_the_anchor_and_medusa_does_not'], 'the served law is not the one that learnt'),
    ('tokens_by_the_weights_of_others', 'inference/proposers/hydra_network.py', 'first = i * self.depths - i * (i - 1) // 2', 'first = i * self.depths - i * (i + 1) // 2', ['tests/test_heads_of_state.py::test_each_head_is_the_formula[hydra]'], 'a token is read by the weights of the one before'),
    ('every_token_is_the_anchor', 'cotrain/students/hydra.py', 'embedded[:, j + 1 :].flatten(0, 1)', 'embedded[:, 1 : count + 1].flatten(0, 1)', ['tests/test_heads_of_state.py::test_each_head_is_the_formula[hydra]'], 'heads learn without the drafts before them'),
    ('embeddings_of_any_size', 'inference/proposers/hydra_network.py', 'F.rms_norm(embedded.to(self.tokens.dtype), embedded.shape[-1:])', 'embedded.to(self.tokens.dtype)', ['tests/test_heads_of_state.py::test_each_head_is_the_formula[hydra]'], 'embeddings of a hundredth are not read at all'),
    ('heads_without_the_state_itself', 'inference/proposers/hydra_network.py', 'torch.addmm(newest.to(self.out.dtype), F.silu', 'torch.addmm(0 * newest.to(self.out.dtype), F.silu', ['tests/test_heads_of_state.py::test_heads_begin_as_the_targets_own[hydra]'], 'heads begin with no law at all'),
    ('drafts_that_later_heads_do_not_see', 'inference/proposers/hydra.py', 'target.embedded(ids).flatten', 'target.embedded(given["anchor"].expand_as(ids)).flatten', ['tests/test_students.py::test_the_law_that_learns_is_the_law_that_is_served[hydra]'], 'later heads read the anchor for every draft'),
]
