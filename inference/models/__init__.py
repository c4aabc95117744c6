"""Any Hugging Face causal LM with one forward on ragged rows, and how its passes are run."""
