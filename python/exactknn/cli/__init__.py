"""The command line. Each module named after a command holds its options, its help and what it does."""

from exactknn.cli.main import main

__all__ = ["main"]
