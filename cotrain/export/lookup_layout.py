"""Export of drafts of kind retrieval and hybrid for vLLM: the draft folder, unchanged, and a README.

In vLLM, the method `custom_class` loads `inference.servers.vllm_lookup.Lookup`, which reads the folder. So the package
`inference` must be installed in vLLM's environment.
"""

import shlex
import shutil
from pathlib import Path

from cotrain.export.engines import MARK, place, serve_vllm
from cotrain.export.publishing import planned_anew, said_of
from inference.drafts.atomic import new_folder
from inference.drafts.draft_folder import PROMPTS, describe, read
from inference.drafts.weight_files import CONFIG, read_json
from inference.servers.vllm_lookup import FOLDER
from inference.servers.vllm_server import custom_class

SECTION = """# Look-up for vLLM

Made for `{target}`; the text keeps the target's distribution. vLLM treats the drafts as certain, so a draft model in
this folder drafts its likeliest tokens there.

vLLM's environment must have the package `inference`: `pip install --no-deps` of cotrain, or `PYTHONPATH=<checkout>`.

```
{command}
```

{remarks}{mark}
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
    """Copy the folder `source`, of kind retrieval or hybrid, to `output`, with a README that has the launch command.
    Return `output`. The folder's prompts are left out, since engines do not read them.

    k: drafts per round. target: hub id or path. If k or target is None, its value is read from cotrain.json. replace:
    whether a folder at `output` is replaced. name: the folder's name on the hub, if it will be pushed.

    Raises ValueError, which names the key, for a folder without metadata, and for a folder with a datastore if it is to
    be pushed. Raises FileExistsError if `output` is not empty and `replace` is False.
    """
    source_metadata = read(source).metadata
    if source_metadata is None:
        raise ValueError(
            f"draft.path={source} has no cotrain.json, so its target is unknown: name a folder that cotrain train wrote"
        )
    if name and (read_json(Path(source) / CONFIG).get("lookup") or {}).get("datastore"):
        raise ValueError(
            f"push_to_hub={name}: {source} looks up drafts in a datastore on this machine, which other people do not "
            "have: leave push_to_hub= out"
        )
    metadata = source_metadata.exported(target, k, None)
    remarks = said_of(metadata)
    if source_metadata.kind == "hybrid" and not k:
        metadata, planned = planned_anew(source, source_metadata, metadata, "greedy")
        remarks += planned
    served = metadata.target["name"]
    with new_folder(Path(output), replace=replace) as new:
        shutil.copytree(source, new, dirs_exist_ok=True, ignore=shutil.ignore_patterns(PROMPTS))
        describe(new, metadata)
        folder = name.split("/")[-1] if name else str(Path(output).absolute())
        command = f"{FOLDER}={shlex.quote(folder)} {serve_vllm(place(str(served)), custom_class(metadata.k))}"
        fetched = f"hf download {name} --local-dir {folder}\n" if name else ""
        (new / "README.md").write_text(
            SECTION.format(
                target=metadata.learnt_from,
                command=fetched + command,
                remarks="".join(f"{one}\n\n" for one in remarks),
                mark=MARK,
            ),
            encoding="utf-8",
        )
    return Path(output)
