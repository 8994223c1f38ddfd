"""Engines run clients; they do not know methods."""

from fedloom.engines.base import Engine, Homes, Shop
from fedloom.engines.cuda import CudaEngine
from fedloom.engines.host import HostEngine
from fedloom.engines.plain import PlainEngine

__all__ = ["CudaEngine", "Engine", "Homes", "HostEngine", "PlainEngine", "Shop"]
