"""Run the commands of a page as they are written, in a fresh clone whose path has a space, and say what each printed.

    python -m studies.as_written outputs/results/tutorial_cpu.json docs/tutorial-cpu.md
    python -m studies.as_written outputs/results/tutorial_gpu.json docs/tutorial-gpu.md --stand-in
    python -m studies.as_written /tmp/readme.json README.md --stand-in --add minutes=2

Commands are the lines of blocks without a language. --stand-in: a small random Qwen3 in the folder Qwen/Qwen3-8B of the
clone takes the place of the hub's, prompts.jsonl is a copy of the shipped prompts, `trainer=gpu` is left out where there
is no GPU, and a server that answers as vLLM does runs at the page's address. --add: a setting that each `cotrain train`
gets besides, as `minutes=2`. --set-up: make the clone's own environment as the page says; otherwise this one's packages
are used, with the clone's code. Returns 1 if a command fails.
"""
