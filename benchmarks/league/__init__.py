"""The league table: every method on the same tasks."""
