"""AdapterRegistry: what is known after reads that fail, overtake each other, or come too late."""

import threading

import pytest

from jpaged.engine.adapters.adapter_registry import AdapterRegistry
from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.errors import EngineError, ModelLoadError
from jpaged.lora.request import LoRARequest


class Reader:
    """Reads of a source wait until it is in `may_read`. Sources with "bad" cannot be read."""

    def __init__(self):
        self.may_read = {source: threading.Event() for source in ("bad", "good", "next")}

    def __call__(self, name: str, source: object, generation: int) -> LoadedAdapter:
        said = source if isinstance(source, str) else source[0]["arrays"]
        assert self.may_read[said].wait(20)
        if said == "bad":
            raise ModelLoadError("cannot be read")
        return LoadedAdapter(name, f"{name} {generation}", 1, said, "")


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
def registry(reader):
    made = AdapterRegistry(reader, max_loaded=4)
    yield made
    for event in reader.may_read.values():
        event.set()
    made.close()


def contents(registry: AdapterRegistry) -> list[object]:
    return [None if known.loaded is None else known.loaded.content for known in registry.known()]


def test_a_reload_is_known_if_the_first_read_fails_before_its_end(reader, registry):
    first = registry.get(LoRARequest("a", 1, "bad"))
    again = registry.reload(LoRARequest("a", 1, "good"))
    reader.may_read["bad"].set()
    with pytest.raises(ModelLoadError):
        first.result(20)
    reader.may_read["good"].set()
    again.result(20)
    assert contents(registry) == ["good"]


def test_a_reload_does_not_bring_back_a_removed_adapter(reader, registry):
    registry.get(LoRARequest("a", 1, "good"))
    again = registry.reload(LoRARequest("a", 1, "next"))
    assert registry.remove("a")
    for event in reader.may_read.values():
        event.set()
    assert again.result(20).content == "next"
    assert registry.known() == []


def test_arrays_that_cannot_be_read_leave_the_old_ones(reader, registry):
    for event in reader.may_read.values():
        event.set()
    registry.add_arrays("a", {"arrays": "good"}, {}).result(20)
    with pytest.raises(ModelLoadError):
        registry.add_arrays("a", {"arrays": "bad"}, {}).result(20)
    assert contents(registry) == ["good"]
    registry.add_arrays("a", {"arrays": "next"}, {}).result(20)
    assert contents(registry) == ["next"]
    assert registry.find("a").path == ""


def test_reads_that_have_not_begun_end_with_an_error_after_close(reader, registry):
    """A cancelled Future would end a waiting coroutine as if its task was cancelled."""
    reading = [registry.get(LoRARequest(f"a{number}", number, "good")) for number in (1, 2)]
    late = registry.get(LoRARequest("late", 3, "next"))
    registry.close()
    for event in reader.may_read.values():
        event.set()
    with pytest.raises(EngineError, match="closed"):
        late.result(20)
    for future in reading:
        assert future.exception(20) is None or isinstance(future.exception(), EngineError)
