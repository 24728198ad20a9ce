"""Recipes: complete programs that use exactknn as a reader would, run from the project's root."""
