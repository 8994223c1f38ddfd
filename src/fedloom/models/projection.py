"""MOON's network: two layers between the representation and the classifier, `NAME+projection` for any network.

Li et al., "Model-Contrastive Federated Learning", CVPR 2021: a representation of width d goes through dense layers to d
and to 256, with ReLU between them, and what comes out of these is contrasted and classified.
"""

from collections import OrderedDict

from torch import nn

SUFFIX = "+projection"
WIDTH = 256


def split(name: str) -> tuple[str, bool]:
    """A model's name without the suffix, and whether it was there; options behind a colon stay."""
    base, colon, options = name.partition(":")
    return base.removesuffix(SUFFIX) + colon + options, base.endswith(SUFFIX)


def project(network: nn.Module) -> nn.Module:
    """Put the projection before the linear layer `head` of a network, which is made anew for its width."""
    old = network.get_submodule("head")
    assert isinstance(old, nn.Linear), "all networks of the catalogue end so"
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        fc1=nn.Linear(old.in_features, old.in_features),
        relu=nn.ReLU(),
        fc2=nn.Linear(old.in_features, WIDTH),
        head=nn.Linear(WIDTH, old.out_features),
    )
    network.head = nn.Sequential(layers)
    return network


def added(representation: int, classes: int) -> int:
    """How many more parameters a network has with a projection."""
    projection = (representation + 1) * representation + (representation + 1) * WIDTH
    return projection + (WIDTH - representation) * classes
