"""A run: built from a config, played round by round, kept on disk."""
