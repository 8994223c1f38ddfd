"""Matching the neurons of networks."""
