"""Vision transformers from `transformers`, whole or with `peft`'s LoRA: the extra `fedloom[vit]`.

With LoRA the body is frozen and only two thin matrices A (rank x width) and B (width x rank) beside every query and
value projection, and the head, are trained. So only these are in a row: they alone travel and are averaged, while the
body is in memory once, whatever the number of worker processes.

A model's name may carry options: `vit-tiny-lora:rank=4,alpha=8`.
"""

from typing import Any

import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.models.base import ModelRequest, ModelSpec, expand_model_input_channels
from fedloom.utils.settings import Settings


class _ViTOptions(Settings):
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

    @model_validator(mode="after")
    def _heads_fit(self) -> "_ViTOptions":
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} cannot be shared among {self.heads} heads.")
        return self


class _ViTBaseOptions(_ViTOptions):
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


class _LoRAOptions(Settings):
    """Low-rank adaptation of the query and value projections."""

    rank: int = Field(8, ge=1)
    """rows of A and columns of B"""
    alpha: float = Field(16.0, gt=0)
    """the product BA counts alpha / rank times"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout before A"""


class _ViTLoRAOptions(_LoRAOptions, _ViTOptions):
    """ViT-Ti with LoRA."""


class _ViTBaseLoRAOptions(_LoRAOptions, _ViTBaseOptions):
    """ViT-B/16 with LoRA."""


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
    """Under which other names files know the tensors, see `fedloom.models.initial_weights`."""

    def __init__(self, vit: nn.Module, width: int, classes: int, channels: int, size: int) -> None:
        super().__init__()
        self.vit, self.channels, self.size = vit, channels, size
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = expand_model_input_channels(x, self.channels)
        if self.size and x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", align_corners=False)
        scores: Tensor = self.head(self.vit(pixel_values=x).last_hidden_state[:, 0])
        return scores


def _build_vit(wanted: ModelRequest, geometry: _ViTOptions) -> nn.Module:
    """The vision transformer, with LoRA if the options have it."""
    channels, (height, width) = _input(wanted, geometry)
    transformers, peft = _libraries(wanted)
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
    if isinstance(geometry, _LoRAOptions):
        leaves = {path.rpartition(".")[2] for path, _ in body.named_modules()}
        targets = ["q_proj", "v_proj"] if "q_proj" in leaves else ["query", "value"]  # transformers 5, and before
        adapted = peft.LoraConfig(
            r=geometry.rank,
            lora_alpha=geometry.alpha,
            lora_dropout=geometry.dropout,
            target_modules=targets,
            bias="none",
        )
        body = peft.inject_adapter_in_model(adapted, body)  # which also freezes the rest of the body
    return VisionTransformer(body, geometry.width, wanted.classes, channels, geometry.size)


def _count_vit_parameters(wanted: ModelRequest, geometry: _ViTOptions) -> int:
    """How many trainable parameters `make` gives, without the libraries it needs."""
    channels, (height, width) = _input(wanted, geometry)
    w, d, p = geometry.width, geometry.depth, geometry.patch
    head = w * wanted.classes + wanted.classes
    if isinstance(geometry, _LoRAOptions):
        return 4 * d * w * geometry.rank + head
    tokens = (height // p) * (width // p) + 1
    embedding = w + tokens * w + channels * p * p * w + w
    block = 4 * (w * w + w) + 2 * 2 * w + (4 * w * w + 4 * w) + (4 * w * w + w)
    return embedding + d * block + 2 * w + head


def _input(wanted: ModelRequest, geometry: _ViTOptions) -> tuple[int, tuple[int, int]]:
    """Channels and sides of what enters the body."""
    channels, height, width = wanted.images(colour=geometry.colour)
    if geometry.size:
        height = width = geometry.size
    if height % geometry.patch or width % geometry.patch:
        base, size = wanted.name.partition(":")[0], geometry.patch * max(1, round(height / geometry.patch))
        raise InputError(
            f"model {wanted.name!r} cannot cut images of {height} x {width} pixels into patches of {geometry.patch}; "
            f"give another size, such as {base}:size={size}."
        )
    return channels, (height, width)


def _libraries(wanted: ModelRequest) -> tuple[Any, Any]:
    try:
        import peft
        import transformers
    except ImportError as error:
        missing = error.name or "transformers"
        raise InputError(
            f"model {wanted.name!r} needs {missing}, which is not installed: pip install 'fedloom[vit]'."
        ) from None
    return transformers, peft


NETWORKS: dict[str, ModelSpec[Any]] = {
    "vit-tiny": ModelSpec(
        "ViT-Ti: 12 blocks of width 192, patches of 4 pixels", _build_vit, _ViTOptions, count=_count_vit_parameters
    ),
    "vit-tiny-lora": ModelSpec(
        "the same, frozen, with LoRA of rank 8 on queries and values",
        _build_vit,
        _ViTLoRAOptions,
        count=_count_vit_parameters,
    ),
    "vit-b16": ModelSpec("ViT-B/16 on images resized to 224", _build_vit, _ViTBaseOptions, count=_count_vit_parameters),
    "vit-b16-lora": ModelSpec(
        "the same, frozen, with LoRA of rank 8 on queries and values",
        _build_vit,
        _ViTBaseLoRAOptions,
        count=_count_vit_parameters,
    ),
}
