"""The engines that are compared, with the weights that each uses, and how to start their runners."""

import dataclasses
import pathlib

RUNNERS = pathlib.Path(__file__).resolve().parent.parent / "peers"
JPAGED = "jpaged"
LONG = "-long"  # suffix of a model with a configuration for more positions; conversions ignore it


@dataclasses.dataclass(frozen=True, slots=True)
class Configuration:
    """An engine with one kind of weights. Only configurations with the same `weights` are compared."""

    engine: str
    weights: str             # bf16, int8 or int4
    kind: str                # the engine's own name for these weights
    venv: str = ""           # folder in PEERS/venvs; empty: the interpreter that has jpaged
    converted: str = ""      # path in PEERS/converted, with {model} in place of the model
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.engine} {self.kind}"

    @property
    def is_jpaged(self) -> bool:
        return self.engine == JPAGED


CONFIGURATIONS = (
    Configuration(JPAGED, "bf16", "bf16"),
    Configuration("transformers", "bf16", "bf16", "hf"),
    Configuration("openvino", "bf16", "fp16", "ov", "ov-{model}-fp16"),
    Configuration("vllm", "bf16", "bf16", "vllm"),
    Configuration("llamacpp", "bf16", "bf16", "llama", "{model}-bf16.gguf"),
    Configuration(JPAGED, "int8", "int8", options=("--quantization", "int8")),
    Configuration("openvino", "int8", "int8", "ov", "ov-{model}-int8"),
    Configuration("llamacpp", "int8", "q8_0", "llama", "{model}-q8_0.gguf"),
    Configuration(JPAGED, "int4", "int4", options=("--quantization", "int4")),
    Configuration("openvino", "int4", "int4", "ov", "ov-{model}-int4"),
    Configuration("llamacpp", "int4", "q4_k_m", "llama", "{model}-q4_k_m.gguf"),
)
PEERS = tuple(dict.fromkeys(each.engine for each in CONFIGURATIONS if not each.is_jpaged))


@dataclasses.dataclass(frozen=True, slots=True)
class Installation:
    """The folder of the peers, and the interpreter that has jpaged."""

    peers: pathlib.Path
    python: pathlib.Path

    def missing(self, configuration: Configuration, model: str) -> str | None:
        """Return the first path that a configuration needs and that does not exist, or None."""
        paths = [self.peers / "models" / model, self.peers / "workload.json", self._python(configuration)]
        if configuration.converted:
            paths.append(self._converted(configuration, model))
        return next((str(path) for path in paths if not path.exists()), None)

    def command(self, configuration: Configuration, model: str, *arguments: str) -> list[str]:
        """Return the command that runs a configuration's runner on a model."""
        runner = RUNNERS / f"bench_{configuration.engine}.py"
        command = [self._python(configuration), runner, "--model", self.peers / "models" / model]
        if configuration.converted:
            command += ["--converted", self._converted(configuration, model)]
        return [*map(str, command), *configuration.options, *arguments]

    def workload(self, name: str) -> tuple[str, ...]:
        """Return the arguments that choose a workload."""
        return "--workload", str(self.peers / "workload.json"), "--name", name

    def _python(self, configuration: Configuration) -> pathlib.Path:
        return self.peers / "venvs" / configuration.venv / "bin/python" if configuration.venv else self.python

    def _converted(self, configuration: Configuration, model: str) -> pathlib.Path:
        return self.peers / "converted" / configuration.converted.format(model=model.removesuffix(LONG))
