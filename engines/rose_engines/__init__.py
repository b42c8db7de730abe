"""Everything that speaks to a rollout engine or runs inside one; start at ``docs/engines.md``."""
