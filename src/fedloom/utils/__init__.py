"""General helpers: files, settings, formatting, processes."""
