"""A model over TLS 1.3, against a blocking TLS copy: the same contexts, certificates and cipher on both sides.

Certificates come from an authority that lives as long as the run; it needs the extra ``certs``.
"""

import statistics
from pathlib import Path

from benchmarks.machine import Machine
from benchmarks.pairs import PAIRS, QUICK_PAIRS, ratios
from benchmarks.peers import MODES
from benchmarks.report import HEAD, Report, row, samples_of
from benchmarks.transfer import GPT2_MEDIUM_BYTES, LABELS, QUICK_BYTES, TMPFS, pair, scratch
from streamoff.sim.sizes import format_size
from streamoff.transports.authority import create, issue
from streamoff.types import Address

__all__ = ["measure"]


def measure(*, quick: bool) -> Report:
    """Transfer GPT-2 medium's tensors to tmpfs and to memory."""
    nbytes = QUICK_BYTES if quick else GPT2_MEDIUM_BYTES
    pairs = QUICK_PAIRS if quick else PAIRS
    with scratch(TMPFS) as directory:
        landings, authority = directory / "landings", directory / "authority"
        landings.mkdir()
        identities = _identities(authority)
        with pair(landings, "gpt2-medium", nbytes, identities) as both:
            found = {mode: both.compare(mode, pairs) for mode in MODES}
            machine, size = Machine.here(directory), both.size
    disk = found["disk"]
    return Report(
        title=f"tls: {format_size(size)} over TLS 1.3, medians of {pairs} interleaved pairs (lowest-highest)",
        machine=machine,
        figures={
            "tls_vs_raw_tls": statistics.median(ratios(disk)),
            "tls_memory_vs_raw_tls": statistics.median(ratios(found["memory"])),
            "tls_cpu_vs_raw_tls": disk["ours"].cpu / disk["theirs"].cpu,
            "receiver_growth_mib": disk["ours"].receiver_growth_mib,
            "source_growth_mib": disk["ours"].source_growth_mib,
        },
        rows=[HEAD, *(row(f"{LABELS[mode]}, raw TLS", both) for mode, both in found.items())],
        samples=samples_of(found),
        quick=quick,
    )


def _identities(authority: Path) -> dict[str, str]:
    create(authority)
    return {name: str(issue(authority, Address(name)).directory) for name in ("source", "receiver")}
