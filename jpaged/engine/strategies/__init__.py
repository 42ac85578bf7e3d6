"""Strategies: how the requests of a request group become its answer. One class per kind of answer."""

from jpaged.engine.strategies.base import CollectedStep, Output, Strategy, StrategyContext
from jpaged.engine.strategies.beam import BeamStrategy
from jpaged.engine.strategies.pool import PoolStrategy
from jpaged.engine.strategies.sample import BestOfStrategy, SampleStrategy
from jpaged.engine.strategies.score import ScoreStrategy

__all__ = [
    "BeamStrategy",
    "BestOfStrategy",
    "CollectedStep",
    "Output",
    "PoolStrategy",
    "SampleStrategy",
    "ScoreStrategy",
    "Strategy",
    "StrategyContext",
]
