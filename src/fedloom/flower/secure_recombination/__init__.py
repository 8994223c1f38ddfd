"""The secure exchange of layers; optional, nobody else imports it."""
