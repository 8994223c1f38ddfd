"""Agreements, certificates and site identities."""
