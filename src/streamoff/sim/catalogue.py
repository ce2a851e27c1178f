"""The tasks there are, by the name that a configuration gives them."""

from collections.abc import Sequence
from pathlib import Path

from streamoff.sim.config import SimulationConfig
from streamoff.sim.tasks import Task

__all__ = ["make_task"]


def make_task(config: SimulationConfig, sites: Sequence[str], directory: Path) -> Task:
    """Make the task of a simulation.

    Args:
        config: Which task, and its settings.
        sites: Names of the sites.
        directory: Where the task may keep files; the caller removes it.

    Raises:
        UsageError: The settings do not fit the task, or an extra is not installed.
    """
    if config.task == "digits":
        from streamoff.sim.digits import Digits  # noqa: PLC0415  one task never loads the other's

        return Digits(sites, seed=config.seed)
    from streamoff.sim.checkpoint import Checkpoint  # noqa: PLC0415

    return Checkpoint(
        sites,
        seed=config.seed,
        directory=directory,
        model=config.model,
        nbytes=config.model_size,
        shapes=config.site_tensors or "1",
        storage=config.storage,
    )
