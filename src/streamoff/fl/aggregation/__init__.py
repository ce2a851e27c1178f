"""Averaging contributions: the terms of a round, two engines, and what a round reports.

Synchronous code for one worker thread; it knows no event loop.
"""

from streamoff.fl.aggregation.columnar import Columnar
from streamoff.fl.aggregation.contribution import Contribution, Kind
from streamoff.fl.aggregation.engine import (
    Choice,
    Engine,
    EngineName,
    NewWriter,
    Stop,
    check_engine,
    choose_engine,
    preflight,
)
from streamoff.fl.aggregation.foreign import as_state, materialized
from streamoff.fl.aggregation.in_time import InTime
from streamoff.fl.aggregation.intake import Fit, Terms, check_layout
from streamoff.fl.aggregation.policies import Policies
from streamoff.fl.aggregation.report import AggregationResult, Reason, Rejection, RoundReport
from streamoff.fl.aggregation.weights import weight_of, weighted_metrics

__all__ = [
    "AggregationResult",
    "Choice",
    "Columnar",
    "Contribution",
    "Engine",
    "EngineName",
    "Fit",
    "InTime",
    "Kind",
    "NewWriter",
    "Policies",
    "Reason",
    "Rejection",
    "RoundReport",
    "Stop",
    "Terms",
    "as_state",
    "check_layout",
    "choose_engine",
    "materialized",
    "open_engine",
    "preflight",
    "weight_of",
    "weighted_metrics",
]


def open_engine(name: EngineName, terms: Terms) -> Engine:
    """Open a round.

    Args:
        name: As :func:`choose_engine` says.
        terms: What the round is about.

    Raises:
        DtypeError: The global model has an entry without arithmetic that is not excluded.
        UsageError: There is no such engine.
    """
    check_engine(name)
    return Columnar(terms) if name == "columnar" else InTime(terms)
