"""Recipes: complete example programs that use exactknn, run from the project's root."""
