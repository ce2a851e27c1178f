"""What an engine tells whoever watches a simulation."""

from typing import Protocol

from streamoff.sim.report import RoundRow, SimulationReport

__all__ = ["Observer", "Silent"]


class Observer(Protocol):
    """Called by the engine from the event loop's thread; must return quickly and must not raise."""

    def round_started(self, number: int, sites: int) -> None:
        """Round ``number``, counted from 1, was sent to ``sites`` sites."""
        ...

    def transfer(self, site: str, landed_bytes: int, total_bytes: int) -> None:
        """``landed_bytes`` of ``total_bytes`` of a site's contribution have landed in this round."""
        ...

    def round_ended(self, row: RoundRow) -> None:
        """A round is over and its model is the global one."""
        ...

    def finished(self, report: SimulationReport) -> None:
        """The model is published and the scratch space is free again."""
        ...


class Silent:
    """An observer that does nothing."""

    def round_started(self, number: int, sites: int) -> None:
        """Do nothing."""

    def transfer(self, site: str, landed_bytes: int, total_bytes: int) -> None:
        """Do nothing."""

    def round_ended(self, row: RoundRow) -> None:
        """Do nothing."""

    def finished(self, report: SimulationReport) -> None:
        """Do nothing."""
