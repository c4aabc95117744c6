"""Command `cotrain datastore`. It indexes a corpus; drafts with look-up then search the index."""

from collections.abc import Iterator
from pathlib import Path

from cotrain.config.settings import DatastoreConfig
from cotrain.data.conversations import Template
from cotrain.data.prompt_rows import PromptRows, Source
from cotrain.data.sources import source_of
from cotrain.errors import UserError, user_errors
from cotrain.run_folder import refuse_replaced, writable
from cotrain.training.preconditions import ids_of, outline
from inference.drafts.compatibility import hash_tokenizer
from inference.lookup.corpus import ABOUT, ORDER, TOKENS, About, Datastore
from inference.measure.environment import environment
from inference.request import ends_of


def run(cfg: DatastoreConfig) -> None:
    """Tokenize the training split with the target's tokenizer, and write the datastore to `output`. Raises UserError if
    `output` cannot be written or replaced."""
    refuse_replaced(cfg.output, ABOUT, (ORDER, TOKENS))
    for parent in Path(cfg.output).absolute().parents:
        if (parent / ABOUT).is_file():
            raise UserError(
                f"output={cfg.output} lies in the datastore {parent}, which may be replaced as a whole: "
                "name another folder"
            )
    writable("output", cfg.output)
    with user_errors():
        target, tokenizer = outline(cfg.target.path, cfg.target.trust_remote_code)
        source = source_of(cfg.data, "train", Template(tokenizer, cfg.data.template, ends_of(target)))
        print(*source.remarks, sep="\n", end="\n" * bool(source.remarks))
        origin = {"target": cfg.target.path, "data": cfg.data.path, "environment": environment()}
        about = About(ids_of(tokenizer), cfg.depth, tokenizer=hash_tokenizer(tokenizer), made=origin)
        store = Datastore.of(_documents(source), about)
        try:
            place = store.save(cfg.output, replace=cfg.overwrite)
        except FileExistsError as error:
            raise UserError(
                f"output={cfg.output} has a datastore: name another folder, or set overwrite=true"
            ) from error
    print(
        f"wrote {place}: {store.about.tokens} tokens of {store.about.documents} documents; to use it, "
        f"cotrain train draft=retrieval draft.datastore={place}"
    )


def _documents(source: Source) -> Iterator[list[int]]:
    """Yield the token ids of each document in the source: a text, or a prompt with its completion."""
    if isinstance(source, PromptRows):
        yield from ([*row["prompt"], *row["completion"]] for row in source.rows)
        return
    for text in source.texts["text"]:
        yield list(source.tokenizer(text, verbose=False)["input_ids"])
