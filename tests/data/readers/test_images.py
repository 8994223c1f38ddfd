"""Tests of image folders: files found, splits, and damaged images."""

import io
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from PIL import Image

from fedloom.data import Dataset, load_dataset
from fedloom.data.readers.images import _decode_image
from fedloom.errors import InputError
from tests.support.damaged_files import attempt, damage


def picture(seed: int, height: int = 8, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


def fill(folder: Path, count: int, first: int = 0, side: int = 8) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i:03d}.png").write_bytes(encoded(picture(first + i, side, side)))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of seven and six images, of which every fifth is for testing: one each."""
    fill(tmp_path / "photos" / "cat", 7)
    fill(tmp_path / "photos" / "dog", 6, 100)
    (tmp_path / "photos" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "photos" / ".hidden").mkdir()
    return tmp_path / "photos"


def test_a_folder_a_class(photos: Path) -> None:
    data = load_dataset(f"folder:{photos}")
    assert (data.classes, data.class_names, data.shape) == (2, ("cat", "dog"), (3, 8, 8))
    assert (data.owners, data.domains) == (None, None)
    assert data.train.y.tolist() == [0] * 6 + [1] * 5
    assert data.test.y.tolist() == [0, 1]
    held_out = [2, 102]
    kept = [i for i in (*range(7), *range(100, 106)) if i not in held_out]
    assert np.array_equal(data.train.x.numpy(), [picture(i) for i in kept])
    assert np.array_equal(data.test.x.numpy(), [picture(i) for i in held_out])
    assert float(data.transform(data.train.x).max()) <= 1


def test_a_path_with_a_slash_is_a_folder_of_images(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos.parent)
    data = load_dataset("photos/")
    assert (data.class_names, data.notes) == (("cat", "dog"), ())
    assert load_dataset("./photos,size=4").shape == (3, 4, 4)
    with pytest.raises(InputError, match=r"^/.*/phtos is not a folder; expected one with a folder of images for each"):
        load_dataset("phtos/")


@pytest.mark.parametrize("inner", ["", "train"])
def test_domains_that_are_read_as_classes_are_noted(tmp_path: Path, inner: str) -> None:
    for domain in ("winter", "summer"):
        for label in ("cat", "dog"):
            fill(tmp_path / inner / domain / label, 3)
            fill(tmp_path / "test" / domain / label, 1) if inner else None
    data = load_dataset(f"folder:{tmp_path}")
    assert data.class_names == ("summer", "winter")
    assert f"domains are named domains:{tmp_path}." in data.notes[0]


@pytest.mark.parametrize("name", ["test", "val", "valid"])
def test_a_folder_for_testing_is_used(tmp_path: Path, name: str) -> None:
    for part, count in (("train", 3), (name, 2)):
        fill(tmp_path / part / "a", count)
        fill(tmp_path / part / "b", count, 50)
    data = load_dataset(f"folder:{tmp_path}")
    assert (len(data.train), len(data.test)) == (6, 4)


def domains_of(root: Path) -> Path:
    for number, domain in enumerate(("photo", "sketch", "art")):
        for label, name in enumerate(("cat", "dog", "horse")):
            if (domain, name) != ("art", "horse"):  # a domain may lack a class
                fill(root / domain / name, 5 + number, 1000 * number + 100 * label)
    return root


def test_a_folder_a_domain(tmp_path: Path) -> None:
    data = load_dataset(f"domains:{domains_of(tmp_path)}")
    assert data.domain_names == ("art", "photo", "sketch")
    assert data.class_names == ("cat", "dog", "horse")
    assert data.domains is not None
    counts = np.stack([np.bincount(data.train.y[data.domains == k].numpy(), minlength=3) for k in range(3)])
    assert counts.tolist() == [[6, 6, 0], [4, 4, 4], [5, 5, 5]]
    assert data.test_domains is not None
    assert data.test_domains.tolist() == [0] * 2 + [1] * 3 + [2] * 3
    assert np.array_equal(data.train.x[data.domains == 1][0].numpy(), picture(0))
    assert len(data.test) == 8


def test_resizing_is_that_of_pillow(photos: Path) -> None:
    data = load_dataset(f"folder:{photos},size=5")
    expected = np.asarray(Image.fromarray(picture(0)).resize((5, 5), Image.Resampling.BILINEAR))
    assert data.shape == (3, 5, 5)
    assert np.array_equal(data.train.x[0].numpy(), expected)


def test_images_of_different_sizes_need_a_size(photos: Path) -> None:
    (photos / "dog" / "004.png").write_bytes(encoded(picture(7, 9, 8)))
    with pytest.raises(InputError, match=r"dog/004.png has 8 x 9 pixels where .*has 8 x 8; .*size=64"):
        load_dataset(f"folder:{photos}")
    assert load_dataset(f"folder:{photos},size=8").shape == (3, 8, 8)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK"])
def test_grey_and_other_images_become_colour(mode: str) -> None:
    form = "JPEG" if mode == "CMYK" else "PNG"
    image = Image.fromarray(picture(0)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, form)
    with Image.open(io.BytesIO(buffer.getvalue())) as stored:
        expected = np.asarray(stored.convert("RGB"))
    assert np.array_equal(_decode_image(buffer.getvalue(), "it", None), expected)


