"""Weights from the Hugging Face hub, fetched into its cache and verified.

    hf-hub:org/name[@revision]            a repository in OpenCLIP's layout
    hf:org/name[@revision]                a repository in transformers' layout
    open_clip:ViT-B-32/laion2b_s34b_b79k  OpenCLIP's model and pretrained tag: by openclip_tags.json
                                          (scripts/openclip_tags.py), and by the installed OpenCLIP

The only module that imports huggingface_hub, which honors HF_ENDPOINT, HF_HOME, HF_TOKEN and
HF_HUB_OFFLINE, and resumes a download that was cut.
"""

import contextlib
import difflib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_train.errors import CheckpointError, UserError
from clip_train.models.files import (
    CONFIG_NAME,
    TRANSFORMERS_CONFIGS,
    WEIGHTS_NAMES,
    sha256_of,
)
from clip_train.models.openclip.config import library

PREFIXES = ("hf-hub:", "hf:", "open_clip:")
TRANSFORMERS_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
EXAMPLE = "open_clip:ViT-B-32/laion2b_s34b_b79k"
_TAGS = Path(__file__).parent / "openclip_tags.json"


def is_on_hub(place: str) -> bool:
    return place.startswith(PREFIXES)


def fetch(place: str) -> Path:
    """The weights' file in the cache, with the repository's description beside it.

    UserError for an unknown form of name, or without huggingface_hub; CheckpointError if it cannot
    be fetched.
    """
    repository, revision = resolve(place)
    owner, name, *files = repository.split("/")
    repository = f"{owner}/{name}"
    try:
        import huggingface_hub as hub
        import huggingface_hub.errors
    except ImportError as e:
        raise UserError(f"{place} needs huggingface_hub: pip install 'clip-train[hub]'") from e
    missing = []
    wanted = files or (TRANSFORMERS_WEIGHTS if place.startswith("hf:") else WEIGHTS_NAMES)
    beside = TRANSFORMERS_CONFIGS if place.startswith("hf:") else (CONFIG_NAME,)
    for name in wanted:
        try:
            file = _verified(hub, place, repository, name, revision)
        except hub.errors.EntryNotFoundError as e:
            missing.append(e)
            continue
        for other in beside:
            with contextlib.suppress(hub.errors.EntryNotFoundError):  # weights alone will do
                _verified(hub, place, repository, other, file.parent.name)  # of the same commit
        return file
    raise CheckpointError(
        f"{place}: {repository} has neither {' nor '.join(wanted)}, or they cannot be "
        f"reached: {missing[-1]}"
    )


def described_at(place: str, names: Collection[str] = TRANSFORMERS_CONFIGS) -> Path:
    """The folder in the cache with these files of hf:org/name, as far as it has them. Files that
    are in the cache are not asked for again. UserError, CheckpointError."""
    repository, revision = resolve(place)
    try:
        import huggingface_hub as hub
        import huggingface_hub.errors
    except ImportError as e:
        raise UserError(f"{place} needs huggingface_hub: pip install 'clip-train[hub]'") from e
    folder: Path | None = None
    for name in names:
        path = hub.try_to_load_from_cache(repository, name, revision=revision)
        if path is None:
            with contextlib.suppress(hub.errors.EntryNotFoundError):
                path = str(_verified(hub, place, repository, name, revision))
        if isinstance(path, str):
            folder = Path(path).parent
    if folder is None:
        raise CheckpointError(f"{place}: {repository} has neither {' nor '.join(names)}")
    return folder


def cached(place: str) -> Path | None:
    """The weights' file if it is in the cache; None: not there, or huggingface_hub is missing.

    Nothing is fetched. UserError as in `resolve`.
    """
    repository, revision = resolve(place)
    owner, name, *files = repository.split("/")
    try:
        import huggingface_hub as hub
    except ImportError:
        return None
    for file in files or (TRANSFORMERS_WEIGHTS if place.startswith("hf:") else WEIGHTS_NAMES):
        path = hub.try_to_load_from_cache(f"{owner}/{name}", file, revision=revision)
        if isinstance(path, str):
            return Path(path)
    return None


def check_upload(place: str) -> str:
    """The repository of hf:USER/NAME, to which this machine can try to upload. UserError for
    another form of name, without huggingface_hub, or without a token."""
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)", place)
    if match is None:
        raise UserError(f"--push ({place}): write hf:USER/NAME, or hf:ORGANIZATION/NAME")
    try:
        import huggingface_hub as hub
        import huggingface_hub.constants
    except ImportError as e:
        raise UserError(
            f"--push ({place}) needs huggingface_hub: pip install 'clip-train[hub]'"
        ) from e
    if hub.constants.HF_HUB_OFFLINE:
        raise UserError(f"--push ({place}) needs the network, and HF_HUB_OFFLINE is set: unset it")
    if hub.get_token() is None:
        raise UserError(
            f"--push ({place}) needs a token that may write: set HF_TOKEN, or run `hf auth login` "
            "(huggingface.co/settings/tokens makes one)"
        )
    return match[1]


