"""Vision transformers, optionally with LoRA.

They come from `transformers` and `peft`, and need the extra `fedloom[vit]`.

LoRA freezes the body. It trains the head and two thin matrices next to every query and value projection, A (rank x
width) and B (width x rank). Only these are in a row, so only they are sent and averaged. The frozen body is in memory
once, whatever the number of worker processes.

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
    """Size of a vision transformer."""

    width: int = Field(192, ge=1)
    """size of the embedding of each patch"""
    depth: int = Field(12, ge=1)
    """number of blocks"""
    heads: int = Field(3, ge=1)
    """number of attention heads"""
    patch: int = Field(4, ge=1)
    """side of a patch in pixels"""
    size: int = Field(0, ge=0)
    """side that images are resized to; 0 keeps their size"""
    color: bool = False
    """use three channels for all data; gray images are repeated"""

    @model_validator(mode="after")
    def _heads_fit(self) -> "_ViTOptions":
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} cannot be shared among {self.heads} heads.")
        return self


class _ViTBaseOptions(_ViTOptions):
    """Size of ViT-B/16, as in pretrained checkpoints."""

    width: int = Field(768, ge=1)
    """size of the embedding of each patch"""
    heads: int = Field(12, ge=1)
    """number of attention heads"""
    patch: int = Field(16, ge=1)
    """side of a patch in pixels"""
    size: int = Field(224, ge=0)
    """side that images are resized to; 0 keeps their size"""
    color: bool = True
    """use three channels for all data; gray images are repeated"""


class _LoRAOptions(Settings):
    """Low-rank adaptation of the query and value projections."""

    rank: int = Field(8, ge=1)
    """rows of A and columns of B"""
    alpha: float = Field(16.0, gt=0)
    """scale of LoRA: the product BA is multiplied by alpha / rank"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout before A"""


class _ViTLoRAOptions(_LoRAOptions, _ViTOptions):
    """ViT-Ti with LoRA."""


class _ViTBaseLoRAOptions(_LoRAOptions, _ViTBaseOptions):
    """ViT-B/16 with LoRA."""


class VisionTransformer(nn.Module):
    """The body, and the linear `head` on its output for the class token."""

    old_names = (
        (r"\.base_layer\.", "."),  # added by peft around a projection
        (r"^vit\.", ""),
        (r"^classifier\.", "head."),
        # Files use the names of modules in transformers before version 5.
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.attention\.query\.", ".attention.q_proj."),
        (r"\.attention\.attention\.key\.", ".attention.k_proj."),
        (r"\.attention\.attention\.value\.", ".attention.v_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    )
    """Names of the tensors in other tools' files, see `fedloom.models.initial_weights`."""

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


def _build_vit(request: ModelRequest, options: _ViTOptions) -> nn.Module:
    """Return the vision transformer, with LoRA if the options have it."""
    channels, (height, width) = _input(request, options)
    transformers, peft = _libraries(request)
    settings = transformers.ViTConfig(
        hidden_size=options.width,
        num_hidden_layers=options.depth,
        num_attention_heads=options.heads,
        intermediate_size=4 * options.width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=(height, width),
        patch_size=options.patch,
        num_channels=channels,
    )
    body = transformers.ViTModel(settings, add_pooling_layer=False)
    if isinstance(options, _LoRAOptions):
        leaves = {path.rpartition(".")[2] for path, _ in body.named_modules()}
        targets = ["q_proj", "v_proj"] if "q_proj" in leaves else ["query", "value"]  # transformers 5, and older
        adapted = peft.LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules=targets,
            bias="none",
        )
        body = peft.inject_adapter_in_model(adapted, body)  # also freezes the rest of the body
    return VisionTransformer(body, options.width, request.classes, channels, options.size)


def _count_vit_parameters(request: ModelRequest, options: _ViTOptions) -> int:
    """Return the number of trainable parameters of `_build_vit` without the libraries it needs."""
    channels, (height, width) = _input(request, options)
    w, d, p = options.width, options.depth, options.patch
    head = w * request.classes + request.classes
    if isinstance(options, _LoRAOptions):
        return 4 * d * w * options.rank + head
    tokens = (height // p) * (width // p) + 1
    embedding = w + tokens * w + channels * p * p * w + w
    block = 4 * (w * w + w) + 2 * 2 * w + (4 * w * w + 4 * w) + (4 * w * w + w)
    return embedding + d * block + 2 * w + head


def _input(request: ModelRequest, options: _ViTOptions) -> tuple[int, tuple[int, int]]:
    """Return channels and sides of the images that enter the body."""
    channels, height, width = request.image_shape(color=options.color)
    if options.size:
        height = width = options.size
    if height % options.patch or width % options.patch:
        base, size = request.name.partition(":")[0], options.patch * max(1, round(height / options.patch))
        raise InputError(
            f"model {request.name!r} cannot cut images of {height} x {width} pixels into patches of {options.patch}; "
            f"give another size, such as {base}:size={size}."
        )
    return channels, (height, width)


def _libraries(request: ModelRequest) -> tuple[Any, Any]:
    try:
        import peft
        import transformers
    except ImportError as error:
        missing = error.name or "transformers"
        raise InputError(
            f"model {request.name!r} needs {missing}, which is not installed: pip install 'fedloom[vit]'."
        ) from None
    return transformers, peft


NETWORKS: dict[str, ModelSpec[Any]] = {
    "vit-tiny": ModelSpec(
        "ViT-Ti: 12 blocks of width 192, patches of 4 pixels",
        _build_vit,
        _ViTOptions,
        count_parameters=_count_vit_parameters,
    ),
    "vit-tiny-lora": ModelSpec(
        "frozen ViT-Ti with LoRA of rank 8 on queries and values",
        _build_vit,
        _ViTLoRAOptions,
        count_parameters=_count_vit_parameters,
    ),
    "vit-b16": ModelSpec(
        "ViT-B/16 on images resized to 224", _build_vit, _ViTBaseOptions, count_parameters=_count_vit_parameters
    ),
    "vit-b16-lora": ModelSpec(
        "frozen ViT-B/16 with LoRA of rank 8 on queries and values",
        _build_vit,
        _ViTBaseLoRAOptions,
        count_parameters=_count_vit_parameters,
    ),
}
