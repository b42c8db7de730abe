"""What every test shares: fixtures of the development tools, and a clean event loop policy."""

import asyncio

pytest_plugins = ["rose_dev.testing", "rose_dev.engine_testing"]

# Without this, pytest-asyncio asks Python 3.11 for "the current loop", which makes one that nobody
# closes; its ResourceWarning would fail a random test.
asyncio.set_event_loop(None)
