"""Exceptions of the rollout room.

RolloutError
├── InvalidTurn       the request is wrong in itself; names the field
│   ├── UnsafeTurn    it asks of an engine what no engine may be asked; names the field
│   └── PromptTooLong it leaves no room for an answer in the context; says both sizes
├── UnknownVersion    the request is pinned to a version nobody has announced; it may yet come
│   └── VersionGone   the pinned version exists no more on any engine, or never will
├── InvalidRound      tail batching was asked for what its states do not allow
├── InvalidBound      sizes that no trainer could have
└── BrokenStream      an engine's events contradict what it sent before
"""


class RolloutError(Exception):
    """Base of everything ``rose_core.rollouts`` raises."""


class InvalidTurn(RolloutError):
    """The request is wrong in itself; trying the same again does not help."""


class UnsafeTurn(InvalidTurn):
    """An engine is not known to bear it: an unknown field, or a value out of its bounds."""


class PromptTooLong(InvalidTurn):
    """The prompt leaves no room for an answer in the context.

    Harnesses end or condense a conversation at this error, and know it by its words: these are
    vLLM's and OpenAI's, and OpenAI's code, which LangChain looks for among them. Dialects that have
    others write them from the sizes.

    Args:
        tokens: of the prompt; more where ``at_least`` says so.
        context: tokens of prompt and answer together.
        at_least: nobody has counted to the prompt's end.
    """

    def __init__(self, tokens: int, context: int, *, at_least: bool = False) -> None:
        self.tokens = f"at least {tokens}" if at_least else str(tokens)
        self.context = context
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, your prompt has "
            f"{self.tokens} tokens, and must leave room for an answer (spec.contextTokens of the "
            "lease). Please reduce the length of the messages. (context_length_exceeded)"
        )


class UnknownVersion(RolloutError):
    """The request is pinned to a version that nobody has announced (yet)."""


class VersionGone(UnknownVersion):
    """The version the request is pinned to runs on no engine, and waiting brings none."""


class BrokenStream(RolloutError):
    """An engine's events contradict what it sent before; the leg counts as lost."""


class InvalidRound(RolloutError):
    """Tail batching was asked for what its states do not allow; names prompt and round."""


class InvalidBound(RolloutError):
    """A batch or a bound of staleness that no trainer could have."""
