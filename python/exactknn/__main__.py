"""``python -m exactknn``: the same as the command ``exactknn``."""

import sys

from exactknn.cli import main

if __name__ == "__main__":
    sys.exit(main())
