"""Small data files for golden runs, written without fedloom."""

import json
from pathlib import Path

import numpy as np


def table(folder: Path) -> None:
    """320 rows of four sites: a number, a word, and an income that both tell something about."""
    rows = [
        f"{20 + 7 * k % 50},{('cook', 'nurse', '')[k % 3]},{('low', 'high')[7 * k % 50 > 25]},{k % 11 / 4},site{k % 4}"
        for k in range(320)
    ]
    (folder / "people.csv").write_text("\n".join(["age,job,income,score,site", *rows]) + "\n")


def parquet(folder: Path) -> None:
    """A Hugging Face data set of texts."""
    import pyarrow
    import pyarrow.parquet

    (folder / "reviews").mkdir()
    for part, count in (("train", 120), ("test", 30)):
        texts = [f"{('good', 'bad')[k % 2]} film number {k % 9} of {count}" for k in range(count)]
        columns = {
            "text": texts,
            "label": [k % 2 for k in range(count)],
            "user": [f"user{k % 5}" for k in range(count)],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "reviews" / f"{part}-00000-of-00001.parquet")


def shakespeare(folder: Path) -> None:
    """Three roles with a few sentences each."""
    said = {f"ROLE{k}": [f"To be, or not to be, that is the question {k}: "] * 4 for k in range(3)}
    (folder / "shakespeare").mkdir()
    (folder / "shakespeare" / "by_role.json").write_text(json.dumps({"users": list(said), "speeches": said}))


def tweets(folder: Path) -> None:
    """Four users with twenty tweets each: id, date, query, name and text."""
    users = [f"user{k}" for k in range(4)]
    texts = [f"{('bad', 'good')[i % 2]} morning number {i % 7}" for i in range(25)]
    for part, which in (("train", range(20)), ("test", range(20, 25))):
        held = {
            user: {"x": [[str(i), "Mon", "NO_QUERY", user, texts[i]] for i in which], "y": [i % 2 for i in which]}
            for user in users
        }
        sizes = [len(which)] * len(users)
        content = {"users": users, "num_samples": sizes, "hierarchies": [], "user_data": held}
        place = folder / "sent140" / "data" / part
        place.mkdir(parents=True)
        (place / f"all_data_{part}.json").write_text(json.dumps(content))


def pictures(folder: Path) -> None:
    """Three domains of two classes with ten images each, 12 pixels a side."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for domain in ("photo", "sketch", "cartoon"):
        for label, name in enumerate(("cat", "dog")):
            place = folder / "pictures" / domain / name
            place.mkdir(parents=True)
            for k in range(10):
                pixels = draw.integers(0, 128, (12, 12, 3), dtype=np.uint8) + np.uint8(100 * label)
                Image.fromarray(pixels).save(place / f"{k}.png")


def positions(folder: Path) -> None:
    """A partition of the digits among five clients."""
    (folder / "parts.json").write_text(json.dumps([list(range(k, 1000, 5)) for k in range(5)]))


MAKERS = {
    "table": table,
    "parquet": parquet,
    "shakespeare": shakespeare,
    "tweets": tweets,
    "pictures": pictures,
    "positions": positions,
}
