"""CostModel: seconds of a step as a linear function of its load. Fitted to measured steps, and stored as JSON.

    seconds = fixed + per_token * tokens + per_row * rows + per_kv_token * kv_tokens
            + per_prompt_pair * prompt_pairs + per_moved_block * moved_blocks

No coefficient is negative. `StepLoad` defines the load.
"""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.collectives import Link, all_reduce_seconds
from jpaged.errors import RequestError
from jpaged.simulator.step_load import FEATURES, EngineShape, StepLoad

FORMAT = 1
COEFFICIENTS = ("fixed", "per_token", "per_row", "per_kv_token", "per_prompt_pair", "per_moved_block")
SHIPPED = pathlib.Path(__file__).parent / "cost_models"


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step timed on a device: its load, and the median seconds of its repeats."""

    load: StepLoad
    seconds: float
    repeats: int
    case: str  # description of the requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduces:
    """The all-reduces of a step of a model split over several devices. Sampling's small ones are not included."""

    num_devices: int
    count: int         # two per layer, and one for the embedding
    hidden_bytes: int  # bytes of a token's hidden state; an all-reduce has one for each token of the step
    link: Link

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds of all of them, without overlap."""
        return self.count * all_reduce_seconds(load.tokens * self.hidden_bytes, self.num_devices, self.link)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Predicts the seconds of a step. Each coefficient is in seconds per unit of the quantity in its name."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_row: float = 0.0
    per_kv_token: float = 0.0
    per_prompt_pair: float = 0.0
    per_moved_block: float = 0.0
    origin: str = "given by hand, not measured"  # source of the coefficients; printed with results
    engine: EngineShape | None = None            # the measured engine
    largest: StepLoad | None = None              # largest measured value of each feature
    all_reduces: AllReduces | None = None        # None: one device, or included in the measured coefficients

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise RequestError(name, value, "a cost model's coefficient must be a finite number, 0 or more")
        if not any(getattr(self, name) for name in COEFFICIENTS):
            raise RequestError("cost_model", self.origin, "all coefficients are 0: a step would take no time")

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds of a step with this load, including all-reduces."""
        return (
            self.seconds_between_devices(load)
            + self.fixed
            + self.per_token * load.tokens
            + self.per_row * load.rows
            + self.per_kv_token * load.kv_tokens
            + self.per_prompt_pair * load.prompt_pairs
            + self.per_moved_block * load.moved_blocks
        )

    def seconds_between_devices(self, load: StepLoad) -> float:
        """Return the seconds of a step's all-reduces; 0 without `all_reduces`."""
        return 0.0 if self.all_reduces is None else self.all_reduces.seconds(load)

    def split(self, all_reduces: AllReduces) -> "CostModel":
        """Return a prediction for N devices: the seconds of one device divided by N, plus all-reduces.

        It is a lower bound, because the coefficients also contain work that is not split: host, kernel starts, norms.
        """
        count = all_reduces.num_devices
        return dataclasses.replace(
            self,
            **{name: getattr(self, name) / count for name in COEFFICIENTS},
            origin=f"{self.origin}; predicted for {count} devices: divided by {count}, and all-reduces added",
            all_reduces=all_reduces,
        )

    def goes_beyond(self, load: StepLoad) -> bool:
        """Return True if a feature of the load is larger than in every measured step: its seconds are extrapolated.

        Moved blocks are ignored. They are measured separately, and every block takes the same time.
        """
        largest = self.largest
        return largest is not None and (
            load.kv_tokens > largest.kv_tokens
            or load.rows > largest.rows
            or load.tokens > largest.tokens
            or load.prompt_pairs > largest.prompt_pairs
        )


def fit(steps: Sequence[MeasuredStep], *, origin: str, engine: EngineShape) -> CostModel:
    """Fit a model to measured steps: least squares of the relative errors, without negative coefficients.

    Fits every subset of coefficients with the others at 0, and returns the best fit without a negative coefficient. The
    result is exact, from 63 small least-squares problems for six coefficients. A feature that is 0 in all steps, like
    moved blocks, gets the coefficient 0. Raises RequestError if there are too few steps.
    """
    loads = np.array([[1.0, *dataclasses.astuple(step.load)] for step in steps])
    seconds = np.array([step.seconds for step in steps])
    present = [column for column in range(loads.shape[1]) if loads[:, column].any()]
    if len(steps) < len(present):
        raise RequestError("steps", len(steps), f"too few to fit {len(present)} coefficients: measure more")
    scale = np.abs(loads).max(axis=0)
    scale[scale == 0] = 1
    relative = loads / scale / seconds[:, None]  # scaled, because tokens are hundreds and pairs are millions
    best, best_error = np.zeros(loads.shape[1]), math.inf
    for size in range(1, len(present) + 1):
        for chosen in itertools.combinations(present, size):
            columns = list(chosen)
            solution = np.linalg.lstsq(relative[:, columns], np.ones(len(steps)), rcond=None)[0]
            error = float(np.square(relative[:, columns] @ solution - 1).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(loads.shape[1]), error
                best[columns] = solution
    values: Any = (float(value) for value in best / scale)
    largest = StepLoad(*(float(value) for value in loads[:, 1:].max(axis=0)))
    return CostModel(**dict(zip(COEFFICIENTS, values, strict=True)), origin=origin, engine=engine, largest=largest)


def relative_errors(model: CostModel, steps: Sequence[MeasuredStep]) -> list[float]:
    """Return the relative error of each measured step: predicted seconds / measured seconds - 1."""
    return [model.seconds(step.load) / step.seconds - 1 for step in steps]


def to_json(model: CostModel, steps: Sequence[MeasuredStep], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON that `read_cost_model` reads. about: more entries, such as the machine."""
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
    """Return the cost model of `--cost-model`.

    name: a shipped model, a file of `jpaged bench steps`, or coefficients by hand ("fixed=0.004,per_token=2e-6").
    Raises RequestError. For a file it names the faulty key.
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
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise RequestError("cost_model", name, f"cannot be read as JSON: {error}") from None
    return _from_json(name, data)


def _by_hand(text: str) -> CostModel:
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in COEFFICIENTS or key in values:
            raise RequestError("cost_model", text, f"{key!r}: name each of {', '.join(COEFFICIENTS)} at most once")
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
        raise RequestError("cost_model", name, f"not a cost model of `jpaged bench steps` ({reason})") from None
