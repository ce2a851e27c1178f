"""Real training on real data: scikit-learn's handwritten digits, unevenly spread over the sites.

1797 images of 8 by 8 pixels and a small convolutional network. A fifth of the images is held out for
evaluation; the rest is split over the sites by class, in proportions drawn from a Dirichlet distribution,
so that a site sees a few classes often and others hardly ever.

Every bit of the result follows from the seed and the sites. Random numbers come from generators made for
the purpose (``torch.Generator`` from seed, round and site; NumPy's ``default_rng`` for the split), never
from the global ones. Training and evaluation run with one torch thread, because the order in which a
reduction adds depends on the number of threads.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F  # noqa: N812  the name that every reader of torch code expects

from streamoff.errors import UsageError
from streamoff.sim.seeds import derive
from streamoff.sim.tasks import GlobalState, TrainResult, tensors_of

__all__ = ["Digits", "DigitsSite", "dirichlet_split", "one_thread"]

Tensors = dict[str, torch.Tensor]

CLASSES: Final = 10
HELD_OUT: Final = 5
"""One image in so many is held out."""
LEAST_SAMPLES: Final = 8
"""What each site gets at least, if there are enough images."""

LEARNING_RATE: Final = 0.1
MOMENTUM: Final = 0.9
BATCH: Final = 32
EPOCHS: Final = 10

_SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    "conv1.weight": (16, 1, 3, 3),
    "conv1.bias": (16,),
    "conv2.weight": (64, 16, 3, 3),
    "conv2.bias": (64,),
    "head.weight": (CLASSES, 256),
    "head.bias": (CLASSES,),
}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread inside the block.

    The setting belongs to the process: only one thread may be inside such a block at a time, as is the case
    for the one worker thread of a simulation.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dirichlet_split(
    labels: NDArray[np.int64], sites: int, *, alpha: float, seed: int
) -> list[NDArray[np.int64]]:
    """Spread samples over sites, class by class, in Dirichlet-distributed proportions.

    Args:
        labels: Shape (n,), class of each sample.
        sites: 1 to n.
        alpha: Concentration, > 0: small is uneven, large is even.
        seed: Non-negative.

    Returns:
        Sorted sample numbers of each site. They are disjoint and complete, and each site has at least
        ``min(LEAST_SAMPLES, n // sites)``: what is missing is taken from the site that has most.

    Source: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
    Visual Classification", 2019, with a floor on the number of samples.
    """
    random = np.random.default_rng(derive(seed, "split", sites))
    parts: list[list[int]] = [[] for _ in range(sites)]
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        shares = np.cumsum(random.dirichlet(np.full(sites, alpha)))[:-1]
        cuts = (shares * len(members)).astype(np.int64)
        for part, chosen in zip(parts, np.split(members, cuts), strict=True):
            part.extend(chosen.tolist())
    least = min(LEAST_SAMPLES, len(labels) // sites)
    for part in parts:
        while len(part) < least:
            richest = max(parts, key=len)
            part.append(richest.pop(int(random.integers(len(richest)))))
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


@dataclass(frozen=True, slots=True)
class _Samples:
    """Images of shape (n, 1, 8, 8), float32 in 0 to 1, and labels of shape (n,), int64."""

    images: torch.Tensor
    labels: torch.Tensor

    def at(self, chosen: NDArray[np.int64] | torch.Tensor) -> "_Samples":
        index = torch.as_tensor(chosen)
        return _Samples(self.images[index], self.labels[index])

    def __len__(self) -> int:
        return len(self.labels)


def _load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  an extra, wanted only here
    except ImportError as error:
        raise UsageError(
            "task digits needs scikit-learn",
            hint="Install it with: pip install 'streamoff[digits]'",
        ) from error
    found: Any = load_digits()
    return (found.images / 16).astype(np.float32), found.target.astype(np.int64)


class Digits:
    """The digits task: a :class:`~streamoff.sim.tasks.Task`.

    Args:
        sites: Names of the sites; each can have at least one image.
        seed: Of the split, the initial model and all training, non-negative.
        alpha: Concentration of the Dirichlet distribution, finite and > 0.

    Raises:
        UsageError: An argument is out of range, or scikit-learn is not installed.
    """

    landing: Literal["memory", "disk"] = "memory"

    def __init__(self, sites: Sequence[str], *, seed: int, alpha: float = 0.5) -> None:
        if not (math.isfinite(alpha) and alpha > 0):
            raise UsageError("alpha is out of range", expected="a finite number above 0", got=alpha)
        images, labels = _load()
        order = np.random.default_rng(derive(seed, "held out")).permutation(len(labels))
        held_out, kept = np.split(order, [len(labels) // HELD_OUT])
        if not 1 <= len(sites) <= len(kept):
            raise UsageError(
                "sites is out of range for task digits",
                expected=f"1 to {len(kept)}: each trains on an image at least",
                got=len(sites),
            )
        every = _Samples(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels))
        self._seed = seed
        self._held_out = every.at(held_out)
        split = dirichlet_split(labels[kept], len(sites), alpha=alpha, seed=seed)
        self._sites = {
            name: DigitsSite(name, every.at(kept[part]), seed=seed)
            for name, part in zip(sites, split, strict=True)
        }

    def initial_state(self) -> Tensors:
        """Return the parameters before the first round; fresh tensors, the caller owns them."""
        random = torch.Generator().manual_seed(derive(self._seed, "initial"))
        state = {}
        for name, shape in _SHAPES.items():
            fan_in = math.prod(_SHAPES[f"{name.split('.')[0]}.weight"][1:])
            bound = fan_in**-0.5
            state[name] = torch.empty(shape).uniform_(-bound, bound, generator=random)
        return state

    def site(self, name: str) -> "DigitsSite":
        """Return a site's part.

        Raises:
            UsageError: The task has no such site.
        """
        if name not in self._sites:
            raise UsageError("no such site", site=name)
        return self._sites[name]

    def evaluate(
        self,
        state: GlobalState,
        accepted: Mapping[int, Sequence[str]],  # noqa: ARG002  the protocol's name
    ) -> dict[str, float]:
        """Return ``accuracy`` (0 to 1) and ``loss`` (mean cross entropy) on the held-out images."""
        tensors = tensors_of(state)
        with one_thread(), torch.no_grad():
            scores = _forward(tensors, self._held_out.images)
            loss = F.cross_entropy(scores, self._held_out.labels)
            right = (scores.argmax(dim=1) == self._held_out.labels).sum()
            return {"accuracy": right.item() / len(self._held_out), "loss": loss.item()}


class DigitsSite:
    """One site: its images and plain SGD with momentum on them.

    Args:
        name: Of the site.
        samples: Its images.
        seed: Of the simulation.
    """

    def __init__(self, name: str, samples: _Samples, *, seed: int) -> None:
        self.name = name
        self._samples = samples
        self._seed = seed

    def train(self, round: int, state: GlobalState) -> TrainResult:  # noqa: A002  the word of the domain
        """Train for :data:`EPOCHS` epochs, starting from the global parameters.

        Args:
            round: Number of the round; batches are drawn from a generator of seed, round and site.
            state: The global parameters; not changed.

        Returns:
            Fresh parameters, the number of images as weight, and the mean ``loss`` of the last epoch.
        """
        random = torch.Generator().manual_seed(derive(self._seed, "train", round, self.name))
        tensors = tensors_of(state)
        params = {name: tensors[name].detach().clone().requires_grad_() for name in _SHAPES}
        speed = {name: torch.zeros_like(param) for name, param in params.items()}
        loss = 0.0
        with one_thread():
            for _ in range(EPOCHS):
                order, loss = torch.randperm(len(self._samples), generator=random), 0.0
                for at in range(0, len(order), BATCH):
                    batch = self._samples.at(order[at : at + BATCH])
                    loss += _step(params, speed, batch) * len(batch)
        return TrainResult(
            params={name: param.detach() for name, param in params.items()},
            weight=float(len(self._samples)),
            metrics={"loss": loss / len(self._samples)},
        )


def _forward(params: Mapping[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """Map images of shape (n, 1, 8, 8) to scores of shape (n, CLASSES)."""
    hidden = F.conv2d(images, params["conv1.weight"], params["conv1.bias"], padding=1)
    hidden = F.max_pool2d(F.relu(hidden), 2)
    hidden = F.conv2d(hidden, params["conv2.weight"], params["conv2.bias"], padding=1)
    hidden = F.max_pool2d(F.relu(hidden), 2)
    return F.linear(hidden.flatten(1), params["head.weight"], params["head.bias"])


def _step(params: Tensors, speed: Tensors, batch: _Samples) -> float:
    """Take one SGD step in place and return the batch's mean loss before it."""
    loss = F.cross_entropy(_forward(params, batch.images), batch.labels)
    gradients = torch.autograd.grad(loss, list(params.values()))
    with torch.no_grad():
        for (name, param), gradient in zip(params.items(), gradients, strict=True):
            speed[name].mul_(MOMENTUM).add_(gradient)
            param.sub_(speed[name], alpha=LEARNING_RATE)
    return loss.item()
