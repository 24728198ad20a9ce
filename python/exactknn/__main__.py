"""``python -m exactknn`` runs the command ``exactknn``."""

import sys

from exactknn.cli import main

if __name__ == "__main__":
    sys.exit(main())
