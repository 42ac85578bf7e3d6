"""CostModel: a step's seconds as a linear function of its load, fitted to measured steps and kept as JSON.

    seconds = fixed + per_token * tokens + per_row * rows + per_kv_token * kv_tokens
            + per_prompt_pair * prompt_pairs + per_moved_block * moved_blocks

No coefficient is negative. What a load is: `StepLoad`.
"""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.errors import RequestError
from jpaged.simulator.step_load import FEATURES, EngineShape, StepLoad

FORMAT = 1
COEFFICIENTS = ("fixed", "per_token", "per_row", "per_kv_token", "per_prompt_pair", "per_moved_block")
SHIPPED = pathlib.Path(__file__).parent / "cost_models"


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step as it was timed on a device: its load, and the median seconds of its repeats."""

    load: StepLoad
    seconds: float
    repeats: int
    case: str  # what was run, in words


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of a step. All coefficients are in seconds for one unit of what they are named after."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_row: float = 0.0
    per_kv_token: float = 0.0
    per_prompt_pair: float = 0.0
    per_moved_block: float = 0.0
    origin: str = "given by hand, not measured"  # where the coefficients come from, for whoever reads a result
    engine: EngineShape | None = None            # the engine that was measured
    largest: StepLoad | None = None              # the largest of each number that was measured

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise RequestError(name, value, "a cost model's coefficient must be a finite number, 0 or more")
        if not any(getattr(self, name) for name in COEFFICIENTS):
            raise RequestError("cost_model", self.origin, "all coefficients are 0: a step would take no time")

    def seconds(self, load: StepLoad) -> float:
        """How long a step takes."""
        return (
            self.fixed
            + self.per_token * load.tokens
            + self.per_row * load.rows
            + self.per_kv_token * load.kv_tokens
            + self.per_prompt_pair * load.prompt_pairs
            + self.per_moved_block * load.moved_blocks
        )

    def goes_beyond(self, load: StepLoad) -> bool:
        """Whether a load is larger than any that was measured: its seconds are then an extrapolation.

        Moved blocks are not looked at: they are measured by themselves, and each takes as long as the other.
        """
        largest = self.largest
        return largest is not None and (
            load.kv_tokens > largest.kv_tokens
            or load.rows > largest.rows
            or load.tokens > largest.tokens
            or load.prompt_pairs > largest.prompt_pairs
        )


def fit(steps: Sequence[MeasuredStep], *, origin: str, engine: EngineShape) -> CostModel:
    """The model whose relative errors over measured steps have the least sum of squares.

    Every set of coefficients is tried with the others at 0, and the best one without a negative coefficient kept: with
    six that is 63 small least-squares problems, and exact. What never varied away from 0 (blocks that no step moved)
    keeps the coefficient 0.
    """
    loads = np.array([[1.0, *dataclasses.astuple(step.load)] for step in steps])
    seconds = np.array([step.seconds for step in steps])
    present = [column for column in range(loads.shape[1]) if loads[:, column].any()]
    if len(steps) < len(present):
        raise RequestError("steps", len(steps), f"too few to fit {len(present)} coefficients: measure more")
    scale = np.abs(loads).max(axis=0)
    scale[scale == 0] = 1
    relative = loads / scale / seconds[:, None]  # columns of like size: tokens are hundreds, pairs millions
    best, best_error = np.zeros(loads.shape[1]), math.inf
    for size in range(1, len(present) + 1):
        for chosen in itertools.combinations(present, size):
            columns = list(chosen)
            solution = np.linalg.lstsq(relative[:, columns], np.ones(len(steps)), rcond=None)[0]
            error = float(np.square(relative[:, columns] @ solution - 1).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(loads.shape[1]), error
                best[columns] = solution
    values = (float(value) for value in best / scale)
    largest = StepLoad(*(float(value) for value in loads[:, 1:].max(axis=0)))
    return CostModel(**dict(zip(COEFFICIENTS, values, strict=True)), origin=origin, engine=engine, largest=largest)


def relative_errors(model: CostModel, steps: Sequence[MeasuredStep]) -> list[float]:
    """Of each measured step: the model's seconds over the measured ones, minus 1."""
    return [model.seconds(step.load) / step.seconds - 1 for step in steps]


def to_json(model: CostModel, steps: Sequence[MeasuredStep], about: Mapping[str, Any]) -> dict[str, Any]:
    """What `read_cost_model` reads: coefficients, engine, the steps they were fitted to, and `about` (machine...)."""
    assert model.engine is not None
    errors = np.abs(relative_errors(model, steps))
    return {
        "format": FORMAT,
        **about,
        "origin": model.origin,
        "seconds": {name: getattr(model, name) for name in COEFFICIENTS},
        "engine": dataclasses.asdict(model.engine),
        "relative_error": {"median": float(np.median(errors)), "largest": float(errors.max())},
        "steps": [
            {"case": s.case, **dataclasses.asdict(s.load), "seconds": s.seconds, "repeats": s.repeats} for s in steps
        ],
    }


def read_cost_model(name: str) -> CostModel:
    """The model that `--cost-model` names: a shipped one, a file of `jpaged bench steps`, or coefficients by hand.

    By hand: "fixed=0.004,per_token=2e-6". Raises RequestError for a file that is none, by its key.
    """
    shipped = SHIPPED / f"{name}.json"
    path = shipped if shipped.is_file() else pathlib.Path(name)
    if "=" in name and not path.exists():
        return _by_hand(name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.json")))
        raise RequestError(
            "cost_model", name, f"no such file; there are {known}, files that `jpaged bench steps --output-json` "
            f"writes, and coefficients by hand: fixed=SECONDS,per_token=SECONDS ({', '.join(COEFFICIENTS)})"
        )  # fmt: skip
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError("cost_model", name, f"cannot be read as JSON: {error}") from None
    return _from_json(name, data)


def _by_hand(text: str) -> CostModel:
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in COEFFICIENTS or key in values:
            raise RequestError("cost_model", text, f"{key!r}: name each of {', '.join(COEFFICIENTS)} once at most")
        try:
            values[key] = float(value)
        except ValueError:
            raise RequestError("cost_model", text, f"{key} must be a number of seconds") from None
    return CostModel(**values)


def _from_json(name: str, data: Any) -> CostModel:
    try:
        if data["format"] != FORMAT:
            raise RequestError("cost_model", name, f"format {data['format']!r}: this version reads {FORMAT}")
        seconds, engine = data["seconds"], dict(data["engine"])
        for key in ("windows", "row_buckets", "token_buckets"):
            engine[key] = tuple(engine[key])
        steps = [StepLoad(*(step[feature] for feature in FEATURES)) for step in data["steps"]]
        largest = StepLoad(*(max(getattr(step, feature) for step in steps) for feature in FEATURES))
        coefficients = {key: seconds[key] for key in COEFFICIENTS}
        return CostModel(**coefficients, origin=data["origin"], engine=EngineShape(**engine), largest=largest)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise RequestError("cost_model", name, f"no cost model of `jpaged bench steps` ({reason})") from None
