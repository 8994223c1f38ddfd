"""Whole experiments of the papers on a GPU."""
