"""Synthetic images of a run as small inline PNGs, in the pixel range of the data."""

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.report.markup import SectionHtml, render_section, render_section_tag
from fedloom.report.statistics import GroupStatistics
from fedloom.utils.formatting import format_plural
from fedloom.utils.storage import read_safetensors

MOST_SETS = 6
MOST_OF_A_CLASS = 12

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _SyntheticImages:
    """The synthetic data set of a run."""

    images: Floats
    """N x height x width x channels, between 0 and 1, with one or three channels."""
    labels: Floats
    """The class weights, one row for each sample."""
    losses: Floats
    """The matching loss of each iteration; may be empty."""

    @staticmethod
    def read(folder: Path) -> "_SyntheticImages | None":
        """Read the set of the run in `folder`; None if there is none, or if its samples are not images."""
        path = folder / "synthetic.safetensors"
        if not path.is_file():
            return None
        tensors = {name: tensor.double().numpy() for name, tensor in read_safetensors(path, has_checksum=True).items()}
        images, labels = tensors.get("images"), tensors.get("labels")
        if images is None or labels is None or images.ndim != 4 or images.shape[1] not in (1, 3):
            return None
        if "mean" in tensors and "std" in tensors:
            images = images * tensors["std"][:, None, None] + tensors["mean"][:, None, None]
        if "losses" not in tensors:
            return None  # they were not optimized and are noise (`dynafed.iterations=0`)
        return _SyntheticImages(_squeezed(images).transpose(0, 2, 3, 1), labels, tensors["losses"])


def _squeezed(images: Floats) -> Floats:
    """Scale images to the range 0 to 1. The method does not limit its pixels. The most extreme ones are clipped, so
    that the others remain distinguishable."""
    low, high = np.quantile(images, (0.02, 0.98), axis=(1, 2, 3), keepdims=True)
    low, high = np.minimum(low, 0), np.maximum(high, 1)
    return np.asarray(np.clip((images - low) / (high - low), 0, 1))


def render_synthetic_images(groups: Sequence[GroupStatistics]) -> SectionHtml:
    """Return the section with the synthetic images of one run of each group; empty if there are none."""
    found = []
    for group in groups:
        sets = ((run, made) for run in group.runs if (made := _SyntheticImages.read(run.folder)) is not None)
        found += [(group, *one) for one in islice(sets, 1)]
    if not found:
        return SectionHtml("")
    blocks: list[str] = []
    for group, run, made in found[:MOST_SETS]:
        if len(found) > 1 or len(group.runs) > 1:
            blocks.append(render_section_tag("h3", f"{group.label}, seed {run.seed}"))
        blocks += [render_section_tag("p", _said(made), class_="hint"), _classes(made, run.class_names)]
    hint = (
        "The server made these samples from the trajectory of the global model. A matching loss of 0 means that "
        "training on them follows the trajectory, 1 that it leads nowhere. Each row shows the samples with the largest "
        "weight for a class. Pixels may exceed the range of real images; here they are scaled back into it."
    )
    if len(found) > MOST_SETS:
        hint += f" Only the first {MOST_SETS} of {len(found)} methods are shown."
    return render_section("Synthetic samples", hint, *blocks)


def _said(made: _SyntheticImages) -> str:
    said = format_plural(len(made.images), "sample")
    if made.losses.size:
        tenth = max(1, made.losses.size // 10)
        first, last = made.losses[:tenth].mean(), made.losses[-tenth:].mean()
        said += (
            f". The matching loss went from {first:.3f} to {last:.3f} in {format_plural(made.losses.size, 'iteration')}"
        )
    return said + "."


def _classes(made: _SyntheticImages, names: Sequence[str]) -> SectionHtml:
    """Return a row of images for each class: samples with this most likely class, largest weight first."""
    likeliest, sureness = made.labels.argmax(axis=1), made.labels.max(axis=1)
    rows = []
    for label in range(made.labels.shape[1]):
        members = np.flatnonzero(likeliest == label)
        members = members[np.argsort(-sureness[members], kind="stable")]
        name = names[label] if label < len(names) else str(label)
        shown = [_figure(made.images[at], name, sureness[at]) for at in members[:MOST_OF_A_CLASS]]
        left = len(members) - len(shown)
        count = f"{left} more" if left else "" if shown else "no samples"
        rows.append(
            render_section_tag(
                "div",
                render_section_tag("b", name),
                render_section_tag("div", *shown, render_section_tag("i", count) if count else ""),
                class_="made",
            )
        )
    return render_section_tag("div", *rows, class_="made-set")


def _figure(image: Floats, name: str, weight: float) -> SectionHtml:
    share = f"{weight:.0%}"
    picture = render_section_tag("img", src=_png(image), alt=f"a synthetic {name}, {share}", width="48", height="48")
    return render_section_tag("figure", picture, render_section_tag("figcaption", share))


def _png(image: Floats) -> str:
    """Encode an image (height x width x channels, between 0 and 1) as the data URL of a PNG."""
    height, width, channels = image.shape
    pixels = np.rint(image * 255).astype(np.uint8).reshape(height, width * channels)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1).tobytes()  # 0: no filter

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">2I5B", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines, 9)), chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()
