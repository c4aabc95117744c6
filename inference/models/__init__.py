"""Any Hugging Face causal LM behind one forward on ragged rows, and how its passes are run."""
