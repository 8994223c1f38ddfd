"""Models as rows, and what passes between server and clients."""
