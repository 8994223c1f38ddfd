"""Secure recombination: clients exchange layers that the server cannot read. Optional; nothing else imports it."""