def test_sixteen_bits_are_not_cut_off_in_silence() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(buffer, "PNG")
    with pytest.raises(InputError, match=r"it has pixels of the kind 'I;16'; expected 8 bits a channel"):
        _decode_image(buffer.getvalue(), "it", None)


def test_an_image_that_claims_to_be_huge() -> None:
    content = bytearray(encoded(picture(0)))
    for side in (9_000, 2**31 - 1):  # a little and far too large
        content[16:24] = side.to_bytes(4, "big") * 2
        content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
        assert "it" in (attempt(lambda: _decode_image(bytes(content), "it", None)) or "")


def test_formats_that_start_programs_are_not_opened() -> None:
    said = attempt(lambda: _decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it", None))
    assert said == "cannot decode it: no image."


def edit(photos: Path, change: str) -> None:
    if change == "broken":
        (photos / "dog" / "003.png").write_bytes(b"not a picture")
    elif change == "cut":
        path = photos / "cat" / "001.png"
        path.write_bytes(path.read_bytes()[:-30])
    elif change == "alone":
        for path in (photos / "dog").iterdir():
            path.unlink()
        (photos / "dog").rmdir()
    elif change == "flat":
        for name in ("cat", "dog"):
            for path in (photos / name).iterdir():
                path.unlink()
    elif change == "train":
        (photos / "train").mkdir()


@pytest.mark.parametrize(
    ("change", "spec", "message"),
    [
        ("broken", "folder:{}", "cannot decode .*dog/003.png: no image"),
        ("cut", "folder:{}", "cannot decode .*cat/001.png"),
        ("alone", "folder:{}", "has one class, 'cat'"),
        ("flat", "folder:{}", "hold no images"),
        ("train", "folder:{}", "has a folder 'train' but none called 'test'"),
        ("", "folder:{}/cat", "has no folders; expected one folder for each class"),
        ("", "folder:{}/absent", "is not a folder"),
        ("", "folder:", "wants a path"),
        ("", "folder:{},size=0", "expected a whole number of at least 1"),
        ("", "folder:{},size=9999", "expected at most 1024"),
        ("", "folder:{},side=3", "side"),
        ("", "domains:{}", "cat has no folders"),
    ],
)
def test_folders_that_are_not_right(photos: Path, change: str, spec: str, message: str) -> None:
    edit(photos, change)
    with pytest.raises(InputError, match=message):
        load_dataset(spec.format(photos))


def test_domains_without_a_common_class(tmp_path: Path) -> None:
    fill(tmp_path / "photo" / "cat", 5)
    fill(tmp_path / "sketch" / "Cat", 5)
    with pytest.raises(InputError, match="have no class in common"):
        load_dataset(f"domains:{tmp_path}")


def test_a_test_class_that_nobody_trains_on(tmp_path: Path) -> None:
    for part in ("train", "test"):
        fill(tmp_path / part / "a", 3)
        fill(tmp_path / part / "b", 3)
    (tmp_path / "test" / "b").rename(tmp_path / "test" / "B")
    with pytest.raises(InputError, match="test/B is a class that the training images do not have"):
        load_dataset(f"folder:{tmp_path}")


def test_links_in_a_circle_end(photos: Path) -> None:
    (photos / "cat" / "again").symlink_to(photos / "cat", target_is_directory=True)
    assert len(load_dataset(f"folder:{photos}").train) == 11


def test_a_changed_image_is_seen(photos: Path) -> None:
    def first() -> Dataset:
        return load_dataset(f"folder:{photos}")

    assert np.array_equal(first().train.x[0].numpy(), picture(0))
    (photos / "cat" / "000.png").write_bytes(encoded(picture(9)) + b"tail")
    assert np.array_equal(first().train.x[0].numpy(), picture(9))


FORMS = {"PNG": {}, "JPEG": {"quality": 90}, "BMP": {}, "GIF": {}, "WEBP": {}, "TIFF": {}, "PPM": {}}


@pytest.mark.filterwarnings("ignore")  # Pillow's own, about what it finds in broken files
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=damage())
def test_broken_images_are_refused_in_one_sentence(form: str, change: Callable[[bytes], bytes]) -> None:
    whole = encoded(picture(1, 12, 10), form, **FORMS[form])
    said = attempt(lambda: _decode_image(change(whole), "folder/it.png", 6))
    assert said is None or "folder/it.png" in said


@settings(max_examples=40, deadline=None)
@given(change=damage())
def test_a_broken_png_is_never_taken_for_another_image(change: Callable[[bytes], bytes]) -> None:
    """PNG has checksums; what still decodes is the picture itself."""
    whole = encoded(picture(1, 12, 10))
    broken = change(whole)
    if attempt(lambda: _decode_image(broken, "it", None)) is None:
        assert np.array_equal(_decode_image(broken, "it", None), picture(1, 12, 10))


def test_without_pillow_it_is_said_how_to_get_it(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"decoded by Pillow; install it with pip install 'fedloom\[images\]'"):
        load_dataset(f"folder:{photos},size=7")
