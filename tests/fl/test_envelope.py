"""What server and sites say around the tensors: it survives the way, and anything else is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from streamoff.errors import ContributionRejectedError, StreamoffError, WeightError
from streamoff.fl.aggregation import Kind
from streamoff.fl.envelope import (
    MAX_METRICS,
    MAX_TEXT,
    ResultEnvelope,
    TaskEnvelope,
    result_topic,
    task_topic,
)

TASK = {"job": "job-1", "round": 2, "rounds": 5, "kind": "full", "params": {"w": "a ref"}}
RESULT = {
    "job": "job-1",
    "round": 2,
    "weight": 3.0,
    "kind": "diff",
    "params": {"w": "a ref"},
    "metrics": {"loss": 0.5},
    "error": "",
}


def test_topics_belong_to_jobs() -> None:
    """Two jobs of one endpoint never hear each other's tasks or results."""
    topics = [topic(job) for topic in (task_topic, result_topic) for job in ("a", "b")]
    assert topics == [
        "streamoff.a.task",
        "streamoff.b.task",
        "streamoff.a.result",
        "streamoff.b.result",
    ]


def test_a_task_survives_the_way() -> None:
    """What was said is what is heard, field by field."""
    task = TaskEnvelope(job="job-1", round=2, rounds=5, kind=Kind.DIFF, params={"w": 1})
    assert TaskEnvelope.of(task.tree(), site="server") == task
    assert task.tree().keys() == TASK.keys()


def test_a_result_survives_the_way() -> None:
    """What was said is what is heard, field by field, and the kind is a kind again."""
    result = ResultEnvelope(
        job="job-1", round=2, weight=3.5, kind=Kind.DIFF, params={"w": 1}, metrics={"loss": 0.5}
    )
    heard = ResultEnvelope.of(result.tree(), site="site-1")
    assert heard == result
    assert heard.kind is Kind.DIFF
    assert result.tree().keys() == RESULT.keys()


def test_an_error_needs_no_weight_and_is_cut_to_size() -> None:
    """A site that failed has no weight to give, and its last words are bounded."""
    heard = ResultEnvelope.of(RESULT | {"error": "x" * 5000, "weight": None}, site="site-1")
    assert (heard.error, heard.weight) == ("x" * MAX_TEXT, 0.0)


@pytest.mark.parametrize("field", ["job", "round", "rounds", "kind", "params"])
def test_a_task_without_a_field_is_none(field: str) -> None:
    """Every field of a task is needed; the refusal names the one that is missing."""
    tree = {name: value for name, value in TASK.items() if name != field}
    with pytest.raises(ContributionRejectedError) as caught:
        TaskEnvelope.of(tree, site="server")
    assert field in str(caught.value) or field == "params"
    assert caught.value.where["site"] == "server"


@pytest.mark.parametrize("field", ["job", "round", "weight", "kind", "params", "metrics", "error"])
def test_a_result_without_a_field_is_none(field: str) -> None:
    """Every field of a result is needed; a weight is never replaced by one."""
    tree = {name: value for name, value in RESULT.items() if name != field}
    with pytest.raises(WeightError if field == "weight" else ContributionRejectedError):
        ResultEnvelope.of(tree, site="site-1")


def test_bounds_are_exact() -> None:
    """The largest admissible values pass and the next larger ones do not."""
    metrics = {f"m{number}": 1.0 for number in range(MAX_METRICS - 1)} | {"n" * MAX_TEXT: 2}
    for good, bad in (
        ({"round": 2**31 - 1}, {"round": 2**31}),
        ({"round": 0}, {"round": -1}),
        ({"job": "j" * MAX_TEXT}, {"job": "j" * (MAX_TEXT + 1)}),
        ({"metrics": metrics}, {"metrics": metrics | {"one more": 1.0}}),
        ({"metrics": {"n" * MAX_TEXT: 1}}, {"metrics": {"n" * (MAX_TEXT + 1): 1}}),
        ({"metrics": {"m": 2**1023}}, {"metrics": {"m": 2**1024}}),
    ):
        ResultEnvelope.of(RESULT | good, site="site-1")
        with pytest.raises(ContributionRejectedError):
            ResultEnvelope.of(RESULT | bad, site="site-1")


def test_metrics_are_floats_and_nothing_is_hidden() -> None:
    """Ints become floats, and a NaN or infinity stays one: it is the site's to say."""
    heard = ResultEnvelope.of(RESULT | {"metrics": {"n": 3, "loss": float("inf")}}, site="site-1")
    assert heard.metrics == {"n": 3.0, "loss": float("inf")}
    assert type(heard.metrics["n"]) is float


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63])
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.sampled_from(["full", "diff", "job-1"])
)
KEYS = st.sampled_from([*RESULT, "rounds"]) | st.text(max_size=5) | st.integers()
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=8),
    max_leaves=20,
)


def refusal(kind: type[TaskEnvelope | ResultEnvelope], tree: object) -> str:
    """Why a tree is no envelope; empty if it is one."""
    try:
        kind.of(tree, site="site-1")
    except StreamoffError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("field", ["round", "weight", "job", "kind", "error", "metrics", "params"])
def test_a_number_that_python_does_not_print_is_refused_in_words(field: str) -> None:
    """An int of more digits than Python converts to text does not break the message that refuses it."""
    for value in (10**5000, {"loss": 10**5000}, {10**5000: 1.0}):
        assert bool(refusal(ResultEnvelope, RESULT | {field: value})) == (field != "params")


@given(st.dictionaries(st.sampled_from([*RESULT, "rounds"]), TREES))
def test_whatever_comes_is_an_envelope_or_a_typed_refusal(changes: dict[str, object]) -> None:
    """No tree of any types and sizes makes anything else of the check, nor of the text of its refusal."""
    for kind, good in ((TaskEnvelope, TASK), (ResultEnvelope, RESULT)):
        for tree in (good | changes, changes):
            assert len(refusal(kind, tree)) < 2000


@given(TREES)
def test_what_is_no_dict_is_no_envelope(tree: object) -> None:
    """A tree of another shape is refused, however deep it is."""
    if isinstance(tree, dict) and RESULT.keys() <= tree.keys():
        return
    with pytest.raises(StreamoffError):
        ResultEnvelope.of(tree, site="site-1")
