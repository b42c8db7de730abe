"""Fixtures that every room shares."""

pytest_plugins = ["rose_dev.testing"]
