"""Planted bugs of the n-gram baselines."""

# fmt: off
ROWS_OF_BUGS = [
    ('kneser_ney_raw_lower_counts', 'cotrain/bundled/ngram_lm.py', 'np.unique(grams % vocabulary**k, return_counts=True)', 'np.unique(pack(stream, k, vocabulary), return_counts=True)', ['tests/test_ngram_lm.py::test_by_hand'], 'lower orders count occurrences, not different tokens before'),
    ('kneser_ney_left_mass_lost', 'cotrain/bundled/ngram_lm.py', 'left=np.add.reduceat(cut, starts) / total', 'left=discounts(counts)[1] * sizes / total', ['tests/test_ngram_lm.py::test_laws_sum_to_one[2]'], 'laws do not sum to 1'),
    ('kneser_ney_unseen_context_keeps_nothing', 'cotrain/bundled/ngram_lm.py', 'grams // self.vocabulary, 1.0)', 'grams // self.vocabulary, 0.0)', ['tests/test_ngram_lm.py::test_unseen_context_backs_off'], 'an unseen context gives probability 0'),
    ('kneser_ney_drops_the_last_token', 'cotrain/bundled/ngram_lm.py', 'grams % vocabulary**k', 'grams // vocabulary', ['tests/test_ngram_lm.py::test_textbook_recursion'], 'the shorter context is the far end, not the near one'),
    ('kneser_ney_packs_by_less', 'cotrain/bundled/ngram_lm.py', '        packed *= vocabulary\n', '        packed *= vocabulary - 1\n', ['tests/test_ngram_lm.py::test_by_hand'], 'two n-grams share a code'),
    ('kneser_ney_wide_codes_wrap', 'cotrain/bundled/ngram_lm.py', 'or vocabulary**order > 2**63:', 'or order > 63:', ['tests/test_ngram_lm.py::test_refuses'], 'codes past 63 bits wrap around in silence'),
    ('kneser_ney_discount_formula', 'cotrain/bundled/ngram_lm.py', 'found = i - (i + 1) *', 'found = i - i *', ['tests/test_ngram_lm.py::test_discounts_by_hand'], 'discounts of modified Kneser-Ney'),
    ('ngram_context_of_the_block_only', 'cotrain/bundled/ngram_lm.py', 'logs = model.log_prob(blocks.flatten().numpy()).reshape(blocks.shape)', 'logs = np.stack([model.log_prob(block) for block in blocks.numpy()])', ['tests/test_ngram_lm.py::test_evaluate'], 'a baseline weaker than it says'),
    ('bigram_transposed', 'cotrain/bundled/ngram_lm.py', 'smoothed / smoothed.sum(1, keepdim=True)', 'smoothed / smoothed.sum(0, keepdim=True)', ['tests/test_ngram_lm.py::test_bigram_counts'], 'a table normalised over the wrong token'),
    ('bigram_alpha_mean_of_means', 'cotrain/bundled/ngram_lm.py', 'total += alpha(log_p, logs[ids.long()]).sum().item()', 'total += alpha(log_p, logs[ids.long()]).sum().item() / ids.numel()', ['tests/test_ngram_lm.py::test_bigram_alpha_by_hand'], 27),
    ('bits_per_byte_in_nats', 'cotrain/bundled/ngram_lm.py', 'return nats / size / math.log(2)', 'return nats / size', ['tests/test_ngram_lm.py::test_bits_per_byte'], 'nats reported as bits'),
]
