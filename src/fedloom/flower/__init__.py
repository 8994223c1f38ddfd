"""fedloom on a real network: Flower connects the server and the sites.

    server   runs/round.py -> server/engine.py -> server/transport.py -> Flower's Grid -> SuperLink
    site     SuperNode -> site/client_app.py (a process for each message) -> site/process.py (stays) -> site/handlers.py

They exchange `SiteMessage`s (message.py): a kind, a small header and named arrays of raw bytes. Only few files import
Flower, and only when they use it, so that everything else can be tested without it.
"""
