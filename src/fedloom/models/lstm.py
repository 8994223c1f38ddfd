"""LEAF's LSTM networks for text.

They have a token embedding, two LSTM layers, and a classifier of the last step.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. Inputs are rows of integers, one per token. The two
LSTM layers are separate modules, so that FedMR can swap them one by one.
"""

from typing import Any

from pydantic import Field
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.models.base import ModelRequest, ModelSpec
from fedloom.utils.settings import Settings

GLOVE = 400_000
"""Number of words with published GloVe vectors. LEAF's Sent140 network has an embedding for each."""


class _CharacterLSTMOptions(Settings):
    vocabulary: int = Field(0, ge=0)
    """number of different tokens; 0: the number in the data, or else the number of classes"""
    embedding: int = Field(8, ge=1)
    """size of the embedding of each token"""
    hidden: int = Field(256, ge=1)
    """width of the LSTM layers"""


class _WordLSTMOptions(Settings):
    vocabulary: int = Field(0, ge=0)
    """number of known words, without the token for all others; 0: the number in the data, or else GloVe's 400,000"""
    embedding: int = Field(100, ge=1)
    """size of the embedding of each word"""
    hidden: int = Field(100, ge=1)
    """width of the LSTM layers"""
    dense: int = Field(128, ge=0)
    """width of the dense layer before the head; 0 leaves it out"""
    frozen: bool = False
    """neither train nor send the embedding; start it from a file of vectors"""


class TokenLSTM(nn.Module):
    """Embedding, two LSTM layers, and a classifier of the second layer's last step."""

    def __init__(
        self, vocabulary_size: int, embedding: int, hidden: int, dense: int, classes: int, frozen: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding)
        self.embedding.weight.requires_grad_(not frozen)
        self.lstm1 = nn.LSTM(embedding, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden, hidden, batch_first=True)
        self.fc1 = nn.Linear(hidden, dense) if dense else nn.Identity()  # LEAF has no activation after it
        self.head = nn.Linear(dense or hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        try:
            x = self.embedding(tokens.long())
        except IndexError:  # only on a CPU; a check on a GPU would make every step wait
            low, high = (int(end) for end in tokens.aminmax())
            raise InputError(
                f"the data have the tokens {low} to {high}, but the network's vocabulary is 0 to "
                f"{self.embedding.num_embeddings - 1}; change it with the option vocabulary=N."
            ) from None
        x, _ = self.lstm1(x)
        x, _ = self.lstm2(x)
        scores: Tensor = self.head(self.fc1(x[:, -1]))
        return scores


def _build_character_lstm(request: ModelRequest, options: _CharacterLSTMOptions) -> nn.Module:
    """Return a network that predicts the next character."""
    request.sequence_length()
    vocabulary_size = options.vocabulary or request.vocabulary_size or request.classes
    return TokenLSTM(vocabulary_size, options.embedding, options.hidden, 0, request.classes)


def _build_word_lstm(request: ModelRequest, options: _WordLSTMOptions) -> nn.Module:
    """Return a network that predicts the sentiment of a message."""
    request.sequence_length()
    vocabulary_size = options.vocabulary + 1 if options.vocabulary else request.vocabulary_size or GLOVE + 1
    return TokenLSTM(
        vocabulary_size, options.embedding, options.hidden, options.dense, request.classes, frozen=options.frozen
    )


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
