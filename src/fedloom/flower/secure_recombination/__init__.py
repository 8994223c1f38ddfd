"""Secure recombination: clients exchange layers that the server cannot read.

It is optional: nothing else imports it.
"""
