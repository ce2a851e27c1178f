"""Training on handwritten digits."""

import contextlib
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from streamoff.errors import UsageError
from streamoff.sim.digits import LEAST_SAMPLES, Digits, dirichlet_split, one_thread
from streamoff.sim.tasks import GlobalState
from streamoff.tensors.state import MemoryState

Tensors = Mapping[str, torch.Tensor]
NAMES = tuple(f"site-{number}" for number in range(1, 9))


def trained_by(task: Digits, name: str, number: int, state: GlobalState) -> tuple[Tensors, float]:
    """Return a site's parameters and weight."""
    result = task.site(name).train(number, state)
    assert isinstance(result.params, Mapping)
    return result.params, result.weight


def averaged(task: Digits, state: Tensors, number: int, names: Sequence[str] = NAMES) -> Tensors:
    """Return the weighted mean of what the sites make of a model."""
    mean = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in state.items()}
    total = 0.0
    for site in names:
        params, weight = trained_by(task, site, number, state)
        total += weight
        for name, tensor in params.items():
            mean[name].add_(tensor, alpha=weight)
    return {name: tensor.div(total).float() for name, tensor in mean.items()}


def trained(seed: int, rounds: int, names: Sequence[str] = NAMES) -> tuple[Digits, Tensors]:
    """Run plain federated averaging and return the task and the last model."""
    task = Digits(names, seed=seed)
    state: Tensors = task.initial_state()
    for number in range(rounds):
        state = averaged(task, state, number, names)
    return task, state


def same(left: Tensors, right: Tensors) -> bool:
    """Whether two models have the same bits."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_five_rounds_of_eight_sites_learn_to_read(seed: int) -> None:
    """Plain averaging over unevenly spread digits reaches 0.93 on images that no site has seen."""
    task, state = trained(seed, rounds=5)
    metrics = task.evaluate(state, {})
    assert metrics["accuracy"] >= 0.93
    assert metrics["loss"] < 0.3


def test_nothing_is_learnt_before_the_first_round() -> None:
    """The initial model guesses, so the accuracy comes from the rounds."""
    task, state = trained(0, rounds=0)
    assert task.evaluate(state, {})["accuracy"] < 0.3


def test_a_run_repeats_to_the_bit_and_depends_on_its_seed() -> None:
    """The same seed gives the same bits in another task object; another seed gives others."""
    assert same(trained(5, 2)[1], trained(5, 2)[1])
    assert not same(trained(5, 1)[1], trained(6, 1)[1])


def test_a_site_trains_the_same_alone_and_in_any_order() -> None:
    """A site's result depends on seed, round, name and model only, not on who trained before it."""
    task = Digits(NAMES, seed=3)
    state = task.initial_state()
    first = {name: trained_by(task, name, 0, state) for name in NAMES}
    second = {name: trained_by(task, name, 0, state) for name in reversed(NAMES)}
    assert all(same(first[name][0], second[name][0]) for name in NAMES)
    assert not same(first["site-1"][0], trained_by(task, "site-1", 1, state)[0])


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    """Training and evaluation compute in one thread, whatever torch is set to, and set it back."""
    task = Digits(NAMES, seed=3)
    state = task.initial_state()
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            params, _ = trained_by(task, "site-1", 0, state)
            found.append((params, task.evaluate(state, {})))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(same(params, found[0][0]) for params, _ in found)
    assert all(metrics == found[0][1] for _, metrics in found)


def test_the_number_of_threads_is_set_back_when_training_fails() -> None:
    """An error inside does not leave the process with one thread."""
    before = torch.get_num_threads()
    with contextlib.suppress(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_the_global_generators_are_left_alone() -> None:
    """Neither torch's nor NumPy's global generator moves, and neither has any influence."""
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    _, one = trained(5, 1)
    after = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert all(np.array_equal(old, new) for old, new in zip(before[1], after[1], strict=True))
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    assert same(one, trained(5, 1)[1])


def test_the_model_that_a_site_gets_is_not_changed() -> None:
    """A site trains a copy: the global model may be shared by all sites and need not be a plain dict."""
    task = Digits(NAMES, seed=3)
    state = task.initial_state()
    copy = {name: tensor.clone() for name, tensor in state.items()}
    params, _ = trained_by(task, "site-2", 0, MemoryState(state))
    assert same(state, copy)
    assert all(params[name].data_ptr() != state[name].data_ptr() for name in state)
    assert not any(tensor.requires_grad for tensor in params.values())


def test_the_weights_are_the_numbers_of_images() -> None:
    """All images but the held-out fifth are somebody's, and each counts once."""
    task = Digits(NAMES, seed=3)
    weights = [task.site(name).train(0, task.initial_state()).weight for name in NAMES]
    assert sum(weights) == 1797 - 1797 // 5
    assert min(weights) >= LEAST_SAMPLES
    assert max(weights) > 2 * min(weights)


@pytest.mark.parametrize(("sites", "least"), [(1, 1438), (8, 8), (100, 8), (500, 2), (1438, 1)])
def test_a_split_is_complete_disjoint_and_nobody_goes_empty(sites: int, least: int) -> None:
    """However many sites there are, each sample has one owner and each owner some samples."""
    labels = np.arange(1438) % 10
    parts = dirichlet_split(labels, sites, alpha=0.1, seed=4)
    assert len(parts) == sites
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1438))
    assert min(map(len, parts)) >= least


def test_a_small_alpha_is_uneven_and_a_large_one_even() -> None:
    """The concentration decides how many classes a site sees."""
    labels = np.arange(1430) % 10

    def largest_share(alpha: float) -> float:
        parts = dirichlet_split(labels, 8, alpha=alpha, seed=4)
        return max(float(np.bincount(labels[part]).max()) / len(part) for part in parts)

    assert largest_share(0.1) > 0.4
    assert largest_share(1000.0) < 0.15


@pytest.mark.parametrize("sites", [0, 1439])
def test_more_sites_than_images_are_refused(sites: int) -> None:
    """A site without an image cannot train, so the task is not made."""
    with pytest.raises(UsageError, match="sites"):
        Digits([f"site-{number}" for number in range(sites)], seed=0)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_alpha_is_refused(alpha: float) -> None:
    """The concentration is a finite number above zero."""
    with pytest.raises(UsageError, match="alpha"):
        Digits(NAMES, seed=0, alpha=alpha)


def test_an_unknown_site_is_refused() -> None:
    """Only sites that got images have a part in the task."""
    with pytest.raises(UsageError, match="site-9"):
        Digits(NAMES, seed=0).site("site-9")


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn the error names the extra that brings it."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'streamoff\[digits\]'"):
        Digits(NAMES, seed=0)
