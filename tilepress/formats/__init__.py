"""Bytes on disk <-> tensors. This package needs torch and safetensors only and imports nothing else of tilepress.

The two errors live here because every other part, down to the formats, raises them.
"""


def dtype_name(dtype) -> str:
    """A torch dtype as a model's config spells it: bfloat16, float16, int32."""
    return str(dtype).removeprefix("torch.")


class TilepressError(Exception):
    """Something the user can mend: `message` says what is wrong with its values, `hint` the command or flag that helps.

    The command line prints both as two lines and ends with `exit_code`.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TilepressError):
    """The request itself is wrong: a value out of range, an output folder that exists, an unknown architecture."""

    exit_code = 2
