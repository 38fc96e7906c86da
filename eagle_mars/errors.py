"""Every error that eagle_mars raises on purpose. Each message is one sentence that names the fix."""

from __future__ import annotations


class EagleMarsError(Exception):
    """Root of all errors of this package: catching it catches every mistake that a user can mend."""


class ConfigError(EagleMarsError, ValueError):
    """An option is unknown, out of its range, or contradicts another one."""


class CheckpointError(EagleMarsError):
    """A checkpoint is missing, unreadable, incomplete, or doesn't fit its target."""


class UnsupportedTargetError(EagleMarsError):
    """The target architecture can't be verified over a tree (recurrent, sliding window, encoder-decoder, ...)."""


class ContextLengthError(EagleMarsError, ValueError):
    """The prompt, or the prompt with the requested tokens, doesn't fit into the target's context."""


class LogitsError(EagleMarsError):
    """The target produced NaN, or a row with no finite logit: nothing may be accepted from it."""


class RanksError(EagleMarsError):
    """The processes of a tensor-parallel target were asked for, or decided, different things."""


class EmbeddedModelError(EagleMarsError):
    """The embedded target can't be had: its PyPI package is missing, incomplete or unreadable."""


class EngineError(EagleMarsError):
    """A serving engine has a version, a signature or a mode that our plugin doesn't know: it refuses to start."""
