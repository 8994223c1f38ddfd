"""LEAF's networks for text: an embedding of tokens, two LSTM layers, and what the last step says.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. Inputs are rows of whole numbers, one a token. The two
layers are two modules, so that FedMR may swap them one by one.
"""

from typing import Any

from pydantic import Field
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.models.base import ModelRequest, ModelSpec
from fedloom.utils.settings import Settings

GLOVE = 400_000
"""Words that GloVe's vectors are published for; LEAF's Sent140 has an embedding for each."""


class _CharacterLSTMOptions(Settings):
    vocabulary: int = Field(0, ge=0)
    """different tokens; 0: as many as the data say, or else as there are classes"""
    embedding: int = Field(8, ge=1)
    """numbers for each token"""
    hidden: int = Field(256, ge=1)
    """width of the LSTM layers"""


class _WordLSTMOptions(Settings):
    vocabulary: int = Field(0, ge=0)
    """known words, beside one number more for all others; 0: as many as the data say, or else the 400,000 of GloVe"""
    embedding: int = Field(100, ge=1)
    """numbers for each word"""
    hidden: int = Field(100, ge=1)
    """width of the LSTM layers"""
    dense: int = Field(128, ge=0)
    """width of the dense layer before the head; 0 leaves it out"""
    frozen: bool = False
    """the embedding is neither trained nor sent; start it from a file of vectors"""


class TokenLSTM(nn.Module):
    """Tokens, embedded; two LSTM layers; a classifier of the second one's last step."""

    def __init__(
        self, tokens: int, embedding: int, hidden: int, dense: int, classes: int, frozen: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.embedding.weight.requires_grad_(not frozen)
        self.lstm1 = nn.LSTM(embedding, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden, hidden, batch_first=True)
        self.fc1 = nn.Linear(hidden, dense) if dense else nn.Identity()  # LEAF has no activation behind it
        self.head = nn.Linear(dense or hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        try:
            x = self.embedding(tokens.long())
        except IndexError:  # only a CPU tells; to look for it on a GPU would make every step wait
            low, high = (int(end) for end in tokens.aminmax())
            raise InputError(
                f"the data have the tokens {low} to {high}, but the network's vocabulary is 0 to "
                f"{self.embedding.num_embeddings - 1}; give it another one with the option vocabulary=N."
            ) from None
        x, _ = self.lstm1(x)
        x, _ = self.lstm2(x)
        scores: Tensor = self.head(self.fc1(x[:, -1]))
        return scores


def _build_character_lstm(wanted: ModelRequest, options: _CharacterLSTMOptions) -> nn.Module:
    """The next character after some."""
    wanted.length()
    tokens = options.vocabulary or wanted.tokens or wanted.classes
    return TokenLSTM(tokens, options.embedding, options.hidden, 0, wanted.classes)


def _build_word_lstm(wanted: ModelRequest, options: _WordLSTMOptions) -> nn.Module:
    """The mood of a message."""
    wanted.length()
    tokens = options.vocabulary + 1 if options.vocabulary else wanted.tokens or GLOVE + 1
    return TokenLSTM(tokens, options.embedding, options.hidden, options.dense, wanted.classes, frozen=options.frozen)


NETWORKS: dict[str, ModelSpec[Any]] = {
    "lstm-shakespeare": ModelSpec(
        "LEAF's LSTM for the next character: embedding of 8, two layers of 256",
        _build_character_lstm,
        _CharacterLSTMOptions,
        (80, 80),
    ),
    "lstm-sent140": ModelSpec(
        "LEAF's LSTM for Sent140: embedding of 100 for every word, two layers of 100, dense layer of 128",
        _build_word_lstm,
        _WordLSTMOptions,
        (25, 2),
    ),
}
