"""The machine tier: sans-IO worlds of many machines, about four milliseconds each."""

from __future__ import annotations

from collections.abc import Iterator

from . import machine_scenario
from .machine_scenario import MachineScenario
from .machine_world import World
from .tier import Tally

__all__ = ["Machines"]


class Machines:
    """Machines alone, in virtual time, on a network that loses, doubles and reorders messages."""

    name = "machines"
    attempts = 1
    most_shrinks = 500
    patience = 60.0

    def draw(self, seed: int) -> MachineScenario:
        """The scenario of a seed."""
        return machine_scenario.draw(seed)

    def run(self, scenario: MachineScenario) -> Tally:
        """Run it; see :class:`~tests.torture.machine_world.World`."""
        world = World(scenario)
        ends = world.run()
        return Tally(1, world.injected, ends)

    def smaller(self, scenario: MachineScenario) -> Iterator[MachineScenario]:
        """Neighbours with one thing less."""
        return machine_scenario.smaller(scenario)
