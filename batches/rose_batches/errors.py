"""Exceptions of batches.

BatchesError
├── BadBatch        a request is wrong, or asks for what is not there; says what, and its code
└── Damaged         what lies in the folder cannot be trusted; says which file, and what to do
"""


class BatchesError(Exception):
    """Base of everything ``rose_batches`` raises."""


class BadBatch(BatchesError):
    """A request that is wrong whoever asks it.

    Args:
        message: what was wrong, and what was expected.
        code: a closed word.
        status: of HTTP.
        param: the field.
    """

    def __init__(
        self, message: str, code: str, *, status: int = 400, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param


class Damaged(BatchesError):
    """The folder of batches cannot be used as it is."""
