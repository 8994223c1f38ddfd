"""The papers' networks, by name."""

from fedloom.models.networks import ModelInfo, build, catalogue

__all__ = ["ModelInfo", "build", "catalogue"]
