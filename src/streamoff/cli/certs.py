"""``streamoff certs``: an authority for a consortium, and the identities it issues."""

import argparse

from streamoff.cli.exits import ExitCode
from streamoff.errors import UsageError
from streamoff.types import Address

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Make an authority in ``args.directory``, or issue an identity from it.

    Raises:
        UsageError: Something is there already, the address or the days are wrong, or a package is missing.
        OSError: The directory cannot be written.
    """
    try:
        from streamoff.transports import authority
    except ImportError as error:
        raise UsageError(
            "making certificates needs the package 'cryptography'",
            hint="Install it with: pip install 'streamoff[certs]'",
        ) from error
    if args.action == "init":
        days = authority.AUTHORITY_DAYS if args.days is None else args.days
        made = authority.create(args.directory, days=days, force=args.force)
        print(f"authority in {made.directory}, valid until {made.until:%Y-%m-%d}")
        print("Keep the directory to yourself: whoever has it can speak for every address.")
    else:
        days = authority.ENDPOINT_DAYS if args.days is None else args.days
        address = Address(args.address)
        made = authority.issue(args.directory, address, days=days, force=args.force)
        print(f"{address}: {made.directory}, valid until {made.until:%Y-%m-%d}")
        print("Move the directory, as a whole and in secret, to the endpoint.")
    return ExitCode.OK
