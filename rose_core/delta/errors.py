"""Exceptions of the weight format.

DeltaError
├── HeaderError       a file of tensors whose header cannot be
├── ManifestError     a manifest that contradicts itself or the format
├── BlockError        a block whose bytes are not what the manifest says
├── DigestMismatch    weights that do not have the digest the manifest states
└── LineageError      no way from the version at hand to the version wanted
"""


class DeltaError(Exception):
    """Base of everything ``rose_core.delta`` raises."""


class HeaderError(DeltaError):
    """A file that is no safetensors file, or a damaged one; fetch it again."""


class ManifestError(DeltaError):
    """A manifest that contradicts itself or the format; nothing may be applied from it."""


class BlockError(DeltaError):
    """A block whose bytes are damaged or are not what the manifest says; fetch it again."""


class DigestMismatch(DeltaError):
    """Weights that do not have the digest the manifest states; undo, then refill."""


class LineageError(DeltaError):
    """No way from the version at hand to the version wanted; take the full state instead."""
