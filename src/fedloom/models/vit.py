"""Vision transformers from `transformers`, whole or with `peft`'s LoRA: the extra `fedloom[vit]`.

With LoRA the body is frozen and only two thin matrices A (rank x width) and B (width x rank) beside every query and
value projection, and the head, are trained. So only these are in a row: they alone travel and are averaged, while the
body is in memory once, whatever the number of worker processes.

A model's name may carry options: `vit-tiny-lora:rank=4,alpha=8`.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedloom.errors import InputError, unknown
from fedloom.settings import Settings, validated

Shape = tuple[int, ...]


class Geometry(Settings):
    """The size of a vision transformer."""

    width: int = Field(192, ge=1)
    """numbers for each patch"""
    depth: int = Field(12, ge=1)
    """blocks"""
    heads: int = Field(3, ge=1)
    """attention heads"""
    patch: int = Field(4, ge=1)
    """side of a patch in pixels"""
    size: int = Field(0, ge=0)
    """side that images are resized to; 0 takes them as they are"""
    colour: bool = False
    """three channels whatever the data have; grey images are repeated"""


class BaseGeometry(Geometry):
    """ViT-B/16, as pretrained checkpoints have it."""

    width: int = Field(768, ge=1)
    """numbers for each patch"""
    heads: int = Field(12, ge=1)
    """attention heads"""
    patch: int = Field(16, ge=1)
    """side of a patch in pixels"""
    size: int = Field(224, ge=0)
    """side that images are resized to; 0 takes them as they are"""
    colour: bool = True
    """three channels whatever the data have; grey images are repeated"""


class Lora(Settings):
    """Low-rank adaptation of the query and value projections."""

    rank: int = Field(8, ge=1)
    """rows of A and columns of B"""
    alpha: float = Field(16.0, gt=0)
    """the product BA counts alpha / rank times"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout before A"""


GEOMETRIES: dict[str, type[Geometry]] = {"vit-tiny": Geometry, "vit-b16": BaseGeometry}


class VisionTransformer(nn.Module):
    """The body, whose output for the class token goes into the linear `head`."""

    old_names = (
        (r"\.base_layer\.", "."),  # what peft puts around a projection
        (r"^vit\.", ""),
        (r"^classifier\.", "head."),
        # Files keep the names that transformers' modules had before version 5.
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.attention\.query\.", ".attention.q_proj."),
        (r"\.attention\.attention\.key\.", ".attention.k_proj."),
        (r"\.attention\.attention\.value\.", ".attention.v_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    )
    """Under which other names files know the tensors, see `fedloom.initial`."""

    def __init__(self, vit: nn.Module, width: int, classes: int, channels: int, size: int) -> None:
        super().__init__()
        self.vit, self.channels, self.size = vit, channels, size
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < self.channels:
            x = x.expand(-1, self.channels, -1, -1)
        if self.size and x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", align_corners=False)
        scores: Tensor = self.head(self.vit(pixel_values=x).last_hidden_state[:, 0])
        return scores


def make(name: str, shape: Shape, classes: int) -> nn.Module:
    """The vision transformer `name`, with its options, for images of `shape`."""
    base, geometry, lora = _parse(name)
    channels, (height, width) = _input(name, base, geometry, shape)
    transformers, peft = _libraries(base)
    settings = transformers.ViTConfig(
        hidden_size=geometry.width,
        num_hidden_layers=geometry.depth,
        num_attention_heads=geometry.heads,
        intermediate_size=4 * geometry.width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=(height, width),
        patch_size=geometry.patch,
        num_channels=channels,
    )
    body = transformers.ViTModel(settings, add_pooling_layer=False)
    if lora is not None:
        leaves = {path.rpartition(".")[2] for path, _ in body.named_modules()}
        targets = ["q_proj", "v_proj"] if "q_proj" in leaves else ["query", "value"]  # transformers 5, and before
        adapted = peft.LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, bias="none"
        )
        body = peft.inject_adapter_in_model(adapted, body)  # which also freezes the rest of the body
    return VisionTransformer(body, geometry.width, classes, channels, geometry.size)


def count(name: str, shape: Shape, classes: int) -> int:
    """How many trainable parameters `make` gives, without the libraries it needs."""
    base, geometry, lora = _parse(name)
    channels, (height, width) = _input(name, base, geometry, shape)
    w, d, p = geometry.width, geometry.depth, geometry.patch
    head = w * classes + classes
    if lora is not None:
        return 4 * d * w * lora.rank + head
    tokens = (height // p) * (width // p) + 1
    embedding = w + tokens * w + channels * p * p * w + w
    block = 4 * (w * w + w) + 2 * 2 * w + (4 * w * w + 4 * w) + (4 * w * w + w)
    return embedding + d * block + 2 * w + head


def _parse(name: str) -> tuple[str, Geometry, Lora | None]:
    """`vit-tiny-lora:rank=4` as its parts."""
    base, _, text = name.partition(":")
    given: dict[str, Any] = {}
    for pair in text.split(",") if text else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise InputError(f"options of a model are given as {base}:NAME=VALUE,NAME=VALUE, not {name!r}.")
        given[key] = value
    plain = base.removesuffix("-lora")
    kinds: list[type[Settings]] = [GEOMETRIES[plain], *([Lora] if plain != base else [])]
    for key in given:
        if not any(key in kind.model_fields for kind in kinds):
            raise unknown(f"option of {base}", key, [field for kind in kinds for field in kind.model_fields])
    shares = [{key: value for key, value in given.items() if key in kind.model_fields} for kind in kinds]
    try:
        geometry = validated(GEOMETRIES[plain], shares[0])
        lora = validated(Lora, shares[1]) if plain != base else None
    except InputError as error:
        raise InputError(f"model {base!r}: {error}") from None
    if geometry.width % geometry.heads:
        raise InputError(f"model {base!r} cannot share a width of {geometry.width} among {geometry.heads} heads.")
    return base, geometry, lora


def _input(name: str, base: str, geometry: Geometry, shape: Shape) -> tuple[int, tuple[int, int]]:
    """Channels and sides of what enters the body."""
    if len(shape) != 3:
        raise InputError(f"model {base!r} cannot take inputs of shape {shape}; it wants images, (C, H, W).")
    channels = 3 if geometry.colour else shape[0]
    if shape[0] not in (1, channels):
        raise InputError(f"model {base!r} cannot take images of {shape[0]} channels; it takes 1 or {channels}.")
    height, width = (geometry.size, geometry.size) if geometry.size else shape[1:]
    if height % geometry.patch or width % geometry.patch:
        raise InputError(
            f"model {name!r} cannot cut images of {height} x {width} pixels into patches of {geometry.patch}; give "
            f"another size, such as {base}:size={geometry.patch * max(1, round(height / geometry.patch))}."
        )
    return channels, (height, width)


def _libraries(base: str) -> tuple[Any, Any]:
    try:
        import peft
        import transformers
    except ImportError as error:
        missing = error.name or "transformers"
        raise InputError(
            f"model {base!r} needs {missing}, which is not installed: pip install 'fedloom[vit]'."
        ) from None
    return transformers, peft


NETWORKS: dict[str, tuple[str, Callable[[str, Shape, int], nn.Module]]] = {
    "vit-tiny": ("ViT-Ti: 12 blocks of width 192, patches of 4 pixels", make),
    "vit-tiny-lora": ("the same, frozen, with LoRA of rank 8 on queries and values", make),
    "vit-b16": ("ViT-B/16 on images resized to 224", make),
    "vit-b16-lora": ("the same, frozen, with LoRA of rank 8 on queries and values", make),
}
