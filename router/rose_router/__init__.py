"""The lease's URL: takes turns, keeps their tokens, finishes them; start at ``docs/router.md``."""
