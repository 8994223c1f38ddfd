"""Models as rows, random streams, averaging, and the tasks and updates of clients."""
