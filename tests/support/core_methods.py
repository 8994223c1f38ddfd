"""The methods that stand for all others in `make test`.

`make test-all` runs the cross-products over every method.
"""

CORE_METHODS = ("fedavg", "fedbn", "fedcda", "fedcross", "feddf", "fedgen", "fedmr", "fedprox", "lss", "scaffold")
"""The plain method, the five papers' servers and clients, control variates, personal layers, a generator, server data.

DynaFed is not here: its synthesis has tests of its own.
"""
