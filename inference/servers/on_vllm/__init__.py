"""What a vLLM imports on a CPU: it has this folder in its PYTHONPATH, and nothing else of this project."""
