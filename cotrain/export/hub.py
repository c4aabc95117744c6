"""An exported folder on the Hugging Face hub, with its card. HF_TOKEN or `hf auth login` say who pushes, HF_ENDPOINT
where to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import HFValidationError, validate_repo_id

from cotrain.errors import UserError
from inference.drafts.bundled_target import resolve


def require(repo: str) -> None:
    """Raise UserError for a name that is not user/name, and where the hub does not answer or knows no such user: asked
    before minutes of export. Rights to write to `repo` are known when it is pushed."""
    with _told(repo):
        if repo.count("/") != 1:
            raise HFValidationError("it must be user/name")
        validate_repo_id(repo)
        HfApi().whoami()


def push(folder: Path, repo: str) -> str:
    """Upload all files of the folder to a repository that is made, public, where there is none; returns its address.
    Raises UserError for what the hub refuses."""
    with _told(repo, f"; {folder} is whole, `hf upload {repo} {folder}` pushes it"):
        hub = HfApi()
        address = hub.create_repo(repo, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Draft exported by cotrain")
    return str(address)


def local(target: str) -> bool:
    """Whether the target is a folder of this machine, which nobody finds who downloads the draft."""
    return Path(resolve(target)).is_dir()


@contextmanager
def _told(repo: str, then: str = "") -> Iterator[None]:
    """What the hub's client raises, in a line; then: what can be done all the same."""
    try:
        yield
    except HFValidationError as error:
        raise UserError(f"push_to_hub={repo}: {error}") from error
    except LocalTokenNotFoundError as error:
        raise UserError(f"push_to_hub={repo}: no token of the hub: hf auth login, or set HF_TOKEN") from error
    except OfflineModeIsEnabled as error:
        raise UserError(f"push_to_hub={repo}: HF_HUB_OFFLINE is set{then}") from error
    except (HTTPError, OSError, RuntimeError) as error:  # the last is of hf_xet, which uploads large files
        raise UserError(f"push_to_hub={repo}: {' '.join(str(error).split())}{then}") from error
