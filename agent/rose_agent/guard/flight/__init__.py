"""The flight recorder: a ring in memory, its dumps after a breach, and two ways to show them."""
