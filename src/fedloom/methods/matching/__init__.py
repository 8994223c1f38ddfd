"""Matching of the neurons of networks."""
