"""Look-up, alone or with a draft model, for vLLM: the draft folder unchanged, read there by our proposer class.

vLLM's method `custom_class` loads `inference.servers.vllm_lookup.Lookup`; its environment must have this package.
"""

import json
import shlex
import shutil
from pathlib import Path

from cotrain.export.engines import MARK, place
from inference.drafts.atomic import new_folder
from inference.drafts.draft_folder import describe, read
from inference.drafts.weight_files import CONFIG, read_json
from inference.servers.vllm_lookup import FOLDER
from inference.servers.vllm_server import custom_class

SECTION = """# Look-up for vLLM

Made for `{target}`; the text stays the target's. vLLM takes look-up's drafts for certain, so a model beside it drafts
its likeliest tokens there.

vLLM's environment must have the package `inference`: `pip install --no-deps` of cotrain, or `PYTHONPATH=<checkout>`.

```
{command}
```

{mark}
"""


def export(
    source: str | Path,
    output: str | Path,
    k: int | None = None,
    *,
    target: str | None = None,
    replace: bool = False,
    name: str | None = None,
) -> Path:
    """Copy a folder of kind retrieval or hybrid, with a README that has the launch command. k: drafts a round, None: as
    planned. target: hub id or path; None: the one that the folder names. name: what the README calls the folder.

    Raises ValueError naming the key for a folder without metadata, FileExistsError for a folder that is not empty
    without replace.
    """
    source_metadata = read(source).metadata
    if source_metadata is None:
        raise ValueError(f"draft.path={source}: it does not say what it is, there is no cotrain.json")
    if name and (read_json(Path(source) / CONFIG).get("lookup") or {}).get("datastore"):
        raise ValueError(f"push_to_hub: {source} looks up a datastore of this machine, which others do not have")
    metadata = source_metadata.exported(target, k, None)
    served = metadata.target["name"]
    with new_folder(Path(output), replace=replace) as new:
        shutil.copytree(source, new, dirs_exist_ok=True)
        describe(new, metadata)
        command = launch(name.split("/")[-1] if name else str(Path(output).absolute()), str(served), metadata.k)
        fetched = f"hf download {name} --local-dir {name.split('/')[-1]}\n" if name else ""
        (new / "README.md").write_text(
            SECTION.format(target=served, command=fetched + command, mark=MARK), encoding="utf-8"
        )
    return Path(output)


def launch(draft: str, target: str, k: int) -> str:
    """The command that serves, for a POSIX shell."""
    serve = shlex.join(["vllm", "serve", place(target), "--speculative-config", json.dumps(custom_class(k))])
    return f"{FOLDER}={shlex.quote(draft)} {serve}"
