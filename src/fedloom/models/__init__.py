"""Networks of the papers, built by name."""

from fedloom.models.registry import ModelInfo, available_models, build_model, count_parameters

__all__ = ["ModelInfo", "available_models", "build_model", "count_parameters"]
