"""From what a user calls a model to a folder or a GGUF file: a path, a Hugging Face hub id, or the demo model.

The hub client reads HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT itself; a snapshot that is in its cache is used
when there is no network.
"""

import logging
import re
from pathlib import Path

from jpaged.errors import ModelLoadError

logger = logging.getLogger(__name__)

DEMO = "demo"
_GGUF = ".gguf"
_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

TOKENIZER_FILES = (
    "tokenizer*", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
)  # fmt: skip
POOLING = "1_Pooling/config.json"  # of Sentence Transformers: how a model pools
CONFIG = "config.json"
MODEL_FILES = (CONFIG, "generation_config.json", "*.safetensors", "*.safetensors.index.json", POOLING)
# Other formats in sub-folders, and the same weights once more under other names.
_UNWANTED = ("[!1]*/*", "1*/*.safetensors*", "1*/*.model", "consolidated*")


def find_model(model: str, revision: str | None = None) -> Path:
    """The folder of a model, fetched first if it is a hub id, or its GGUF file. Raises ModelLoadError with what to do.

    A folder that holds nothing but one model as GGUF stands for that file.
    """
    if model == DEMO:
        folder = Path(__file__).parent.parent / "demo_model"
        if not folder.is_dir():
            raise ModelLoadError(
                f"{folder} is missing: this installation of jpaged has no demo model, install it again"
            )
        return folder
    path = _find(model, revision, MODEL_FILES + TOKENIZER_FILES)
    return path if path.is_file() or (path / "config.json").is_file() else _gguf_in(path) or path


def find_config(model: str, revision: str | None = None) -> Path:
    """The folder of a model, its GGUF file, or a config.json that was named itself. Of a hub id only the config.json is
    fetched. Raises ModelLoadError with what to do."""
    path = Path(model).expanduser()
    if path.name == CONFIG and path.is_file():
        return path
    if model == DEMO or path.exists():
        return find_model(model, revision)
    return _find(model, revision, (CONFIG,))


def find_tokenizer(tokenizer: str, revision: str | None = None) -> Path:
    """The folder of a tokenizer, fetched first if it is a hub id; or the GGUF file that has it."""
    return _find(tokenizer, revision, ("config.json", *TOKENIZER_FILES))


def is_gguf(path: Path) -> bool:
    """Whether what `find_model` gave is a GGUF file."""
    return path.suffix == _GGUF


def _find(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        if is_gguf(path):
            return path
        raise ModelLoadError(
            f"{name} is a file: give the folder that holds config.json and the safetensors files, or a {_GGUF} file"
        )
    if is_gguf(path):
        raise ModelLoadError(
            f"there is no file {name!r}; one on the hub must be fetched first: hf download OWNER/NAME {path.name}"
        )
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"there is no folder {name!r}, and it is no hub id (owner/name) either")
    return _fetch(name, revision, patterns)


def _gguf_in(folder: Path) -> Path | None:
    """The GGUF model of a folder, None where there is none; the first part of one that is split."""
    models = [p for p in sorted(folder.glob(f"*{_GGUF}")) if not _LATER_PART.fullmatch(p.name)]
    if len(models) > 1:
        raise ModelLoadError(
            f"{folder} has {len(models)} GGUF models: name the file, for example {models[0]}; others are "
            f"{', '.join(p.name for p in models[1:])}"
        )
    return models[0] if models else None


def _fetch(repo: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    # Imported here: it takes a quarter of a second, and a folder needs none of it.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_UNWANTED)
            )
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{repo}: the hub gives it only to those who accepted its terms: do so on its page, and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{repo}: no such folder here and no such model on the hub; if it is private, set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"{repo}: the hub's model has no revision {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        # A snapshot that another program fetched may lack files that are not needed: what is needed and not there is
        # found, and named, when the folder is opened.
        if snapshot := getattr(error, "snapshot_path", None):
            logger.warning("%s: the hub cannot be reached, and its cached snapshot lacks files; trying it", repo)
            return Path(snapshot)
        raise ModelLoadError(
            f"{repo}: no such folder here, it is not in the cache ({huggingface_hub.constants.HF_HUB_CACHE}), and the "
            "hub cannot be reached (or HF_HUB_OFFLINE is set): fetch it where there is a network, or give a folder"
        ) from error
    except Exception as error:  # the client's HTTP library, and with it its errors, change from version to version
        raise ModelLoadError(
            f"{repo}: cannot be fetched from the hub ({type(error).__name__}: {error}); "
            "files that are complete are kept, try again to fetch the rest"
        ) from error
