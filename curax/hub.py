"""Checkpoints and files of problems on the Hugging Face hub, by name.

    owner/name[@revision]           a checkpoint
    owner/name[@revision][:PATH]    data: a file, a pattern, or a folder with a split

What exists here under such a name is taken first. Files come through the package
`huggingface_hub` into its cache, only those that are read, and nothing of a repository
is run. That package resumes broken downloads, locks what other processes download too,
keeps to `HF_HUB_OFFLINE`, and alone sees the token. A revision that is a commit needs
no network once its files are in the cache.
"""

import contextlib
import glob
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from curax.settings.packages import missing

TOKENIZER = (
    *("tokenizer.json", "*.model", "vocab.json", "merges.txt", "added_tokens.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)
ADAPTER = "adapter_config.json"  # of a folder that holds adapters alone, as peft has it
CONFIG = ("config.json", "generation_config.json", "curax.json", ADAPTER)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
DATA = (".jsonl", ".parquet", ".json")
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?:@([^\s:@]+))?(?::(\S+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
SHOWN = 4  # files that a message names


class HubError(ValueError):
    """A name cannot be found or downloaded. Its text is one sentence."""


class Name(NamedTuple):
    """The parts of a name on the hub."""

    repo: str  # owner/name
    revision: str | None  # branch, tag or commit; None: the default branch
    inside: str  # file, pattern or folder; empty: the top folder

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}{f':{self.inside}' if self.inside else ''}"


def parsed(path: str | Path, kind: str) -> Name | None:
    """The parts of a name on the hub; None: a local path, or nothing like a name.

    Args:
        path: what a config or a command line has.
        kind: of the repository: `model`, or `dataset`, whose name may have a PATH. A
            last part with the suffix of a data file is no name without one.
    """
    text = str(path)
    found = _NAME.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    name = Name(found[1], found[2], (found[3] or "").strip("/"))
    if kind == "model":
        return None if name.inside else name
    is_file = not name.inside and text.lower().endswith(DATA)
    return None if is_file else name


def pinned(path: str, kind: str, before: Any = None) -> str:
    """A name with its revision as a commit; other paths as they are.

    Args:
        path: a path, or a name on the hub.
        kind: as of `parsed`.
        before: the pinned name that a run began with; where it has the same parts, a
            name without a revision is that one, without asking the hub.

    Raises:
        HubError: the hub does not have it, or cannot be asked.
    """
    name = parsed(path, kind)
    if name is None or _COMMIT.fullmatch(name.revision or ""):
        return path
    old = _NAME.fullmatch(before) if isinstance(before, str) else None
    if old and old[2] and name == (old[1], None, (old[3] or "").strip("/")):
        return str(before)
    with _package(name, kind) as hub:
        resolved = hub.HfApi().resolve_revision(
            name.repo, repo_type=kind, revision=name.revision
        )
    return str(name._replace(revision=resolved.resolved))


def checkpoint(path: str | Path, *, weights: bool = True) -> Path:
    """The folder of a checkpoint, downloaded where its path is a name on the hub.

    Args:
        path: folder, or `owner/name[@revision]`.
        weights: whether the weights are needed too, not only config and tokenizer.

    Raises:
        HubError: as `pinned`; or it has the weights of adapters alone.
    """
    name, folder = parsed(path, "model"), Path(os.path.expanduser(path))
    if name is not None:
        wanted = [*CONFIG, *TOKENIZER, *(WEIGHTS if weights else ())]
        # To the hub a `*` passes `/`, and folders hold the weights in other forms.
        folder = _snapshot(name, "model", wanted, ignore=["*/*"])
    alone = (folder / ADAPTER).is_file() and not (folder / "config.json").exists()
    if weights and alone:  # a tokenizer may lie beside them
        raise HubError(
            f"{path} holds adapters without the checkpoint that they belong to; name "
            "the folder of a run, or of both merged, as curax export writes it without "
            "--adapter."
        )
    return folder


def data(path: str | Path, split: str) -> Path:
    """The local path of data, downloaded where it is a name on the hub.

    Args:
        path: local path or pattern, or `owner/name[@revision][:PATH]`.
        split: of a folder, the files to download: those whose names begin with it.

    Raises:
        HubError: as `pinned`; or no file has this name.
    """
    name = parsed(path, "dataset")
    if name is None:
        return Path(os.path.expanduser(path))
    wanted = _patterns(name.inside, split)
    folder = _snapshot(name, "dataset", wanted)
    if not any(found for pattern in wanted for found in folder.glob(pattern)):
        what = f"no file of data of the split {split} in a folder of this name"
        if len(wanted) == 1 or glob.has_magic(name.inside):
            what = "no such file of data"
        raise HubError(
            f"{name}: there is {what}{_listed(name)}; name a file, a pattern or a "
            f"folder behind a colon, as {name.repo}:data/{split}-*.parquet."
        )
    return folder / name.inside


def _patterns(inside: str, split: str) -> list[str]:
    """Patterns of the files that the PATH of a name stands for."""
    if inside.lower().endswith(DATA):
        return [inside]
    if glob.has_magic(inside):
        return [inside + suffix for suffix in DATA]
    folder = f"{inside}/" if inside else ""
    return [
        f"{folder}{split}{rest}{suffix}"
        for suffix in (".jsonl", ".parquet")
        for rest in ("", "[-_.]*")
    ]


def _listed(name: Name) -> str:
    """Phrase that names some data files of a repository; empty if it cannot be read."""
    with contextlib.suppress(HubError), _package(name, "dataset") as hub:
        files = hub.HfApi().list_repo_files(
            name.repo, repo_type="dataset", revision=name.revision
        )
        some = sorted(file for file in files if file.lower().endswith(DATA))
        more = ", ..." if len(some) > SHOWN else ""
        return f", but {', '.join(some[:SHOWN]) or 'no file of data at all'}{more}"
    return ""


def _snapshot(
    name: Name, kind: str, patterns: Sequence[str], ignore: Sequence[str] = ()
) -> Path:
    """Folder of the cache with the files of a revision that match patterns."""
    with _package(name, kind) as hub:
        if not sys.stderr.isatty():
            hub.utils.disable_progress_bars()
        folder = hub.snapshot_download(
            name.repo,
            repo_type=kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignore),
        )
    return Path(folder)


@contextlib.contextmanager
def _package(name: Name, kind: str) -> Iterator[Any]:
    """The package, in a context that turns its errors into sentences.

    The texts of its errors, which may quote what was sent, are not shown.

    Raises:
        HubError: the package is missing, or failed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError as error:
        raise HubError(
            f"{name} does not exist here, and for a name on the hub {missing(error)}"
        ) from error
    try:
        yield huggingface_hub
    except Exception as error:
        raise HubError(_sentence(name, kind, error)) from None


def _sentence(name: Name, kind: str, error: BaseException) -> str:
    """The sentence about an error of the package."""
    from huggingface_hub import errors, is_offline_mode

    missing_here = f"{name} does not exist here"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name.repo} on the hub is gated; accept its terms on its page there, and "
            "log in with hf auth login."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{name.repo} on the hub has no revision {name.revision or 'main'}; name a "
            "branch, a tag or a commit of it behind an @."
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return (
            f"{missing_here}, and the hub has no {kind} {name.repo} that may be read "
            "with the token given here, if any; correct the name, or log in with hf "
            "auth login."
        )
    if is_offline_mode():
        return (
            f"{missing_here}, and the hub's cache has not all of it while "
            "HF_HUB_OFFLINE is set; unset that to download it, or name a folder."
        )
    if status is not None:
        return f"{missing_here}, and the hub answers with {status}; try again later."
    own = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)
    if isinstance(error, OSError) and error.strerror and not isinstance(error, own):
        return (
            f"{name} cannot be written to the hub's cache ({error.strerror}); mend "
            "that and try again, what is there is kept."
        )
    cause = error.__cause__ or error
    return (
        f"{missing_here}, and the hub cannot be reached ({type(cause).__name__}); try "
        "again with a connection, or name a folder."
    )
