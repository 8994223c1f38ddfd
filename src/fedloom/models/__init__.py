"""The papers' networks, by name."""

from fedloom.models.networks import ModelInfo, build, catalogue, count

__all__ = ["ModelInfo", "build", "catalogue", "count"]
