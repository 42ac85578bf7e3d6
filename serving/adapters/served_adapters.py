"""The LoRA adapters of a server: those of --lora-modules, and those that its operator loads while it runs.

The engine's registry owns names and content. This module checks the folders of adapters, and reads their chat
templates. Both take disk time, so they run in threads.
"""

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import msgspec

from jpaged.errors import ModelLoadError, RequestError, shown
from jpaged.lora.request import LoRARequest
from jpaged.serving.web.error_responses import APIError
from jpaged.serving.web.operator_folders import OperatorFolders

CONFIG = "adapter_config.json"
TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
MAX_SHOWN = 16             # names in an error message
MAX_TEMPLATE_BYTES = 2**24  # of a file with a chat template


class AdapterInfo(Protocol):
    """An adapter that the engine knows. path: its folder; "": live arrays."""

    @property
    def name(self) -> str: ...
    @property
    def int_id(self) -> int: ...
    @property
    def path(self) -> str: ...


class Registry(Protocol):
    """The engine's adapters: `AsyncLLM.adapters`."""

    def get(self, request: LoRARequest) -> Future[Any]:
        """Read an adapter if it is not in memory. Raises RequestError; the Future raises ModelLoadError."""
        ...

    def reload(self, request: LoRARequest) -> Future[Any]:
        """Read an adapter again. Raises as `get`."""
        ...

    def remove(self, adapter: str | int) -> bool:
        """Forget an adapter. Its requests go on."""
        ...

    def find(self, adapter: str | int) -> AdapterInfo | None:
        """An adapter by name or number."""
        ...

    def known(self) -> Sequence[AdapterInfo]:
        """All adapters."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterModule:
    """An adapter of --lora-modules. base_model_name: `parent` in /v1/models; None: the served model's name."""

    name: str
    path: str
    base_model_name: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterCard:
    """An adapter for /v1/models. created: seconds since 1970."""

    name: str
    root: str
    parent: str
    created: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about an adapter that the registry does not have. path: its folder, when they were read."""

    path: str
    parent: str
    created: int
    chat_template: str | None = None


class ServedAdapters:
    """Adapters by name.

    model_names: names of the model, which no adapter may have.
    folders:     adapters below them may be loaded while the server runs. Empty: none may.
    """

    def __init__(self, registry: Registry, model_names: Sequence[str], folders: Sequence[Path] = ()):
        self._registry, self._model_names = registry, tuple(model_names)
        self._folders = OperatorFolders("lora_dirs", folders)
        self._facts: dict[str, _Facts] = {}

    def request(self, name: str) -> LoRARequest | None:
        """An adapter as the engine wants it; None: there is none of this name."""
        found = self._registry.find(name)
        return None if found is None else LoRARequest(found.name, found.int_id)

    def chat_template(self, name: str) -> str | None:
        """The chat template in an adapter's folder; None: it has none."""
        found = self._registry.find(name)
        return None if found is None else self._facts_of(found).chat_template

    def cards(self) -> Iterator[AdapterCard]:
        """All adapters, in the order in which they were added."""
        for found in self._registry.known():
            facts = self._facts_of(found)
            yield AdapterCard(found.name, found.path, facts.parent, facts.created)

    def names_text(self) -> str:
        """The names of the first adapters, for an error message."""
        names = [found.name for found in self._registry.known()]
        if len(names) > MAX_SHOWN:
            return f"{', '.join(names[:MAX_SHOWN])} and {len(names) - MAX_SHOWN} more in GET /v1/models"
        return ", ".join(names) or "none is loaded"

    def load_modules(self, modules: Sequence[AdapterModule]) -> None:
        """Load the adapters of --lora-modules, and wait for them. Raises RequestError and ModelLoadError."""
        futures = []
        for module in modules:
            if module.name in self._model_names:
                raise RequestError("lora_modules", module.name, "is the name of the model: use another name")
            if module.name in self._facts:
                raise RequestError("lora_modules", module.name, "is there twice: a name belongs to one adapter")
            folder = Path(module.path).expanduser()
            self._note(module.name, str(folder), chat_template_of(folder), module.base_model_name)
            futures.append((module, self._registry.get(LoRARequest(module.name, self._number(), str(folder)))))
        for module, future in futures:
            try:
                future.result()
            except ModelLoadError as error:
                raise ModelLoadError(f"LoRA adapter {module.name!r}: {error}") from None

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter. Returns when it is in host memory. Raises APIError; then nothing has changed.

        in_place: replace the adapter of this name, if there is one. Running requests keep the old one.
        """
        if name in self._model_names:
            raise APIError(HTTPStatus.BAD_REQUEST, f"lora_name: {name!r} is the name of the model", param="lora_name")
        self._check_free(name, in_place=in_place)
        try:
            folder, template = await asyncio.to_thread(self._checked, path)
            self._check_free(name, in_place=in_place)
            reading = asyncio.wrap_future(self._read(name, str(folder)))
            await asyncio.shield(self._finish(reading, name, folder, template))  # also if the client goes away
        except ModelLoadError as error:
            raise APIError(HTTPStatus.BAD_REQUEST, str(error), param="lora_path", code="bad_adapter") from None

    async def _finish(self, reading: asyncio.Future[Any], name: str, folder: Path, template: str | None) -> None:
        """Wait for an adapter, and note its template, unless it was unloaded or a later load was faster."""
        await reading
        found = self._registry.find(name)
        if found is not None and found.path == str(folder):
            self._note(name, str(folder), template, None)

    def unload(self, name: str | None, number: int | None) -> str:
        """Forget an adapter by name, number, or both. Returns its name. Running requests keep it.

        Raises APIError 404 if there is none.
        """
        key = name if name is not None else number
        found = None if key is None else self._registry.find(key)
        if found is None or number not in (None, found.int_id):
            what = f"{name!r}" if number is None else f"with lora_int_id {number}"
            message = f"The lora adapter {what} cannot be found: there are {self.names_text()}"
            raise APIError(HTTPStatus.NOT_FOUND, message, param="lora_name", code="adapter_not_found")
        self._registry.remove(found.name)
        self._facts.pop(found.name, None)
        return found.name

    def _facts_of(self, found: AdapterInfo) -> _Facts:
        """The facts about an adapter. Another front end may have loaded it, or loaded it again from another folder."""
        facts = self._facts.get(found.name)
        if facts is None or facts.path != found.path:
            try:
                template = chat_template_of(Path(found.path)) if found.path else None
            except ModelLoadError:  # the folder is gone
                template = None
            self._note(found.name, found.path, template, None)
        return self._facts[found.name]

    def _check_free(self, name: str, *, in_place: bool) -> None:
        if not in_place and self._registry.find(name) is not None:
            message = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
            message += "set 'load_inplace' to True."  # vLLM's words, which controllers look for
            raise APIError(HTTPStatus.BAD_REQUEST, message, param="lora_name", code="adapter_exists")

    def _read(self, name: str, path: str) -> Future[Any]:
        known = self._registry.find(name)
        if known is not None:
            return self._registry.reload(LoRARequest(name, known.int_id, path))
        return self._registry.get(LoRARequest(name, self._number(), path))

    def _number(self) -> int:
        """A lora_int_id that no adapter has."""
        return 1 + max((found.int_id for found in self._registry.known()), default=0)

    def _checked(self, path: str) -> tuple[Path, str | None]:
        """The folder of an adapter below the operator's folders, and its chat template. Raises APIError."""
        folder = self._folders.find(
            "lora_path", path, is_wanted=lambda found: (found / CONFIG).is_file(),
            closed="adapters cannot be loaded while the server runs",
        )  # fmt: skip
        if folder is None:
            message = f"lora_path: no adapter found for {shown(path)}: there is no {CONFIG}"
            raise APIError(HTTPStatus.NOT_FOUND, message, param="lora_path", code="adapter_not_found")
        return folder, chat_template_of(folder)

    def _note(self, name: str, path: str, template: str | None, parent: str | None) -> None:
        self._facts[name] = _Facts(path, parent or self._model_names[0], int(time.time()), template)


def chat_template_of(folder: Path) -> str | None:
    """The chat template in an adapter's folder: chat_template.jinja, else tokenizer_config.json's. None: no template.

    Raises ModelLoadError for a file that cannot be read.
    """
    template, config = folder / TEMPLATE, folder / TOKENIZER_CONFIG
    try:
        if template.is_file():
            return _bytes_of(template).decode()
        if not config.is_file():
            return None
        found = msgspec.json.decode(_bytes_of(config), type=dict[str, Any]).get("chat_template")
    except (OSError, ValueError) as error:  # msgspec's and UnicodeDecodeError are ValueErrors
        raise ModelLoadError(f"{folder}: the chat template cannot be read: {error}") from None
    if isinstance(found, list):  # several templates by name, as Transformers 4 wrote them
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _bytes_of(path: Path) -> bytes:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ModelLoadError(f"{path} has more than {MAX_TEMPLATE_BYTES:,} bytes: it is no chat template")
    return path.read_bytes()
