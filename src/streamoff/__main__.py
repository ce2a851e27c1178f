"""``python -m streamoff`` is the command ``streamoff``."""

import sys

from streamoff.cli import main

if __name__ == "__main__":
    sys.exit(main())
