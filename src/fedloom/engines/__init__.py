"""Engines train and evaluate clients. They know no method."""
