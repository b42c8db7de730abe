"""A router and its engines, as in the router's own tests."""

from tests.router.conftest import stage  # noqa: F401  # a fixture
