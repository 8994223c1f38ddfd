"""Who may do what: agreements, certificates, identities."""
