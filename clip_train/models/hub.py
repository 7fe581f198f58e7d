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
from collections.abc import Collection, Sequence
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
REMEDY = "give the hub's repository as hf-hub:org/name"
_TAGS = Path(__file__).parent / "openclip_tags.json"


def is_on_hub(place: str) -> bool:
    return place.startswith(PREFIXES)


def fetch(place: str) -> Path:
    """The weights' file in the cache, with the repository's description beside it.

    UserError for an unknown form of name, or without huggingface_hub; CheckpointError if it cannot
    be fetched.
    """
    found = resolve(place)
    try:
        import huggingface_hub as hub
        import huggingface_hub.errors
    except ImportError as e:
        raise UserError(f"{place} needs huggingface_hub: pip install 'clip-train[hub]'") from e
    missing = []
    wanted = _weights_names(place, found)
    descriptions = TRANSFORMERS_CONFIGS if place.startswith("hf:") else (CONFIG_NAME,)
    for name in wanted:
        try:
            file = _verified(hub, place, found.repository, name, found.revision)
        except hub.errors.EntryNotFoundError as e:
            missing.append(e)
            continue
        commit = file.parent.name  # the cache has a folder for each commit
        for description in descriptions:
            # the description is optional
            with contextlib.suppress(hub.errors.EntryNotFoundError):
                _verified(hub, place, found.repository, description, commit)
        return file
    raise CheckpointError(
        f"{place}: {found.repository} has neither {' nor '.join(wanted)}, or they cannot be "
        f"reached: {missing[-1]}"
    )


def described_at(place: str, names: Collection[str] = TRANSFORMERS_CONFIGS) -> Path:
    """The folder in the cache with these files of hf:org/name, as far as it has them. Files that
    are in the cache are not asked for again. UserError, CheckpointError."""
    found = resolve(place)
    try:
        import huggingface_hub as hub
        import huggingface_hub.errors
    except ImportError as e:
        raise UserError(f"{place} needs huggingface_hub: pip install 'clip-train[hub]'") from e
    folder: Path | None = None
    for name in names:
        # str: cached; None: never asked; another object: known not to exist
        path = hub.try_to_load_from_cache(found.repository, name, revision=found.revision)
        if path is None:
            with contextlib.suppress(hub.errors.EntryNotFoundError):
                path = str(_verified(hub, place, found.repository, name, found.revision))
        if isinstance(path, str):
            folder = Path(path).parent
    if folder is None:
        raise CheckpointError(f"{place}: {found.repository} has neither {' nor '.join(names)}")
    return folder


def cached(place: str) -> Path | None:
    """The weights' file if it is in the cache; None: not there, or huggingface_hub is missing.

    Nothing is fetched. UserError as in `resolve`.
    """
    found = resolve(place)
    try:
        import huggingface_hub as hub
    except ImportError:
        return None
    for name in _weights_names(place, found):
        path = hub.try_to_load_from_cache(found.repository, name, revision=found.revision)
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
    # errors of huggingface_hub and of its HTTP library, which differs between releases
    except Exception as e:
        raise CheckpointError(
            f"--push (hf:{repository}) failed: {type(e).__name__}: {e}. The export is complete in "
            f"{folder}; run the same command again, or hf upload {repository} {folder}"
        ) from e
    return str(url)


@dataclass(frozen=True)
class HubPlace:
    """Where on the hub a model's weights are."""

    repository: str  # org/name
    file: str | None = None  # None: a usual name, such as open_clip_model.safetensors
    revision: str | None = None  # None: the newest

    @classmethod
    def of(cls, name: str) -> "HubPlace":
        """name: org/name or org/name/file, as in OpenCLIP's table of pretrained tags."""
        owner, repository, *file = name.split("/", 2)
        return cls(f"{owner}/{repository}", file[0] if file else None)


def resolve(place: str) -> HubPlace:
    """The place on the hub that a name means. UserError."""
    scheme, _, name = place.partition(":")
    if scheme in ("hf-hub", "hf"):
        match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@(\S+))?", name)
        if match is None:
            raise UserError(f"{place}: write {scheme}:org/name, or {scheme}:org/name@revision")
        return HubPlace(match[1], revision=match[2])
    if "/" not in name:
        raise UserError(f"{place}: write open_clip:MODEL/TAG, such as {EXAMPLE}")
    # OpenCLIP itself accepts these spellings of a model and a tag
    model, _, tag = name.rpartition("/")
    model, tag = model.replace("/", "-"), tag.lower().replace("-", "_")
    known = _known_tags()
    if f"{model}/{tag}" in known.places:
        return known.places[f"{model}/{tag}"]
    return _by_openclip(place, model, tag, known)


