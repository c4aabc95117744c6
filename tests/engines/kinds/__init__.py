"""Kinds of draft other than the independent one served by a real vLLM; run apart from `make test-engines`:

COTRAIN_VLLM=.venv-engines/bin/python .venv/bin/python -m pytest -rA -s tests/engines/kinds
"""