def upload(folder: Path, repository: str, message: str, *, public: bool) -> str:
    """Upload a folder's files as one commit; returns the repository's URL. A new repository is
    private unless `public`; one that exists stays as it is. CheckpointError."""
    import huggingface_hub as hub

    api = hub.HfApi()
    try:
        url = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except Exception as e:  # of its HTTP library too, which differs between releases
        raise CheckpointError(
            f"--push (hf:{repository}) failed: {type(e).__name__}: {e}. The export is complete in "
            f"{folder}; run the same command again, or hf upload {repository} {folder}"
        ) from e
    return str(url)


def resolve(place: str) -> tuple[str, str | None]:
    """(repository, revision or None for its newest). UserError.

    The repository of some tags ends with the name of a file, org/name/file.
    """
    scheme, _, name = place.partition(":")
    if scheme in ("hf-hub", "hf"):
        match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@(\S+))?", name)
        if match is None:
            raise UserError(f"{place}: write {scheme}:org/name, or {scheme}:org/name@revision")
        return match[1], match[2]
    if "/" not in name:
        raise UserError(f"{place}: write open_clip:MODEL/TAG, such as {EXAMPLE}")
    # OpenCLIP itself accepts these spellings of a model and a tag
    model, _, tag = name.rpartition("/")
    model, tag = model.replace("/", "-"), tag.lower().replace("-", "_")
    known = _known_tags()
    repository = known.repositories.get(f"{model}/{tag}")
    return repository or _by_openclip(place, model, tag, known), None


@dataclass(frozen=True)
class KnownTags:
    """openclip_tags.json."""

    open_clip: str  # its version
    repositories: dict[str, str]  # by MODEL/TAG; some end with the name of a file


def _known_tags() -> KnownTags:
    content = json.loads(_TAGS.read_text())
    return KnownTags(content["open_clip"], content["tags"])


def _by_openclip(place: str, model: str, tag: str, known: KnownTags) -> str:
    """The repository of a tag that only the installed OpenCLIP knows. UserError."""
    name, by_name = f"{model}/{tag}", "give the hub's repository as hf-hub:org/name"
    try:
        open_clip = library(place)
    except UserError:
        raise UserError(
            f"{place} is not among the {len(known.repositories)} pretrained tags of OpenCLIP "
            f"{known.open_clip}, which clip-train knows{_nearest(name, known.repositories)} "
            f"Otherwise install a newer OpenCLIP (pip install 'clip-train[openclip]'), or {by_name}"
        ) from None
    config = open_clip.get_pretrained_cfg(model, tag) or {}
    if config.get("hf_hub"):
        return config["hf_hub"].rstrip("/")
    if config:
        raise UserError(
            f"{place}: OpenCLIP has these weights at {config.get('url')}, not on the hub: download "
            f"them, and give the file; or {by_name}"
        )
    tags = {*known.repositories, *("/".join(pair) for pair in open_clip.list_pretrained())}
    raise UserError(
        f"{place} is not a pretrained tag of OpenCLIP {known.open_clip}, nor of the installed "
        f"{open_clip.__version__}{_nearest(name, tags)} Otherwise {by_name}"
    )


def _nearest(name: str, known: Collection[str]) -> str:
    """The tags that resemble MODEL/TAG, or else the models, as the end of a sentence."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.8)
    if close:
        return f": did you mean {', '.join(close)}?"
    model = name.partition("/")[0]
    tags = sorted(tag.partition("/")[2] for tag in known if tag.startswith(f"{model}/"))
    if tags:
        return f": {model} has the tags {', '.join(tags)}."
    models = sorted({tag.partition("/")[0] for tag in known})
    close = difflib.get_close_matches(model, models, n=3, cutoff=0.4)
    return f": the nearest models are {', '.join(close)}." if close else "."


def _verified(hub: Any, place: str, repository: str, name: str, revision: str | None) -> Path:
    """Fetch one file into the cache; a damaged one once more. EntryNotFoundError; CheckpointError.

    The cache names a large file (LFS), such as weights, by the sha256 that the hub states. Others,
    such as descriptions, are not verified.
    """
    for again in (False, True):
        try:
            path = Path(
                hub.hf_hub_download(repository, name, revision=revision, force_download=again)
            )
        except hub.errors.EntryNotFoundError:
            raise
        except Exception as e:  # of its HTTP library too, which differs between releases
            near = ""
            if isinstance(e, hub.errors.RepositoryNotFoundError):
                close = difflib.get_close_matches(
                    repository, set(_known_tags().repositories.values()), n=3, cutoff=0.8
                )
                near = f"; did you mean hf-hub:{' or hf-hub:'.join(close)}?" if close else ""
            raise CheckpointError(
                f"{place}: {name} cannot be fetched: {type(e).__name__}: {e}{near}"
            ) from e
        blob = path.resolve()
        if len(blob.name) != 64 or blob.name == sha256_of(blob):
            return path
    raise CheckpointError(
        f"{place}: {name} does not have the checksum that the hub states ({blob.name}); "
        "try again later"
    )
