"""Memory and bytes of a job, before it starts."""
