"""Read LEAF's JSON files, which list the samples x and y of each user."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedloom.errors import InputError
from fedloom.utils.storage import parse_json_file

Users = dict[str, tuple[list[Any], list[Any]]]
"""The lists x and y of each user."""


LEAF_SPLIT = (("train/*.json", "test/*.json"), ("data/train/*.json", "data/test/*.json"))
"""Where LEAF puts the training and test files of data that it has split."""
LEAF_WHOLE = (("all_data/*.json",), ("all_data*.json",), ("data/all_data/*.json",), ("data/all_data*.json",))
"""Where it puts all files of data that it has not split."""


def find_leaf_files(folder: Path) -> tuple[list[Path], list[Path]] | None:
    """Find training and test files in `train/` and `test/`, or all files in `all_data/`, also under `data/`."""
    for train, test in LEAF_SPLIT:
        split = sorted(folder.glob(train)), sorted(folder.glob(test))
        if all(split):
            return split
    for (pattern,) in LEAF_WHOLE:
        if everything := sorted(folder.glob(pattern)):
            return everything, []
    return None


def read_leaf_users(
    train_files: list[Path], test_files: list[Path], min_examples: int = 0
) -> tuple[Users, Users | None]:
    """Read and check the users of these files; leave out those with fewer than `min_examples` samples.

    There are no users to test with, None, if LEAF has not split the data.
    """
    parts = [_users(paths) for paths in (train_files, test_files) if paths]
    sizes: Counter[str] = Counter()
    for part in parts:
        sizes.update({user: len(y) for user, (_, y) in part.items()})
    kept = [{user: pair for user, pair in part.items() if sizes[user] >= min_examples} for part in parts]
    return kept[0], kept[1] if test_files else None


def _users(paths: list[Path]) -> Users:
    users: Users = {}
    for path in paths:
        for user, x, y in _read(path):
            if user in users:
                raise InputError(f"{path} holds the user {user!r}, whom another file holds already.")
            users[user] = x, y
    if not any(x for x, _ in users.values()):
        raise InputError(f"{paths[0].parent} holds no samples; expected some in {paths[0].name}.")
    return users


def _read(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    content = parse_json_file(path)
    users = content.get("users") if isinstance(content, dict) else None
    data = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, list) or not isinstance(data, dict):
        raise InputError(f"{path} is not one of LEAF's files; expected 'users' and 'user_data'.")
    if not all(isinstance(user, str) for user in users) or len(set(users)) < len(users):
        raise InputError(f"{path} has 'users' that are not different names.")
    sizes = content.get("num_samples")
    if sizes is not None and (not isinstance(sizes, list) or len(sizes) != len(users)):
        raise InputError(f"{path} has {len(users)} users, but 'num_samples' does not have one number for each.")
    if surplus := data.keys() - set(users):
        raise InputError(f"{path} has samples of {min(surplus)!r}, who is not among its users.")
    for number, user in enumerate(users):
        held = data.get(user)
        x, y = (held.get("x"), held.get("y")) if isinstance(held, dict) else (None, None)
        if not isinstance(x, list) or not isinstance(y, list):
            raise InputError(f"{path} has no lists x and y for the user {user!r}.")
        if len(x) != len(y) or (sizes is not None and sizes[number] != len(y)):
            said = "" if sizes is None else f" where num_samples says {sizes[number]!r}"
            raise InputError(f"{path} has {len(x)} x and {len(y)} y for the user {user!r}{said}; expected as many.")
        yield user, x, y
