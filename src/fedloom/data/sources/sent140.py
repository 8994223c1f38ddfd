"""Sent140: sentiment of tweets by user, in LEAF's JSON files."""

from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset, DatasetSpec, dataset_owner_positions
from fedloom.data.readers.leaf import LEAF_SPLIT, LEAF_WHOLE, Users, find_leaf_files, read_leaf_users
from fedloom.data.readers.text import LENGTH_IN_WORDS, TextTokenizer, select_first_text_samples
from fedloom.data.samples import InputTransform, Samples
from fedloom.data.sources.base import DatasetSource
from fedloom.errors import InputError

NAMES = ("negative", "positive")
TEXT = 4
"""Where the text stands in one of LEAF's samples: id, date, query, user, text."""


@dataclass(frozen=True, kw_only=True)
class Sent140Source(DatasetSource):
    """Tweets, and how they become tokens."""

    tokenizer: TextTokenizer = field(default_factory=TextTokenizer)
    min_examples: int = 1
    """Users with fewer tweets are left out (LEAF's -k)."""
    test_share: float = 0.1
    """How much of each user's tweets is for testing, where LEAF has not split them."""

    def input_files(self, folder: Path) -> list[Path]:
        return super().input_files(folder) + ([self.tokenizer.vocabulary] if self.tokenizer.vocabulary else [])

    def with_options(self, spec: DatasetSpec) -> "Sent140Source":
        tokenizer = TextTokenizer.from_spec(spec)
        min_examples, test_share = spec.integer_option("min", 1, 1), spec.fraction_option("test", 0.1)
        return replace(
            self, tokenizer=tokenizer, min_examples=min_examples, test_share=test_share, shape=(tokenizer.length,)
        )

    def cache_key(self) -> str:
        return f"{super().cache_key()} {self.tokenizer} {self.min_examples} {self.test_share}"

    def read(self, folder: Path) -> Dataset:
        found = find_leaf_files(folder)
        if found is None:
            raise InputError(f"{folder} has no train/*.json and test/*.json of LEAF.")
        users, test_users = read_leaf_users(*found, self.min_examples)
        names = tuple(user for user, (x, _) in users.items() if x)
        texts, labels, owners = _flat({user: users[user] for user in names}, folder)
        if test_users is None:
            first = select_first_text_samples(owners, 1 - self.test_share)
            test_texts, test_labels, test_owners = list(compress(texts, ~first)), labels[~first], owners[~first]
            texts, labels, owners = list(compress(texts, first)), labels[first], owners[first]
        else:
            test_texts, test_labels, test_owners = _flat(test_users, folder)
            test_owners = dataset_owner_positions(list(test_users), names)[test_owners]
        if not texts or not test_texts:
            raise InputError(
                f"{folder} leaves no tweets to train or to test with, when users have {self.min_examples} or more."
            )
        x, test_x, vocabulary_size, note = self.tokenizer.tokenize(texts, test_texts, "sent140")
        train = Samples(torch.from_numpy(x), torch.from_numpy(labels))
        test = Samples(torch.from_numpy(test_x), torch.from_numpy(test_labels))
        return Dataset(
            train, test, NAMES, owners, names, notes=(note,), vocabulary_size=vocabulary_size, test_owners=test_owners
        )


def _flat(users: Users, folder: Path) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """All texts and labels of these users, and whose they are."""
    texts: list[str] = []
    labels: list[int] = []
    for user, (xs, ys) in users.items():
        for x, y in zip(xs, ys, strict=True):
            text = x[TEXT] if isinstance(x, list) and len(x) > TEXT else x
            if not isinstance(text, str):
                raise InputError(f"{folder} has a sample of {user!r} without a text as its fifth entry.")
            if isinstance(y, bool) or y not in (0, 1):
                raise InputError(f"{folder} has a sample of {user!r} with the label {y!r}; expected 0 or 1.")
            texts.append(text)
            labels.append(int(y))
    owners = np.repeat(np.arange(len(users)), np.array([len(y) for _, y in users.values()], dtype=np.int64))
    return texts, np.array(labels, dtype=np.int64), owners


SENT140 = Sent140Source(
    name="sent140",
    summary="whether a tweet is cheerful, by user",
    shape=(LENGTH_IN_WORDS,),
    num_train_examples=None,
    num_test_examples=None,
    transform=InputTransform.identity(),
    class_names=NAMES,
    file_names=("train/*.json and test/*.json of LEAF",),
    file_patterns={"LEAF's files": LEAF_SPLIT + LEAF_WHOLE},
    folder_names=("sent140",),
    base_url="https://github.com/TalwalkarLab/leaf",
    manual_steps="run LEAF's data/sent140/preprocess.sh",
)
