"""The kopf shell around ``rose_core.lending``; start at ``docs/operator.md``."""