def _weights_names(place: str, found: HubPlace) -> Sequence[str]:
    """The names that the weights' file may have."""
    if found.file is not None:
        return [found.file]
    return TRANSFORMERS_WEIGHTS if place.startswith("hf:") else WEIGHTS_NAMES


@dataclass(frozen=True)
class KnownTags:
    """openclip_tags.json."""

    open_clip: str  # its version
    places: dict[str, HubPlace]  # by MODEL/TAG


def _known_tags() -> KnownTags:
    content = json.loads(_TAGS.read_text())
    places = {tag: HubPlace.of(name) for tag, name in content["tags"].items()}
    return KnownTags(content["open_clip"], places)


def _by_openclip(place: str, model: str, tag: str, known: KnownTags) -> HubPlace:
    """The place of a tag that only the installed OpenCLIP knows. UserError."""
    try:
        open_clip = library(place)
    except UserError:
        raise UserError(
            f"{place} is not among the {len(known.places)} pretrained tags of OpenCLIP "
            f"{known.open_clip}, which clip-train knows. {_nearest(model, tag, known.places)}"
            f"Otherwise install a newer OpenCLIP (pip install 'clip-train[openclip]'), or {REMEDY}"
        ) from None
    config = open_clip.get_pretrained_cfg(model, tag) or {}
    if config.get("hf_hub"):
        return HubPlace.of(config["hf_hub"].rstrip("/"))
    if config:
        raise UserError(
            f"{place}: OpenCLIP has these weights at {config.get('url')}, not on the hub: download "
            f"them, and give the file; or {REMEDY}"
        )
    tags = {*known.places, *("/".join(pair) for pair in open_clip.list_pretrained())}
    raise UserError(
        f"{place} is not a pretrained tag of OpenCLIP {known.open_clip}, nor of the installed "
        f"{open_clip.__version__}. {_nearest(model, tag, tags)}Otherwise {REMEDY}"
    )


def _nearest(model: str, tag: str, known: Collection[str]) -> str:
    """A sentence, with a space behind it, that names the tags that resemble MODEL/TAG, the tags of
    the model, or the models that resemble it. "" without any."""
    close = difflib.get_close_matches(f"{model}/{tag}", sorted(known), n=3, cutoff=0.8)
    if close:
        return f"Did you mean {', '.join(close)}? "
    tags = sorted(name.partition("/")[2] for name in known if name.startswith(f"{model}/"))
    if tags:
        return f"{model} has the tags {', '.join(tags)}. "
    models = sorted({name.partition("/")[0] for name in known})
    close = difflib.get_close_matches(model, models, n=3, cutoff=0.4)
    if close:
        return f"The nearest models are {', '.join(close)}. "
    return ""


def _places_like(repository: str) -> list[str]:
    """The places of OpenCLIP's pretrained tags whose repositories resemble this one."""
    places: dict[str, str] = {}  # by repository
    for tag, known in _known_tags().places.items():
        # only the tag says which file of the repository has the weights
        name = f"hf-hub:{known.repository}" if known.file is None else f"open_clip:{tag}"
        places.setdefault(known.repository, name)
    close = difflib.get_close_matches(repository, places, n=3, cutoff=0.8)
    return [places[name] for name in close]


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
        except hub.errors.RepositoryNotFoundError as e:
            close = _places_like(repository)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise CheckpointError(
                f"{place}: {name} cannot be fetched: {type(e).__name__}: {e}{hint}"
            ) from e
        # errors of huggingface_hub and of its HTTP library, which differs between releases
        except Exception as e:
            raise CheckpointError(
                f"{place}: {name} cannot be fetched: {type(e).__name__}: {e}"
            ) from e
        blob = path.resolve()
        is_large_file = len(blob.name) == 64  # named by its sha256
        if not is_large_file or blob.name == sha256_of(blob):
            return path
    raise CheckpointError(
        f"{place}: {name} does not have the checksum that the hub states ({blob.name}); "
        "try again later"
    )
