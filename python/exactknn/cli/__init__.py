"""The command line. The module of a command holds its options, its help text and its implementation."""

from exactknn.cli.main import main

__all__ = ["main"]
