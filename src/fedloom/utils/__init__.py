"""General helpers that know nothing of learning."""
