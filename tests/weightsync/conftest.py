"""The same run directories and models as for the engine host."""

from tests.host.conftest import models, rundir

__all__ = ["models", "rundir"]
