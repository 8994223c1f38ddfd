"""fedloom on a real network: the same rounds, with Flower's SuperLink and SuperNodes between server and clients.

    server   rounds.py -> engines/flower.py -> link.py  -> Flower's Grid -> SuperLink
    site     SuperNode -> door.py (a new process for each message) -> site_process.py (stays) -> site.py

What travels is a `Parcel` (parcel.py): a kind, a small header and named arrays of raw bytes. Flower itself is imported
in few files, and only when it is used, so that everything else can be tested without it.
"""
