"""Finds the folder or GGUF file of a model: from a path, a Hugging Face hub id, or the name `demo`.

The hub client reads HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT itself. Without a network it uses a snapshot in
its cache.

Imported late: huggingface_hub, which a folder does not need.
"""

import logging
import re
from pathlib import Path

from jpaged.errors import ModelLoadError
from jpaged.lifetime import not_using_device

logger = logging.getLogger(__name__)

DEMO = "demo"
_GGUF = ".gguf"
_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

TOKENIZER_FILES = (
    "tokenizer*", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
)  # fmt: skip
# Files of Sentence Transformers: see `loading/sentence_transformers.py`
POOLING = "1_Pooling/config.json"
MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
TEXT_LENGTH = "sentence_bert_config.json"
CONFIG = "config.json"
MODEL_FILES = (
    CONFIG, "generation_config.json", "*.safetensors", "*.safetensors.index.json", POOLING, MODULES, PROMPTS,
    TEXT_LENGTH,
)  # fmt: skip
# Only the sub-folder 1_Pooling is needed (see POOLING). consolidated* repeats the weights under other names.
_UNWANTED = ("[!1]*/*", "1*/*.safetensors*", "1*/*.model", "consolidated*")

PARTIAL = ".partial"  # suffix of a folder that is being written


def find_model(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the folder or the GGUF file of a model. A hub id is fetched first, to `download_dir` or the hub's cache.

    For a folder without config.json and with one GGUF model, the GGUF file is returned. Raises ModelLoadError.
    """
    if model == DEMO:
        folder = Path(__file__).parent.parent / "demo_model"
        if not folder.is_dir():
            raise ModelLoadError(
                f"{folder} is missing: this installation of jpaged has no demo model, install jpaged again"
            )
        return folder
    path = _find(model, revision, MODEL_FILES + TOKENIZER_FILES, download_dir)
    if path.name.startswith(".") and path.suffix == PARTIAL:
        raise ModelLoadError(
            f"{path} is incomplete: a command that was killed left it. Remove it, and run the command again"
        )
    return path if path.is_file() or (path / "config.json").is_file() else _gguf_in(path) or path


def find_config(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the folder of a model, its GGUF file, or the config.json that `model` names.

    If `model` is a hub id, only its config.json is fetched. Raises ModelLoadError.
    """
    path = Path(model).expanduser()
    if path.name == CONFIG and path.is_file():
        return path
    if model == DEMO or path.exists():
        return find_model(model, revision, download_dir)
    return _find(model, revision, (CONFIG,), download_dir)


def find_tokenizer(tokenizer: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the folder or the GGUF file of a tokenizer. A hub id is fetched first."""
    return _find(tokenizer, revision, ("config.json", *TOKENIZER_FILES), download_dir)


def is_gguf(path: Path) -> bool:
    """Return True for the path of a GGUF file, by its name."""
    return path.suffix == _GGUF


def _find(name: str, revision: str | None, patterns: tuple[str, ...], download_dir: str | None) -> Path:
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
            f"there is no file {name!r}; a file on the hub must be fetched first: hf download OWNER/NAME {path.name}"
        )
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"there is no folder {name!r}, and the name is not a hub id (owner/name)")
    return _fetch(name, revision, patterns, download_dir)


def _gguf_in(folder: Path) -> Path | None:
    """The GGUF model of a folder, or None. If the model is split, its first part."""
    models = [p for p in sorted(folder.glob(f"*{_GGUF}")) if not _LATER_PART.fullmatch(p.name)]
    if len(models) > 1:
        raise ModelLoadError(
            f"{folder} has {len(models)} GGUF models: name one of the files, for example {models[0]}; the others "
            f"are {', '.join(p.name for p in models[1:])}"
        )
    return models[0] if models else None


@not_using_device()
def _fetch(repo: str, revision: str | None, patterns: tuple[str, ...], download_dir: str | None) -> Path:
    # Imported here because it takes 0.25 s, and a local folder does not need it.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, cache_dir=download_dir, allow_patterns=list(patterns),
                ignore_patterns=list(_UNWANTED),
            )
        )
    except errors.GatedRepoError:
        raise ModelLoadError(
            f"{repo}: the hub serves this model only to users who accepted its terms: accept them on the model's page, "
            "and set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelLoadError(
            f"{repo}: no such folder here and no such model on the hub; if it is private, set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelLoadError(f"{repo}: the model on the hub has no revision {revision!r}") from None
    except errors.LocalEntryNotFoundError as error:
        cache = download_dir or huggingface_hub.constants.HF_HUB_CACHE
        # A snapshot that another program fetched may lack files. Opening the folder reports missing files by name.
        if snapshot := getattr(error, "snapshot_path", None):
            logger.warning("%s: the hub cannot be reached, and its cached snapshot lacks files; trying it", repo)
            return Path(snapshot)
        raise ModelLoadError(
            f"{repo}: no such folder here, it is not in the cache ({cache}), and the "
            "hub cannot be reached (or HF_HUB_OFFLINE is set): fetch it with a network, or name a local folder"
        ) from None
    except Exception as error:  # the client's HTTP library and its error types differ between versions
        raise ModelLoadError(
            f"{repo}: cannot be fetched from the hub ({type(error).__name__}: {error}); "
            "complete files are kept, try again to fetch the rest"
        ) from None
