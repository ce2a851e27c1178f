"""``streamoff simulate``: the arguments, the run under signals, the report."""

import argparse
import functools
import json
import os
from pathlib import Path

from streamoff.cli.exits import ExitCode
from streamoff.cli.progress import watching
from streamoff.cli.supervise import supervised, terminable
from streamoff.errors import UsageError
from streamoff.sim.config import SimulationConfig
from streamoff.sim.report import SimulationReport

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Simulate, publish the model and report.

    Raises:
        UsageError: The arguments contradict each other, a path does not fit, or an extra is missing.
        StoppedError: A signal came; the job has cleaned up.
        StreamoffError: The job failed.
    """
    config = SimulationConfig(
        recipe=args.recipe,
        sites=args.sites,
        rounds=args.rounds,
        task=args.task,
        model=args.model,
        model_size=args.model_size,
        site_tensors=args.site_tensors,
        offload=args.offload,
        aggregation=args.aggregation,
        backend=args.backend,
        seed=args.seed,
        scratch=args.scratch,
        durable=args.durable,
        page_cache=args.page_cache,
        output=args.output,
        min_responses=args.min_responses,
    )
    _check_json(args.json, config)
    with terminable():
        from streamoff.sim.engine import simulate  # loads torch: wrong arguments are told before
        from streamoff.sim.memory import keep_large_blocks_mapped

        keep_large_blocks_mapped()
        with watching(config, quiet=args.quiet) as display:
            report = supervised(
                functools.partial(simulate, config, display),
                backend=config.backend,
                stopping=display.stopping,
            )
        if args.json is not None:
            _write_json(args.json, report)
    if not args.quiet:
        print(report.to_text())
    return ExitCode.OK


def _check_json(path: Path | None, config: SimulationConfig) -> None:
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise UsageError("the directory of json does not exist", path=path.absolute().parent)
    if path.is_dir():
        raise UsageError("json is a directory", path=path)
    if path.absolute() == config.output.absolute():
        raise UsageError("json and output are the same file", path=path)


def _write_json(path: Path, report: SimulationReport) -> None:
    """Write the whole report beside its place and rename it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
